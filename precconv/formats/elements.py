"""A tensor's elements in row-major order, any stretch of them, in bounded memory.

Contiguous tensors are read straight into the caller's buffer.  For the others a tile, a block of whole inner
rows, is gathered and kept, so that reading on is cheap: strips along one dimension are copied with a step,
from memory where the tile's elements lie close together in the file, else each is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Literal

from .storage_bytes import StorageBytes, storage_bytes
from .torch_file import TorchFile, swap_width
from .torch_tensors import TensorRef

__all__ = ["ElementReader"]

_TILE = 32 << 20  #: bytes gathered at a time, and bytes held to gather them from
_STRIP = 1 << 20  #: bytes read at a time for a strip
_SEEK = 1 << 13  #: bytes that are read on in the time that reading elsewhere takes to start
_NO_STRIDE = 1 << 62
_FORMATS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}

Dim = tuple[int, int]  #: size and stride
Placed = tuple[int, int, int]  #: size, stride in the source, stride in the target


class ElementReader:
    """Reads one tensor; keeps state, so one thread at a time."""

    def __init__(self, file: TorchFile, ref: TensorRef, *, tile: int = _TILE) -> None:
        self._ref = ref
        self._bytes = storage_bytes(file, ref)
        self._swap = swap_width(ref) if file.big_endian and ref.storage.inline is None else 1
        self._tiles = None if ref.is_contiguous else _Tiles(self._bytes, ref, tile)

    def read(self, out: memoryview, start: int) -> None:
        """Fill ``out``, contiguous writable bytes of whole elements, from element ``start`` on."""
        ref, flat = self._ref, out.cast("B")
        if start < 0 or len(flat) % ref.itemsize or start + len(flat) // ref.itemsize > ref.numel:
            raise ValueError(f"elements {start} and {len(flat)} bytes on are not in a tensor of {ref.numel}")
        if self._tiles is None:
            self._bytes.read(flat, ref.byte_start + start * ref.itemsize)
        else:
            self._tiles.read(flat, start * ref.itemsize)
        if self._swap > 1:
            _byteswap(flat, self._swap)


def _byteswap(data: memoryview, width: int) -> None:
    step = _STRIP // width * width
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        old = memoryview(bytes(piece))
        for i in range(width):
            piece[i::width] = old[width - 1 - i :: width]


def _coalesced(dims: list[Dim]) -> list[Dim]:
    """The same elements in the same order with as few dimensions as can be."""
    out: list[Dim] = []
    for size, stride in dims:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return out or [(1, 1)]


def _offsets(dims: list[Placed], src: int, dst: int) -> Iterator[tuple[int, int]]:
    """Source and target offset of every index of ``dims``: size, source stride, target stride."""
    if not dims:
        yield src, dst
        return
    (size, stride, step), *inner = dims
    for i in range(size):
        if inner:
            yield from _offsets(inner, src + i * stride, dst + i * step)
        else:
            yield src + i * stride, dst + i * step


class _Tiles:
    """The tiles of one strided tensor, the last one kept."""

    def __init__(self, source: StorageBytes, ref: TensorRef, tile: int) -> None:
        unit = min(ref.itemsize, 8)
        parts = ref.itemsize // unit
        dims = [(n, s * parts) for n, s in zip(ref.shape, ref.stride, strict=True)]
        self._source = source
        self._start = ref.byte_start
        self._unit = unit
        self._dims = _coalesced([*dims, (parts, 1)])
        self._near = tile
        self._cap = max(1, tile // unit)
        sizes = [size for size, _ in self._dims]
        self._cut = next(d for d in range(len(sizes)) if prod(sizes[d + 1 :]) <= self._cap)
        self._inner = prod(sizes[self._cut + 1 :])
        self._rows = max(1, self._cap // self._inner)  #: of the cut dimension, in a tile
        self._first = self._last = 0  #: units of the tensor the kept tile covers
        self._tile = memoryview(bytearray())

    def read(self, out: memoryview, at: int) -> None:
        """Fill ``out`` from byte ``at`` of the tensor's row-major bytes."""
        done = 0
        while done < len(out):
            here = (at + done) // self._unit
            if not self._first <= here < self._last:
                self._load(here)
            skip = at + done - self._first * self._unit
            piece = self._tile[skip : skip + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _load(self, here: int) -> None:
        """Gather the tile that holds unit ``here``."""
        size, stride = self._dims[self._cut]
        outer, within = divmod(here, size * self._inner)
        row = within // self._inner // self._rows * self._rows
        rows = min(self._rows, size - row)
        base = row * stride
        for length, step in reversed(self._dims[: self._cut]):
            outer, index = divmod(outer, length)
            base += index * step
        box = [(rows, stride), *self._dims[self._cut + 1 :]]
        self._first = here - within % self._inner - (within // self._inner - row) * self._inner
        self._last = self._first + rows * self._inner
        self._tile = memoryview(bytearray(rows * self._inner * self._unit))
        _Box(self._source, self._start + base * self._unit, self._unit, self._near).gather(self._tile, box)


class _Box:
    """Copies a block of elements: ``dims`` in units from byte ``start`` of the storage."""

    def __init__(self, source: StorageBytes, start: int, unit: int, near: int) -> None:
        self._source = source
        self._start = start
        self._unit = unit
        self._format = _FORMATS[unit]
        self._near = near // unit  #: units held to gather from

    def gather(self, tile: memoryview, dims: list[Dim]) -> None:
        """Fill ``tile`` with the block's elements in row-major order."""
        sizes = [size for size, _ in dims]
        steps = [prod(sizes[d + 1 :]) for d in range(len(sizes))]
        placed = [(n, s, t) for (n, s), t in zip(dims, steps, strict=True) if n > 1]
        self._copy(tile.cast(self._format), 0, 0, placed or [(1, 1, 1)])

    def _copy(self, target: memoryview[int], src: int, dst: int, dims: list[Placed]) -> None:
        """Copy by the cheapest way: all from memory, part by part, or strip by strip from the file."""
        span = sum((n - 1) * s for n, s, _ in dims) + 1
        count = prod(n for n, _, _ in dims)
        strip = min(dims, key=lambda dim: dim[1] or _NO_STRIDE)
        if span > max(2 * count, count // strip[0] * _SEEK // self._unit, _STRIP // self._unit):
            for a, b in _offsets(_sorted(dims, strip), src, dst):
                self._far_strip(target[b : b + (strip[0] - 1) * strip[2] + 1 : strip[2]], a, strip[0], strip[1])
        elif span > self._near and len(dims) > 1:
            self._split(target, src, dst, dims, span)
        else:
            near = self._units(src, span)
            n, stride, step = longest = max(dims)
            for a, b in _offsets(_sorted(dims, longest), 0, dst):
                target[b : b + (n - 1) * step + 1 : step] = self._stepped(near, a, n, stride)

    def _split(self, target: memoryview[int], src: int, dst: int, dims: list[Placed], span: int) -> None:
        """Cut the dimension of the largest stride so that each part fits into memory."""
        n, stride, step = widest = max(dims, key=lambda dim: dim[1])
        others = [dim for dim in dims if dim is not widest]
        rows = max(1, min(n, (self._near - (span - (n - 1) * stride)) // stride + 1))
        for i in range(0, n, rows):
            part = min(rows, n - i)
            inner = [(part, stride, step), *others] if part > 1 else others
            self._copy(target, src + i * stride, dst + i * step, inner)

    def _far_strip(self, place: memoryview[int], src: int, n: int, stride: int) -> None:
        """Copy a strip whose elements must be read for it."""
        apart = stride * self._unit
        count = 1 if apart >= _SEEK else n if stride == 0 else max(1, _STRIP // apart)
        for at in range(0, n, count):
            m = min(count, n - at)
            near = self._units(src + at * stride, (m - 1) * stride + 1)
            place[at : at + m] = self._stepped(near, 0, m, stride)

    def _stepped(self, near: memoryview[int], src: int, n: int, stride: int) -> memoryview[int]:
        if stride == 0:
            return memoryview(bytes(near[src : src + 1].cast("B")) * n).cast(self._format)
        return near[src : src + (n - 1) * stride + 1 : stride]

    def _units(self, at: int, count: int) -> memoryview[int]:
        buffer = memoryview(bytearray(count * self._unit))
        self._source.read(buffer, self._start + at * self._unit)
        return buffer.cast(self._format)


def _sorted(dims: list[Placed], axis: Placed) -> list[Placed]:
    """The dimensions but ``axis``, in an order that goes forwards through the source, which may be packed."""
    return sorted((dim for dim in dims if dim is not axis), key=lambda dim: -dim[1])
