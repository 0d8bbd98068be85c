"""The kernel against torch bit for bit, against ml_dtypes and numpy, and against exact arithmetic."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precconv.cast import VECTOR, Lane, cast_chunk, first_difference, one_thread, pair, reference_cast
from precconv.dtypes import BF16, CASTABLE, FP16, FP32, FP64, DType
from precconv.stats import Norms, Stats

from .samples import PROPERTY, bits_of, empty, from_bits, is_nan, specials, torch_dtype

NUMPY: dict[str, Any] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64}
PAIRS = [(a, b) for a in CASTABLE for b in CASTABLE]
each_pair = pytest.mark.parametrize(("src", "dst"), PAIRS, ids=lambda d: str(d))
narrow = pytest.mark.parametrize("dst", [FP16, BF16], ids=str)


def in_numpy(x: torch.Tensor, dst: DType) -> np.ndarray:
    """Bit patterns of a conversion by numpy and ml_dtypes: another implementation of the same rounding."""
    src = next(d for d in CASTABLE if torch_dtype(d) == x.dtype)
    with np.errstate(all="ignore"):
        values: np.ndarray = bits_of(x).view(NUMPY[src.name]).astype(NUMPY[dst.name])
    return values.view(f"uint{dst.bits}")


def exact(pattern: int, src: DType, dst: DType) -> int:
    """The bit pattern that rounding once to nearest even gives, in integers and fractions alone; NaN not handled."""
    sign, magnitude = pattern >> (src.bits - 1), pattern & ((1 << (src.bits - 1)) - 1)
    out = sign << (dst.bits - 1)
    field, fraction = magnitude >> src.mantissa, magnitude & ((1 << src.mantissa) - 1)
    if magnitude == src.max_bits + 1:
        return out | (dst.max_bits + 1)
    if magnitude == 0:
        return out
    # value = significand x 2^power, exactly
    significand = fraction | (bool(field) << src.mantissa)
    power = max(field, 1) - src.bias - src.mantissa
    exponent = max(significand.bit_length() - 1 + power, 1 - dst.bias)  # of the target's binade
    scaled = Fraction(significand) * Fraction(2) ** (power - exponent + dst.mantissa)
    rounded = round(scaled)  # Python rounds fractions half to even
    # the implicit bit carries into the exponent by itself, also when rounding reaches the next binade
    result = ((exponent + dst.bias - 1) << dst.mantissa) + rounded
    return out | min(result, dst.max_bits + 1)


def buffer(data: bytes | memoryview) -> memoryview:
    """A writable copy: torch warns of any other."""
    return memoryview(bytearray(data))


def slow_stats(x: torch.Tensor, y: torch.Tensor, dst: DType) -> Stats:
    """Stats by their definitions, one float at a time in numpy's FP64."""
    a, b = x.double().numpy(), y.double().numpy()
    finite = np.isfinite(a)
    bound = dst.overflow_bound
    magnitude = np.abs(a[finite])
    over = magnitude >= bound
    return Stats(
        n=len(a),
        nan=int(np.isnan(a).sum()),
        inf=int(np.isinf(a).sum()),
        zero=int((a == 0).sum()),
        overflow=int(over.sum()),
        underflow=int(((a != 0) & (b == 0)).sum()),
        subnormal=int(((b != 0) & (np.abs(b) < dst.smallest_normal)).sum()),
        overflow_max=float(magnitude.max()) if over.any() else 0.0,
    )


def slow_norms(x: torch.Tensor, y: torch.Tensor) -> Norms:
    a, b = x.double().numpy(), y.double().numpy()
    both = np.isfinite(a) & np.isfinite(b)
    largest = float(np.abs(a[np.isfinite(a)]).max(initial=0))
    a, e = a[both], b[both] - a[both]
    with np.errstate(over="ignore"):
        return Norms(largest, float(np.abs(e).max(initial=0)), float((a * a).sum()), float((e * e).sum()))


def assert_norms(got: Norms | None, want: Norms) -> None:
    assert got is not None
    assert (got.max_abs, got.max_abs_error) == (want.max_abs, want.max_abs_error)
    assert got.square_sum == pytest.approx(want.square_sum, rel=1e-12, abs=0)
    assert got.square_error_sum == pytest.approx(want.square_error_sum, rel=1e-12, abs=0)


