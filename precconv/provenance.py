"""The record that a conversion leaves in its output's metadata: what was made from what, with which options.

It depends on the source's bytes and on the options alone: no time, no path and no machine is in it, so that two runs
write the same bytes.  Read back it is hostile input, like all metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["KEY", "Record", "read_record", "words"]

#: In ``__metadata__``.
KEY = "precconv"
_VERSION = re.compile(r"\d{1,5}(\.\d{1,5}){0,3}([a-z]{1,4}\d{1,5}|\.dev\d{1,5})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Record:
    """What an output says of how it was made."""

    options: Mapping[str, Any]  #: those that differ from the defaults and shape the bytes, as ``convert`` has them
    source_bytes: int  #: of the file, or of all files where several became one
    digest: str  #: ``sha256:…``, as the source's reader has it
    version: str  #: of precconv

    def text(self) -> str:
        """ASCII JSON, keys sorted: the same record is the same text."""
        data = {
            "options": dict(self.options),
            "source": {"bytes": self.source_bytes, "header": self.digest},
            "version": self.version,
        }
        return json.dumps(data, sort_keys=True, separators=(",", ":"))


def read_record(metadata: Mapping[str, str]) -> Record | None:
    """The record in an output's metadata; None where there is none, or none that can be read."""
    try:
        data = json.loads(metadata[KEY])
        found = Record(data["options"], data["source"]["bytes"], data["source"]["header"], data["version"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    kinds = ((found.options, dict), (found.source_bytes, int), (found.digest, str), (found.version, str))
    if not all(isinstance(value, kind) for value, kind in kinds) or not _VERSION.fullmatch(found.version):
        return None
    return found


def words(options: Mapping[str, Any]) -> list[str]:
    """Options as on the command line."""
    said: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, dict):
            said += [option, ",".join(f"{k}={v}" for k, v in value.items())]
        elif isinstance(value, list):
            kept = ((v.removesuffix("=keep"), v.endswith("=keep")) for v in value)
            said += [word for v, is_kept in kept for word in ("--keep" if is_kept else option, v)]
        else:
            said += [option] if value is True else [option, str(value)]
    return said
