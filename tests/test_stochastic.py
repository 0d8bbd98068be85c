"""Stochastic rounding against its definition, one element at a time in plain Python, and against statistics."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from hashlib import blake2b, shake_128
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import precconv
from benchmarks import rounding
from precconv.cast import Lane, first_difference, pair, reference_cast
from precconv.cli import cli
from precconv.draws import BLOCK, Draws, Stretch, keys, stretches
from precconv.dtypes import BF16, FP16, FP32, FP64, DType
from precconv.runs import CHUNK_BYTES, Run
from precconv.stochastic import halves, words

from .samples import PROPERTY, bits_of, from_bits, is_nan, specials, torch_dtype, write_checkpoint

PLAIN: dict[str, Any] = {"preset": "none", "norms": "cast", "mixed": "cast"}
PAIRS = [(a, b) for a in (FP32, FP64) for b in (FP16, BF16)]
each_pair = pytest.mark.parametrize(("src", "dst"), PAIRS, ids=str)
narrow = pytest.mark.parametrize("dst", [FP16, BF16], ids=str)
#: Standard deviations; by chance a statistic is farther off once in a million times.
SIGMAS = 5.0

# The definition --------------------------------------------------------------------------------------------

TABLE = shake_128(b"precconv").digest(4 * (BLOCK // 2 + 1))


def half(j: int, factor: int, added: int) -> int:
    """16 random bits of element ``j`` of a block: two neighbouring halves of the block's words, xored."""

    def part(j: int) -> int:
        entry = int.from_bytes(TABLE[j // 2 * 4 :][:4], "little")
        return (entry * (factor | 1) + added) >> 16 * (j % 2) & 0xFFFF

    return part(j) ^ part(j + 1)


def word(i: int, first: int, second: int) -> int:
    """32 random bits of counter ``i``."""

    def fold(h: int, shift: int) -> int:
        sign_filled = (h - (1 << 32) if h >> 31 else h) >> shift
        return h ^ (sign_filled & 0xFFFFFFFF)

    h = fold((i * 0xED5AD4BB + first) & 0xFFFFFFFF, 16)
    h = fold((h * 0xAC4C1B51 + second) & 0xFFFFFFFF, 15)
    return (h * 0x31848BAB) & 0xFFFFFFFF


def draw(seed: int, name: str, index: int) -> int:
    """48 random bits of an element: half a word of those that a block shares, and a word of its own."""
    block, i = divmod(index, 1 << 19)
    data = seed.to_bytes(8, "little") + block.to_bytes(8, "little") + name.encode()
    digest = blake2b(data, digest_size=16).digest()
    a, b, c, d = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8, 12))
    return half(i, a, b) << 32 | word(i, c, d)


def rounded(x: float, dst: DType, drawn: int) -> float:
    """The magnitude of a finite value below the largest of ``dst``, rounded."""
    size = Fraction(abs(x))
    unit = Fraction(dst.smallest_subnormal)
    while size >= unit * (2 << dst.mantissa):
        unit *= 2
    steps = size // unit
    remainder = (size / unit - steps) * (1 << 48) // 1
    return float((steps + (remainder + drawn >= 1 << 48)) * unit)


def defined(x: torch.Tensor, dst: DType, draws: Sequence[int]) -> np.ndarray:
    """Bits of the results by the definition; nearest ones from the largest finite value on."""
    nearest = reference_cast(x, pair(precconv.dtype(x.dtype), dst), clamp=False)
    out = nearest.clone()
    for i, (value, drawn) in enumerate(zip(x.tolist(), draws, strict=True)):
        if abs(value) < dst.max:
            out[i] = torch.copysign(torch.tensor(rounded(value, dst, drawn), dtype=torch.float64), x[i].double())
    return bits_of(out)


def cast(x: torch.Tensor, dst: DType, parts: Sequence[Stretch]) -> torch.Tensor:
    """Through the streamed conversion's kernel."""
    lane = Lane(max(x.numel(), 1) * 8 + 512)
    lane.source(x.numel() * x.element_size())[:] = bits_of(x).tobytes()
    raw = lane.cast(pair(precconv.dtype(x.dtype), dst), x.numel(), parts)
    return torch.frombuffer(bytearray(raw), dtype=torch_dtype(dst))


