"""Stochastic rounding to a 16-bit type: up in magnitude with a probability equal to the remainder.

A draw is a number of 63 bits, made from an element's index and its tensor's keys alone; of a remainder of s bits it
is the top s bits that decide.  So most elements need 16 bits of one 32-bit word, and which those are depends neither
on the source's type nor on how a value is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from .draws import Stretch
from .dtypes import FP32, FP64, DType

__all__ = ["Rounder", "words"]

#: Those of ``triple32`` (Chris Wellons, hash-prospector), which does more than is needed here.
_FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
_DRAW = 63  #: bits
#: Bits of a remainder that are compared.  What a value has beyond them, at most 2^-62 of its remainder's unit, is cut.
_MOST = 62
#: Elements of a stretch, on average, from which on each is done by itself: expanding keys costs as much as using them.
_LONG = 4096


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


def _exactly(x: torch.Tensor, dst: DType, high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Round any finite FP64 below the largest of ``dst``, in integers; bits of the result as int16.

    ``high``, ``low``: the two random words of each element; the second where any of them has bits that it decides on.
    """
    bits = x.view(torch.int64)
    magnitude = bits & torch.iinfo(torch.int64).max
    field = magnitude >> FP64.mantissa
    significand = magnitude & ((1 << FP64.mantissa) - 1)
    significand |= (field > 0).long() << FP64.mantissa
    lowest = FP64.bias + 1 - dst.bias  # exponent field of the smallest normal of ``dst``
    exponent = field.clamp(min=lowest)  # of the binade whose unit the result has
    drop = exponent - field.clamp_(min=1) + (FP64.mantissa - dst.mantissa)
    significand >>= (drop - _MOST).clamp_(0, 63)
    drop.clamp_(max=_MOST)
    draw = (high.long() & 0xFFFFFFFF) << 31
    if low is not None:
        draw |= (low.long() & 0xFFFFFFFF) >> 1
    significand += draw >> (_DRAW - drop)
    rounded = (significand >> drop) + ((exponent - lowest) << dst.mantissa)  # a carry reaches the exponent by itself
    return (rounded | ((bits >> 63) & 1) << (dst.bits - 1)).to(torch.int16)


