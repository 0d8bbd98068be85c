"""Rounding to nearest even on bit patterns, in integer arithmetic alone, without torch or precconv.

A pattern is an unsigned integer held in int64 (for FP64 in the two's complement of its 64 bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Patterns = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """An IEEE 754 binary format: widths of the exponent and of the stored mantissa, in bits."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def inf(self) -> int:
        """Pattern of +Inf; what lies above, without the sign, is NaN."""
        return ((1 << self.exponent) - 1) << self.mantissa


FORMATS = {"fp64": Layout(11, 52), "fp32": Layout(8, 23), "fp16": Layout(5, 10), "bf16": Layout(8, 7)}


def magnitudes(patterns: Patterns, layout: Layout) -> Patterns:
    """Patterns without their signs."""
    return patterns & ((1 << (layout.bits - 1)) - 1)


def round_patterns(patterns: Patterns, src: Layout, dst: Layout) -> Patterns:
    """Each value rounded once into ``dst``, ties to even; NaN becomes the quiet NaN without payload.

    A finite value is s * 2**e with an integer s.  Its quantum in the target is 2**q: s is divided by
    2**(q - e) and rounded by its remainder.  A carry goes from the mantissa on into the exponent field.
    """
    a = magnitudes(patterns, src)
    field = a >> src.mantissa
    s = a & ((1 << src.mantissa) - 1)
    s |= (field > 0).astype(np.int64) << src.mantissa
    e = np.maximum(field, 1) - (src.bias + src.mantissa)
    if (field == field[0]).all() and field[0]:  # consecutive patterns: one exponent stands for all
        e = e[:1]
    top = np.full_like(e, src.mantissa)  # position of the highest bit of s
    if len(e) == len(a):
        low = field == 0
        top[low] = _bit_length(s[low]) - 1
    smallest = 1 - dst.bias
    q = np.maximum(e + top, smallest) - dst.mantissa
    r = _divide(s, q - e)
    result = ((q + dst.mantissa - smallest) << dst.mantissa) + r
    result = np.where(s == 0, 0, np.minimum(result, dst.inf))
    result[a == src.inf] = dst.inf
    result[a > src.inf] = dst.inf | (1 << (dst.mantissa - 1))
    signed: Patterns = result | (_signs(patterns, src) << (dst.bits - 1))
    return signed


def _divide(s: Patterns, shift: Patterns) -> Patterns:
    """``s / 2**shift`` to nearest, ties to even; exact for negative shifts."""
    right = np.clip(shift, 0, 62)
    r = s >> right
    rest = s - (r << right)
    half = (np.int64(1) << right) >> 1
    up = (rest > half) | ((rest == half) & (right > 0) & (r & 1 == 1))
    quotient: Patterns = (r + up) << np.maximum(-shift, 0)
    return quotient


def _bit_length(s: Patterns) -> Patterns:
    s, length = s.copy(), np.zeros_like(s)
    for step in (32, 16, 8, 4, 2, 1):
        big = s >> step > 0
        length[big] += step
        s[big] >>= step
    return length + (s > 0)


def _signs(patterns: Patterns, layout: Layout) -> Patterns:
    return (patterns >> (layout.bits - 1)) & 1


def is_nan(patterns: Patterns, layout: Layout) -> NDArray[np.bool_]:
    return magnitudes(patterns, layout) > layout.inf


def counts(patterns: Patterns, rounded: Patterns, src: Layout, dst: Layout) -> dict[str, int]:
    """What a conversion from ``patterns`` to ``rounded`` has to report, by the names of ``Stats``."""
    a, r = magnitudes(patterns, src), magnitudes(rounded, dst)
    found = {
        "nan": a > src.inf,
        "inf": a == src.inf,
        "zero": a == 0,
        "overflow": (a < src.inf) & (r == dst.inf),
        "underflow": (a > 0) & (r == 0),
        "subnormal": (r > 0) & (r < 1 << dst.mantissa),
    }
    return {"n": len(a), **{name: int(np.count_nonzero(mask)) for name, mask in found.items()}}
