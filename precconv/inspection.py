"""What is inside a checkpoint, from its header alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import open_checkpoint
from .dtypes import DType
from .tensors import TensorInfo

__all__ = ["DTypeTotal", "Inspection", "inspect"]


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
                }
                for t in self.tensors
            ],
        }


def inspect(source: str | os.PathLike[str]) -> Inspection:
    """Read a checkpoint's header; raises InputError.  No tensor data is read and torch is not imported."""
    reader = open_checkpoint(source)
    with reader.file:
        return Inspection(
            path=os.fspath(source),
            format=reader.format.name,
            file_bytes=reader.file.size,
            metadata={**reader.metadata},
            tensors=tuple(reader.infos),
            notes=tuple(reader.notes),
        )
