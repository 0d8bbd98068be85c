"""The kernel: chunks of one type in, chunks of another and their statistics out.  No I/O, no policy.

Only the kernels (tests/test_layers.py names them) compute with torch.  Everything is counted
on integer magnitude patterns (the bits without the sign), which sort as their values do, so every count is exact.  A
chunk costs the cast and one look at the result: no pattern at or above Inf and none below the smallest normal means no
NaN, Inf, overflow, underflow, zero or subnormal, and nothing else is computed; only chunks that fail this are counted,
on the source.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import NamedTuple

with warnings.catch_warnings():  # numpy is not needed, and torch complains where it is not installed
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from .draws import Stretch
from .dtypes import FP64, DType
from .stats import Norms, Stats
from .stochastic import Rounder

__all__ = [
    "Lane",
    "Pair",
    "blank",
    "cast_chunk",
    "cast_into",
    "count_ones",
    "first_difference",
    "one_thread",
    "pair",
    "reference_cast",
]

#: torch treats the last elements of an array, those that do not fill a vector, with other code, whose NaN differ.
#: Casting whole multiples of this many elements makes every result independent of where a chunk ends.
VECTOR = 64

_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and a target type, and the magnitude patterns at which something happens between them."""

    src: DType
    dst: DType
    src_inf: int  #: pattern of Inf; NaN lie above
    dst_inf: int
    dst_normal: int  #: smallest normal of the target
    overflow: int  #: of the source: the first pattern that no longer fits; ``src_inf`` where all do

    @property
    def src_torch(self) -> torch.dtype:
        return _torch(self.src)

    @property
    def dst_torch(self) -> torch.dtype:
        return _torch(self.dst)

    @property
    def narrows(self) -> bool:
        """Whether stochastic rounding is for it: from a wider type to one of 16 bits."""
        return self.dst.bits == 16 and self.src.bits > 16


@cache
def pair(src: DType, dst: DType) -> Pair:
    """The limits between two castable types, derived from the dtype table."""
    bound, inclusive = dst.overflow_bound, dst.overflow_inclusive
    low, high = 0, src.max_bits + 1  # the first pattern whose value overflows; Inf if none does
    while low < high:
        middle = (low + high) // 2
        value = src.magnitude(middle)
        low, high = (low, middle) if value > bound or (inclusive and value == bound) else (middle + 1, high)
    return Pair(src, dst, src.max_bits + 1, dst.max_bits + 1, 1 << dst.mantissa, low)


def _torch(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.torch)
    assert isinstance(found, torch.dtype)
    return found


