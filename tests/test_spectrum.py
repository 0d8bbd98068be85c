"""The kernel of a scan against numpy and ml_dtypes, and against exact arithmetic where those round twice."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precconv import spectrum
from precconv.cast import one_thread
from precconv.dtypes import BF16, CASTABLE, FP16, FP32, FP64, TARGETS, DType, dtype
from precconv.measures import Dyadic, Loss, Measure
from precconv.spectrum import BLOCK, Scanner

from .samples import PROPERTY, bits_of, from_bits, specials, torch_dtype
from .test_cast import double_rounding, exact, in_numpy

each_source = pytest.mark.parametrize("src", CASTABLE, ids=str)
narrow = pytest.mark.parametrize("to", [FP16, BF16], ids=str)


def measured(x: torch.Tensor, scanner: Scanner | None = None) -> Measure:
    """A flat tensor's measure, block by block."""
    data = memoryview(bytearray(bits_of(x).tobytes()))
    step, scanner = BLOCK * x.element_size(), scanner or Scanner()
    with one_thread():  # whose number decides on the order of a sum
        alone = scanner.exponents(data, dtype(x.dtype))  # counted alone, and in blocks of its own
        assert bytes(data) == bits_of(x).tobytes()
        parts = [scanner.measure(data[at : at + step], dtype(x.dtype)) for at in range(0, len(data), step)]
    found = reduce(add, parts, Measure())
    assert alone == found.exponents
    return found


def value(number: Dyadic) -> Fraction:
    return number.mantissa * Fraction(2) ** number.exponent


def cast_by_others(x: torch.Tensor, to: DType) -> np.ndarray:
    """FP64 values after the cast, by numpy and ml_dtypes; by exact arithmetic from FP64, which those round twice."""
    src = dtype(x.dtype)
    if src is FP64:
        bits = np.array([exact(int(p), src, to) if is_number(int(p)) else 0 for p in bits_of(x)], f"uint{to.bits}")
    else:
        bits = in_numpy(x, to)
    result: np.ndarray = from_bits(bits, to).double().numpy()
    return result


def is_number(pattern: int) -> bool:
    return pattern & ((1 << 63) - 1) <= FP64.max_bits + 1


def check(x: torch.Tensor) -> None:
    """Compare every number of a measure with its definition."""
    got, src = measured(x), dtype(x.dtype)
    a: np.ndarray = x.double().numpy()
    finite = np.isfinite(a)
    sizes = np.abs(a[finite])
    nonzero = sizes[sizes > 0]
    assert got.n == len(a)
    assert got.nan == np.isnan(a).sum()
    assert got.inf == np.isinf(a).sum()
    assert got.zero == (a == 0).sum()
    assert got.subnormal == (nonzero < src.smallest_normal).sum()
    assert got.min_abs == nonzero.min(initial=math.inf)
    assert got.max_abs == sizes.max(initial=0)
    assert {e: n for e, n in got.exponents if n} == Counter((np.frexp(nonzero)[1] - 1).tolist())
    for to in TARGETS:
        check_loss(got.loss(to), a, finite, cast_by_others(x, to), to)


def check_loss(got: Loss, a: np.ndarray, finite: np.ndarray, b: np.ndarray, to: DType) -> None:
    over = finite & ~np.isfinite(b)
    assert got.overflow == over.sum(), to
    assert got.underflow == (finite & (a != 0) & (b == 0)).sum(), to
    small = np.abs(b) < to.smallest_normal
    assert got.subnormal == (finite & (b != 0) & small).sum(), to
    assert got.is_exact == np.array_equal(a[finite], b[finite]), to
    x = a[finite & ~over]
    error = b[finite & ~over] - x
    assert got.max_abs_error == np.abs(error).max(initial=0), to
    for number, values in ((got.square_sum, x), (got.square_error_sum, error)):
        want = sum((Fraction(v) ** 2 for v in values.tolist()), Fraction())
        assert abs(value(number) - want) <= want / 1_000_000, to


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", [FP16, BF16], ids=str)
def test_all_patterns_of_a_16_bit_type_are_measured_as_numpy_and_ml_dtypes_do(src: DType) -> None:
    check(from_bits(np.arange(1 << 16, dtype=np.uint16), src))


@each_source
def test_patterns_at_which_something_happens_are_measured_exactly(src: DType) -> None:
    x = from_bits(np.array(specials(src), dtype=f"uint{src.bits}"), src)
    check(x)
    for pattern in x:
        check(pattern.reshape(1))


@pytest.mark.parametrize("src", [FP32, FP64], ids=str)
def test_every_binary_exponent_has_its_own_bin(src: DType) -> None:
    exponents = np.arange(1 - src.bias - src.mantissa, src.bias + 1)
    values = np.ldexp(1.0, exponents)
    x = torch.from_numpy(np.concatenate([values, -1.5 * values])).to(torch_dtype(src))
    counts = dict(measured(x).exponents)
    assert list(counts) == exponents.tolist()
    assert counts.pop(int(exponents[0])) in (1, 2)  # half of the smallest subnormal cannot be added to it
    assert counts.pop(int(exponents[1])) in (2, 3)
    assert set(counts.values()) == {2}
    check(x)


def test_fp64_near_ties_of_narrower_types_is_measured_as_if_rounded_once() -> None:
    check(from_bits(np.array(double_rounding(), dtype=np.uint64), FP64))


@narrow
def test_ties_go_to_even_in_either_direction(to: DType) -> None:
    patterns = np.arange(1 << to.mantissa, 3 << to.mantissa, dtype=np.int64)
    low, high = (np.array([to.magnitude(int(p) + i) for p in patterns]) for i in (0, 1))
    check(torch.from_numpy((low + high) / 2).float())


