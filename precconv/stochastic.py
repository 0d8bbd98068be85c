"""Stochastic rounding to a 16-bit type: up in magnitude with a probability equal to the remainder.

A draw is a number of 48 bits, made from an element's index and its tensor's keys alone; of a remainder of s bits it
is the top s bits that decide.  The top 16 are half of a word of 32 bits that two neighbours share, and are enough for
most elements; the others are a word of the element's own.  So neither the source's type nor the way a value is
computed shows in a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch

from .draws import Stretch
from .dtypes import FP32, FP64, DType

__all__ = ["Rounder", "words"]

#: Those of ``triple32`` (Chris Wellons, hash-prospector), which does more than is needed here.
_FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_HALF, _WORD = 16, 32  #: bits of the two parts of a draw
#: Bits of a remainder that are compared.  What a value has beyond them, 2^-48 of its result's unit, is cut.
_DRAW = _HALF + _WORD
#: Elements of a stretch, on average, from which on each is done by itself: expanding keys costs as much as using them.
_LONG = 4096
_SIGN = -1 << 15  #: of 16 bits
#: Elements that are looked at together first, to find the few that are of some kind.
_FOLD = 8
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


class _Counters:
    """Where the elements of a chunk stand in their tensors, and their keys.

    Words that pairs of elements share lie one after the other, those of a stretch together; where a stretch begins or
    ends within a pair, half a word is nobody's.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._ends, self._pair_ends = [0], [0]
        self._odd = []  # whether the first half of a stretch's words is nobody's
        rows = []
        for (a, b, c, d), first, elements in stretches:
            at, pair_at = self._ends[-1], self._pair_ends[-1]
            pair, odd = divmod(first, 2)
            # keys are shifted, so that a position in the chunk, or among its words, counts as an index in the tensor
            rows.append(
                [_signed(k) for k in (a + (pair - pair_at) * _FACTORS[0], b, c + (first - at) * _FACTORS[0], d)]
            )
            self._ends.append(at + elements)
            self._pair_ends.append(pair_at + (odd + elements + 1) // 2)
            self._odd.append(odd)
        self._keys = torch.tensor(rows, dtype=torch.int32).t().contiguous()

    @property
    def pairs(self) -> int:
        return self._pair_ends[-1]

    @property
    def _is_long(self) -> bool:
        return self._ends[-1] >= _LONG * len(self._odd)

    def halves(self, counters: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The first parts of all draws, as int16; ``out`` or other memory.

        ``counters``: those of positions, from 0 on.  It, ``out`` and ``scratch`` have ``pairs`` elements.
        """
        ends, keys = self._pair_ends, self._keys[:2]
        if not self._is_long:
            counts = torch.tensor(ends).diff()
            keys, ends = torch.stack([torch.repeat_interleave(key, counts) for key in keys]), [0, ends[-1]]
        for i, (start, end) in enumerate(pairwise(ends)):
            first, second = keys if len(ends) == 2 else keys[:, i : i + 1]
            words(counters[start:end], first, second, out[start:end], scratch[start:end])
        return self._closed(out.view(torch.int16))

    def _closed(self, halves: torch.Tensor) -> torch.Tensor:
        """Without those that are nobody's."""
        if len(self._odd) == 1:
            return halves[self._odd[0] :][: self._ends[-1]]
        if 2 * self._pair_ends[-1] == self._ends[-1]:
            return halves
        begins = [2 * at + odd for at, odd in zip(self._pair_ends, self._odd, strict=False)]
        counts = [end - start for start, end in pairwise(self._ends)]
        if self._is_long:
            return torch.cat([halves[at : at + n] for at, n in zip(begins, counts, strict=True)])
        shifts = torch.tensor(begins) - torch.tensor(self._ends[:-1])
        where = torch.repeat_interleave(shifts, torch.tensor(counts)) + torch.arange(self._ends[-1])
        return torch.index_select(halves, 0, where)

    def words(self, positions: torch.Tensor) -> torch.Tensor:
        """The second parts of the draws of the elements at some positions in the chunk."""
        found = positions.to(torch.int32).mul_(_signed(_FACTORS[0]))
        first, second = self._keys[2:]
        if len(self._odd) > 1:
            which = torch.bucketize(positions, torch.tensor(self._ends[1:]), right=True)
            first, second = torch.index_select(first, 0, which), torch.index_select(second, 0, which)
        words(found, first, second, found, torch.empty_like(found))
        return found


class _Folded:
    """Where int16 values are at most ``bound``: quick where few are, for only a part of them is gone through."""

    def __init__(self, values: torch.Tensor, bound: int) -> None:
        self._values, self._bound = values, bound
        self._width = values.numel() // _FOLD
        rows = values[: _FOLD * self._width].view(_FOLD, self._width)  # those of a column lie far apart
        self._columns = torch.amin(rows, 0) if self._width else values[:0]
        self._found = (self._columns <= bound).nonzero()

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
        self._range = self._words = self._sums = self._scratch = torch.empty(0, dtype=torch.int32)
        self._nearest = self._low = torch.empty(0, dtype=torch.int16)

    def _grow(self, n: int, pairs: int) -> None:
        if self._range.numel() < pairs:
            self._range = torch.arange(pairs, dtype=torch.int32).mul_(_signed(_FACTORS[0]))
            self._words = torch.empty_like(self._range)
        if self._nearest.numel() < n or self._scratch.numel() < pairs:
            self._sums, self._scratch = (torch.empty(max(n, pairs), dtype=torch.int32) for _ in range(2))
            self._nearest, self._low = (torch.empty(n, dtype=torch.int16) for _ in range(2))

    def round(self, x: torch.Tensor, y: torch.Tensor, dst: DType, stretches: Sequence[Stretch]) -> None:
        """Round the flat ``x``, FP32 or FP64, into ``y``, where it stands rounded to nearest.

        From the largest finite value on that is what it stays, and so with NaN and Inf.
        """
        n = x.numel()
        counters = _Counters(stretches)
        pairs = counters.pairs
        self._grow(n, pairs)
        halves = counters.halves(self._range[:pairs], self._words[:pairs], self._scratch[:pairs])
        assert halves.numel() == n
        if x.dtype == torch.float32:
            self._narrow(x, y, dst, counters, halves)
            return
        rounded = _exactly(x, dst, _draws(halves, counters.words(torch.arange(n))))
        fits = (x.view(torch.int64) & torch.iinfo(torch.int64).max) < _pattern(dst.max, FP64)
        bits = y.view(torch.int16)
        torch.where(fits, rounded, bits, out=bits)

    def _narrow(self, x: torch.Tensor, y: torch.Tensor, dst: DType, counters: _Counters, halves: torch.Tensor) -> None:
        """FP32: add the draw to the bits that go, and let it carry.

        Results that are subnormal in ``dst`` but normal in FP32 lose more bits than that.  Which those are, and which
        do not fit, is first looked for in the nearest values, half as many bytes.
        """
        n, normal = x.numel(), 1 << dst.mantissa
        result = y.view(torch.int16)
        nearest = torch.bitwise_and(result, ~_SIGN, out=self._nearest[:n])
        least, most = (int(v) for v in torch.aminmax(nearest))
        apart: list[tuple[torch.Tensor, torch.Tensor]] = []  # positions and results of what is done one by one
        if most >= dst.max_bits:
            large = _Folded(nearest ^ ~_SIGN, dst.max_bits ^ ~_SIGN).positions()
            large = large[_magnitudes(x.view(torch.int32)[large]) >= _pattern(dst.max, FP32)]
            apart.append((large, result[large]))
        has_many = False
        if dst.bias != FP32.bias and least <= normal:
            small = _Folded(nearest, normal)
            has_many = not small.is_few
            if not has_many:
                where = small.positions()
                apart.append((where, self._few(x, result, where, dst, counters, halves)))
        self._carry(x, y, dst, halves)
        if has_many:
            where = self._many(x, result, dst, halves)
            apart.append((where, _whole(x, dst, where, counters, halves)))
        for where, patterns in apart:
            result[where] = patterns

    def _carry(self, x: torch.Tensor, y: torch.Tensor, dst: DType, halves: torch.Tensor) -> None:
        """Round what is normal in ``dst``, or subnormal in both: it loses as many bits as the significand."""
        drop = FP32.mantissa - dst.mantissa
        sums = self._sums[: x.numel()].copy_(halves.view(torch.uint16))
        if drop < _HALF:
            sums.bitwise_right_shift_(_HALF - drop)
        sums.add_(x.view(torch.int32))
        if drop == dst.bits:  # BF16 is the upper half
            y.view(torch.int16).copy_(sums.bitwise_right_shift_(drop))
        else:
            y.copy_(sums.bitwise_and_(-1 << drop).view(torch.float32))

    def _fixed(self, x: torch.Tensor, dst: DType, halves: torch.Tensor) -> torch.Tensor:
        """Sizes and first parts of draws together, in units of 2^-16 of the smallest subnormal.

        For what is subnormal in ``dst`` or hardly larger.  What becomes of other values, Inf and NaN among them, has
        no meaning.  Where the lower 16 bits are all set, the rest of size and draw decides: by chance, one in 2^16.
        """
        n = x.numel()
        sizes = torch.abs(x, out=self._scratch.view(torch.float32)[:n]).mul_(2.0**_HALF / dst.smallest_subnormal)
        sums = self._sums[:n].copy_(sizes)  # what is less than 1 is cut
        return sums.add_(self._scratch[:n].copy_(halves.view(torch.uint16)))

    def _few(
        self,
        x: torch.Tensor,
        nearest: torch.Tensor,
        where: torch.Tensor,
        dst: DType,
        counters: _Counters,
        halves: torch.Tensor,
    ) -> torch.Tensor:
        """The results at some positions, subnormal in ``dst`` or hardly larger."""
        sums = self._fixed(torch.index_select(x, 0, where), dst, torch.index_select(halves, 0, where))
        undecided = (sums.to(torch.int16) == -1).nonzero().view(-1)
        rounded = sums.bitwise_right_shift_(_HALF).to(torch.int16)
        rounded |= torch.index_select(nearest, 0, where) & _SIGN
        if undecided.numel():
            rounded[undecided] = _whole(x, dst, where[undecided], counters, halves)
        return rounded

    def _many(self, x: torch.Tensor, result: torch.Tensor, dst: DType, halves: torch.Tensor) -> torch.Tensor:
        """Put the same of all that are into ``result``, where the signs are right, but for those undecided: where."""
        sums = self._fixed(x, dst, halves)
        nearest, low = self._nearest[: x.numel()], self._low[: x.numel()].copy_(sums)
        small = torch.le(nearest, 1 << dst.mantissa, out=nearest)
        undecided = _Folded(torch.ne(low, -1, out=low).ge_(small), 0).positions()
        low.copy_(sums.bitwise_right_shift_(_HALF)).bitwise_xor_(result)
        result.bitwise_xor_(low.bitwise_and_(small.mul_(~_SIGN)))
        return undecided


def _whole(x: torch.Tensor, dst: DType, where: torch.Tensor, counters: _Counters, halves: torch.Tensor) -> torch.Tensor:
    """The results at some positions of FP32, subnormal in ``dst`` or hardly larger, by the whole of their draws."""
    exact = torch.index_select(x, 0, where).double()
    sums = (exact.abs() * (2.0**_DRAW / dst.smallest_subnormal)).long()
    sums += _draws(torch.index_select(halves, 0, where), counters.words(where))
    return ((sums >> _DRAW) | torch.signbit(exact).long() << (dst.bits - 1)).to(torch.int16)


def _draws(half: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """From their two parts."""
    return (half.long() & 0xFFFF) << _WORD | (word.long() & 0xFFFFFFFF)


def _magnitudes(bits: torch.Tensor) -> torch.Tensor:
    return bits & torch.iinfo(bits.dtype).max
