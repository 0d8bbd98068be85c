"""The bit patterns that the exhaustive check walks: all of a type, samples of every exponent, hard cases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .reference import FORMATS, Layout, Patterns

SLICE = 1 << 18  # patterns at a time: 1 MB of fp32, a chunk of a conversion


def span(start: int, end: int) -> Iterator[Patterns]:
    """All patterns from ``start`` to ``end``."""
    for low in range(start, end, SLICE):
        yield np.arange(low, min(low + SLICE, end), dtype=np.int64)


def every_exponent(layout: Layout, count: int, seed: int = 0) -> Iterator[Patterns]:
    """For every sign and exponent: the ends of the mantissas, every kind of tie, ``count`` at random."""
    rng = np.random.default_rng(seed)
    size = 1 << layout.mantissa
    fractions = {0, 1, size - 1, size - 2}
    for bit in range(layout.mantissa):
        for odd in (0, 2 << bit):  # the tie at this bit, below an even and an odd last place
            fractions |= {((1 << bit) + odd + d) % size for d in (-1, 0, 1)}
            fractions |= {(size - (1 << bit) + odd + d) % size for d in (-1, 0, 1)}
    fixed = np.array(sorted(fractions), dtype=np.int64)
    for top in range(1 << (layout.exponent + 1)):
        fraction = np.concatenate([fixed, rng.integers(0, size, count, dtype=np.int64)])
        yield as_signed(np.int64(top).astype(np.uint64) << np.uint64(layout.mantissa)) | fraction


def near_weights(layout: Layout, seed: int = 0) -> Iterator[Patterns]:
    """Chunks of ordinary weights with one special value each, first, last or between."""
    rng = np.random.default_rng(seed)
    inf, one = layout.inf, layout.bias << layout.mantissa
    specials = [0, 1, 1 << layout.mantissa, inf - 1, inf, inf + 1, inf | (1 << (layout.mantissa - 1))]
    specials += [one - (k << layout.mantissa) for k in range(0, layout.bias, max(1, layout.bias // 64))]
    specials += [one + (k << layout.mantissa) for k in range(0, layout.bias, max(1, layout.bias // 64))]
    size = 1 << layout.mantissa
    for special in specials:
        for sign in (0, 1):
            exponents = layout.bias - rng.integers(4, 9, 1024, dtype=np.int64)
            weights = (exponents << layout.mantissa) | rng.integers(0, size, 1024, dtype=np.int64)
            weights[rng.choice([0, len(weights) - 1, 500])] = special
            yield weights | as_signed(np.uint64(sign << (layout.bits - 1)))


def fp64_hard(dst: Layout, around: Patterns) -> Iterator[Patterns]:
    """FP64 patterns beside the values ``around`` of ``dst``, beside the ties between them, and where rounding
    to FP32 on the way would turn a value just off a tie into the tie."""
    offsets = [0, 1, 2, 3, 1 << 27, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, (1 << 29) - 1, 1 << 29]
    a = around[around < dst.inf]
    bits = [to_fp64(a, dst), midpoints(a, dst)]
    for base in bits:
        for offset in offsets:
            for signed in (offset, -offset):
                near = np.clip(base + signed, 0, FORMATS["fp64"].inf)
                yield near
                yield near | np.int64(-(1 << 63))


def to_fp64(patterns: Patterns, src: Layout) -> Patterns:
    """FP64 patterns of finite, non-negative values; exact, by ldexp."""
    s, e = _integer(patterns, src)
    return _ldexp(s, e)


def midpoints(patterns: Patterns, src: Layout) -> Patterns:
    """FP64 patterns of the ties above finite, non-negative values; above the largest, the overflow bound."""
    s, e = _integer(patterns, src)
    return _ldexp(2 * s + 1, e - 1)


def _integer(patterns: Patterns, src: Layout) -> tuple[Patterns, Patterns]:
    """``s`` and ``e`` of values ``s * 2**e``."""
    field = patterns >> src.mantissa
    s = (patterns & ((1 << src.mantissa) - 1)) + ((field > 0).astype(np.int64) << src.mantissa)
    return s, np.maximum(field, 1) - src.bias - src.mantissa


def _ldexp(s: Patterns, e: Patterns) -> Patterns:
    values: Patterns = np.ldexp(s.astype(np.float64), e.astype(np.int32)).view(np.int64)
    return values


def as_signed(patterns: np.uint64 | np.ndarray) -> Patterns:
    return np.asarray(patterns, dtype=np.uint64).view(np.int64)
