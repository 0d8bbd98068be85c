"""Measures add up exactly, in any order."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv.dtypes import BF16, FP16, TARGETS
from precconv.exponents import Exponents
from precconv.measures import Dyadic, Loss, Measure, holders, total, total_loss

from .samples import PROPERTY

counts = st.integers(0, 1 << 40)
sizes = st.floats(0, allow_infinity=False, allow_nan=False)
dyadics = st.builds(Dyadic.of, sizes, st.integers(-2000, 2000))
exponents = st.builds(Exponents.of, st.dictionaries(st.integers(-1074, 1023), counts, max_size=5))
losses = st.builds(Loss, counts, counts, counts, st.booleans(), sizes, dyadics, dyadics)
measures = st.builds(
    Measure, counts, counts, counts, counts, counts, sizes, sizes, exponents, st.tuples(losses, losses, losses)
)


@PROPERTY
@given(measures, measures, measures)
def test_measures_add_in_any_order_and_nothing_changes_nothing(a: Measure, b: Measure, c: Measure) -> None:
    assert (a + b) + c == a + (b + c) == (c + a) + b
    assert a + Measure() == a == Measure() + a
    assert total([a, b, c]) == a + b + c
    assert total([]) == Measure()
    assert total_loss([a.losses[0], b.losses[1], c.losses[2]]) == a.losses[0] + b.losses[1] + c.losses[2]
    assert total_loss([]) == Loss()


@PROPERTY
@given(sizes, sizes, st.integers(-2000, 2000))
def test_floats_add_up_exactly(a: float, b: float, power: int) -> None:
    got = Dyadic.of(a, power) + Dyadic.of(b)
    assert got.mantissa * Fraction(2) ** got.exponent == Fraction(a) * Fraction(2) ** power + Fraction(b)
    assert got.mantissa % 2 or got == Dyadic()


@PROPERTY
@given(dyadics, dyadics.filter(lambda d: d.mantissa))
def test_a_quotient_is_exact(a: Dyadic, b: Dyadic) -> None:
    above, below = a.over(b)
    quotient = a.mantissa * Fraction(2) ** a.exponent / (b.mantissa * Fraction(2) ** b.exponent)
    assert Fraction(above, below) == quotient


def test_a_histogram_has_no_zeros_at_its_ends_and_none_missing_between() -> None:
    made = Exponents.of({-3: 0, -2: 5, 1: 7, 4: 0})
    assert made == Exponents(-2, (5, 0, 0, 7))
    assert dict(made) == {-2: 5, -1: 0, 0: 0, 1: 7}
    assert Exponents.of({3: 0}) == Exponents.of({}) == Exponents()
    assert dict(made + Exponents(1, (1, 2))) == {-2: 5, -1: 0, 0: 0, 1: 8, 2: 2}


@pytest.mark.parametrize(("exponent", "values"), [(-5, 0), (-2, 0), (-1, 5), (1, 5), (2, 12), (9, 12)])
def test_what_lies_below_a_power_of_two_is_counted(exponent: int, values: int) -> None:
    assert Exponents(-2, (5, 0, 0, 7)).below(exponent) == values


def test_ratios_of_sums_no_float_can_hold_are_right() -> None:
    huge, tiny = Dyadic.of(1.0, 3000), Dyadic.of(1.0, -3000)
    loss = Loss(square_sum=huge, square_error_sum=tiny)
    assert loss.snr == pytest.approx(10 * 6000 * math.log10(2))
    assert loss.relative_rms_error == 0.0
    assert Loss(square_sum=huge, square_error_sum=Dyadic.of(1.0, 2998)).relative_rms_error == 0.5
    assert Loss(square_sum=huge).snr == math.inf
    assert Loss(square_sum=huge).relative_rms_error == 0.0


def test_shares_are_of_what_could_have_been_lost() -> None:
    m = Measure(10, nan=1, inf=2, zero=3, losses=(Loss(), Loss(underflow=2), Loss()))
    assert m.underflow_share(FP16) == 0.5
    assert m.underflow_share(BF16) == 0.0
    assert Measure(3, zero=3).underflow_share(FP16) == 0.0


@pytest.mark.parametrize("kept", ["fp32", "fp32 bf16", "fp32 fp16", "fp32 fp16 bf16", ""])
def test_what_holds_every_value_is_what_changes_none(kept: str) -> None:
    made = Measure(1, losses=tuple(Loss(is_exact=to.name in kept.split()) for to in TARGETS))
    assert {to.name for to in holders(made)} == set(kept.split())
