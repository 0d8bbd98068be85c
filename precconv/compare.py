"""The kernel of a comparison: chunks of two tensors in, how far they lie apart out.  No I/O, no policy.

Beside the cast the only module that computes with torch.  Floats are compared in FP64, to which every other float
widens exactly; integers as 64-bit patterns or, where those overflow, as Python's; all else by its bits.
Work is done in blocks that start at whole multiples of ``BLOCK`` elements of a tensor, each summed by itself,
so a result does not depend on how a tensor is cut into chunks as long as chunks start there too.
"""

from __future__ import annotations

import math
import mmap
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

with warnings.catch_warnings():  # numpy is not needed, and torch complains where it is not installed
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from .deviation import Comparison, Deviation, Tolerance, Worst, exact, value_of
from .dtypes import DType

__all__ = ["BLOCK", "Lanes"]

#: Elements.  Measured on 2 MB of FP32 against FP32, one thread: 16 K 2.4 ms, 32 K 1.9 ms, 64 K 1.7 ms, 128 K 1.8 ms,
#: 256 K 2.4 ms, where the FP64 values no longer fit the cache.
BLOCK = 1 << 16

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOWEST = -(1 << 63)


class _Block(NamedTuple):
    """The same elements of both sides, as bytes, and room for their FP64 values and errors."""

    a: torch.Tensor
    b: torch.Tensor
    pair: Comparison
    room: list[torch.Tensor]
    tolerance: Tolerance | None


class _Spot(NamedTuple):
    """The worst element of a block; where it is must be asked before the next block is looked at."""

    rank: int
    error: float
    where: Callable[[], int]


class Lanes:
    """The two buffers of one thread, and the comparison of what is in them."""

    def __init__(self, size: int) -> None:
        """``size``: bytes of the largest chunk of either side."""
        self._raw = [mmap.mmap(-1, size) for _ in range(2)]
        self._views = [memoryview(m) for m in self._raw]
        self._bytes = [torch.frombuffer(m, dtype=torch.uint8) for m in self._raw]
        self._room = [torch.empty(BLOCK, dtype=torch.float64) for _ in range(3)]

    def buffers(self, a: int, b: int) -> tuple[memoryview, memoryview]:
        """Where to put so many bytes of each side."""
        return self._views[0][:a], self._views[1][:b]

    def compare(self, pair: Comparison, start: int, n: int, tolerance: Tolerance | None) -> Deviation:
        """Compare the ``n`` elements in the buffers, which are a tensor's from ``start`` on, a multiple of BLOCK."""
        look, same_type = _LOOK[pair.how], pair.a is pair.b
        total = Deviation()
        rank, worst, at = -1, 0.0, 0
        for first in range(0, n, BLOCK):
            count = min(BLOCK, n - first)
            a, b = (
                raw[first * d.bits // 8 : (first + count) * d.bits // 8]
                for raw, d in zip(self._bytes, (pair.a, pair.b), strict=True)
            )
            room = self._room if count == BLOCK else [r[:count] for r in self._room]
            if same_type and _same_bytes(a, b):
                total += Deviation(count, squares=_squares_alone(a, pair, room[0]))
                continue
            part, spot = look(_Block(a, b, pair, room, tolerance))
            total += part
            if spot is not None and (spot.rank, spot.error) > (rank, worst):
                rank, worst, at = spot.rank, spot.error, first + spot.where()
        return total if rank < 0 else replace(total, worst=self._worst(pair, start, rank, worst, at))

    def _worst(self, pair: Comparison, start: int, rank: int, error: float, at: int) -> Worst:
        a, b = (_pattern(raw, at, d) for raw, d in zip(self._views, (pair.a, pair.b), strict=True))
        return Worst(rank, error, start + at, value_of(a, pair.a), value_of(b, pair.b), a, b)


def _pattern(raw: memoryview, at: int, dtype: DType) -> int:
    """The bits of an element, little-endian; those of packed ones follow each other from the lowest bit up."""
    first, end = at * dtype.bits // 8, -(-(at + 1) * dtype.bits // 8)
    whole = int.from_bytes(raw[first:end], "little")
    return whole >> (at * dtype.bits - first * 8) & ((1 << dtype.bits) - 1)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    size = a.numel()
    if size % 8 == 0:  # in the wide type torch compares seven times as fast
        return torch.equal(a.view(torch.int64), b.view(torch.int64))
    whole = size - size % 8
    return _same_bytes(a[:whole], b[:whole]) and torch.equal(a[whole:], b[whole:])


def _first(mask: torch.Tensor) -> int:
    return int(mask.to(torch.uint8).argmax())  # of several, the first


# --- floats -------------------------------------------------------------------------------------------------


@cache
def _values(dtype: DType) -> torch.Tensor:
    """The value of every pattern of an 8-bit float type: torch cannot widen all of them."""
    return torch.tensor([float(value_of(pattern, dtype)) for pattern in range(256)], dtype=torch.float64)


def _widen(x: torch.Tensor, dtype: DType, out: torch.Tensor) -> torch.Tensor:
    """Bytes as FP64 values, exactly."""
    if dtype.bits == 8:
        return torch.index_select(_values(dtype), 0, x.int(), out=out)
    kind = getattr(torch, dtype.torch)
    assert isinstance(kind, torch.dtype)
    return out.copy_(x.view(kind))


def _square_sum(x: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x))
    return norm * norm  # Inf where ** would raise


