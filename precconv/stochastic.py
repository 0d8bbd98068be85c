"""Stochastic rounding to a 16-bit type: up in magnitude with a probability equal to the remainder.

A draw is a number of 48 bits, made from an element's index and its tensor's keys alone; of a remainder of s bits it
is the top s bits that decide.  The top 16, enough for most elements, come from a table of random words, another affine
function of it for each block of a tensor; the others are a word of the element's own, made where they are needed.  So
neither the source's type nor the way a value is computed shows in a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import shake_128
from itertools import accumulate

import torch

from .draws import BLOCK, Stretch
from .dtypes import FP32, FP64, DType

__all__ = ["Rounder", "halves", "words"]

#: Those of ``triple32`` (Chris Wellons, hash-prospector), which does more than is needed here.
_FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_HALF, _WORD = 16, 32  #: bits of the two parts of a draw
#: Bits of a remainder that are compared.  What a value has beyond them, 2^-48 of its result's unit, is cut.
_DRAW = _HALF + _WORD
#: Elements of a stretch, on average, from which on each is done by itself: expanding keys costs more than using them.
_LONG = 2048
_SIGN = -1 << 15  #: of 16 bits
#: Elements that are looked at together first, to find the few that are of some kind.
_FOLD = 16
#: From so many of the columns of that on they are folded in turn.
_WIDE = 1 << 14
#: One in so many of these: from there on it takes less time to do something to all elements than to find those.
_FEW = 8


def _signed(value: int) -> int:
    """A 32-bit pattern as the int32 it is for torch."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def words(
    counters: torch.Tensor, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """32 random bits for each of some int32 counters, by two keys: tensors of one element or of as many.

    A counter is an index times the first factor.  In 32 bits: plus the first key; fold; times the second factor,
    plus the second key; fold; times the third factor.  To fold is to xor with itself shifted to the right, by 16 and
    then by 15, the sign filling up.  With one key alone the words of any two tensors would be the same ones in
    another order.
    """
    torch.add(counters, first, out=out)
    out.bitwise_xor_(torch.bitwise_right_shift(out, 16, out=scratch))
    torch.add(second, out, alpha=_signed(_FACTORS[1]), out=out)
    out.bitwise_xor_(torch.bitwise_right_shift(out, 15, out=scratch))
    out.mul_(_signed(_FACTORS[2]))


@cache
def _pattern(value: float, dtype: DType) -> int:
    """The magnitude pattern of a value that ``dtype`` holds exactly."""
    if dtype is FP32:
        return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
    return int(torch.tensor(value, dtype=torch.float64).view(torch.int64))


def _exactly(x: torch.Tensor, dst: DType, draw: torch.Tensor) -> torch.Tensor:
    """Round any finite FP64 below the largest of ``dst``, in integers; bits of the result as int16."""
    bits = x.view(torch.int64)
    magnitude = bits & torch.iinfo(torch.int64).max
    field = magnitude >> FP64.mantissa
    significand = magnitude & ((1 << FP64.mantissa) - 1)
    significand |= (field > 0).long() << FP64.mantissa
    lowest = FP64.bias + 1 - dst.bias  # exponent field of the smallest normal of ``dst``
    exponent = field.clamp(min=lowest)  # of the binade whose unit the result has
    drop = exponent - field.clamp_(min=1) + (FP64.mantissa - dst.mantissa)
    significand >>= (drop - _DRAW).clamp_(0, 63)
    drop.clamp_(max=_DRAW)
    significand += draw >> (_DRAW - drop)
    rounded = (significand >> drop) + ((exponent - lowest) << dst.mantissa)  # a carry reaches the exponent by itself
    return (rounded | ((bits >> 63) & 1) << (dst.bits - 1)).to(torch.int16)