# --- values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("src", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dst", CASTABLE, ids=str)
def test_all_patterns_of_a_16_bit_type_are_cast_as_torch_and_ml_dtypes_do(src: DType, dst: DType) -> None:
    x = from_bits(np.arange(1 << 16), src)
    before = bits_of(x).copy()
    with one_thread():  # torch's threads end their shares within a vector, where its NaN differ
        want = x.to(torch_dtype(dst))
    got, stats = cast_chunk(x, dst)
    assert np.array_equal(bits_of(got), bits_of(want))
    assert np.array_equal(bits_of(x), before)
    by_numpy = in_numpy(x, dst)
    nan = is_nan(bits_of(got), dst)
    assert np.array_equal(nan, is_nan(by_numpy, dst))
    assert np.array_equal(bits_of(got)[~nan], by_numpy[~nan])
    assert stats == slow_stats(x, got, dst)


@pytest.mark.parametrize("src", [FP16, BF16], ids=str)
@pytest.mark.parametrize("dst", CASTABLE, ids=str)
def test_patterns_of_a_16_bit_type_are_cast_as_exact_arithmetic_says(src: DType, dst: DType) -> None:
    patterns = np.arange(1 << 16)
    patterns = patterns[~is_nan(patterns.astype(np.uint16), src)]
    patterns = patterns[::7]  # exact arithmetic is slow, and the test above has been through all of them
    got = bits_of(cast_chunk(from_bits(patterns, src), dst)[0])
    assert got.tolist() == [exact(int(p), src, dst) for p in patterns]


def fp32_patterns(dst: DType) -> np.ndarray:
    """Every exponent and sign; low bits at, just above and just below every tie; mantissas all over."""
    dropped = FP32.mantissa - dst.mantissa  # in a normal result; more are dropped in a subnormal one
    rng = np.random.default_rng(7)
    mantissas = {0, 1, 2, (1 << 23) - 1, (1 << 23) - 2}
    for low in range(dropped - 1, 23):  # where the tie lies, from normal down to the smallest subnormal
        tops = {0, 1, 2, 3, (1 << (22 - low)) - 1, *rng.integers(0, 1 << (22 - low), 24).tolist()}
        for top in tops:
            tie = ((top << 1 | 1) << low) & ((1 << 23) - 1)
            mantissas |= {tie, tie - 1, (tie + 1) & ((1 << 23) - 1)}
    mantissas |= set(rng.integers(0, 1 << 23, 512).tolist())
    m = np.array(sorted(mantissas), dtype=np.uint32)
    heads = np.arange(1 << 9, dtype=np.uint32) << np.uint32(23)  # sign and exponent
    return (heads[:, None] | m[None, :]).reshape(-1)