def _patterns(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Magnitude patterns of a flat float tensor, as integers of the same width."""
    bits = x.view(_INT[x.element_size()])
    return torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=out)


def cast_into(x: torch.Tensor, y: torch.Tensor) -> None:
    """Round the flat ``x`` into ``y``: to nearest, ties to even, once.

    torch rounds FP64 to a 16-bit type twice, by way of FP32.  Here that step rounds to odd: truncated, the last bit
    set when anything was lost, which makes the second rounding that of the exact value (Boldo and Melquiond, 2008).
    """
    if x.dtype == torch.float64 and y.element_size() == 2:
        single = x.to(torch.float32)
        back = single.double()
        bits = single.view(torch.int32)
        bits -= (back.abs() > x.abs()).to(torch.int32)
        bits |= (back != x).to(torch.int32)
        x = single
    y.copy_(x)


def count_ones(mask: torch.Tensor) -> int:
    """Number of ones among zeros, faster than torch counts: sums that stay in the mask's own narrow type."""
    n = mask.numel()
    if mask.dtype == torch.int16:
        if n % VECTOR == 0 and n // VECTOR <= torch.iinfo(torch.int16).max:
            mask = mask.view(-1, VECTOR).sum(0, dtype=torch.int16)
        return int(mask.sum())
    return int(mask.sum(dtype=torch.int32 if mask.dtype == torch.int32 else torch.int64))


def _zeros(x: torch.Tensor, scratch: torch.Tensor) -> int:
    """Number of zeros, of either sign."""
    n = x.numel()
    if x.element_size() == 2:
        return count_ones(torch.eq(_patterns(x), 0, out=scratch.view(torch.int16)[:n]))
    ones = torch.eq(x, 0, out=scratch.view(x.dtype)[:n])
    return int(ones.sum(dtype=x.dtype if n <= 1 << 24 else torch.float64))  # FP32 counts no further


def _tally(x: torch.Tensor, r: torch.Tensor, p: Pair, scratch: torch.Tensor) -> Stats | None:
    """Counts for the source ``x`` behind the result patterns ``r``; None when there is nothing to say."""
    low, high = (int(v) for v in torch.aminmax(r))
    if p.dst_normal <= low and high < p.dst_inf:
        return None
    nan = inf = zero = overflow = underflow = subnormal = 0
    largest = 0.0
    results = scratch.view(r.dtype)[: r.numel()]
    if low < p.dst_normal:
        subnormal = count_ones(torch.lt(r, p.dst_normal, out=results))
    if low == 0:
        results_zero = count_ones(torch.eq(r, 0, out=results))
        zero = _zeros(x, scratch)
        subnormal, underflow = subnormal - results_zero, results_zero - zero
    if high >= p.dst_inf:
        a = _patterns(x)
        source = scratch.view(a.dtype)[: a.numel()]
        nan = count_ones(torch.gt(a, p.src_inf, out=source))
        inf = count_ones(torch.eq(a, p.src_inf, out=source))
        overflow = count_ones(torch.ge(a, p.overflow, out=source)) - nan - inf
        if overflow:
            largest = p.src.magnitude(int(a.masked_fill(a >= p.src_inf, 0).max()))
    return Stats(x.numel(), nan, inf, zero, overflow, underflow, subnormal, largest)


def _norms(x: torch.Tensor, y: torch.Tensor, scratch: torch.Tensor, *, finite: bool) -> Norms:
    """Sizes and errors of a segment.  The error of rounding an FP32 or narrower value is exact in FP32."""
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    x = x.to(wide)
    error = torch.sub(y, x, out=scratch.view(wide)[: x.numel()])
    largest = x
    if not finite:
        largest = x.masked_fill(~torch.isfinite(x), 0)
        keep = torch.isfinite(error)
        x, error = x.masked_fill(~keep, 0), error.masked_fill(~keep, 0)
    return Norms(_max_abs(largest), _max_abs(error), _square_sum(x), _square_sum(error))


def _max_abs(x: torch.Tensor) -> float:
    low, high = torch.aminmax(x)
    return max(abs(float(low)), abs(float(high)))


def _square_sum(x: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return norm * norm  # Inf where ** would raise


def _clamp(x: torch.Tensor, y: torch.Tensor, p: Pair) -> None:
    """Turn what overflowed to infinity into the largest finite value of the same sign."""
    over = torch.isinf(y) & torch.isfinite(x)
    y[over] = torch.copysign(torch.tensor(p.dst.max, dtype=y.dtype), y[over])


#: (key, first element, end): a tensor's part of a chunk; the key is the caller's.
Segment = tuple[int, int, int]


#: Segments in a chunk from which on it pays to look at them all at once.
_MANY = 16


def _many(
    parts: list[Segment], r: torch.Tensor, p: Pair, scratch: torch.Tensor
) -> tuple[list[Segment], list[tuple[int, Stats]]]:
    """Sort the many segments of a chunk by what is in their results.

    Returns those that hold zero, Inf or NaN and must be counted on the source, and the statistics of those that hold
    nothing worse than subnormals.
    """
    ends = torch.tensor([end for _, _, end in parts]) - 1
    mask = scratch.view(r.dtype)[: r.numel()]

    def counts(hits: torch.Tensor) -> list[int]:
        sums = hits.cumsum(0, dtype=torch.int32)[ends]
        return sums.diff(prepend=sums.new_zeros(1)).tolist()

    small = counts(torch.lt(r, p.dst_normal, out=mask))
    zero = counts(torch.eq(r, 0, out=mask))
    large = counts(torch.ge(r, p.dst_inf, out=mask))
    odd, found = [], []
    for part, subnormal, zeros, larges in zip(parts, small, zero, large, strict=True):
        if zeros or larges:
            odd.append(part)
        elif subnormal:
            found.append((part[0], Stats(part[2] - part[1], subnormal=subnormal)))
    return odd, found


class _Views(NamedTuple):
    """A lane's buffers as tensors, for chunks of one size between two types."""

    p: Pair
    n: int
    x: torch.Tensor  #: the source, up to a whole number of vectors
    y: torch.Tensor  #: the result, likewise
    bits: torch.Tensor  #: the result's ``n`` elements as integers
    r: torch.Tensor  #: for their magnitude patterns
    mask: int
    raw: memoryview  #: the result's bytes


class Lane:
    """The buffers of one thread, and the work on one chunk in them.

    Fill ``source(nbytes)``, call ``cast``, then write what it returned before the next chunk is filled.
    """

    def __init__(self, size: int) -> None:
        """``size``: bytes of the largest chunk, on its wider side."""
        self._raw = [mmap.mmap(-1, size) for _ in range(2)]
        self._raw_views = [memoryview(m) for m in self._raw]
        self._views_of: _Views | None = None
        self._in, self._out = (torch.frombuffer(m, dtype=torch.uint8) for m in self._raw)
        self._scratch = [torch.empty(n * size, dtype=torch.uint8) for n in (1, 2)]  # errors of 16-bit chunks are FP32
        self._rounder = Rounder()

    def source(self, nbytes: int) -> memoryview:
        """Where to put ``nbytes`` bytes of the source."""
        return self._raw_views[0][:nbytes]

    def load(self, p: Pair, x: torch.Tensor) -> None:
        """Put a tensor's elements, in row-major order, from wherever they are, where the source is."""
        self._set(p, x.numel()).x[: x.numel()].view(x.shape).copy_(x)

    def unload(self, p: Pair, y: torch.Tensor) -> None:
        """Put the result into a tensor, in row-major order."""
        y.copy_(self._set(p, y.numel()).y[: y.numel()].view(y.shape))

    def _set(self, p: Pair, n: int) -> _Views:
        """The buffers as tensors; the same for nearly every chunk, and making them costs as much as the cast."""
        views = self._views_of
        if views is None or views.p is not p or views.n != n:
            padded = -(-n // VECTOR) * VECTOR
            x = self._in.view(p.src_torch)[:padded]
            y = x if p.src is p.dst else self._out.view(p.dst_torch)[:padded]
            kind = _INT[p.dst.itemsize]
            r = self._scratch[0].view(kind)[:n]
            raw = self._raw_views[0 if p.src is p.dst else 1][: n * p.dst.itemsize]
            views = _Views(p, n, x, y, y[:n].view(kind), r, torch.iinfo(kind).max, raw)
            self._views_of = views
        return views

    def cast(self, p: Pair, n: int, stretches: Sequence[Stretch] = ()) -> memoryview:
        """Cast the first ``n`` elements of the source; the bytes of the result, the source's own if nothing changes.

        ``stretches``: whose random bits they get, where ``p`` narrows; without them they are rounded to nearest.
        """
        views = self._set(p, n)
        if p.src is not p.dst:
            cast_into(views.x, views.y)
        if stretches and p.narrows:
            self._rounder.round(views.x[:n], views.y[:n], p.dst, stretches)
        return views.raw

    def survey(
        self, p: Pair, n: int, segments: Iterable[Segment], *, clamp: bool = False, norms: bool = False
    ) -> list[tuple[int, Stats]]:
        """Statistics of the chunk just cast, for those segments where there is anything to say.

        With ``norms`` that is every segment.  With ``clamp`` overflowed results become the largest finite value.
        """
        views = self._set(p, n)
        r = torch.bitwise_and(views.bits, views.mask, out=views.r)
        least, most = torch.aminmax(r)
        low, high = least.item(), most.item()
        clean = p.dst_normal <= low and high < p.dst_inf
        if clean and not norms:
            return []
        y = views.y[:n]
        x = views.x[:n]
        parts = list(segments)
        if not norms and len(parts) > _MANY:
            parts, found = _many(parts, r, p, self._scratch[1])
        else:
            found = []
        for key, start, end in parts:
            part = slice(start, end)
            stats = None if clean else _tally(x[part], r[part], p, self._scratch[1])
            if stats is not None and stats.overflow and clamp:
                _clamp(x[part], y[part], p)
            if norms:
                extent = _norms(x[part], y[part], self._scratch[1], finite=high < p.dst_inf)
                stats = (stats or Stats(end - start)) + Stats(norms=extent)
            if stats is not None:
                found.append((key, stats))
        return found


def cast_chunk(x: torch.Tensor, to: DType, *, clamp: bool = False, norms: bool = False) -> tuple[torch.Tensor, Stats]:
    """Cast the flat, castable ``x`` to ``to``; a new tensor and the statistics of every element.

    The same kernel as the streamed conversion's, for tensors in memory.  ``x`` is not changed.
    """
    from .dtypes import dtype

    p = pair(dtype(x.dtype), to)
    n = x.numel()
    y = torch.empty(-(-n // VECTOR) * VECTOR, dtype=p.dst_torch)
    cast_into(torch.nn.functional.pad(x, (0, y.numel() - n)), y)
    y = y[:n]
    if n == 0:
        return y, Stats(norms=Norms() if norms else None)
    scratch = torch.empty(n * 8, dtype=torch.uint8)
    stats = _tally(x, _patterns(y), p, scratch) or Stats(n)
    if clamp and stats.overflow:
        _clamp(x, y, p)
    return y, stats + Stats(norms=_norms(x, y, scratch, finite=False)) if norms else stats


def reference_cast(x: torch.Tensor, p: Pair, *, clamp: bool, stretches: Sequence[Stretch] = ()) -> torch.Tensor:
    """What a conversion must hold, by the shortest way that is right: verification's side of the comparison."""
    y = torch.empty(-(-x.numel() // VECTOR) * VECTOR, dtype=p.dst_torch)
    padded = torch.nn.functional.pad(x, (0, y.numel() - x.numel()))
    if p.src is FP64 and p.dst.bits == 16:
        cast_into(padded, y)
    else:
        y = padded.to(p.dst_torch)
    y = y[: x.numel()]
    if stretches and p.narrows:
        Rounder().round(x, y, p.dst, stretches)
    if clamp:
        largest = torch.tensor(p.dst.max, dtype=p.dst_torch)
        y = torch.where(torch.isinf(y) & torch.isfinite(x), torch.copysign(largest, y), y)
    return y


def first_difference(
    x: memoryview, y: memoryview, p: Pair | None, *, clamp: bool, stretches: Sequence[Stretch] = ()
) -> int | None:
    """Where the bytes ``y`` first differ from those of ``x`` cast by ``p``, or from ``x`` itself; None if nowhere."""
    got, want = torch.frombuffer(y, dtype=torch.uint8), torch.frombuffer(x, dtype=torch.uint8)
    if p is not None:
        want = reference_cast(want.view(p.src_torch), p, clamp=clamp, stretches=stretches).view(torch.uint8)
    if torch.equal(want, got):
        return None
    return int((want != got).nonzero()[0])


def blank(x: memoryview, size: int, shown: bytearray) -> None:
    """Zero the elements, of ``size`` bytes, whose byte in ``shown`` is 0: no tensor has them, they may be anything."""
    elements = torch.frombuffer(x, dtype=torch.uint8).view(-1, size)
    elements[torch.frombuffer(shown, dtype=torch.uint8) == 0] = 0


_threads_lock = Lock()
_threads_users = 0  #: how many are inside ``one_thread``
_threads_before = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch on the calling thread, which has siblings of ours; restored when the last one leaves."""
    global _threads_users, _threads_before
    with _threads_lock:
        if not _threads_users:
            _threads_before = torch.get_num_threads()
        _threads_users += 1
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _threads_lock:
            _threads_users -= 1
            if not _threads_users:
                torch.set_num_threads(_threads_before)