def whole(n: int, *, seed: int = 0, name: str = "w", first: int = 0) -> list[Stretch]:
    return list(stretches(seed, name, first, n))


def of_all_kinds(src: DType, n: int) -> torch.Tensor:
    """Awkward patterns, random ones of every exponent, and values around those that matter here."""
    rng = np.random.default_rng(3)
    limits = [
        v for d in (FP16, BF16) for v in (d.max, d.smallest_normal, d.smallest_subnormal, d.smallest_normal / 2**40)
    ]
    near = [v * f for v in limits for f in (0.3, 0.75, 1 - 2**-12, 1 + 2**-12, 1.001, 3.7, -1.3)]
    values = torch.tensor(near, dtype=torch.float64).to(torch_dtype(src))
    kind = np.uint32 if src is FP32 else np.uint64
    anything = from_bits(rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True), src)
    ordinary = torch.from_numpy(rng.normal(0, 1e-3, n)).to(torch_dtype(src))
    return torch.cat([from_bits(specials(src), src), values, anything, ordinary])


def test_the_random_words_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    counters = [0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, *rng.integers(0, 1 << 32, 500).tolist()]
    for a, b, _, _ in (keys(0, "w", 0), keys(7, "layers.0.ü", 3), (0, 0, 0, 0), (0xFFFFFFFF,) * 4):
        got = from_bits([i * 0xED5AD4BB & 0xFFFFFFFF for i in counters], precconv.dtype("uint32")).view(torch.int32)
        first, second = (from_bits([key], precconv.dtype("uint32")).view(torch.int32) for key in (a, b))
        words(got, first, second, got, torch.empty_like(got))
        assert bits_of(got).tolist() == [word(i, a, b) for i in counters]


def test_halves_of_words_are_those_of_the_definition() -> None:
    long, last = 5000, BLOCK - 5000
    where = [("a", 0, long), ("a", 1, long), ("b", last, 5000), ("ü", last - 1, 5001), ("ü", 2 * BLOCK + 7, long)]
    short = [("c", first, n) for first in (0, 1, 6, BLOCK - 8) for n in (1, 2, 7, 8)]
    for chosen in (where, short, [*short, *where, *short]):
        parts = [s for name, first, n in chosen for s in stretches(3, name, first, n)]
        out = torch.empty(sum(s.elements for s in parts), dtype=torch.int16)
        halves(parts, out, torch.empty(out.numel() + 2, dtype=torch.int32))
        want = [draw(3, name, first + i) >> 32 for name, first, n in chosen for i in range(n)]
        assert bits_of(out).tolist() == want


@each_pair
def test_every_element_is_rounded_as_defined(src: DType, dst: DType) -> None:
    x = of_all_kinds(src, 3000)
    draws = [draw(11, "a", i) for i in range(x.numel())]
    want = defined(x, dst, draws)
    parts = whole(x.numel(), seed=11, name="a")
    for got in (cast(x, dst, parts), reference_cast(x, pair(src, dst), clamp=False, stretches=parts)):
        assert np.array_equal(bits_of(got), want)
    nearest = reference_cast(x, pair(src, dst), clamp=False)
    assert (bits_of(nearest) != want).sum() > x.numel() // 10


@each_pair
def test_of_small_values_half_a_word_decides_or_more(src: DType, dst: DType) -> None:
    rng = np.random.default_rng(8)
    edge = dst.smallest_normal * 2.0 ** (23 - dst.mantissa - 16)
    for low, high in ((edge, 64 * edge), (edge / 64, 64 * edge)):
        x = torch.from_numpy(np.exp(rng.uniform(np.log(low), np.log(high), 3000))).to(torch_dtype(src))
        x = torch.cat([x, torch.full((1,), low, dtype=x.dtype), torch.zeros(7, dtype=x.dtype)])
        draws = [draw(0, "w", i) for i in range(x.numel())]
        assert np.array_equal(bits_of(cast(x, dst, whole(x.numel()))), defined(x, dst, draws))


