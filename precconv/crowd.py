"""The kernel of a scan for small tensors that lie side by side: all at once, each with a measure of its own.

For what nearly all tensors hold: zeros, and FP32 normals that FP16 does not overflow.  Any other tensor is one for
``spectrum``, which takes as long for a small one as this does for some dozens.  Every number is made from a tensor's
own elements, in their order: no result depends on the neighbours, and each is the one of ``spectrum``, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .cast import cast_into, pair
from .dtypes import FP16, FP32, FP64, TARGETS, DType
from .exponents import Exponents
from .measures import Dyadic, Loss, Measure
from .spectrum import square_sums

__all__ = ["measure_crowd"]

#: Bits of a counter that counts to ``SMALL``; four are in an int64.
_FIELD = 16


def measure_crowd(data: memoryview, src: DType, lengths: Sequence[int]) -> list[Measure | None]:
    """The measures of tensors that follow each other in ``data``, none longer than ``SMALL`` and none empty.

    None stands for those that are for ``spectrum``.  ``data`` is left as it is.
    """
    if src is FP64:
        return [None] * len(lengths)
    values = torch.frombuffer(data, dtype=pair(src, src).src_torch)
    return _Crowd(values.to(torch.float32).abs(), src, torch.tensor(lengths)).measures()


class _Crowd:
    """Sizes of values as FP32, and what the elements of each tensor have together."""

    def __init__(self, x: torch.Tensor, src: DType, lengths: torch.Tensor) -> None:
        self._x, self._src, self._lengths = x, src, lengths
        self._ends = lengths.cumsum(0)
        patterns = x.view(torch.int32)
        self._most = self._reduced(x, "max").view(torch.int32)
        self._least = self._reduced(x.masked_fill(patterns == 0, math.inf), "min").view(torch.int32)
        self._fields = patterns >> FP32.mantissa
        self._signal = square_sums(x, lengths)

    def _reduced(self, x: torch.Tensor, how: str) -> torch.Tensor:
        return torch.segment_reduce(x, how, lengths=self._lengths)

    def _counts(self, *flags: torch.Tensor) -> list[list[int]]:
        """How many of each tensor's elements have each of up to four flags."""
        packed = torch.zeros(self._x.numel(), dtype=torch.int64)
        for i, flag in enumerate(flags):
            packed.add_(flag, alpha=1 << i * _FIELD)
        sums = packed.cumsum_(0)[self._ends - 1]
        sums = sums.diff(prepend=sums.new_zeros(1))
        return [((sums >> i * _FIELD) & ((1 << _FIELD) - 1)).tolist() for i in range(len(flags))]

    def _histograms(self, first: int, last: int) -> list[list[int]]:
        """Elements of each tensor by exponent field, from ``first``; the place before that is for what is below."""
        span = last - first + 2
        tensors = torch.repeat_interleave(torch.arange(len(self._lengths)) * span, self._lengths)
        places = tensors.add_(self._fields.clamp(first - 1, last)).sub_(first - 1)
        found: list[list[int]] = torch.bincount(places, minlength=len(self._lengths) * span).view(-1, span).tolist()
        return found

    def measures(self) -> list[Measure | None]:
        smallest, limit = 1 << FP32.mantissa, pair(FP32, FP16).overflow
        usual = (self._most < limit) & (self._least >= smallest)
        if not usual.any():
            return [None] * len(usual)
        first = max(int(self._least.min()), smallest) >> FP32.mantissa
        last = max(min(int(self._most.max()), limit) >> FP32.mantissa, first)
        losses = [self._losses(to) for to in TARGETS]
        rows = zip(
            usual.tolist(), self._lengths.tolist(), self._least.tolist(), self._most.tolist(),
            self._histograms(first, last), zip(*losses, strict=True), strict=True,
        )  # fmt: skip
        return [
            self._measure(n, low, high, counts, first, lost) if is_usual else None
            for is_usual, n, low, high, counts, lost in rows
        ]

    def _measure(
        self, n: int, low: int, high: int, counts: list[int], first: int, losses: tuple[Loss | Dyadic, ...]
    ) -> Measure:
        exponents, least = Exponents(), math.inf
        if high:
            start, end = low >> FP32.mantissa, high >> FP32.mantissa
            exponents = Exponents(start - FP32.bias, tuple(counts[start - first + 1 : end - first + 2]))
            least = FP32.magnitude(low)
        return Measure(
            n=n,
            zero=counts[0] if high else n,
            subnormal=exponents.below(1 - self._src.bias),
            min_abs=least,
            max_abs=FP32.magnitude(high),
            exponents=exponents,
            losses=tuple(
                Loss(subnormal=exponents.below(1 - to.bias), square_sum=loss) if isinstance(loss, Dyadic) else loss
                for to, loss in zip(TARGETS, losses, strict=True)
            ),
        )

    def _losses(self, to: DType) -> list[Loss] | list[Dyadic]:
        """What a cast would do to each tensor; where there is nothing to cast, its sum of squares."""
        if to is self._src or to is FP32:
            return self._signal
        x = self._x
        y = torch.empty_like(x, dtype=pair(FP32, to).dst_torch)
        cast_into(x, y)
        back = y.float()
        changed, patterns = back.view(torch.int32) != x.view(torch.int32), y.view(torch.int16)
        lost, low, gone, zeros = self._counts(changed, patterns < 1 << to.mantissa, patterns == 0, x == 0)
        error = back.sub_(x).abs_()
        worst, squares = self._reduced(error, "max").tolist(), square_sums(error, self._lengths)
        return [
            Loss(0, none - zero, small - none, not differ and not far, far, signal, square)
            for differ, small, none, zero, far, signal, square in zip(
                lost, low, gone, zeros, worst, self._signal, squares, strict=True
            )
        ]
