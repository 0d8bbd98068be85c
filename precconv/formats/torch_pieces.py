"""Stretches of tensor data that go from a torch checkpoint to its output, and what of them tensors show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..dtypes import DType
from .torch_tensors import TensorRef

__all__ = ["Piece", "Shown"]

Dim = tuple[int, int]  #: size and stride


@dataclass(frozen=True, slots=True)
class Shown:
    """A chosen tensor over a piece: its elements lie between ``first`` and ``end``, all of them if contiguous."""

    name: str
    ref: TensorRef
    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements one after the other in the source that stay so in the output.

    The views of one block of memory: mostly one contiguous tensor, which may have several names.  Elements between
    those that views show are there too: copied where the piece is copied, zeros where it is cast.
    """

    record: int  #: its number in the archive
    src: TensorRef  #: the elements as one contiguous tensor, which ``ElementReader`` reads
    to: DType  #: ``src.dtype`` where they are copied bit for bit
    offset: int  #: first byte in the output file
    src_offset: int | None  #: first byte in the source file; None where they don't lie there as they are
    tensors: tuple[Shown, ...]  #: those with names, which may overlap
    views: tuple[TensorRef, ...]  #: all tensors over it, where it is cast

    @property
    def numel(self) -> int:
        return self.src.shape[0]

    @property
    def is_cast(self) -> bool:
        return self.to is not self.src.dtype

    @property
    def nbytes(self) -> int:
        """In the output."""
        return self.numel * max(1, self.to.bits // 8)

    @property
    def has_gaps(self) -> bool:
        """Whether some elements may belong to no tensor.

        Whatever stands there need not be a number that fits: such elements become zeros, see ``shown``.
        """
        if not self.is_cast:
            return False
        end = 0
        for first, last in sorted(self._dense()):
            if first > end:
                return True
            end = max(end, last)
        return end < self.numel

    def _dense(self) -> Iterator[tuple[int, int]]:
        """The stretches that single tensors fill."""
        for view in self.views:
            extent = 1
            for size, stride in sorted(_dims(view), key=lambda dim: dim[1]):
                if stride > extent:
                    break
                extent += (size - 1) * stride
            else:
                first = view.offset - self._base(view)
                yield first, first + extent

    def _base(self, view: TensorRef) -> int:
        """The piece's first element, as the view's storage counts."""
        return self.src.offset - view.storage.start

    def shown(self, start: int, count: int) -> bytearray:
        """For ``count`` elements from ``start``, 1 where a tensor shows it, else 0."""
        mask = bytearray(count)
        for view in self.views:
            dims = sorted(_dims(view), key=lambda dim: -dim[1])
            first = view.offset - self._base(view) - start
            for at, size, step in _strips(dims, first, count):
                skip = max(0, -(at // step))
                low = at + skip * step
                n = min(size - skip, -(-(count - low) // step))
                if n > 0:
                    mask[low : low + (n - 1) * step + 1 : step] = b"\1" * n
        return mask


def _dims(view: TensorRef) -> list[Dim]:
    """Its dimensions that lead anywhere, joined where two are one."""
    out: list[Dim] = []
    for size, stride in sorted(zip(view.shape, view.stride, strict=True), key=lambda dim: -dim[1]):
        if size == 1 or stride == 0:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return out


def _strips(dims: list[Dim], at: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Start, length and step of the innermost rows that touch the first ``count`` elements."""
    if len(dims) < 2:
        size, step = dims[0] if dims else (1, 1)
        yield at, size, step
        return
    (size, stride), *inner = dims
    extent = sum((n - 1) * s for n, s in inner) + 1
    first = max(0, -(-(1 - at - extent) // stride))
    last = min(size, -(-(count - at) // stride))
    for i in range(first, last):
        yield from _strips(inner, at + i * stride, count)