@each_source
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 0.0, -0.0], ids=str)
def test_tensors_of_one_odd_value_only_are_measured(src: DType, number: float) -> None:
    x = torch.full((700,), number, dtype=torch_dtype(src))
    check(x)
    got = measured(x)
    assert got.exponents.counts == ()
    assert (got.min_abs, got.max_abs) == (math.inf, 0.0)
    assert all(got.loss(to).is_exact for to in TARGETS)


@each_source
def test_no_elements_are_nothing(src: DType) -> None:
    assert measured(torch.empty(0, dtype=torch_dtype(src))) == Measure()


@each_source
@pytest.mark.parametrize("scale", [-40, -12, 0, 17, 60])
def test_random_values_of_any_size_are_measured_as_numpy_does(src: DType, scale: int) -> None:
    g = torch.Generator().manual_seed(scale)
    x = torch.randn(3001, generator=g, dtype=torch.float64) * 2.0**scale
    x[::50] = 0
    check(x.to(torch_dtype(src)))


@each_source
def test_random_patterns_are_measured_as_numpy_does(src: DType) -> None:
    rng = np.random.default_rng(5)
    check(from_bits(rng.integers(0, 1 << src.bits, 4000, dtype=f"uint{src.bits}"), src))


@PROPERTY
@given(st.lists(st.floats(width=64), max_size=200), st.sampled_from(CASTABLE))
def test_any_values_are_measured_by_the_definitions(values: list[float], src: DType) -> None:
    check(torch.tensor(values, dtype=torch.float64).to(torch_dtype(src)))


def test_large_blocks_count_pairs_and_rows_as_small_ones_count_elements() -> None:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(2 * BLOCK + 12345, generator=g) * 0.02
    x[::1000] = 0
    a: np.ndarray = x.double().numpy()
    got = measured(x)
    assert {e: n for e, n in got.exponents if n} == Counter((np.frexp(a[a != 0])[1] - 1).tolist())
    assert float(value(got.loss(FP32).square_sum)) == pytest.approx(float((a * a).sum()), rel=1e-6)
    for to in (FP16, BF16):
        b = cast_by_others(x, to)
        loss, error = got.loss(to), b - a
        assert loss.underflow == ((a != 0) & (b == 0)).sum()
        assert loss.subnormal == ((b != 0) & (np.abs(b) < to.smallest_normal)).sum()
        assert loss.max_abs_error == np.abs(error).max()
        ratio = float((error * error).sum() / (a * a).sum())
        assert loss.relative_rms_error == pytest.approx(ratio**0.5, rel=1e-6)
        assert loss.snr == pytest.approx(-10 * math.log10(ratio), rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 511, 512, 513, 4096])
@pytest.mark.parametrize("last", [0.75, 3e38, 1e-45])
def test_histograms_are_right_for_any_length_and_range(n: int, last: float) -> None:
    x = torch.linspace(0.01, 0.7, n)
    x[-1] = last
    check(x)


# --- exactness --------------------------------------------------------------------------------------------


@narrow
@pytest.mark.parametrize("src", [FP32, FP64], ids=str)
def test_an_upcast_is_exact_until_one_bit_is_set_that_the_narrow_type_has_not(to: DType, src: DType) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    x = from_bits(patterns, to).to(torch_dtype(src))
    assert measured(x).loss(to).is_exact
    bits = bits_of(x).copy()
    bits[0x3C00] |= 1
    assert not measured(from_bits(bits, src)).loss(to).is_exact


def test_fp32_is_exactly_bf16_when_its_low_16_bits_are_zero() -> None:
    patterns = np.array([p for p in specials(FP32) if p & 0x7FFFFFFF <= 0x7F800000], dtype=np.uint32)
    for pattern in patterns:
        got = measured(from_bits([int(pattern)], FP32)).loss(BF16).is_exact
        assert got == (pattern & 0xFFFF == 0), hex(pattern)


def test_subnormals_are_not_called_exact_where_the_processor_takes_them_for_zero() -> None:
    x = from_bits([1, 0x8000, 0x10000, 0x7FFFFF], FP32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        assert not measured(x).loss(FP16).is_exact
        assert not measured(x).loss(BF16).is_exact
    finally:
        torch.set_flush_denormal(False)


# --- nothing depends on how it is read --------------------------------------------------------------------


@each_source
def test_a_block_is_measured_the_same_wherever_it_lies(src: DType) -> None:
    g = torch.Generator().manual_seed(2)
    x = torch.randn(70001, generator=g, dtype=torch.float64).to(torch_dtype(src))
    data, scanner = bits_of(x).tobytes(), Scanner()
    want = measured(x)
    for elements in (0, 1, 3, 5, 8, 17):
        at = elements * src.itemsize
        space = memoryview(bytearray(at + len(data)))
        space[at:] = data
        with one_thread():
            assert scanner.measure(space[at:], src) == want
        assert not any(space[:at]), "what stands before it is left as it is"


def test_a_scanner_forgets_what_it_saw_before() -> None:
    used = Scanner()
    tensors = [
        from_bits(np.array(specials(src), dtype=f"uint{src.bits}"), src)[:n]
        for src in (*CASTABLE, *CASTABLE[::-1])
        for n in (300, 7, 60)
    ]
    for x in tensors:
        assert measured(x, used) == measured(x)


def test_a_scanner_holds_what_a_block_of_the_widest_type_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "BLOCK", 64)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64)
    assert Scanner().measure(memoryview(bytearray(bits_of(x).tobytes())), FP64) == measured(x)
