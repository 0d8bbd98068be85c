"""What is inside a checkpoint, from its header alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .bulk import collector_paused
from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import DType
from .errors import UsageError
from .fileio import SourceFile
from .tensors import TensorInfo
from .weights import Weights

__all__ = ["DTypeTotal", "Inspection", "inspect_file"]


@dataclass(frozen=True, slots=True)
class DTypeTotal:
    """All tensors of one dtype together."""

    dtype: DType
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's header; iterating gives its tensors in the order of the file."""

    path: str
    format: str
    file_bytes: int
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]
    notes: tuple[str, ...]
    structure: tuple[str, ...] = ()  #: what a torch checkpoint wraps its tensors in, a line each
    files: tuple[str, ...] = ()  #: of a directory: the file of each tensor, relative

    def __iter__(self) -> Iterator[TensorInfo]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def totals(self) -> list[DTypeTotal]:
        """One row a dtype, the most bytes first."""
        rows: dict[DType, tuple[int, int, int]] = {}
        for t in self.tensors:
            tensors, elements, nbytes = rows.get(t.dtype, (0, 0, 0))
            rows[t.dtype] = (tensors + 1, elements + t.numel, nbytes + t.nbytes)
        return sorted((DTypeTotal(d, *row) for d, row in rows.items()), key=lambda r: -r.nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes and offsets in bytes."""
        return {
            "path": self.path,
            "format": self.format,
            "file_bytes": self.file_bytes,
            "metadata": dict(self.metadata),
            "notes": list(self.notes),
            "structure": list(self.structure),
            "totals": {
                t.dtype.name: {"tensors": t.tensors, "elements": t.elements, "bytes": t.nbytes} for t in self.totals()
            },
            "tensors": [
                {
                    "name": t.name,
                    "dtype": t.dtype.name,
                    "shape": list(t.shape),
                    "bytes": t.nbytes,
                    "offset": t.offset,
                    **({"file": self.files[n]} if self.files else {}),
                }
                for n, t in enumerate(self.tensors)
            ],
        }


def inspect_file(
    source: str | os.PathLike[str] | SourceFile, *, weights: Weights = "auto", select: str | None = None
) -> Inspection:
    """Read a checkpoint's header; raises InputError.  No tensor data is read and torch is not imported.

    ``weights``, ``select``: as in ``convert``.  Where they leave a choice, all weights are shown and a note says so.
    """
    with _open(source, weights, select) as (found, notes):
        return Inspection(
            path=os.fspath(source if isinstance(source, (str, os.PathLike)) else source.path),
            format=found.format.name,
            file_bytes=found.file.size,
            metadata={**found.metadata},
            tensors=tuple(found.infos),
            notes=(*notes, *found.notes),
            structure=tuple(map(str, found.structure())),
        )


@contextmanager
def _open(
    source: str | os.PathLike[str] | SourceFile, weights: Weights, select: str | None
) -> Iterator[tuple[Checkpoint, tuple[str, ...]]]:
    notes: tuple[str, ...] = ()
    with collector_paused():
        try:
            found = open_checkpoint(source, weights=weights, select=select)
        except UsageError as e:
            if weights != "auto" or select is not None:
                raise
            notes = (e.message,)
            found = open_checkpoint(source, weights="all")
    with found:
        yield found, notes
