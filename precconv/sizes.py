"""Sizes as people write them."""

from __future__ import annotations

import re

from .errors import UsageError

__all__ = ["shard_bytes", "size_bytes"]

#: As people write sizes; huggingface_hub's decimal units, and binary ones by their own names.
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}  # fmt: skip


_HINT = "write it like 5GB, 500MB or 2GiB"


def shard_bytes(text: str | int) -> int:
    """Bytes of ``5GB``, ``500MB``, ``2GiB`` or a plain number; raises UsageError."""
    size = size_bytes(text, "shard size")
    if size < 1:
        raise UsageError(f"shard size {text!r} holds no tensor", hint=_HINT)
    return size


def size_bytes(text: str | int, what: str) -> int:
    """The same of any size; ``what`` it is of goes into the message."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", str(text), re.IGNORECASE)
    unit = None if found is None else _UNITS.get(_full(found[2].upper()))
    if found is None or unit is None:
        raise UsageError(f"{what} {text!r} is not a size", hint=_HINT)
    return int(float(found[1]) * unit)


def _full(unit: str) -> str:
    return unit if unit in ("", "B") or unit.endswith("B") else f"{unit}B"