@narrow
def test_fp32_of_every_exponent_is_cast_as_torch_does_bit_for_bit(dst: DType) -> None:
    patterns = fp32_patterns(dst)
    patterns = patterns[: len(patterns) // VECTOR * VECTOR]
    x = from_bits(patterns, FP32)
    with one_thread():
        want = x.to(torch_dtype(dst))
    got, stats = cast_chunk(x, dst)
    assert np.array_equal(bits_of(got), bits_of(want))
    assert stats == slow_stats(x, got, dst)
    by_numpy, nan = in_numpy(x, dst), is_nan(bits_of(got), dst)
    assert np.array_equal(bits_of(got)[~nan], by_numpy[~nan])


@narrow
def test_all_ties_of_fp32_go_to_the_even_neighbour(dst: DType) -> None:
    """Each finite value of the target and the exact midpoint above it."""
    below = np.arange(dst.max_bits, dtype=np.uint16)  # the midpoint above the maximum overflows
    low = from_bits(below, dst).double().numpy()
    high = from_bits(below + 1, dst).double().numpy()
    middle = ((low + high) / 2).astype(np.float32)
    representable = middle.astype(np.float64) == (low + high) / 2
    assert representable.all() == (dst is FP16) or representable.sum() > len(low) - 8
    got = bits_of(cast_chunk(torch.from_numpy(middle[representable]), dst)[0])
    even = below + (below & 1)
    assert np.array_equal(got, even[representable])


@narrow
def test_fp32_is_rounded_as_integers_say(dst: DType) -> None:
    """Against an integer reference of its own: add half minus one and the kept bit, then cut."""
    patterns = fp32_patterns(dst)
    got = bits_of(cast_chunk(from_bits(patterns, FP32), dst)[0]).astype(np.int64)
    magnitude, sign = patterns.astype(np.int64) & 0x7FFFFFFF, (patterns.astype(np.int64) >> 31) << 15
    field = np.maximum(magnitude >> 23, 1)
    significand = (magnitude & 0x7FFFFF) | ((magnitude >> 23 > 0).astype(np.int64) << 23)
    lowest = 1 - dst.bias + FP32.bias  # the FP32 exponent field of the target's smallest normal
    shift = np.minimum(23 - dst.mantissa + np.maximum(lowest - field, 0), 40)
    rounded = (significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift
    base = np.maximum(field - lowest, 0) << dst.mantissa
    want = np.minimum(base + rounded, dst.max_bits + 1) | sign
    number = magnitude <= 0x7F800000
    assert np.array_equal(got[number], want[number])


def double_rounding() -> list[int]:
    """FP64 values whose rounding by way of FP32 goes wrong: a hair beside a tie of the 16-bit type."""
    found = []
    rng = np.random.default_rng(3)
    for dst in (FP16, BF16):
        picks = [0, 1, 2, 3, dst.max_bits - 1, dst.max_bits, 1 << dst.mantissa, *rng.integers(0, dst.max_bits, 600)]
        for pattern in map(int, picks):
            half = Fraction(dst.magnitude(min(pattern + 1, dst.max_bits))) - Fraction(dst.magnitude(pattern))
            step = half or Fraction(dst.max) - Fraction(dst.magnitude(dst.max_bits - 1))
            tie = float(Fraction(dst.magnitude(pattern)) + step / 2)
            middle = int(np.float64(tie).view(np.uint64))
            found += [middle + i for i in (-(1 << 28), -(1 << 20), -2, -1, 0, 1, 2, 1 << 20, 1 << 28)]
    found += [p for p in specials(FP64) if p >> 63 == 0]
    numbers = sorted({p for p in found if 0 <= p <= FP64.max_bits + 1})
    return [*numbers, *(p | 1 << 63 for p in numbers)]


@narrow
def test_fp64_is_rounded_once(dst: DType) -> None:
    patterns = double_rounding()
    x = from_bits(np.array(patterns, dtype=np.uint64), FP64)
    want = np.array([exact(p, FP64, dst) for p in patterns], dtype=np.uint16)
    for got in (cast_chunk(x, dst)[0], reference_cast(x, pair(FP64, dst), clamp=False)):
        assert np.array_equal(bits_of(got), want)
    by_torch = bits_of(x.to(torch.float32).to(torch_dtype(dst)))
    assert not np.array_equal(by_torch, want), "these values no longer tell one rounding from two"


def test_fp64_becomes_fp32_as_exact_arithmetic_says() -> None:
    rng = np.random.default_rng(5)
    patterns = [*specials(FP64), *rng.integers(0, 1 << 63, 2000).tolist()]
    patterns = [p for p in patterns if (p & ((1 << 63) - 1)) <= FP64.max_bits + 1]
    got = bits_of(cast_chunk(from_bits(np.array(patterns, dtype=np.uint64), FP64), FP32)[0])
    assert got.tolist() == [exact(p, FP64, FP32) for p in patterns]


@PROPERTY
@given(st.lists(st.floats(width=64, allow_nan=False), min_size=1, max_size=200), st.sampled_from(CASTABLE))
def test_any_fp64_is_rounded_exactly(values: list[float], dst: DType) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    got = bits_of(cast_chunk(x, dst)[0])
    assert got.tolist() == [exact(int(p), FP64, dst) for p in bits_of(x)]


@each_pair
def test_specials_are_cast_as_numpy_and_exact_arithmetic_do(src: DType, dst: DType) -> None:
    x = from_bits(np.array(specials(src), dtype=np.uint64), src)
    got, stats = cast_chunk(x, dst)
    nan = is_nan(bits_of(got), dst)
    assert np.array_equal(nan, x.isnan().numpy())
    if not (src is FP64 and dst is BF16):  # which ml_dtypes rounds twice
        assert np.array_equal(bits_of(got)[~nan], in_numpy(x, dst)[~nan])
    assert bits_of(got)[~nan].tolist() == [exact(int(b), src, dst) for b in bits_of(x)[~nan]]
    assert stats == slow_stats(x, got, dst)
    assert got.dtype == torch_dtype(dst)


@each_pair
def test_nan_stays_nan_and_is_quiet_where_torch_makes_it_so(src: DType, dst: DType) -> None:
    inf, sign = src.max_bits + 1, 1 << (src.bits - 1)
    payloads = [1, 2, 1 << (src.mantissa - 1), (1 << src.mantissa) - 1]
    x = from_bits([s | (inf + p) for s in (0, sign) for p in payloads] * 9, src)
    got = bits_of(cast_chunk(x, dst)[0])
    assert is_nan(got, dst).all()
    if src is dst:
        assert np.array_equal(got, bits_of(x))  # untouched, payload and all
    else:
        quiet = (got & np.array(1 << (dst.mantissa - 1), got.dtype)) != 0
        # BF16 is widened to FP32 by a shift, which leaves a signalling NaN as it is
        assert np.array_equal(quiet, bits_of(x) & 64 != 0) if (src, dst) == (BF16, FP32) else quiet.all()


@pytest.mark.parametrize("dst", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("src", [FP64, FP32], ids=str)
def test_which_nan_it_becomes_does_not_depend_on_its_place(src: DType, dst: DType) -> None:
    """torch handles the elements that do not fill a vector with other code: chunks end anywhere."""
    if src is dst:
        pytest.skip("not a cast")
    nan = from_bits([src.max_bits + 2, src.max_bits + 2 | 1 << (src.bits - 1), (1 << src.bits) - 1] * 100, src)
    whole = bits_of(cast_chunk(nan, dst)[0])
    lane = Lane(1 << 14)
    for n in [*range(1, 2 * VECTOR + 2), 255, 257]:
        assert np.array_equal(bits_of(cast_chunk(nan[:n], dst)[0]), whole[:n])
        assert np.array_equal(bits_of(reference_cast(nan[:n], pair(src, dst), clamp=False)), whole[:n])
        raw = bits_of(nan[:n]).tobytes()
        lane.source(len(raw))[:] = raw
        assert bytes(lane.cast(pair(src, dst), n)) == whole[:n].tobytes()


# --- the pair's limits ------------------------------------------------------------------------------------


@each_pair
def test_a_pair_knows_the_first_source_pattern_that_overflows(src: DType, dst: DType) -> None:
    p = pair(src, dst)
    assert (p.src_inf, p.dst_inf, p.dst_normal) == (src.max_bits + 1, dst.max_bits + 1, 1 << dst.mantissa)
    around = [b for b in range(p.overflow - 3, p.overflow + 3) if 0 <= b <= src.max_bits]
    got, _ = cast_chunk(from_bits(np.array(around, dtype=np.uint64), src), dst)
    assert got.isinf().tolist() == [b >= p.overflow for b in around]
    if dst.max >= src.max:
        assert p.overflow == p.src_inf


# --- statistics and the fast path -------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn, src: DType) -> torch.Tensor:
    """Ordinary values, with special patterns at random places; or nothing but special patterns."""
    n = draw(st.one_of(st.integers(1, 8), st.integers(1, 300), st.sampled_from([63, 64, 65, 128, 4095, 4096, 4097])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1.0, 1e-5, 1e-39, 6e4, 1e38]))
    with np.errstate(all="ignore"):
        bits = (rng.standard_normal(n) * scale).astype(NUMPY[src.name]).view(f"uint{src.bits}").copy()
    special = np.array(specials(src), dtype=bits.dtype)
    places = draw(st.one_of(st.just([]), st.lists(st.integers(0, n - 1), max_size=12), st.just(list(range(n)))))
    for place in places:
        bits[place] = special[rng.integers(len(special))]
    return from_bits(bits, src)


@st.composite
def segmented(draw: st.DrawFn, n: int) -> list[tuple[int, int, int]]:
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=8))) if n > 1 else []
    return [(100 + i, a, b) for i, (a, b) in enumerate(pairwise([0, *cuts, n]))]


