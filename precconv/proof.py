"""What a proof found: every way in which an output is not what its source and options make, as data and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ._version import __version__
from .plan import Plan

__all__ = ["SCHEMA", "Mismatch", "Proof"]

#: Version of the JSON below: raised when a key changes its meaning or goes; new keys may come.
SCHEMA = 1

Kind = Literal[
    "unreadable",  # the output, or one of its files, cannot be opened
    "missing", "unexpected",  # a tensor, or a file
    "dtype", "shape", "values",  # of a tensor
    "metadata", "record",  # of a safetensors file; the record is what says how it was made
    "bytes",  # outside all tensor data
    "file",  # one that is no weights is another
    "refused",  # a check of the conversion would have refused this source
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing in which an output is not what it should be."""

    kind: Kind
    text: str
    file: str = ""  #: relative, with ``/``; empty where the output is one file
    tensor: str | None = None
    elements: int = 0  #: that differ
    first: tuple[int, ...] | None = None  #: where the first of them is in the tensor's shape


@dataclass(frozen=True)
class Proof:
    """An output held against its source."""

    output: str
    source: str
    options: Mapping[str, Any]  #: that the output should have been made with
    options_from: str  #: ``record``, ``report``, ``arguments``, or ``dtypes`` where only the output's could tell
    words: tuple[str, ...]  #: the same as on the command line
    version: str | None  #: of precconv, by the output's record
    plan: Plan  #: what should be in it
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    files: int  #: of the output, that were compared
    compared_bytes: int  #: of the output
    seconds: float
    ignored: tuple[str, ...] = ()  #: files that were not to matter
    uncompared: int = 0  #: tensors of which the output has no values that could be looked at

    @property
    def proven(self) -> bool:
        """Whether every byte of the output is what the options make of the source."""
        return not self.mismatches

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; schema version ``SCHEMA``."""
        return {
            "schema": SCHEMA,
            "tool": f"precconv {__version__}",
            "output": self.output,
            "source": self.source,
            "proven": self.proven,
            "options": dict(self.options),
            "options_from": self.options_from,
            "words": list(self.words),
            "made_by": self.version,
            "tensors": len(self.plan.items),
            "files": self.files,
            "compared_bytes": self.compared_bytes,
            "ignored": list(self.ignored),
            "uncompared": self.uncompared,
            "seconds": round(self.seconds, 3),
            "mismatches": [asdict(m) for m in self.mismatches],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """ASCII, so that it survives any terminal."""
        return json.dumps(self.to_dict(), allow_nan=False)