@pytest.mark.parametrize("others", [1.0, 2.0**-30], ids=["few small values", "many"])
def test_where_half_a_word_does_not_decide_the_rest_does(others: float) -> None:
    n = 1 << 18
    draws = [draw(4, "w", i) for i in range(n)]
    open_ = [i for i, drawn in enumerate(draws) if drawn >> 32 == 0xFFFF]
    assert open_, "one in 2^16"
    x = torch.full((n,), others)
    want = []
    for i in open_:  # adds up to exactly 1, or to as little less than it as counts
        x[i] = ((1 << 32) - (draws[i] & 0xFFFFFFFF) - i % 2) * 2.0**-48 * FP16.smallest_subnormal
        want.append(rounded(float(x[i]), FP16, draws[i]))
    got = cast(x, FP16, whole(n, seed=4))
    assert got[open_].tolist() == want
    assert others < 1 or set(got.tolist()) == {1.0, *want}


@each_pair
def test_the_parts_of_a_chunk_get_the_bits_of_their_tensors(src: DType, dst: DType) -> None:
    x = of_all_kinds(src, 500)
    where = [("a", 5, 100), ("b", 0, 1), ("ü", BLOCK - 30, 60), ("c", 3 << 33, x.numel() - 161)]
    parts = [s for name, first, n in where for s in stretches(2, name, first, n)]
    assert len(parts) == 5, "one of them goes on in the next block"
    draws = [draw(2, name, first + i) for name, first, n in where for i in range(n)]
    assert np.array_equal(bits_of(cast(x, dst, parts)), defined(x, dst, draws))


@PROPERTY
@given(st.data())
def test_where_a_chunk_ends_does_not_matter(data: st.DataObject) -> None:
    src, dst = data.draw(st.sampled_from(PAIRS))
    x = of_all_kinds(src, 150)
    cuts = sorted({0, x.numel(), *data.draw(st.lists(st.integers(0, x.numel()), max_size=5))})
    first = data.draw(st.sampled_from([0, 1, 77, BLOCK - 100, (1 << 32) - 101, 1 << 40]))
    pieces = [cast(x[a:b], dst, whole(b - a, first=first + a)) for a, b in pairwise(cuts)]
    got, want = bits_of(torch.cat(pieces)), bits_of(cast(x, dst, whole(x.numel(), first=first)))
    assert np.array_equal(got, want)


@narrow
def test_the_type_a_value_comes_in_does_not_matter(dst: DType) -> None:
    x = of_all_kinds(FP32, 2000)
    x = x[~torch.isnan(x)]
    parts = whole(x.numel())
    assert np.array_equal(bits_of(cast(x, dst, parts)), bits_of(cast(x.double(), dst, parts)))


@each_pair
@pytest.mark.parametrize("seed", [0, 1])
def test_what_the_target_holds_exactly_never_changes(src: DType, dst: DType, seed: int) -> None:
    held = from_bits(np.arange(1 << 16), dst)
    x = held.to(torch_dtype(src))
    got = bits_of(cast(x, dst, whole(x.numel(), seed=seed)))
    numbers = ~is_nan(bits_of(held), dst)
    assert np.array_equal(got[numbers], bits_of(held)[numbers])
    assert np.array_equal(got, bits_of(reference_cast(x, pair(src, dst), clamp=False))), "NaN as nearest"


@each_pair
def test_only_what_overflows_becomes_infinite(src: DType, dst: DType) -> None:
    step = (dst.overflow_bound - dst.max) / 8
    x = torch.tensor([dst.max + i * step for i in range(8)] * 50, dtype=torch_dtype(src))
    x = torch.cat([x, -x])
    y = cast(x, dst, whole(x.numel()))
    assert torch.equal(y.abs(), torch.full_like(y, dst.max))
    over = torch.full_like(x, dst.overflow_bound)
    assert torch.isinf(cast(over, dst, whole(x.numel()))).all()
    clamped = reference_cast(over, pair(src, dst), clamp=True, stretches=whole(x.numel()))
    assert torch.equal(clamped, torch.full_like(y, dst.max))


@narrow
def test_the_survey_counts_what_became_of_the_values(dst: DType) -> None:
    x = of_all_kinds(FP32, 5000)
    lane = Lane(x.numel() * 4 + 512)
    lane.source(x.numel() * 4)[:] = bits_of(x).tobytes()
    y = torch.frombuffer(bytearray(lane.cast(pair(FP32, dst), x.numel(), whole(x.numel()))), dtype=torch_dtype(dst))
    ((_, stats),) = lane.survey(pair(FP32, dst), x.numel(), [(0, 0, x.numel())])
    finite = torch.isfinite(x)
    assert stats.overflow == int((x[finite].double().abs() >= dst.overflow_bound).sum())
    assert stats.underflow == int(((x != 0) & (y == 0)).sum())
    assert stats.subnormal == int(((y != 0) & (y.abs() < dst.smallest_normal)).sum())
    nearest = reference_cast(x, pair(FP32, dst), clamp=False)
    assert not torch.equal(y == 0, nearest == 0)


