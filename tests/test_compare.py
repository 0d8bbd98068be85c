"""The kernel of a comparison, against exact arithmetic on values that numpy and ml_dtypes decode."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precconv import compare
from precconv.compare import BLOCK, Lanes
from precconv.deviation import Comparison, Deviation, Tolerance, Worst, comparison, exact, rounded
from precconv.dtypes import CASTABLE, DTYPES, FP32, FP64, TORCH_ONLY, DType, dtype

from .samples import PROPERTY, specials

FP8 = tuple(d for d in DTYPES if d.kind == "float" and d.bits == 8)
FLOATS = (*CASTABLE, *FP8)
INTS = tuple(d for d in DTYPES if d.kind in ("bool", "int", "uint"))
OTHERS = tuple(d for d in (*DTYPES, *TORCH_ONLY) if d not in (*FLOATS, *INTS))
#: Where ml_dtypes spells a type otherwise than torch.
SPELLED = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def numpy_dtype(kind: DType) -> np.dtype[Any]:
    if kind in INTS:
        return np.dtype(np.uint8 if kind.kind == "bool" else kind.name)
    return np.dtype(SPELLED.get(kind.name) or getattr(ml_dtypes, kind.torch))


def values(raw: bytes, kind: DType) -> list[Any]:
    """Floats, exactly widened by ml_dtypes, or Python's integers."""
    array = np.frombuffer(raw, numpy_dtype(kind))
    with np.errstate(invalid="ignore"):  # signalling NaN
        return [int(v) for v in array] if kind in INTS else [float(v) for v in array.astype(np.float64)]


def patterns(raw: bytes, kind: DType) -> list[int]:
    return [int(v) for v in np.frombuffer(raw, f"<u{kind.itemsize}")]


