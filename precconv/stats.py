"""What a cast did to some elements, as one type with one ``+``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from .exponents import Exponents

__all__ = ["Norms", "Stats"]


@dataclass(frozen=True, slots=True)
class Norms:
    """Sizes and errors, accumulated in FP64; only where they are asked for.

    But for ``max_abs`` over the elements that are finite before and after the cast: what overflows has no error.
    """

    max_abs: float = 0.0  #: largest finite |x| of the source
    max_abs_error: float = 0.0  #: largest |cast(x) - x|
    square_sum: float = 0.0  #: of x
    square_error_sum: float = 0.0  #: of cast(x) - x

    def __add__(self, other: Norms) -> Norms:
        return Norms(
            max(self.max_abs, other.max_abs),
            max(self.max_abs_error, other.max_abs_error),
            self.square_sum + other.square_sum,
            self.square_error_sum + other.square_error_sum,
        )

    @property
    def relative_rms_error(self) -> float:
        """Root of the squared error's share in the squared values; 0 where all values are 0."""
        return (self.square_error_sum / self.square_sum) ** 0.5 if self.square_sum else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of elements.  A monoid: chunks add up to tensors, tensors to files, files to batches."""

    n: int = 0  #: elements
    nan: int = 0  #: NaN in the source
    inf: int = 0  #: infinite in the source
    zero: int = 0  #: zero (of either sign) in the source
    overflow: int = 0  #: finite in the source, at or beyond the target's overflow bound
    underflow: int = 0  #: nonzero in the source, zero in the target
    subnormal: int = 0  #: subnormal in the target
    overflow_max: float = 0.0  #: largest finite |x| of the source where something overflowed, else 0
    norms: Norms | None = None
    exponents: Exponents | None = None  #: of the source's values, finite and not zero; only where they are asked for

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.n + other.n,
            self.nan + other.nan,
            self.inf + other.inf,
            self.zero + other.zero,
            self.overflow + other.overflow,
            self.underflow + other.underflow,
            self.subnormal + other.subnormal,
            max(self.overflow_max, other.overflow_max),
            _add(self.norms, other.norms),
            _add(self.exponents, other.exponents),
        )

    @property
    def finite(self) -> int:
        """Elements of the source that are neither NaN nor infinite."""
        return self.n - self.nan - self.inf

    @property
    def underflow_share(self) -> float:
        """Share of the source's finite nonzero values that became zero."""
        nonzero = self.finite - self.zero
        return self.underflow / nonzero if nonzero else 0.0


T = TypeVar("T", Norms, Exponents)


def _add(a: T | None, b: T | None) -> T | None:
    if a is None or b is None:
        return a or b
    return a + b