def _squares_alone(x: torch.Tensor, pair: Comparison, room: torch.Tensor) -> int:
    if pair.how != "float":
        return 0
    a = _widen(x, pair.a, room)
    total = _square_sum(a)
    if not math.isfinite(total):
        total = _square_sum(a.masked_fill_(~torch.isfinite(a), 0))
    return exact(total)


def _floats(block: _Block) -> tuple[Deviation, _Spot | None]:
    a, b = _widen(block.a, block.pair.a, block.room[0]), _widen(block.b, block.pair.b, block.room[1])
    error = torch.sub(a, b, out=block.room[2]).abs_()
    squares, noise = _square_sum(a), _square_sum(error)
    odd = nan = None  # where one side is not finite and the other something else; where both are NaN
    if not (math.isfinite(squares) and math.isfinite(noise)):
        finite = torch.isfinite(a) & torch.isfinite(b)
        nan = torch.isnan(a) & torch.isnan(b)
        odd = ~finite & (a != b) & ~nan
        error.masked_fill_(~finite, 0)
        a.masked_fill_(~finite, 0)
        squares, noise = _square_sum(a), _square_sum(error)
    odds = 0 if odd is None else _count(odd)
    differing = _count(error) + odds
    largest = float(torch.aminmax(error)[1])
    beyond = None if block.tolerance is None else error > block.tolerance.atol + block.tolerance.rtol * a.abs()
    outside = odds + (0 if beyond is None else _count(beyond))
    zeros, nans, bits = _other_bits(block, differing, nan)
    found = Deviation(
        n=a.numel(),
        differing=differing,
        nonfinite=odds,
        zeros=zeros,
        nans=nans,
        beyond=0 if beyond is None else outside,
        max_abs_error=largest,
        squares=exact(squares),
        squared_errors=exact(noise),
    )
    if odd is not None and odds:
        where = odd
        return found, _Spot(3, 0.0, lambda: _first(where))
    if beyond is not None and outside:
        error.masked_fill_(~beyond, 0)
        return found, _Spot(2, float(error.max()), lambda: int(error.argmax()))
    if largest:
        return found, _Spot(1, largest, lambda: int(error.argmax()))
    return found, _Spot(0, 0.0, lambda: _first(bits != 0)) if zeros or nans else None


def _count(x: torch.Tensor) -> int:
    return int(torch.count_nonzero(x))


def _other_bits(block: _Block, differing: int, nan: torch.Tensor | None) -> tuple[int, int, torch.Tensor]:
    """How many zeros and how many NaN have other bits, where both sides are of one dtype; and where bits differ."""
    if block.pair.a is not block.pair.b:
        return 0, 0, block.a
    kind = _INT[block.pair.a.itemsize]
    bits = block.a.view(kind) ^ block.b.view(kind)
    nans = 0 if nan is None else _count(bits[nan])
    return _count(bits) - differing - nans, nans, bits