@cache
def _table() -> torch.Tensor:
    """Random words, one for two elements of a block and one more; made once, in 3 ms."""
    data = shake_128(b"precconv").digest(4 * (BLOCK // 2 + 1))
    return torch.frombuffer(bytearray(data), dtype=torch.int32)


def halves(stretches: Sequence[Stretch], out: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The first parts of the draws of all elements, into the int16 ``out``.

    A block's words are those of the table times an odd key plus another.  Their halves, in the order of memory, are
    xored each with the next, upper ones with lower ones: a product's lower bits depend on the key's lower bits only.
    Within a block this changes nothing about how random the table is, for it can be undone.

    ``scratch``: int32, two elements more than the longest stretch.
    """
    if out.numel() < _LONG * len(stretches):
        return _short_halves(stretches, out)
    at = 0
    for (first, second, _, _), start, n in stretches:
        pair, odd = divmod(start, 2)
        count = (odd + n) // 2 + 1
        factor, added = _signed(first | 1), torch.tensor(_signed(second), dtype=torch.int32)
        torch.add(added, _table()[pair : pair + count], alpha=factor, out=scratch[:count])
        parts = scratch.view(torch.int16)[odd : odd + n + 1]
        torch.bitwise_xor(parts[:-1], parts[1:], out=out[at : at + n])
        at += n
    return out


def _short_halves(stretches: Sequence[Stretch], out: torch.Tensor) -> torch.Tensor:
    """The same for many short stretches: the words of all at once, each stretch's from its first to its last."""
    keys = torch.tensor([[_signed(s.keys[0] | 1), _signed(s.keys[1])] for s in stretches], dtype=torch.int32)
    first, elements = torch.tensor([s[1:] for s in stretches]).t().contiguous()
    odd = first & 1
    counts = (odd + elements >> 1) + 1
    starts = counts.cumsum(0) - counts
    which = torch.repeat_interleave(counts)
    found = torch.index_select(((first >> 1) - starts).int(), 0, which)
    found.add_(torch.arange(found.numel(), dtype=torch.int32))
    factor, added = (torch.index_select(key, 0, which) for key in keys.t().contiguous())
    parts = torch.index_select(_table(), 0, found).mul_(factor).add_(added).view(torch.int16)
    shifts = 2 * starts + odd - (elements.cumsum(0) - elements)
    where = torch.index_select(shifts.int(), 0, torch.repeat_interleave(elements))
    where.add_(torch.arange(where.numel(), dtype=torch.int32))
    return torch.index_select(parts[:-1] ^ parts[1:], 0, where, out=out)


def _words(stretches: Sequence[Stretch], positions: torch.Tensor) -> torch.Tensor:
    """The second parts of the draws of the elements at some positions in the chunk."""
    ends = list(accumulate(s.elements for s in stretches))
    # the first key is shifted, so that a position in the chunk counts as an index in the block
    rows = [
        [_signed(s.keys[2] + (s.first + s.elements - end) * _FACTORS[0]), _signed(s.keys[3])]
        for s, end in zip(stretches, ends, strict=True)
    ]
    first, second = torch.tensor(rows, dtype=torch.int32).t().contiguous()
    if len(rows) > 1:
        which = torch.bucketize(positions, torch.tensor(ends), right=True)
        first, second = torch.index_select(first, 0, which), torch.index_select(second, 0, which)
    found = positions.to(torch.int32).mul_(_signed(_FACTORS[0]))
    words(found, first, second, found, torch.empty_like(found))
    return found


class _Folded:
    """Where int16 values are at most ``bound``: quick where few are, for only a part of them is gone through."""

    def __init__(self, values: torch.Tensor, bound: int) -> None:
        self._values, self._bound = values, bound
        self._width = values.numel() // _FOLD
        rows = values[: _FOLD * self._width].view(_FOLD, self._width)  # those of a column lie far apart
        self._columns = torch.amin(rows, 0) if self._width else values[:0]
        again = _Folded(self._columns, bound) if self._width >= _WIDE else None
        self._found = again.positions().view(-1, 1) if again and again.is_few else (self._columns <= bound).nonzero()

    @property
    def is_few(self) -> bool:
        return self._found.numel() * _FEW <= self._width

    def positions(self) -> torch.Tensor:
        end = _FOLD * self._width
        near = (self._found + torch.arange(0, end, self._width or 1)).view(-1)
        if end < self._values.numel():
            near = torch.cat([near, torch.arange(end, self._values.numel())])
        return torch.masked_select(near, torch.index_select(self._values, 0, near) <= self._bound)


class Rounder:
    """The buffers of one thread, and the rounding of one chunk in them."""

    def __init__(self) -> None:
        self._sums = self._scratch = torch.empty(0, dtype=torch.int32)
        self._halves = self._nearest = self._low = torch.empty(0, dtype=torch.int16)

    def _grow(self, n: int) -> None:
        if self._low.numel() < n:
            self._sums, self._scratch = (torch.empty(n + 2, dtype=torch.int32) for _ in range(2))
            self._halves, self._nearest, self._low = (torch.empty(n, dtype=torch.int16) for _ in range(3))

    def round(self, x: torch.Tensor, y: torch.Tensor, dst: DType, stretches: Sequence[Stretch]) -> None:
        """Round the flat ``x``, FP32 or FP64, into ``y``, where it stands rounded to nearest.

        From the largest finite value on that is what it stays, and so with NaN and Inf.
        """
        n = x.numel()
        self._grow(n)
        if x.dtype == torch.float32:
            self._narrow(x, y, dst, stretches)
            return
        first = halves(stretches, self._halves[:n], self._sums)
        rounded = _exactly(x, dst, _draws(first, _words(stretches, torch.arange(n))))
        fits = (x.view(torch.int64) & torch.iinfo(torch.int64).max) < _pattern(dst.max, FP64)
        bits = y.view(torch.int16)
        torch.where(fits, rounded, bits, out=bits)

    def _narrow(self, x: torch.Tensor, y: torch.Tensor, dst: DType, stretches: Sequence[Stretch]) -> None:
        """FP32: add the draw to the bits that go, and let it carry.

        Results that are subnormal in ``dst`` but normal in FP32 lose more bits than that.  Which those are, and which
        do not fit, is first looked for in the nearest values, half as many bytes.
        """
        normal = 1 << dst.mantissa
        result = y.view(torch.int16)
        nearest = torch.bitwise_and(result, ~_SIGN, out=self._nearest[: x.numel()])
        least, most = (int(v) for v in torch.aminmax(nearest))
        large = few = None
        if most >= dst.max_bits:
            large = _Folded(nearest ^ ~_SIGN, dst.max_bits ^ ~_SIGN).positions()
            large = large[_magnitudes(x.view(torch.int32)[large]) >= _pattern(dst.max, FP32)]
            kept = result[large]
        has_small = dst.bias != FP32.bias and least <= normal
        if has_small:
            small = _Folded(nearest, normal)
            few = small.positions() if small.is_few else None
        first = halves(stretches, self._halves[: x.numel()], self._sums)
        self._carry(x, y, dst, first)
        if few is not None:
            self._few(x, y, few, dst, stretches, first)
        elif has_small:
            where = self._many(x, result, dst, first)
            result[where] = _whole(x, dst, where, stretches, first)
        if large is not None:
            result[large] = kept

    def _carry(self, x: torch.Tensor, y: torch.Tensor, dst: DType, first: torch.Tensor) -> None:
        """Round what is normal in ``dst``, or subnormal in both: it loses as many bits as the significand."""
        drop = FP32.mantissa - dst.mantissa
        sums = self._sums[: x.numel()].copy_(first.view(torch.uint16))
        if drop < _HALF:
            sums.bitwise_right_shift_(_HALF - drop)
        sums.add_(x.view(torch.int32))
        if drop == dst.bits:  # BF16 is the upper half
            y.view(torch.int16).copy_(sums.bitwise_right_shift_(drop))
        else:
            y.copy_(sums.bitwise_and_(-1 << drop).view(torch.float32))

    def _fixed(self, x: torch.Tensor, dst: DType, first: torch.Tensor) -> torch.Tensor:
        """Sizes and first parts of draws together, in units of 2^-16 of the smallest subnormal.

        For what is subnormal in ``dst`` or hardly larger.  What becomes of other values, Inf and NaN among them, has
        no meaning.  Where the lower 16 bits are all set, the rest of size and draw decides: by chance, one in 2^16.
        """
        n = x.numel()
        sizes = torch.abs(x, out=self._scratch.view(torch.float32)[:n]).mul_(2.0**_HALF / dst.smallest_subnormal)
        sums = self._sums[:n].copy_(sizes)  # what is less than 1 is cut
        return sums.add_(self._scratch[:n].copy_(first.view(torch.uint16)))

    def _few(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        where: torch.Tensor,
        dst: DType,
        stretches: Sequence[Stretch],
        first: torch.Tensor,
    ) -> None:
        """Put the results at some positions, subnormal in ``dst`` or hardly larger, into ``y``."""
        values = torch.index_select(x, 0, where)
        sums = self._fixed(values, dst, torch.index_select(first, 0, where))
        undecided = (sums.to(torch.int16) == -1).nonzero()
        rounded = sums.bitwise_right_shift_(_HALF).mul(dst.smallest_subnormal)  # as numbers: it takes fewer calls
        y[where] = rounded.copysign_(values).to(y.dtype)
        if undecided.numel():
            where = where[undecided.view(-1)]
            y.view(torch.int16)[where] = _whole(x, dst, where, stretches, first)

    def _many(self, x: torch.Tensor, result: torch.Tensor, dst: DType, first: torch.Tensor) -> torch.Tensor:
        """Put the same of all that are into ``result``, where the signs are right, but for those undecided: where."""
        sums = self._fixed(x, dst, first)
        nearest, low = self._nearest[: x.numel()], self._low[: x.numel()].copy_(sums)
        small = torch.le(nearest, 1 << dst.mantissa, out=nearest)
        undecided = _Folded(torch.ne(low, -1, out=low).ge_(small), 0).positions()
        low.copy_(sums.bitwise_right_shift_(_HALF)).bitwise_xor_(result)
        result.bitwise_xor_(low.bitwise_and_(small.mul_(~_SIGN)))
        return undecided


def _whole(
    x: torch.Tensor, dst: DType, where: torch.Tensor, stretches: Sequence[Stretch], first: torch.Tensor
) -> torch.Tensor:
    """The results at some positions of FP32, subnormal in ``dst`` or hardly larger, by the whole of their draws."""
    exact = torch.index_select(x, 0, where).double()
    sums = (exact.abs() * (2.0**_DRAW / dst.smallest_subnormal)).long()
    sums += _draws(torch.index_select(first, 0, where), _words(stretches, where))
    return ((sums >> _DRAW) | torch.signbit(exact).long() << (dst.bits - 1)).to(torch.int16)


def _draws(half: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """From their two parts."""
    return (half.long() & 0xFFFF) << _WORD | (word.long() & 0xFFFFFFFF)


def _magnitudes(bits: torch.Tensor) -> torch.Tensor:
    return bits & torch.iinfo(bits.dtype).max