# Statistics ------------------------------------------------------------------------------------------------

N = 1 << 20


def mean_error(x: float, y: torch.Tensor, unit: float) -> float:
    """Standard deviations by which the mean of many roundings of ``x`` is off; ``unit``: its neighbours' distance."""
    share = Fraction(abs(x)) / Fraction(unit) % 1
    deviation = float(share * (1 - share)) ** 0.5 * unit / y.numel() ** 0.5
    return float((y.double().mean() - x) / deviation)


VALUES = {
    "a normal value": (FP16, 1 + 2**-10 * 0.3, 2**-10),
    "a negative one": (FP16, -(1 + 2**-10 * 0.3), 2**-10),
    "a value just above one that fits": (FP16, 1 + 2**-10 * 2**-9, 2**-10),
    "a value at the end of a binade": (FP16, 2 - 2**-10 * 0.6, 2**-10),
    "a subnormal result": (FP16, 2**-24 * 77.3, 2**-24),
    "a value below the smallest subnormal": (FP16, 2**-24 * 0.4, 2**-24),
    "a value far below it": (FP16, 2**-24 * 2**-9, 2**-24),
    "bf16": (BF16, 3.0 + 2**-6 * 0.2, 2**-6),
    "bf16, small": (BF16, 2.0**-126 * (1 + 2**-7 * 0.7), 2.0**-133),
    "bf16, a subnormal result": (BF16, 2.0**-133 * 5.3, 2.0**-133),
}


