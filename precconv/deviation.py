"""How far the elements of one tensor lie from those of another, as one type with one ``+``.

Sums are kept exact, as whole numbers of FP64's smallest unit, so that the order in which chunks are added, and so
the number of threads, changes no digit of a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .dtypes import DType
from .dtypes import dtype as dtype_of

__all__ = ["Comparison", "Deviation", "Tolerance", "Worst", "comparison", "exact", "rounded", "value_of"]

How = Literal["float", "int", "bits"]

_UNIT = 1 << 1074  #: FP64's smallest subnormal is the inverse of this
_INFINITE = 1 << 4096  #: larger than any sum of FP64 values in units: rounds to Inf, as does all that it is added to


def exact(x: float) -> int:
    """A non-negative FP64 value in units of its smallest subnormal."""
    if math.isinf(x):
        return _INFINITE
    numerator, denominator = x.as_integer_ratio()
    return numerator * (_UNIT // denominator)


def rounded(units: int) -> float:
    """The FP64 value nearest to a number of units; Inf where there is none."""
    try:
        return units / _UNIT
    except OverflowError:
        return math.inf


class Comparison(NamedTuple):
    """Two dtypes whose elements can be compared, and how."""

    how: How
    a: DType
    b: DType


def comparison(a: DType, b: DType) -> Comparison | None:
    """How elements of two dtypes are compared: by value among floats and among integers (bool is one), else by bits.

    None where neither is possible: a float against an integer, two dtypes of which one is complex, packed or opaque.
    """
    how = _how(a)
    if how != _how(b) or (how == "bits" and a is not b):
        return None
    return Comparison(how, a, b)


def _how(dtype: DType) -> How:
    if dtype.kind == "float" and dtype.bits >= 8:
        return "float"
    return "int" if dtype.kind in ("bool", "int", "uint") else "bits"


def value_of(pattern: int, dtype: DType) -> float | int | str:
    """The value of an element by its bits; a text for what is no real number: complex, packed, quantized."""
    how = _how(dtype)
    if how == "int":
        return pattern - (1 << dtype.bits) if dtype.kind == "int" and pattern >> (dtype.bits - 1) else pattern
    if how == "float":
        return _float_of(pattern, dtype)
    if dtype in ("complex64", "complex128"):
        half = dtype.bits // 2
        part = dtype_of("fp32" if half == 32 else "fp64")
        return str(complex(_float_of(pattern & ((1 << half) - 1), part), _float_of(pattern >> half, part)))
    return f"{pattern:#0{2 + -(-dtype.bits // 4)}x}"


def _float_of(pattern: int, dtype: DType) -> float:
    sign = 0 if dtype.encoding == "e8m0" else pattern >> (dtype.bits - 1)
    magnitude = pattern & ((1 << (dtype.bits - 1)) - 1) if dtype.encoding != "e8m0" else pattern
    if dtype.encoding == "fnuz" and sign and not magnitude:
        return math.nan  # what would be -0.0
    if magnitude <= dtype.max_bits:
        value = dtype.magnitude(magnitude)
    else:
        value = math.inf if dtype.encoding == "ieee" and magnitude == dtype.max_bits + 1 else math.nan
    return -value if sign else value


class Tolerance(NamedTuple):
    """Finite elements are close enough where |a - b| <= atol + rtol * |a|."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True, slots=True)
class Worst:
    """One differing element.  Of two the worse is the one with the higher ``rank``, then the larger ``error``."""

    rank: int  #: 3 NaN or Inf against another value, 2 beyond the tolerance, 1 another value, 0 other bits only
    error: float  #: |a - b| as FP64; 0 where the rank says all
    index: int  #: of the element, row-major
    a: float | int | str  #: the values; text where they are no real numbers
    b: float | int | str
    a_bits: int
    b_bits: int

    def worse(self, other: Worst) -> bool:
        """Whether this is worse than ``other``; the first of two alike."""
        return (self.rank, self.error, -self.index) > (other.rank, other.error, -other.index)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Counts and errors of elements.  A monoid, exact: neither order nor grouping of a sum changes it.

    Equal by value are also 0.0 and -0.0, and any NaN and any other NaN; of those, the ones with other bits are
    counted in ``zeros`` and ``nans`` where both sides have one dtype.
    """

    n: int = 0  #: elements compared
    differing: int = 0  #: elements with another value
    nonfinite: int = 0  #: of these, with NaN or Inf on one side or on both
    zeros: int = 0  #: zeros of other sign
    nans: int = 0  #: NaN with other bits
    beyond: int = 0  #: elements that differ by more than the tolerance; 0 where none was given
    max_abs_error: float | int = 0  #: largest |a - b| where both are finite; an exact int among integers
    squares: int = 0  #: sum of a², floats finite on both sides only, in units of ``exact``
    squared_errors: int = 0  #: likewise of (a - b)²
    worst: Worst | None = None

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(
            self.n + other.n,
            self.differing + other.differing,
            self.nonfinite + other.nonfinite,
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.beyond + other.beyond,
            max(self.max_abs_error, other.max_abs_error),
            self.squares + other.squares,
            self.squared_errors + other.squared_errors,
            _worse(self.worst, other.worst),
        )

    @property
    def bit_differing(self) -> int:
        """Elements that are not the same bit for bit."""
        return self.differing + self.zeros + self.nans

    @property
    def relative_rms_error(self) -> float:
        """Root of the squared error's share in the squared values of a; 0 without an error, Inf where a is all 0."""
        if not self.squared_errors:
            return 0.0
        signal, noise = rounded(self.squares), rounded(self.squared_errors)
        return math.sqrt(noise / signal) if signal else math.inf

    @property
    def snr_db(self) -> float:
        """10 log10(sum a² / sum (a - b)²) in dB; Inf without an error, -Inf where a is all 0."""
        if not self.squared_errors:
            return math.inf
        signal, noise = rounded(self.squares), rounded(self.squared_errors)
        return 10 * (math.log10(signal) - math.log10(noise)) if signal else -math.inf


def _worse(a: Worst | None, b: Worst | None) -> Worst | None:
    if a is None or b is None:
        return a or b
    return b if b.worse(a) else a
