"""The kernel of a scan: a block of one type in, its measure out.  No I/O, no policy, nothing written.

16-bit values are widened first, so there are two cases, FP32 and FP64.  Counts are taken on integer patterns, as in
``cast``.  Errors of rounding are exact in the wide type.  Their squares are added in FP64 within a block, and exactly
from block to block: since blocks are cut from a tensor's first element on, no result depends on how it was read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .cast import cast_into, count_ones, pair
from .dtypes import FP32, FP64, TARGETS, DType
from .exponents import Exponents
from .measures import Dyadic, Loss, Measure

__all__ = ["BLOCK", "SMALL", "Scanner", "square_sums"]

#: Elements looked at together: what is computed of them stays in the cache.
BLOCK = 1 << 19

#: Elements up to which a tensor is a small one, whose squares are added one by one.
SMALL = 4096

_INT = {torch.float32: torch.int32, torch.float64: torch.int64}
#: Squares of what is scaled to be about 1 neither overflow nor underflow.
_MAX_SCALE = 1000
#: Elements whose squares are added in FP32: in FP64 takes three times as long.
_ROW = 512
#: Largest |x| for which that is safe: its square is far from overflow, what underflows is nothing beside it.
_FP32_SQUARES = (1e-12, 1e15)
_NOTHING = Dyadic()


def _limits(a: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest of some integers."""
    low, high = torch.aminmax(a)
    return int(low), int(high)


def _max_abs(x: torch.Tensor) -> float:
    return max(float(torch.amax(x)), -float(torch.amin(x)))  # faster than aminmax


def _row_norms(x: torch.Tensor) -> torch.Tensor:
    """Numbers with the same sum of squares, far fewer of them where there are many."""
    rows, rest = divmod(x.numel(), _ROW)
    if x.dtype != torch.float32 or not rows:
        return x
    norms = torch.linalg.vector_norm(x[: rows * _ROW].view(rows, _ROW), dim=1)
    return torch.cat([norms, x[rows * _ROW :]]) if rest else norms


def square_sums(x: torch.Tensor, lengths: torch.Tensor) -> list[Dyadic]:
    """The sums of squares of small FP32 tensors that follow each other; nothing where it is not finite."""
    sums = torch.segment_reduce(x.double().square_(), "sum", lengths=lengths)
    return [Dyadic.of(value) if math.isfinite(value) else _NOTHING for value in sums.tolist()]


def _smallest(a: torch.Tensor, scratch: torch.Tensor) -> int:
    """The smallest of non-negative integers, but for zeros: those become the largest there is."""
    return int(torch.sub(a, 1, out=scratch).bitwise_and_(torch.iinfo(a.dtype).max).amin()) + 1


class _Magnitudes(NamedTuple):
    """Patterns without the sign; 0 stands for NaN and Inf."""

    a: torch.Tensor
    wide: DType
    low: int  #: smallest pattern but 0; that of Inf where there is none
    high: int
    nan: int
    inf: int
    zero: int