@pytest.mark.parametrize("to", [FP16, BF16], ids=str)
def test_a_lane_has_room_for_the_errors_of_a_whole_chunk_of_16_bits(to: DType) -> None:
    """They are FP32; torch warns where it must make room, and tests fail of it."""
    lane, n = Lane(1 << 12), 1 << 11
    x = torch.randn(n, generator=torch.Generator().manual_seed(1)).half()
    lane.source(2 * n)[:] = bits_of(x).tobytes()
    p = pair(FP16, to)
    lane.cast(p, n)
    ((_, stats),) = lane.survey(p, n, [(0, 0, n)], norms=True)
    assert stats == cast_chunk(x, to, norms=True)[1]


@pytest.mark.parametrize("norms", [False, True], ids=["counts", "norms"])
@pytest.mark.parametrize("clamp", [False, True], ids=["ieee", "clamp"])
@each_pair
def test_the_lane_equals_cast_chunk_of_each_tensor(src: DType, dst: DType, clamp: bool, norms: bool) -> None:
    lane = Lane(1 << 16)  # used again and again: what is left in it from before must not be seen

    @settings(PROPERTY, max_examples=20)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        x = data.draw(arrays(src))
        segments = data.draw(segmented(x.numel()))
        p, n = pair(src, dst), x.numel()
        raw = bits_of(x).tobytes()
        lane.source(len(raw))[:] = raw
        result = lane.cast(p, n)
        found = dict(lane.survey(p, n, segments, clamp=clamp, norms=norms))
        assert bytes(lane.source(len(raw))) == raw
        want = [cast_chunk(x[a:b], dst, clamp=clamp, norms=norms) for _, a, b in segments]
        assert bytes(result) == b"".join(bits_of(y).tobytes() for y, _ in want)
        for (key, a, b), (y, stats) in zip(segments, want, strict=True):
            seen = found.pop(key, Stats(b - a))
            assert seen == stats
            if norms:
                assert_norms(seen.norms, slow_norms(x[a:b], y))
            if not clamp:
                assert replace(seen, norms=None) == slow_stats(x[a:b], y, dst)
        assert not found
        assert first_difference(buffer(raw), buffer(result), p, clamp=clamp) is None

    holds()