# --- integers -----------------------------------------------------------------------------------------------


def _wide_int(x: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Bytes as 64-bit integers: the values, but of uint64 the bits."""
    if dtype.bits == 8:
        return (x if dtype.kind != "int" else x.view(torch.int8)).long()
    values = x.view(_INT[dtype.itemsize]).long()
    return values & ((1 << dtype.bits) - 1) if dtype.kind == "uint" and dtype.bits < 64 else values


def _unsigned(x: torch.Tensor) -> torch.Tensor:
    """64-bit patterns as the nearest FP64 of the unsigned integer."""
    return x.double() + (x < 0) * 2.0**64


def _ints(block: _Block) -> tuple[Deviation, _Spot | None]:
    pair, tolerance = block.pair, block.tolerance
    a, b = _wide_int(block.a, pair.a), _wide_int(block.b, pair.b)
    high_a, high_b = pair.a == "uint64", pair.b == "uint64"
    if high_a != high_b and bool(((a if high_a else b) < 0).any()):
        return _python_ints(a, b, pair, tolerance)
    turn = _LOWEST if high_a and high_b else 0  # the top bit turned: unsigned patterns sort as signed ones
    # The distance of two signed numbers fits 64 bits without a sign.
    distance = torch.where((a ^ turn) > (b ^ turn), a - b, b - a)
    order = distance ^ _LOWEST
    largest = int(order.max()) - _LOWEST
    if not largest:
        return Deviation(a.numel()), None
    outside = 0
    if tolerance is not None:
        reference = _unsigned(a) if high_a else a.double().abs()
        within = _unsigned(distance) <= tolerance.atol + tolerance.rtol * reference
        outside = a.numel() - _count(within)
        if outside:
            order.masked_fill_(within, _LOWEST)
    found = Deviation(n=a.numel(), differing=_count(distance), beyond=outside, max_abs_error=largest)
    worst = float(int(order.max()) - _LOWEST)
    return found, _Spot(2 if outside else 1, worst, lambda: int(order.argmax()))


def _python_ints(
    a: torch.Tensor, b: torch.Tensor, pair: Comparison, tolerance: Tolerance | None
) -> tuple[Deviation, _Spot | None]:
    """uint64 that no int64 holds, against another type: rare, and 65 bits."""
    left, right = (
        [v % (1 << 64) if d == "uint64" else v for v in x.tolist()] for x, d in zip((a, b), pair[1:], strict=True)
    )
    errors = [abs(p - q) for p, q in zip(left, right, strict=True)]
    outside = [
        tolerance is not None and float(e) > tolerance.atol + tolerance.rtol * float(abs(p))
        for e, p in zip(errors, left, strict=True)
    ]
    found = Deviation(len(errors), sum(map(bool, errors)), beyond=sum(outside), max_abs_error=max(errors))
    spots = [e for e, out in zip(errors, outside, strict=True) if out] or errors
    return found, _Spot(2 if found.beyond else 1, float(max(spots)), lambda: errors.index(max(spots)))


# --- bits ---------------------------------------------------------------------------------------------------


def _bits(block: _Block) -> tuple[Deviation, _Spot | None]:
    """Elements of one dtype as they are; every other one is beyond any tolerance."""
    bits = block.pair.a.bits
    if bits % 8:
        changed = (block.a ^ block.b).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
        differs = changed.view(-1, bits).any(1)
    else:
        differs = (block.a != block.b).view(-1, bits // 8).any(1)
    found = _count(differs)
    beyond = found if block.tolerance is not None else 0
    deviation = Deviation(differs.numel(), found, beyond=beyond)
    return deviation, _Spot(2 if beyond else 1, 0.0, lambda: _first(differs)) if found else None


_LOOK: dict[str, Callable[[_Block], tuple[Deviation, _Spot | None]]] = {"float": _floats, "int": _ints, "bits": _bits}