class Scanner:
    """The buffers of one thread, and the look at one block in them."""

    def __init__(self) -> None:
        self._wide, self._patterns, self._error, self._square = (
            torch.empty(BLOCK * 8, dtype=torch.uint8) for _ in range(4)
        )
        self._narrow = torch.empty(BLOCK * 2, dtype=torch.uint8)
        self._result = torch.empty(BLOCK * 4, dtype=torch.uint8)
        self._ones = torch.empty(BLOCK * 4, dtype=torch.uint8)

    def measure(self, data: memoryview, src: DType) -> Measure:
        """The elements of a tensor, at most ``BLOCK`` of them; what is in ``data`` after it is of no use to anyone."""
        if not len(data):
            return Measure()
        return self._look(*self._widened(data, src), src)

    def exponents(self, data: memoryview, src: DType) -> Exponents:
        """The histogram alone, of any number of elements; ``data`` is left as it is."""
        step = BLOCK * src.itemsize
        parts = (self._widened(data[at : at + step], src) for at in range(0, len(data), step))
        return sum((self._exponents(self._magnitudes(x, wide, self._patterns)) for x, wide in parts), Exponents())

    def _widened(self, data: memoryview, src: DType) -> tuple[torch.Tensor, DType]:
        """The elements in a type that is looked at, and that type."""
        x = torch.frombuffer(data, dtype=pair(src, src).src_torch)
        wide = FP64 if src is FP64 else FP32
        return x if src is wide else self._wide.view(torch.float32)[: x.numel()].copy_(x), wide

    def _magnitudes(self, x: torch.Tensor, wide: DType, room: torch.Tensor) -> _Magnitudes:
        """What is in ``x``; the patterns go to ``room``, which may be its own."""
        n, infinity = x.numel(), wide.max_bits + 1
        bits = x.view(_INT[x.dtype])
        a = torch.bitwise_and(bits, torch.iinfo(bits.dtype).max, out=room.view(bits.dtype)[:n])
        low, high = _limits(a)
        nan = inf = zero = 0
        if high >= infinity:
            nan, inf = count_ones(a > infinity), count_ones(a == infinity)
            a.masked_fill_(a >= infinity, 0)
            low, high = _limits(a)
        if low == 0:
            scratch = self._square.view(a.dtype)[:n]
            zero = count_ones(torch.eq(a, 0, out=scratch)) - nan - inf
            low = _smallest(a, scratch) if high else infinity
        return _Magnitudes(a, wide, low, high, nan, inf, zero)

    def _look(self, x: torch.Tensor, wide: DType, src: DType) -> Measure:
        magnitudes = self._magnitudes(x, wide, x)
        a, _, low, high, nan, inf, zero = magnitudes
        infinity = wide.max_bits + 1
        largest = wide.magnitude(high)
        sizes = a.view(x.dtype)  # rounding is symmetric
        signal = self._square_sum(sizes, largest)
        found = [
            None if to is src or to is wide else self._loss(sizes, to, wide, (low, high, zero + nan + inf), signal)
            for to in TARGETS
        ]
        exponents = self._exponents(magnitudes)
        return Measure(
            x.numel(), nan, inf, zero,
            exponents.below(1 - src.bias),
            wide.magnitude(low) if low < infinity else math.inf,
            largest,
            exponents,
            tuple(
                loss or Loss(subnormal=exponents.below(1 - to.bias), square_sum=signal)
                for to, loss in zip(TARGETS, found, strict=True)
            ),
        )  # fmt: skip

    def _exponents(self, of: _Magnitudes) -> Exponents:
        """The histogram; the patterns are used up."""
        a, wide, low, high, *zeros = of
        if not high:
            return Exponents()
        found = {}
        if not low >> wide.mantissa:  # subnormal: the pattern is the value, in units of the smallest
            small = a[(a > 0) & (a < 1 << wide.mantissa)].double().view(torch.int64) >> FP64.mantissa
            unit = FP64.bias - (1 - wide.bias - wide.mantissa)
            found = {e - unit: n for e, n in enumerate(torch.bincount(small).tolist())}
        first = 0 if any(zeros) else low >> wide.mantissa
        counts = self._fields(a, wide, first, high >> wide.mantissa)
        return Exponents.of(found | {e - wide.bias: n for e, n in enumerate(counts, first) if e})

    def _fields(self, a: torch.Tensor, wide: DType, first: int, last: int) -> list[int]:
        """How many patterns have each exponent field from ``first`` to ``last``; ``a`` is used up."""
        n, span = a.numel(), last - first + 1
        shifted = a.bitwise_right_shift_(wide.mantissa)
        if wide is FP64:
            return torch.bincount(self._narrow.view(torch.int16)[:n].copy_(shifted)).tolist()[first:]
        fields = self._narrow[:n].copy_(shifted).sub_(first)
        if n % 2 or span > 128:
            return torch.bincount(fields).tolist()
        pairs = torch.bincount(fields.view(torch.int16), minlength=span << 8).view(span, 256)  # half as many to count
        return (pairs.sum(0)[:span] + pairs.sum(1)).tolist()

    def _loss(self, x: torch.Tensor, to: DType, wide: DType, limits: tuple[int, int, int], signal: Dyadic) -> Loss:
        """What a cast of the finite sizes ``x`` would do.

        ``limits``: its smallest pattern but zero, its largest, how many zeros.  ``signal``: its sum of squares.
        """
        p, n = pair(wide, to), x.numel()
        low, high, zeros = limits
        if wide is FP32 and to.bias == wide.bias and low >= 1 << wide.mantissa and high < p.overflow:
            return self._shortened(x, wide.mantissa - to.mantissa, signal)
        kind = torch.int16 if to.bits == 16 else torch.int32
        y = self._result.view(p.dst_torch)[:n]
        cast_into(x, y)
        overflow = underflow = subnormal = 0
        if high >= p.overflow or low < (1 - to.bias + wide.bias) << wide.mantissa:
            r = y.view(kind)
            ones = self._ones.view(kind)[:n]
            overflow = count_ones(torch.ge(r, p.dst_inf, out=ones)) if high >= p.overflow else 0
            gone = wide.magnitude(low) <= to.underflow_bound if low < wide.max_bits else False
            underflow = count_ones(torch.eq(r, 0, out=ones)) - zeros if gone else 0
            subnormal = count_ones(torch.lt(r, p.dst_normal, out=ones)) - underflow - zeros
        error = self._error.view(x.dtype)[:n]
        error.copy_(y).sub_(x)
        if overflow:
            lost = torch.isinf(y)
            x, error = x.masked_fill(lost, 0), error.masked_fill(lost, 0)
            signal = self._square_sum(x, _max_abs(x))
        worst = _max_abs(error)
        exact = not worst and not overflow and self._is_exact(x, y)
        return Loss(overflow, underflow, subnormal, exact, worst, signal, self._square_sum(error, worst))

    def _shortened(self, x: torch.Tensor, drop: int, signal: Dyadic) -> Loss:
        """The same where nothing but the last ``drop`` bits of FP32 can go.  Ties go up: that is as far away."""
        bits, half = x.view(torch.int32), 1 << (drop - 1)
        error = self._error.view(x.dtype)[: x.numel()]
        torch.add(bits, half, out=error.view(torch.int32)).bitwise_and_(-1 << drop)
        worst = _max_abs(error.sub_(x))
        lost = not worst and int(torch.bitwise_and(bits, (1 << drop) - 1, out=error.view(torch.int32)).amax())
        return Loss(
            is_exact=not worst and not lost,
            max_abs_error=worst,
            square_sum=signal,
            square_error_sum=self._square_sum(error, worst),
        )

    def _is_exact(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Bit for bit: a processor that takes subnormals for zero finds no error in losing them."""
        kind = _INT[x.dtype]
        return torch.equal(self._error.view(x.dtype)[: x.numel()].copy_(y).view(kind), x.view(kind))

    def _square_sum(self, x: torch.Tensor, largest: float) -> Dyadic:
        """The sum of squares, to six digits at least."""
        if not largest:
            return _NOTHING
        if x.dtype == torch.float32 and x.numel() <= SMALL:
            return square_sums(x, torch.tensor([x.numel()]))[0]
        if _FP32_SQUARES[0] < largest < _FP32_SQUARES[1]:
            norm = float(torch.linalg.vector_norm(_row_norms(x), dtype=torch.float64))
            return Dyadic.of(norm * norm)
        power = max(-_MAX_SCALE, min(_MAX_SCALE, math.frexp(largest)[1]))
        square = self._square.view(torch.float64)[: x.numel()].copy_(x).mul_(math.ldexp(1.0, -power))
        return Dyadic.of(float(square.mul_(square).sum()), 2 * power)