@pytest.mark.parametrize("norms", [False, True])
@each_pair
def test_chunks_of_a_tensor_add_up_to_the_tensor(src: DType, dst: DType, norms: bool) -> None:
    @settings(PROPERTY, max_examples=20)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        x = data.draw(arrays(src))
        parts = [cast_chunk(x[a:b], dst, norms=norms) for _, a, b in data.draw(segmented(x.numel()))]
        whole, stats = cast_chunk(x, dst, norms=norms)
        assert b"".join(bits_of(y).tobytes() for y, _ in parts) == bits_of(whole).tobytes()
        total = reduce(Stats.__add__, (s for _, s in parts))
        if norms:
            assert_norms(total.norms, slow_norms(x, whole))
            assert_norms(stats.norms, slow_norms(x, whole))
        assert total + Stats() == Stats() + total == total
        assert [getattr(total, f) for f in COUNTS] == [getattr(stats, f) for f in COUNTS]

    holds()


COUNTS = ("n", "nan", "inf", "zero", "overflow", "underflow", "subnormal", "overflow_max")


@pytest.mark.parametrize("src", CASTABLE, ids=str)
def test_a_clean_chunk_has_nothing_to_say(src: DType) -> None:
    lane = Lane(1 << 12)
    for dst in CASTABLE:
        raw = bits_of(torch.ones(100, dtype=torch_dtype(src))).tobytes()
        lane.source(len(raw))[:] = raw
        lane.cast(pair(src, dst), 100)
        assert lane.survey(pair(src, dst), 100, [(0, 0, 50), (1, 50, 100)]) == []


@each_pair
def test_only_the_segments_with_something_to_say_are_reported(src: DType, dst: DType) -> None:
    lane = Lane(1 << 12)
    x = torch.ones(100, dtype=torch_dtype(src))
    x[60] = 0
    raw = bits_of(x).tobytes()
    lane.source(len(raw))[:] = raw
    lane.cast(pair(src, dst), 100)
    found = lane.survey(pair(src, dst), 100, [(0, 0, 50), (1, 50, 100)])
    assert [(k, s) for k, s in found if s != Stats(50)] == [(1, Stats(50, zero=1))]


@pytest.mark.parametrize(("src", "dst"), [(FP32, FP16), (FP32, BF16), (FP64, FP32), (FP64, FP16), (BF16, FP16)])
def test_clamping_gives_the_largest_finite_value_and_leaves_infinities_alone(src: DType, dst: DType) -> None:
    p = pair(src, dst)
    big = src.magnitude(p.overflow)
    fits = src.magnitude(p.overflow - 1)
    rounded = cast_chunk(torch.tensor([fits], dtype=torch_dtype(src)), dst)[0].item()
    x = torch.tensor([big, -big, fits, -fits, torch.inf, -torch.inf, torch.nan, src.max], dtype=torch_dtype(src))
    y, stats = cast_chunk(x, dst, clamp=True)
    top = dst.max
    assert y.double()[:6].tolist() == [top, -top, rounded, -rounded, torch.inf, -torch.inf]
    assert y[6].isnan()
    assert y[7] == top
    assert (stats.overflow, stats.overflow_max, stats.inf, stats.nan) == (3, src.max, 2, 1)
    assert torch.equal(reference_cast(x, p, clamp=True).view(torch.uint8), y.view(torch.uint8))


