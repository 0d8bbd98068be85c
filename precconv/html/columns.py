"""Rows of plain data as columns: a key is written once, and a value that repeats is a number into a table.

100,000 tensors would be 150 MB as objects, and a browser would take seconds to read them.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["columns", "packed"]

#: Digits of a number with a fraction: twice as many as are shown.
_DIGITS = 6
#: A table pays where this many rows share a value.
_SHARED = 2


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One list a key, by key path for nested rows; None where a row has no such key.

    A column of strings or lists that repeat is ``{"table": [...], "at": [...]}``; ``at`` is None where there is none.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: _column([row.get(key) for row in rows]) for key in keys}


def _column(values: list[Any]) -> Any:
    some = next((v for v in values if v is not None), None)
    if isinstance(some, Mapping):
        return columns([v or {} for v in values])
    if isinstance(some, str | list):
        return _interned(values)
    return [_short(v) if isinstance(v, float) else v for v in values]


def _interned(values: list[Any]) -> Any:
    keys = [tuple(v) if isinstance(v, list) else v for v in values]
    table = dict.fromkeys(k for k in keys if k is not None)
    if len(table) * _SHARED > len(values):
        return values
    place = {key: n for n, key in enumerate(table)}
    return {"table": [*table], "at": [None if k is None else place[k] for k in keys]}


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def packed(data: Any) -> str:
    """JSON, deflated (zlib, RFC 1950), in base64: not one character of it means anything in HTML."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")