class _Counters:
    """Where the elements of a chunk stand in their tensors, and their keys."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        at = 0
        rows, ends = [], []
        for (a, b, c, d), first, elements in stretches:
            shift = (first - at) * _FACTORS[0]  # from a position in the chunk to an index in the tensor
            rows.append([_signed(key) for key in (a + shift, b, c + shift, d)])
            at += elements
            ends.append(at)
        self._ends = ends
        self._keys = torch.tensor(rows, dtype=torch.int32).t().contiguous()

    @property
    def n(self) -> int:
        return self._ends[-1]

    def all(self, word: int, positions: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        """Put a random word of every element into ``out``: their first, ``word`` 0, or second, 1.

        ``positions``: those of all elements in the chunk, times the first factor.
        """
        keys, ends = self._keys[2 * word : 2 * word + 2], self._ends
        if self.n < _LONG * len(ends):
            counts = torch.tensor(ends).diff(prepend=torch.tensor([0]))
            keys, ends = torch.stack([torch.repeat_interleave(key, counts) for key in keys]), [self.n]
        start = 0
        for i, end in enumerate(ends):
            first, second = keys if len(ends) == 1 else keys[:, i : i + 1]
            words(positions[start:end], first, second, out[start:end], scratch[start:end])
            start = end

    def at(self, word: int, positions: torch.Tensor) -> torch.Tensor:
        """The same for the elements at some positions in the chunk."""
        found = positions.to(torch.int32).mul_(_signed(_FACTORS[0]))
        first, second = self._keys[2 * word : 2 * word + 2]
        if len(self._ends) > 1:
            which = torch.bucketize(positions, torch.tensor(self._ends), right=True)
            first, second = first[which], second[which]
        words(found, first, second, found, torch.empty_like(found))
        return found


def _nonzero(flags: torch.Tensor) -> torch.Tensor:
    """Where int16 flags, which lie at a whole multiple of 8 bytes, are not 0; four at a time, for they are few."""
    whole = flags.numel() // 4 * 4
    fours = flags[:whole].view(torch.int64).nonzero()
    found = torch.cat([(fours * 4 + torch.arange(4)).view(-1), torch.arange(whole, flags.numel())])
    return found[flags[found] != 0]


class Rounder:
    """The buffers of one thread, and the rounding of one chunk in them."""

    def __init__(self) -> None:
        self._range = self._words = self._scratch = torch.empty(0, dtype=torch.int32)

    def _grow(self, n: int) -> None:
        if self._range.numel() < n:
            self._range = torch.arange(n, dtype=torch.int32).mul_(_signed(_FACTORS[0]))
            self._words, self._scratch = torch.empty_like(self._range), torch.empty(n + 4, dtype=torch.int32)

    def round(self, x: torch.Tensor, y: torch.Tensor, dst: DType, stretches: Sequence[Stretch]) -> None:
        """Round the flat ``x``, FP32 or FP64, into ``y``, where it stands rounded to nearest.

        From the largest finite value on that is what it stays, and so with NaN and Inf.
        """
        n = x.numel()
        self._grow(n)
        counters = _Counters(stretches)
        assert counters.n == n
        high, scratch = self._words[:n], self._scratch[:n]
        counters.all(0, self._range[:n], high, scratch)
        if x.dtype == torch.float32:
            self._narrow(x, y, dst, counters)
            return
        low = torch.empty_like(high)
        counters.all(1, self._range[:n], low, scratch)
        fits = (x.view(torch.int64) & torch.iinfo(torch.int64).max) < _pattern(dst.max, FP64)
        bits = y.view(torch.int16)
        torch.where(fits, _exactly(x, dst, high, low), bits, out=bits)

    def _narrow(self, x: torch.Tensor, y: torch.Tensor, dst: DType, counters: _Counters) -> None:
        """FP32: add the draw to the bits that go, and let it carry.

        Results that are subnormal in ``dst`` but normal in FP32 lose more bits than that, and are done one by one.
        Which those are, and which do not fit, is first looked for in the nearest values, half as many bytes.
        """
        n, drop = x.numel(), FP32.mantissa - dst.mantissa
        bits, result, high = x.view(torch.int32), y.view(torch.int16), self._words[:n]
        nearest, flags = (self._scratch.view(torch.int16)[at : at + n] for at in (0, -(-n // 4) * 4))
        torch.bitwise_and(result, torch.iinfo(torch.int16).max, out=nearest)
        least, most = (int(v) for v in torch.aminmax(nearest))
        positions, values = [], []
        if most >= dst.max_bits:
            large = _nonzero(torch.ge(nearest, dst.max_bits, out=flags))
            large = large[_magnitudes(bits[large]) >= _pattern(dst.max, FP32)]
            positions.append(large)
            values.append(result[large])
        normal = 1 << dst.mantissa
        if dst.bias != FP32.bias and least <= normal:
            small = _nonzero(torch.le(nearest, normal, out=flags))
            magnitudes = _magnitudes(bits[small])
            small = small[(magnitudes > 0) & (magnitudes < _pattern(dst.smallest_normal, FP32))]
            exact = x[small].double()
            tiny = exact.abs() < dst.smallest_normal * 2.0 ** (drop - 32)  # a remainder has more bits than a word
            low = counters.at(1, small) if bool(tiny.any()) else None
            positions.append(small)
            values.append(_exactly(exact, dst, high[small], low))
        high.bitwise_right_shift_(32 - drop).bitwise_and_((1 << drop) - 1).add_(bits).bitwise_and_(-1 << drop)
        y.copy_(high.view(torch.float32))
        for where, patterns in zip(positions, values, strict=True):
            result[where] = patterns


def _magnitudes(bits: torch.Tensor) -> torch.Tensor:
    return bits & torch.iinfo(bits.dtype).max