@each_pair
def test_no_elements_are_cast_to_no_elements(src: DType, dst: DType) -> None:
    y, stats = cast_chunk(empty(src), dst)
    assert (y.dtype, y.numel(), stats) == (torch_dtype(dst), 0, Stats())
    assert cast_chunk(empty(src), dst, norms=True)[1].norms == Norms()


def test_zeros_are_counted_beyond_what_fp32_can_count_to() -> None:
    n = (1 << 24) + 3
    x = torch.zeros(n)
    x[5] = 1e-40
    assert cast_chunk(x, FP16)[1] == Stats(n, zero=n - 1, underflow=1)


def test_counts_of_a_16_bit_type_do_not_wrap() -> None:
    n = (1 << 15) * VECTOR  # one more than 16-bit sums of a column can hold
    assert cast_chunk(torch.zeros(n, dtype=torch.bfloat16), FP16)[1] == Stats(n, zero=n)
    assert cast_chunk(torch.full((n + 1,), 1e38, dtype=torch.bfloat16), FP16)[1].overflow == n + 1


@pytest.mark.parametrize("n", [1, 2, 100])
def test_norms_of_values_whose_squares_overflow_are_infinite(n: int) -> None:
    stats = cast_chunk(torch.full((n,), 1e200, dtype=torch.float64), FP64, norms=True)[1]
    assert stats.norms == Norms(1e200, 0.0, torch.inf, 0.0)


@each_pair
def test_norms_are_those_of_numpy_in_fp64(src: DType, dst: DType) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(torch_dtype(src))
    x[17], x[18], x[19] = torch.inf, torch.nan, 0
    y, stats = cast_chunk(x, dst, norms=True)
    assert_norms(stats.norms, slow_norms(x, y))
    assert stats.norms is not None
    assert (stats.norms.square_error_sum > 0) == (dst.mantissa < src.mantissa)


# --- the monoid -------------------------------------------------------------------------------------------

whole = st.integers(0, 1000)
exact_floats = st.integers(0, 1 << 20).map(float)
norms_values = st.builds(Norms, exact_floats, exact_floats, exact_floats, exact_floats)
stats_values = st.builds(Stats, whole, whole, whole, whole, whole, whole, whole, exact_floats, st.none() | norms_values)


@PROPERTY
@given(stats_values, stats_values, stats_values)
def test_statistics_add_in_any_order_and_nothing_changes_nothing(a: Stats, b: Stats, c: Stats) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Stats() == a == Stats() + a
    assert sum([a, b, c], Stats()) == a + b + c


def test_every_count_is_added_and_every_maximum_kept() -> None:
    a = Stats(1, 2, 3, 4, 5, 6, 7, 8.0, Norms(1.0, 2.0, 3.0, 4.0))
    b = Stats(10, 20, 30, 40, 50, 60, 70, 7.0, Norms(0.5, 2.5, 30.0, 40.0))
    assert a + b == Stats(11, 22, 33, 44, 55, 66, 77, 8.0, Norms(1.0, 2.5, 33.0, 44.0))


def test_shares_are_of_what_could_have_been_lost() -> None:
    assert Stats(10, nan=1, inf=1, zero=4, underflow=1).underflow_share == 0.25
    assert Stats(10, nan=1, inf=1).finite == 8
    assert Stats(4, zero=4).underflow_share == 0
    assert Stats().underflow_share == 0
    assert Norms(square_sum=4.0, square_error_sum=1.0).relative_rms_error == 0.5
    assert Norms().relative_rms_error == 0


# --- verification's side ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 500, 999])
def test_the_first_difference_is_found(at: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    y = cast_chunk(x, BF16)[0]
    raw, good, bad = (buffer(bits_of(t).tobytes()) for t in (x, y, y))
    assert first_difference(raw, good, pair(FP32, BF16), clamp=False) is None
    bad[2 * at + 1] ^= 1
    assert first_difference(raw, bad, pair(FP32, BF16), clamp=False) == 2 * at + 1
    assert first_difference(bad, good, None, clamp=False) == 2 * at + 1


def test_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ZeroDivisionError), one_thread():
            _ = 1 // (torch.get_num_threads() - 1)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