@pytest.mark.parametrize("src", [FP32, FP64], ids=str)
@pytest.mark.parametrize("case", VALUES)
def test_the_mean_of_many_roundings_is_the_value(case: str, src: DType) -> None:
    dst, value, unit = VALUES[case]
    x = torch.full((N,), value, dtype=torch_dtype(src))
    value = float(x[0])
    y = cast(x, dst, whole(N, name=case))
    assert sorted(set(y.abs().tolist())) == [abs(value) // unit * unit, (abs(value) // unit + 1) * unit]
    assert abs(mean_error(value, y, unit)) < SIGMAS
    nearest = reference_cast(x, pair(src, dst), clamp=False)
    assert abs(mean_error(value, nearest, unit)) > SIGMAS, "or this could not tell a biased rounding"


@narrow
def test_the_errors_of_a_tensor_of_weights_cancel(dst: DType) -> None:
    x = torch.randn(N, generator=torch.Generator().manual_seed(5)).abs() * 0.02
    down = x.view(torch.int32).bitwise_and(-1 << (23 - dst.mantissa)).view(torch.float32).to(torch_dtype(dst))
    stochastic = cast(x, dst, whole(N))

    def sigmas(y: torch.Tensor) -> float:
        errors = y.double() - x.double()
        return abs(float(errors.mean() / errors.std() * N**0.5))

    assert sigmas(stochastic) < SIGMAS
    assert sigmas(down) > 100, "or this could not tell a biased rounding"


def random_words(name: str, *, seed: int = 0, second: bool = False) -> np.ndarray:
    """Those that the elements of a tensor begin their draws with, two at a time, or the others."""
    if not second:
        out = torch.empty(2 * N, dtype=torch.int16)
        halves(whole(2 * N, seed=seed, name=name), out, torch.empty(BLOCK + 2, dtype=torch.int32))
        return bits_of(out.view(torch.int32))
    found = []
    for stretch in whole(N, seed=seed, name=name):
        c, d = (torch.tensor([key]).to(torch.int32) for key in stretch.keys[2:])
        got = torch.arange(stretch.elements, dtype=torch.int32) * (0xED5AD4BB - (1 << 32))
        words(got, c, d, got, torch.empty_like(got))
        found.append(bits_of(got))
    return np.concatenate(found)


def centred(found: np.ndarray) -> np.ndarray:
    """Uniform numbers of mean 0 and variance 1."""
    centred: np.ndarray = (found / 2.0**32 - 0.5) * 12**0.5
    return centred


@pytest.mark.parametrize("second", [False, True])
def test_random_bits_are_uniform(second: bool) -> None:
    found = random_words("w", second=second)
    assert abs(centred(found).mean()) * N**0.5 < SIGMAS
    for bit in range(32):
        assert abs(((found >> bit) & 1).mean() * 2 - 1) * N**0.5 < SIGMAS, bit
    for shift in (0, 16):
        neighbours = ((found[1:] >> shift & 0xFF) << 8) | (found[:-1] >> shift & 0xFF)
        halves = ((found >> 24) << 8) | (found >> (8 - shift // 2) & 0xFF)
        for what in ((found >> shift) & 0xFFFF, neighbours, halves):
            seen = np.bincount(what, minlength=1 << 16)
            chi_square = ((seen - seen.mean()) ** 2 / seen.mean()).sum()
            freedom = (1 << 16) - 1
            assert abs(chi_square - freedom) / (2 * freedom) ** 0.5 < SIGMAS, "of the values, or of pairs"


def test_neighbours_are_not_correlated() -> None:
    found = random_words("w")
    check_lags(centred(found))
    check_lags(((found.view(np.uint16) + 0.5) / 2.0**16 - 0.5) * 12**0.5)  # what elements begin their draws with


def check_lags(found: np.ndarray) -> None:
    for lag in (*range(1, 33), 64, 127, 128, 129, 256, 1000, 1024, 4096, 65536, BLOCK // 2, BLOCK):
        assert abs((found[lag:] * found[:-lag]).mean()) * (len(found) - lag) ** 0.5 < SIGMAS, lag


def test_tensors_and_seeds_are_not_correlated_at_any_distance() -> None:
    names = [("layers.0.w", 0), ("layers.1.w", 0), ("layers.0.w", 1), ("layers.0.b", 0)]
    found = [np.fft.rfft(centred(random_words(name, seed=seed))) for name, seed in names]
    found.append(np.fft.rfft(centred(random_words("layers.0.w", second=True))))
    for i, a in enumerate(found):
        for b in found[:i]:
            at_all_distances = np.fft.irfft(a * np.conj(b)) / N
            assert np.abs(at_all_distances).max() * N**0.5 < 6.5, "a million of them: by chance 5 are to be expected"


def test_blocks_of_a_tensor_are_not_correlated() -> None:
    blocks = 24
    out = torch.empty(blocks * BLOCK, dtype=torch.int16)
    halves(whole(out.numel()), out, torch.empty(BLOCK + 2, dtype=torch.int32))
    found = out.view(-1, BLOCK).numpy().astype(np.float32) * (12**0.5 / 2**16)
    correlations = (found @ found.T)[np.triu_indices(blocks, 1)] / BLOCK**0.5
    assert np.abs(correlations).max() < 6
    assert abs(correlations.var() - 1) < SIGMAS * (2 / correlations.size) ** 0.5


# Which bits ------------------------------------------------------------------------------------------------


def test_the_keys_change_with_seed_name_and_block() -> None:
    assert len({keys(s, n, b) for s in (0, 1, (1 << 64) - 1) for n in ("a", "b", "") for b in (0, 1, 9)}) == 27
    assert list(stretches(0, "a", 5, 0)) == []
    got = list(stretches(3, "a", BLOCK - 2, BLOCK + 5))
    assert [(s.first, s.elements) for s in got] == [(BLOCK - 2, 2), (0, BLOCK), (0, 3)]
    assert [s.keys for s in got] == [keys(3, "a", block) for block in range(3)]


def test_a_run_knows_the_elements_of_its_tensors() -> None:
    run = Run(FP32, BF16, 0, 0, True, 4, 2, keys=[4, 2, 7], starts=[0, 10, 11, 20])
    assert list(run.parts(0, 20)) == [(4, 0, 10), (2, 0, 1), (7, 0, 9)]
    assert list(run.parts(3, 3)) == [(4, 3, 3)]
    assert list(run.parts(9, 5)) == [(4, 9, 1), (2, 0, 1), (7, 0, 3)]
    assert list(run.parts(15, 5)) == [(7, 4, 5)]
    draws = Draws(1, ["?"] * 4 + ["d", "e", "f", "g"])
    assert draws.of([(4, 3, 3)]) == [Stretch(keys(1, "d", 0), 3, 3)]


# Conversions -----------------------------------------------------------------------------------------------


def model() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(9)
    return {
        "big": torch.randn(CHUNK_BYTES // 4 + 1001, generator=g),
        **{f"small.{i}": torch.randn(i + 1, generator=g) * 1e-6 for i in range(40)},
        "wide": torch.randn(50, 3, generator=g, dtype=torch.float64),
        "half": torch.randn(50, generator=g).half(),
        "brain": torch.randn(50, generator=g).bfloat16(),
        "ids": torch.arange(9),
    }


def of_name(x: torch.Tensor, name: str, dst: DType, seed: int) -> torch.Tensor:
    """What a conversion must make of a tensor."""
    p = pair(precconv.dtype(x.dtype), dst)
    flat = x.contiguous().view(-1)
    return reference_cast(flat, p, clamp=False, stretches=whole(x.numel(), seed=seed, name=name)).view(x.shape)


@pytest.mark.parametrize("to", ["bf16", "fp16"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_file_is_converted_and_verified_by_the_seed(tmp_path: Path, to: str, workers: int) -> None:
    tensors, dst = model(), precconv.dtype(to)
    source, out = write_checkpoint(tmp_path / "in.safetensors", tensors), tmp_path / "out.safetensors"
    report = precconv.convert(
        source, to=to, output=out, rounding="stochastic", seed=5, verify="full", workers=workers, **PLAIN
    )
    assert (report.options["rounding"], report.options["seed"]) == ("stochastic", 5)
    got = load_file(out)
    for name, x in tensors.items():
        want = of_name(x, name, dst, 5) if x.is_floating_point() and x.element_size() > 2 else None
        if want is None:  # what is not narrowed is rounded to nearest
            want = x.to(torch_dtype(dst)) if x.is_floating_point() else x
        assert torch.equal(got[name].view(torch.uint8), want.view(torch.uint8)), name
    assert not torch.equal(got["big"], tensors["big"].to(torch_dtype(dst)))


def test_neither_order_nor_neighbours_nor_format_matter(tmp_path: Path) -> None:
    tensors = model()
    del tensors["big"]
    files = {
        "a.safetensors": tensors,
        "b.safetensors": dict(reversed(tensors.items())),
        "c.safetensors": {"wide": tensors["wide"], "small.3": tensors["small.3"]},
    }
    for name, chosen in files.items():
        write_checkpoint(tmp_path / name, chosen)
    strided = {**tensors, "wide": tensors["wide"].t().contiguous().t()}
    assert not strided["wide"].is_contiguous()
    torch.save(strided, tmp_path / "d.pt")
    want: dict[str, torch.Tensor] = {}
    for name in (*files, "d.pt"):
        out = tmp_path / f"{name}.out.safetensors"
        precconv.convert(tmp_path / name, to="fp16", output=out, rounding="stochastic", seed=1, verify="full", **PLAIN)
        got = load_file(out)
        want = want or got
        assert got.keys() <= want.keys()
        for key, x in got.items():
            assert torch.equal(x, want[key]), (name, key)


def test_a_torch_output_of_contiguous_tensors_has_the_same_bits(tmp_path: Path) -> None:
    tensors = model()
    torch.save(tensors, tmp_path / "in.pt")
    for out in ("out.pt", "out.safetensors"):
        precconv.convert(
            tmp_path / "in.pt", to="bf16", output=tmp_path / out, rounding="stochastic", verify="full", **PLAIN
        )
    got, want = torch.load(tmp_path / "out.pt", weights_only=True), load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in tensors)


def test_tied_tensors_stay_equal(tmp_path: Path) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    torch.save({"embed": x, "other": x.clone(), "head": x}, tmp_path / "in.pt")
    precconv.convert(
        tmp_path / "in.pt", to="bf16", output=tmp_path / "out.safetensors", rounding="stochastic", verify="full"
    )
    got = load_file(tmp_path / "out.safetensors")
    assert torch.equal(got["embed"], got["head"])
    assert torch.equal(got["embed"], of_name(x, "embed", BF16, 0))
    assert not torch.equal(got["embed"], got["other"])


@pytest.mark.parametrize("policy", ["keep", "fp32", "bf16", "clamp", "ieee"])
def test_what_overflows_is_dealt_with_as_ever(tmp_path: Path, policy: Any) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    large = torch.cat([x, torch.tensor([65510.0, 65520.0, -1e6])])
    source = write_checkpoint(tmp_path / "in.safetensors", {"w": x, "large": large, "wide": large.double()})
    out = tmp_path / "out.safetensors"
    report = precconv.convert(
        source, to="fp16", output=out, rounding="stochastic", on_overflow=policy, verify="full", **PLAIN
    )
    assert [t.stats.overflow for t in report.tensors] == [0, 2, 2] or policy in ("keep", "fp32", "bf16")
    got = load_file(out)
    assert torch.equal(got["w"], of_name(x, "w", FP16, 0))
    if policy == "bf16":
        assert torch.equal(got["large"], of_name(large, "large", BF16, 0))
        assert torch.equal(got["wide"], of_name(large.double(), "wide", BF16, 0))
    elif policy in ("keep", "fp32"):
        assert torch.equal(got["large"], large)
    else:
        limit = 65504.0 if policy == "clamp" else float("inf")
        assert got["large"][-3:].tolist() == [65504.0, limit, -limit]


def test_overflow_is_refused_by_the_value_and_not_by_chance(tmp_path: Path) -> None:
    fits = write_checkpoint(tmp_path / "fits.safetensors", {"w": torch.full((5000,), 65519.0)})
    assert precconv.convert(fits, to="fp16", rounding="stochastic").stats.overflow == 0
    not_ = write_checkpoint(tmp_path / "not.safetensors", {"w": torch.full((1,), 65520.0)})
    with pytest.raises(precconv.NumericError):
        precconv.convert(not_, to="fp16", rounding="stochastic")


def test_a_wrong_bit_or_another_seed_does_not_pass_verification() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    raw = memoryview(bytearray(bits_of(x).tobytes()))
    good = memoryview(bytearray(bits_of(cast(x, FP16, whole(1000)))))
    p = pair(FP32, FP16)
    assert first_difference(raw, good, p, clamp=False, stretches=whole(1000)) is None
    assert first_difference(raw, good, p, clamp=False, stretches=whole(1000, seed=1)) is not None
    assert first_difference(raw, good, p, clamp=False) is not None
    good[777] ^= 1
    assert first_difference(raw, good, p, clamp=False, stretches=whole(1000)) == 777


def test_a_seed_is_for_stochastic_rounding_and_64_bits(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"w": torch.randn(100)})
    with pytest.raises(precconv.UsageError, match="seed 0 is of no use") as caught:
        precconv.convert(source, to="bf16", seed=0)
    assert caught.value.hint == "add --rounding stochastic"
    wrong: list[dict[str, Any]] = [{"seed": -1}, {"seed": 1 << 64}]
    for options in wrong:
        with pytest.raises(precconv.UsageError, match="is not a number from 0"):
            precconv.convert(source, to="bf16", rounding="stochastic", **options)
    with pytest.raises(precconv.UsageError, match="rounding 'up' is not one of nearest, stochastic"):
        precconv.convert(source, to="bf16", rounding="up")  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_command_line_rounds_so_too(tmp_path: Path) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    source, out = write_checkpoint(tmp_path / "in.safetensors", {"w": x}), tmp_path / "out.safetensors"
    args = [str(source), "--to", "bf16", "-o", str(out), "--force"]
    for more, seed in ((["--rounding", "stochastic"], 0), (["--rounding", "stochastic", "--seed", "7"], 7)):
        assert CliRunner().invoke(cli, [*args, *more]).exit_code == 0
        assert torch.equal(load_file(out)["w"], of_name(x, "w", BF16, seed))
    refused = CliRunner().invoke(cli, [*args, "--seed", "7"])
    assert refused.exit_code == 2
    assert "seed 7" in refused.stderr


def test_the_benchmark_compares_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "in.safetensors", {"w": torch.randn(1000)})
    assert len(rounding.ratios(source, "bf16", tmp_path / "out.safetensors", 2)) == 2
    assert len(capsys.readouterr().out.splitlines()) == 2