def compared(x: bytes, y: bytes, a: DType, b: DType, tolerance: Tolerance | None = None) -> Deviation:
    """What the kernel says of two whole tensors."""
    pair = comparison(a, b)
    assert pair is not None
    lanes = Lanes(max(len(x), len(y), 1))
    one, other = lanes.buffers(len(x), len(y))
    one[:], other[:] = x, y
    return lanes.compare(pair, 0, len(x) * 8 // a.bits, tolerance)


def expected(x: bytes, y: bytes, a: DType, b: DType, tolerance: Tolerance | None = None) -> Deviation:
    """The same by the definitions, element by element, without rounding."""
    total = Deviation()
    rows = zip(values(x, a), values(y, b), patterns(x, a), patterns(y, b), strict=True)
    for index, (p, q, p_bits, q_bits) in enumerate(rows):
        both_nan = p != p and q != q
        same = p == q or both_nan
        finite = math.isfinite(p) and math.isfinite(q)
        error = abs(Fraction(p) - Fraction(q)) if finite else Fraction(0)
        other_bits = a is b and p_bits != q_bits
        outside = tolerance is not None and not same
        if outside and finite and tolerance is not None:
            outside = float(error) > tolerance.atol + tolerance.rtol * abs(float(p))
        rank = 3 if not same and not finite else 2 if outside else 1
        worst = Worst(rank if not same else 0, float(error), index, p, q, p_bits, q_bits)
        total += Deviation(
            n=1,
            differing=int(not same),
            nonfinite=int(not same and not finite),
            zeros=int(same and other_bits and not both_nan),
            nans=int(both_nan and other_bits),
            beyond=int(outside),
            max_abs_error=int(error) if a in INTS else float(error),
            squares=int(Fraction(p) ** 2 * (1 << 1074)) if finite and a not in INTS else 0,
            squared_errors=int(error**2 * (1 << 1074)) if finite and a not in INTS else 0,
            worst=worst if other_bits or not same else None,
        )
    return total


def assert_agrees(found: Deviation, want: Deviation) -> None:
    """All but the sums exactly; those, which are FP64 inside a block, to a few units of FP64."""
    for name in ("n", "differing", "nonfinite", "zeros", "nans", "beyond", "max_abs_error"):
        assert getattr(found, name) == getattr(want, name), name
    for name in ("squares", "squared_errors"):
        assert rounded(getattr(found, name)) == pytest.approx(rounded(getattr(want, name)), rel=1e-13, abs=1e-300)
    assert repr(found.worst) == repr(want.worst)  # NaN is not equal to itself


def awkward(kind: DType, other: DType, seed: int) -> tuple[bytes, bytes]:
    """Every special value of one type against every one of another, then close and random pairs."""
    rng = np.random.default_rng(seed)
    if kind in FP8 or other in FP8:
        one, two = (
            [*range(0, 256, 7), 0x7C, 0x7F, 0x80, 0xFF] if d in FP8 else specials(d)[::5] for d in (kind, other)
        )
    else:
        one, two = ([*specials(d)[::4], *specials(d)[:5], (1 << (d.bits - 1)) - 2] for d in (kind, other))
    pairs = [*product(one, two)]
    if kind is other:
        pairs += [(v, v) for v in one] + [(v, v ^ 1 << (kind.bits - 1)) for v in one]
    pairs += zip(
        (int(v) for v in rng.integers(0, 1 << min(kind.bits, 63), 99, dtype=np.uint64)),
        (int(v) for v in rng.integers(0, 1 << min(other.bits, 63), 99, dtype=np.uint64)),
        strict=True,
    )
    a, b = zip(*pairs, strict=True)
    return np.array(a, f"<u{kind.itemsize}").tobytes(), np.array(b, f"<u{other.itemsize}").tobytes()


# --- floats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FP8, ids=str)
def test_every_pattern_of_an_8_bit_float_has_the_value_that_ml_dtypes_gives_it(kind: DType) -> None:
    raw = bytes(range(256))
    as_fp64 = np.array(values(raw, kind), np.float64).tobytes()
    found = compared(raw, as_fp64, kind, FP64)
    assert (found.n, found.differing) == (256, 0)


def no_extremes(raw: bytes, other: bytes, a: DType, b: DType) -> tuple[bytes, bytes]:
    """Without FP64 values whose squares leave FP64's range: there the sums are Inf, or nothing."""
    x, y = (np.frombuffer(r, f"<u{d.itemsize}") for r, d in ((raw, a), (other, b)))
    keep = np.ones(len(x), bool)
    for r, d in ((raw, a), (other, b)):
        v = np.abs(np.array(values(r, d)))
        keep &= ~(v < np.inf) | (v == 0) | ((v < 1e150) & (v > 1e-150))
    return x[keep].tobytes(), y[keep].tobytes()


@pytest.mark.parametrize(("a", "b"), [*product(CASTABLE, FLOATS), *((d, d) for d in FP8)], ids=str)
@pytest.mark.parametrize("tolerance", [None, Tolerance(1e-3, 0.0), Tolerance(0.0, 0.5), Tolerance(1e-30, 1e-3)])
def test_floats_are_compared_as_exact_arithmetic_does(a: DType, b: DType, tolerance: Tolerance | None) -> None:
    x, y = no_extremes(*awkward(a, b, 1), a, b)
    assert len(x) > 100 * a.itemsize
    assert_agrees(compared(x, y, a, b, tolerance), expected(x, y, a, b, tolerance))


def test_fp64_at_both_ends_of_its_range_is_counted_right() -> None:
    x, y = awkward(FP64, FP64, 2)
    found, want = compared(x, y, FP64, FP64), expected_counts(x, y)
    assert (found.differing, found.nonfinite, found.zeros, found.nans) == want
    assert found.snr_db != found.snr_db or math.isinf(found.snr_db)  # no such number in FP64


def expected_counts(x: bytes, y: bytes) -> tuple[int, int, int, int]:
    a, b = np.frombuffer(x, np.float64), np.frombuffer(y, np.float64)
    p, q = np.frombuffer(x, np.uint64), np.frombuffer(y, np.uint64)
    nan = np.isnan(a) & np.isnan(b)
    same = (a == b) | nan
    finite = np.isfinite(a) & np.isfinite(b)
    counts = (~same, ~same & ~finite, same & ~nan & (p != q), nan & (p != q))
    return tuple(int(c.sum()) for c in counts)  # type: ignore[return-value]


def fp32(*v: float) -> bytes:
    return np.array(v, np.float32).tobytes()


def bits32(*v: int) -> bytes:
    return np.array(v, np.uint32).tobytes()


def test_any_nan_is_the_value_of_any_other_and_its_bits_are_counted_apart() -> None:
    found = compared(bits32(0x7FC00000, 0x7FC00000), bits32(0x7FC00000, 0xFFC00001), FP32, FP32)
    assert (found.differing, found.nans, found.zeros, found.bit_differing) == (0, 1, 0, 1)
    assert found.worst is not None
    assert (found.worst.rank, found.worst.index, found.worst.b_bits) == (0, 1, 0xFFC00001)


def test_zeros_of_other_sign_are_equal_by_value_and_not_bit_for_bit() -> None:
    found = compared(fp32(0.0, -0.0, 1.0), fp32(-0.0, -0.0, 1.0), FP32, FP32)
    assert (found.differing, found.zeros, found.bit_differing, found.snr_db) == (0, 1, 1, math.inf)
    across = compared(fp32(0.0), np.array([-0.0]).tobytes(), FP32, FP64)
    assert across.bit_differing == 0


def test_inf_against_inf_is_equal_and_against_anything_else_the_worst() -> None:
    inf, nan = math.inf, math.nan
    found = compared(fp32(inf, 5.0, inf, 1.0, inf), fp32(inf, -5.0, -inf, nan, 1.0), FP32, FP32)
    assert (found.differing, found.nonfinite, found.max_abs_error) == (4, 3, 10.0)
    assert found.worst is not None
    assert (found.worst.rank, found.worst.index, found.worst.a, found.worst.b) == (3, 2, inf, -inf)
    assert found.snr_db == pytest.approx(10 * math.log10(25 / 100))  # of the one finite pair that counts


def test_of_several_equally_bad_elements_the_first_is_the_worst() -> None:
    a = np.zeros(3 * BLOCK, np.float32)
    b = a.copy()
    b[[BLOCK - 1, BLOCK, 2 * BLOCK + 7]] = [-1, 1, 1]
    found = compared(a.tobytes(), b.tobytes(), FP32, FP32)
    assert found.worst is not None
    assert found.worst.index == BLOCK - 1


def test_an_element_beyond_the_tolerance_is_worse_than_a_larger_error_within() -> None:
    found = compared(fp32(1000.0, 1.0), fp32(1001.0, 1.5), FP32, FP32, Tolerance(0.0, 0.01))
    assert (found.beyond, found.max_abs_error) == (1, 1.0)
    assert found.worst is not None
    assert (found.worst.rank, found.worst.index) == (2, 1)


@PROPERTY
@given(st.integers(0, 1 << 30), st.sampled_from([d for d in CASTABLE if d is not FP64]))
def test_the_fast_path_for_equal_bytes_finds_what_the_slow_one_does(seed: int, kind: DType) -> None:
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, kind.itemsize * 999, dtype=np.uint8).tobytes()
    fast = compared(raw, raw, kind, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_same_bytes", lambda _a, _b: False)
        assert compared(raw, raw, kind, kind) == fast
        assert compared(raw, raw, dtype("uint8"), dtype("uint8")) == Deviation(len(raw))


# --- integers and bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [*product(INTS, INTS)], ids=str)
@pytest.mark.parametrize("tolerance", [None, Tolerance(3.0, 0.0), Tolerance(0.0, 0.5)])
def test_integers_are_compared_exactly_whatever_their_size(a: DType, b: DType, tolerance: Tolerance | None) -> None:
    def ends(kind: DType) -> list[int]:
        low = -(1 << (kind.bits - 1)) if kind.kind == "int" else 0
        high = 1 if kind.kind == "bool" else low + (1 << kind.bits) - 1
        return [v for v in (low, low + 1, -3, -1, 0, 1, 2, 4, 7, high - 1, high) if low <= v <= high]

    left, right = zip(*product(ends(a), ends(b)), strict=True)
    x, y = np.array(left, numpy_dtype(a)).tobytes(), np.array(right, numpy_dtype(b)).tobytes()
    found, want = compared(x, y, a, b, tolerance), expected(x, y, a, b, tolerance)
    assert isinstance(found.max_abs_error, int)
    assert (found.n, found.differing, found.beyond, found.max_abs_error) == (
        want.n, want.differing, want.beyond, want.max_abs_error,
    )  # fmt: skip
    assert found.worst is not None
    assert want.worst is not None
    p, q = left[found.worst.index], right[found.worst.index]
    assert (found.worst.a, found.worst.b, float(abs(p - q))) == (p, q, want.worst.error)
    assert found.worst.rank == want.worst.rank


def test_the_largest_distance_of_64_bit_integers_does_not_overflow() -> None:
    low, high = np.array([-(1 << 63)]).tobytes(), np.array([(1 << 64) - 1], np.uint64).tobytes()
    assert compared(low, high, dtype("int64"), dtype("uint64")).max_abs_error == (1 << 64) + (1 << 63) - 1
    top = np.array([(1 << 63) - 1]).tobytes()
    assert compared(low, top, dtype("int64"), dtype("int64")).max_abs_error == (1 << 64) - 1


@pytest.mark.parametrize("kind", OTHERS, ids=str)
def test_all_else_is_compared_bit_for_bit(kind: DType) -> None:
    rng = np.random.default_rng(3)
    n, bits = 96, kind.bits
    raw = rng.integers(0, 256, n * bits // 8, dtype=np.uint8)
    assert compared(raw.tobytes(), raw.tobytes(), kind, kind) == Deviation(n)
    changed = raw.copy()
    for element in (95, 50, 17):  # the highest bit of each
        at = element * bits + bits - 1
        changed[at // 8] ^= 1 << (at % 8)
    found = compared(raw.tobytes(), changed.tobytes(), kind, kind, Tolerance(1e9, 1e9))
    assert (found.n, found.differing, found.beyond, found.max_abs_error) == (n, 3, 3, 0)
    assert found.worst is not None
    assert (found.worst.index, found.worst.a_bits ^ found.worst.b_bits) == (17, 1 << (bits - 1))


def test_complex_numbers_are_shown_as_numbers() -> None:
    a, b = (np.array([1 + 2j, v], np.complex64).tobytes() for v in (3j, 4.5))
    found = compared(a, b, dtype("complex64"), dtype("complex64"))
    assert found.worst is not None
    assert (found.worst.a, found.worst.b) == ("3j", "(4.5+0j)")


def test_what_has_no_common_measure_is_not_compared() -> None:
    names = ["fp32", "int32", "complex64", "fp4"]
    assert [(a, b) for a, b in product(names, names) if comparison(dtype(a), dtype(b)) is not None] == [
        (a, a) for a in names
    ]


# --- sums ---------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.floats(min_value=0, allow_nan=False))
def test_a_sum_of_one_value_is_the_value(x: float) -> None:
    assert rounded(exact(x)) == x


@PROPERTY
@given(st.lists(st.floats(min_value=0, max_value=1e300), max_size=30), st.randoms())
def test_sums_are_exact_in_any_order(xs: list[float], random: Any) -> None:
    want = rounded(sum(map(exact, xs)))
    random.shuffle(xs)
    assert rounded(sum(map(exact, xs))) == want == math.fsum(xs)


def test_a_sum_with_inf_is_inf() -> None:
    assert rounded(exact(math.inf) + exact(1.0) + exact(math.inf)) == math.inf
    assert rounded(exact(1.7e308) * 2) == math.inf


@PROPERTY
@given(st.integers(0, 1 << 30), st.permutations(range(4)))
def test_cutting_a_tensor_elsewhere_and_adding_in_another_order_changes_nothing(seed: int, order: list[int]) -> None:
    rng = np.random.default_rng(seed)
    block = 256
    n = 3 * block + 123
    a = rng.normal(size=n).astype(np.float32)
    b = np.where(rng.random(n) < 0.1, a + rng.normal(size=n) * 1e-3, a).astype(np.float32)
    b[rng.integers(n)] = math.nan
    a[rng.integers(n)] = math.inf
    pair = Comparison("float", FP32, FP32)

    def part(first: int, end: int) -> Deviation:
        lanes = Lanes(a.nbytes)
        one, other = lanes.buffers((end - first) * 4, (end - first) * 4)
        one[:], other[:] = a[first:end].tobytes(), b[first:end].tobytes()
        return lanes.compare(pair, first, end - first, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "BLOCK", block)
        parts = [part(i * block, min(n, (i + 1) * block)) for i in range(4)]
        whole = part(0, n)
        assert repr(sum((parts[i] for i in order), Deviation())) == repr(whole)
        assert repr(part(0, 2 * block) + part(2 * block, n)) == repr(whole)


def test_relative_numbers_where_there_is_nothing_to_be_relative_to() -> None:
    none, noise = Deviation(n=3), compared(fp32(0, 0), fp32(0, 1), FP32, FP32)
    assert (none.relative_rms_error, none.snr_db) == (0.0, math.inf)
    assert (noise.relative_rms_error, noise.snr_db) == (math.inf, -math.inf)
