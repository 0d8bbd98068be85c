"""Two files in, what sets them apart out: every format, every dtype, the command and its exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import precconv
from fixtures import make
from precconv.diff import compare_sides
from precconv.differences import unravelled
from precconv.runs import CHUNK_BYTES

from .command import run
from .samples import STORABLE, random_tensor, write_checkpoint
from .test_torch_legacy import FLOATS, tar_file
from .torch_files import big_endian, rezipped, saved

GOOD = make.ROOT / "good"


def file(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint in the format that the name says; ``.old`` is the legacy one."""
    if path.suffix == ".safetensors":
        return write_checkpoint(path, tensors)
    return saved(tensors, path, use_zip=path.suffix != ".old")


def one(path: Path, *values: float, dtype: torch.dtype = torch.float32) -> Path:
    return file(path, {"w": torch.tensor(values, dtype=dtype)})


# --- formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a", ["a.safetensors", "a.pt", "a.old"])
@pytest.mark.parametrize("b", ["b.safetensors", "b.pt", "b.old"])
def test_the_same_tensors_in_any_two_formats_are_equal(a: str, b: str, tmp_path: Path) -> None:
    tensors = {d.name: random_tensor(d, (3, 5), 1) for d in STORABLE}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(-1e9)}
    found = precconv.diff(file(tmp_path / a, tensors), file(tmp_path / b, tensors))
    assert found.equal
    assert (len(found.tensors), found.only_a, found.only_b, found.different) == (len(tensors), (), (), [])
    assert found.total.n == 15 * len(STORABLE) + 1


def test_a_tar_checkpoint_is_compared(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(tar_file())
    flat = torch.frombuffer(bytearray(FLOATS), dtype=torch.float32)
    tensors = {"a": flat.as_strided((2, 3), (1, 2)), "b": flat[3:5], "c": torch.zeros(1, dtype=torch.int64)}
    assert precconv.diff(tmp_path / "a.pt", file(tmp_path / "b.safetensors", tensors)).equal


def test_compressed_and_big_endian_checkpoints_are_compared(tmp_path: Path) -> None:
    x = {"w": torch.randn(333, 77)}
    plain = file(tmp_path / "a.pt", x)
    for other in (rezipped(plain, method=zipfile.ZIP_DEFLATED), big_endian(plain, {"0": 4})):
        assert precconv.diff(file(tmp_path / "b.safetensors", x), other).equal


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no FP4")
def test_packed_views_are_compared_element_by_element(tmp_path: Path) -> None:
    raw = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
    packed = getattr(torch, "float4_e2m1fn_x2")  # noqa: B009  unknown to older releases
    a = saved({"w": raw.view(packed), "rows": raw.view(packed)[::2]}, tmp_path / "a.pt")
    other = raw.clone()
    other[6, 3] ^= 0x10
    b = saved({"w": other.view(packed), "rows": other[::2].contiguous().view(packed)}, tmp_path / "b.pt")
    assert precconv.diff(a, a).equal
    found = precconv.diff(a, b)
    assert {t.name: (t.worst_index, t.differing, t.found.n) for t in found.tensors} == {
        "w": ((6, 7), 1, 128),
        "rows": ((3, 7), 1, 64),
    }


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(700 * 900, dtype=torch.float32).reshape(700, 900)
    return {
        "whole": base,
        "tied": base,
        "transposed": base.T,
        "steps": base[::3, 1::7],
        "expanded": base[:1].expand(300, 900),
        "permuted": base.view(7, 100, 900).permute(2, 0, 1),
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_views_are_compared_element_by_element(workers: int, tmp_path: Path) -> None:
    plain = {name: x.contiguous().clone() for name, x in views().items()}
    a, b = file(tmp_path / "a.pt", views()), tmp_path / "b.safetensors"
    assert precconv.diff(a, file(b, plain), workers=workers).equal
    wrong = {"transposed": (899, 699), "steps": (0, 0), "expanded": (299, 4), "permuted": (500, 3, 77)}
    for name, index in wrong.items():
        plain[name][index] += 1
    found = precconv.diff(file(b, plain), a, workers=workers)
    assert {t.name: (t.worst_index, t.differing) for t in found.different} == {n: (i, 1) for n, i in wrong.items()}


@pytest.mark.parametrize("name", ["every-dtype", "misaligned", "scalars", "empty-tensors", "tiny-llama"])
def test_a_flipped_bit_in_a_tensor_of_any_dtype_is_found(name: str, tmp_path: Path) -> None:
    source = GOOD / f"{name}.safetensors"
    rng = np.random.default_rng(1)
    for t in precconv.inspect(source):
        if not t.numel:
            continue
        element, bit = int(rng.integers(t.numel)), int(rng.integers(t.dtype.bits))
        data, at = bytearray(source.read_bytes()), element * t.dtype.bits + bit
        data[t.offset + at // 8] ^= 1 << (at % 8)
        (tmp_path / "b").write_bytes(data)
        found = precconv.diff(source, tmp_path / "b")
        [changed] = found.different
        assert not found.equal
        assert (changed.name, changed.differing) == (t.name, 1)
        assert changed.worst_index == unravelled(element, t.shape)
        assert changed.found.worst is not None
        assert changed.found.worst.a_bits ^ changed.found.worst.b_bits == 1 << bit


LARGE = 5 * (CHUNK_BYTES // 2) + 77
PLACES = (0, CHUNK_BYTES // 2 - 1, CHUNK_BYTES // 2, 3_000_001, LARGE - 1)


@pytest.mark.parametrize("at", PLACES)
def test_one_flipped_bit_in_a_large_tensor_is_found_with_its_index(at: int, tmp_path: Path) -> None:
    x = random_tensor(precconv.dtype("bf16"), (LARGE,), 2)
    y = x.clone()
    y.view(torch.int16)[at] ^= 1
    a, b = file(tmp_path / "a.safetensors", {"w": x}), file(tmp_path / "b.pt", {"w": y})
    [t] = precconv.diff(a, b, workers=2).different
    assert (t.worst_index, t.differing, t.found.n) == ((at,), 1, LARGE)
    assert t.max_abs_error == abs(float(x[at]) - float(y[at]))


# --- numbers ------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_narrowed_checkpoint_are_those_that_numpy_computes(tmp_path: Path) -> None:
    x = torch.randn(300, 700, dtype=torch.float64).float()
    a, b = file(tmp_path / "a.safetensors", {"w": x}), file(tmp_path / "b.safetensors", {"w": x.bfloat16()})
    found = precconv.diff(a, b)
    p, q = x.double().numpy(), x.bfloat16().double().numpy()
    error = np.abs(p - q)
    [t] = found.tensors
    assert (t.differing, t.max_abs_error) == (int(np.count_nonzero(error)), float(error.max()))
    assert t.worst_index == np.unravel_index(error.argmax(), error.shape)
    assert t.relative_rms_error == pytest.approx(math.sqrt((error**2).sum() / (p**2).sum()), rel=1e-12)
    assert t.snr_db == pytest.approx(10 * math.log10((p**2).sum() / (error**2).sum()), rel=1e-12)
    assert found.dtypes == {("fp32", "bf16"): 1}
    assert not found.equal


def test_dtypes_that_differ_are_equal_where_the_values_are(tmp_path: Path) -> None:
    x = torch.tensor([1.0, -0.0, 2.5, math.inf, math.nan])
    a, b = file(tmp_path / "a.safetensors", {"w": x}), file(tmp_path / "b.safetensors", {"w": x.to(torch.bfloat16)})
    found = precconv.diff(a, b)
    assert found.equal
    assert found.dtypes == {("fp32", "bf16"): 1}


def test_totals_are_over_all_tensors(tmp_path: Path) -> None:
    a = {"x": torch.tensor([3.0, 4.0]), "y": torch.tensor([[12.0]]), "n": torch.tensor([1, 2, 3])}
    b = {"x": torch.tensor([3.0, 4.5]), "y": torch.tensor([[11.0]]), "n": torch.tensor([1, 2, 300])}
    found = precconv.diff(file(tmp_path / "a.pt", a), file(tmp_path / "b.pt", b))
    assert (found.total.n, found.total.bit_differing, found.total.max_abs_error) == (6, 3, 1.0)
    assert found.total.relative_rms_error == pytest.approx(math.sqrt(1.25 / 169))
    assert [t.name for t in found.different] == ["n", "x", "y"]  # integers, then the lowest SNR
    assert [t.max_abs_error for t in found.different] == [297, 0.5, 1.0]


@pytest.mark.parametrize("chunk", [1 << 18, 1 << 20, CHUNK_BYTES])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_numbers_do_not_depend_on_workers_or_chunks(
    chunk: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = {f"w{i}": random_tensor(precconv.dtype("fp32"), (200_003,), i) for i in range(3)}
    a = file(tmp_path / "a.safetensors", x)
    b = file(tmp_path / "b.safetensors", {name: t.to(torch.bfloat16) for name, t in x.items()})
    want = precconv.diff(a, b, workers=1).to_dict() | {"seconds": 0}
    monkeypatch.setattr(sys.modules["precconv.diff"], "CHUNK_BYTES", chunk)  # the name alone is the function's
    assert precconv.diff(a, b, workers=workers).to_dict() | {"seconds": 0} == want


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        ({}, False),
        ({"atol": 0.0}, False),
        ({"atol": 0.25}, True),
        ({"rtol": 0.124}, False),
        ({"rtol": 0.125}, True),
        ({"atol": 0.125, "rtol": 0.0625}, True),
    ],
)
def test_tolerances_are_relative_to_the_first(options: dict[str, float], equal: bool, tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 2.0, 1.0), one(tmp_path / "b.pt", 2.25, 1.0)
    found = precconv.diff(a, b, **options)  # type: ignore[arg-type]
    assert found.equal is equal
    assert found.total.beyond == (0 if equal or not options else 1)


def test_a_tolerance_lets_zeros_and_nans_differ_in_their_bits(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 0.0, math.nan), one(tmp_path / "b.pt", -0.0, -math.nan)
    found = precconv.diff(a, b)
    assert (found.equal, found.total.zeros, found.total.nans, found.total.differing) == (False, 1, 1, 0)
    assert precconv.diff(a, b, atol=0.0).equal


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(bad: float, tmp_path: Path) -> None:
    a = one(tmp_path / "a.pt", 1.0)
    with pytest.raises(precconv.UsageError, match="atol"):
        precconv.diff(a, a, atol=bad)


# --- what is on one side only -------------------------------------------------------------------------------


def test_tensors_missing_shapes_and_dtypes_are_listed(tmp_path: Path) -> None:
    a = {"same": torch.ones(2), "gone": torch.ones(3), "shape": torch.ones(2, 3), "kind": torch.ones(2)}
    b = {"same": torch.ones(2), "new": torch.ones(4), "shape": torch.ones(3, 2), "kind": torch.ones(2).long()}
    found = precconv.diff(file(tmp_path / "a.pt", a), file(tmp_path / "b.safetensors", b))
    assert not found.equal
    assert ([t.name for t in found.only_a], [t.name for t in found.only_b]) == (["gone"], ["new"])
    assert {t.name: t.problem for t in found.tensors} == {"same": None, "shape": "shape", "kind": "dtype"}
    assert {t.name for t in found.different} == {"shape", "kind"}
    assert found.total.n == 2


def test_wrappers_in_names_are_seen_through_on_request(tmp_path: Path) -> None:
    a = file(tmp_path / "a.pt", {"module.net.weight": torch.ones(2), "module.net.bias": torch.ones(1)})
    b = file(tmp_path / "b.safetensors", {"net._orig_mod.weight": torch.ones(2), "net.bias": torch.ones(1)})
    assert len(precconv.diff(a, b).only_a) == 2
    assert "note: no name is on both sides; --strip-wrappers" in run("diff", a, b).stdout
    assert run("diff", a, b, "--strip-wrappers").exit_code == 0
    found = precconv.diff(a, b, strip_wrappers=True)
    assert found.equal
    assert [t.name for t in found.tensors] == ["net.weight", "net.bias"]


def test_each_side_has_its_own_choice_of_weights(tmp_path: Path) -> None:
    state = {"g": {"w": torch.ones(2)}, "d": {"w": torch.zeros(2)}}
    a, b = saved(state, tmp_path / "a.pt"), one(tmp_path / "b.safetensors", 0.0, 0.0)
    assert precconv.diff(a, b, select_a="d").equal
    assert precconv.diff(b, a, select_b="d").equal
    assert not precconv.diff(a, a, select_a="g", select_b="d").equal


def test_tensors_that_are_no_arrays_are_named_and_not_taken_for_equal(tmp_path: Path) -> None:
    a = saved({"s": torch.eye(3).to_sparse(), "w": torch.ones(1)}, tmp_path / "a.pt")
    found = precconv.diff(a, a)
    assert [name for name, _ in found.opaque] == ["s"]
    assert not found.equal
    assert "1 tensor that cannot be compared: s (" in run("diff", a, a).stdout


def test_sides_of_several_checkpoints_are_matched_by_label_and_name(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 1.0), one(tmp_path / "b.safetensors", 2.0)
    with ExitStack() as stack:
        x, y = (stack.enter_context(precconv.open_checkpoint(path)) for path in (a, b))
        sides = ({"unet": x, "vae": y, "": x}, {"vae": y, "unet": y, "text": x})
        found = compare_sides(*sides, names=("one", "other"), tolerance=None, workers=2)
    assert {t.name: t.equal for t in found.tensors} == {"unet/w": False, "vae/w": True}
    assert ([t.name for t in found.only_a], [t.name for t in found.only_b]) == (["w"], ["text/w"])


def test_two_files_without_tensors_are_equal() -> None:
    found = precconv.diff(GOOD / "no-tensors.safetensors", GOOD / "no-tensors.safetensors")
    assert (found.equal, found.total.n) == (True, 0)


# --- the way ------------------------------------------------------------------------------------------------


def test_progress_counts_the_bytes_of_both_sides(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 1.0, 2.0), one(tmp_path / "b.pt", 1.0, 2.0, dtype=torch.float16)
    calls: list[tuple[int, int]] = []
    precconv.diff(a, b, workers=1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (12, 12)


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 1.0), one(tmp_path / "b.pt", 1.0)

    def change(_done: int, _total: int) -> None:
        with b.open("ab") as f:
            f.write(b"x")

    with pytest.raises(precconv.SourceChangedError):
        precconv.diff(a, b, workers=1, progress=change)


def test_torch_keeps_its_number_of_threads(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    a = one(tmp_path / "a.pt", 1.0)
    precconv.diff(a, a)
    assert torch.get_num_threads() == before


MEMORY = """
    import resource, sys, torch
    unit = 1 if sys.platform == "darwin" else 1024
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    before = peak()
    import precconv
    found = precconv.diff(*sys.argv[1:], workers=2)
    assert found.total.n == found.total.differing > 0, found.total
    print(peak() - before)
"""


def growth(a: Path, b: Path) -> int:
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(a), str(b)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform == "win32", reason="no resource module")
@pytest.mark.parametrize("strided", [False, True])
def test_memory_does_not_follow_the_size_of_the_files(strided: bool, tmp_path: Path) -> None:
    def pair(numel: int) -> tuple[Path, Path]:
        one = torch.ones(numel // 1024, 1024, dtype=torch.float32)
        x = {"x": one.T} if strided else {"x": one}
        y = {"x": torch.zeros(*x["x"].shape, dtype=torch.bfloat16)}
        a = saved(x, tmp_path / "a.pt")
        return a, file(tmp_path / "b.pt", y)

    small, large = growth(*pair(5 << 20)), growth(*pair(50 << 20))  # 30 and 300 MB
    assert large < small + (24 << 20)
    assert large < 160 << 20


def test_directories_are_compared_component_by_component(tmp_path: Path) -> None:
    for side, value in (("a", 1.0), ("b", 1.5)):
        for component, x in (("unet", 1.0), ("vae", value)):
            (tmp_path / side / component).mkdir(parents=True)
            write_checkpoint(tmp_path / side / component / "model.safetensors", {"x": torch.tensor([x])})
    found = precconv.diff(tmp_path / "a", tmp_path / "b")
    assert [(t.name, t.equal) for t in found.tensors] == [("unet/x", True), ("vae/x", False)]
    one_of_them = precconv.diff(tmp_path / "a" / "vae", tmp_path / "b" / "vae" / "model.safetensors")
    assert [(t.name, t.equal) for t in one_of_them.tensors] == [("x", False)]


# --- the command --------------------------------------------------------------------------------------------


def test_the_exit_code_says_equal_different_bad_input_or_usage(tmp_path: Path) -> None:
    a, b = one(tmp_path / "a.pt", 1.0), one(tmp_path / "b.safetensors", 1.5)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").mkdir()
    codes = {
        (a, a): 0,
        (a, b): 3,
        (a, b, "--atol", "0.5"): 0,
        (a, b, "--rtol", "0.4"): 3,
        (a, tmp_path / "none"): 1,
        (a, tmp_path / "text"): 1,
        (a, tmp_path / "empty"): 1,
        (a,): 2,
        (a, b, "--atol", "-1"): 2,
        (a, b, "--top", "-1"): 2,
        (a, b, "--workers", "0"): 2,
        (a, b, "--select-b", "x"): 2,
    }
    assert {args: run("diff", *args).exit_code for args in codes} == codes


def test_quiet_says_it_with_the_exit_code_alone(tmp_path: Path) -> None:
    done = run("diff", one(tmp_path / "a.pt", 1.0), one(tmp_path / "b.pt", 2.0), "-q")
    assert (done.exit_code, done.stdout, done.stderr) == (3, "", "")


def test_the_table_has_the_worst_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    a = {
        "small": torch.ones(4),
        "large": torch.ones(4),
        "nan": torch.ones(4),
        "same": torch.ones(4),
        "only": torch.ones(1),
    }
    b = {"small": a["small"] * 1.001, "large": a["large"] * 2, "nan": torch.full((4,), math.nan), "same": torch.ones(4)}
    paths = file(tmp_path / "a.pt", a), file(tmp_path / "b.pt", b)
    lines = run("diff", *paths).stdout.splitlines()
    assert lines[0] == f"{paths[0]} against {paths[1]}: different, 3 of 4 common tensors"
    assert lines[1] == "  1 tensor only in the first: only"
    assert lines[2] == (
        "  12 of 16 elements differ; 4 with NaN or Inf on one side; max abs 1, rel RMS 0.577, SNR 4.8 dB"
    )
    assert [line.split()[0] for line in lines[4:]] == ["tensor", "nan", "large", "small"]
    assert lines[5].endswith("[0]: 1 / nan")
    short = run("diff", *paths, "--top", "1").stdout.splitlines()
    assert short[-1] == "and 2 tensors more (--top 3 shows all)"
    assert len(short) == len(lines) - 1


def test_what_differs_only_in_its_bits_is_shown_with_them(tmp_path: Path) -> None:
    x = torch.tensor([0x7FC00001, 0], dtype=torch.int32).view(torch.float32)
    y = torch.tensor([0x7FC00002, -(1 << 31)], dtype=torch.int32).view(torch.float32)
    done = run("diff", file(tmp_path / "a.pt", {"w": x}), file(tmp_path / "b.pt", {"w": y}))
    assert "1 only by the sign of 0; 1 only by the bits of NaN" in done.stdout
    assert "[0]: nan (0x7fc00001) / nan (0x7fc00002)" in done.stdout


def test_json_has_every_tensor_and_only_numbers_that_json_knows(tmp_path: Path) -> None:
    a = {"w": torch.tensor([1.0, math.inf]), "same": torch.ones(2), "n": torch.tensor([7], dtype=torch.int64)}
    b = {"w": torch.tensor([1.5, 1.0]), "same": torch.ones(2), "n": torch.tensor([9], dtype=torch.int64)}
    done = run("diff", file(tmp_path / "a.pt", a), file(tmp_path / "b.pt", b), "--json")
    assert done.exit_code == 3

    def refuse(text: str) -> Any:
        raise AssertionError(text)

    found = json.loads(done.stdout, parse_constant=refuse)
    assert (found["schema"], found["equal"], found["total"]["differing"]) == (1, False, 3)
    w, same, n = found["tensors"]
    assert w["worst"] == {"index": [1], "a": "inf", "b": 1.0, "a_bits": "0x7f800000", "b_bits": "0x3f800000"}
    assert (w["max_abs_error"], w["nonfinite"]) == (0.5, 1)
    assert (same["equal"], same["snr_db"], same["worst"]) == (True, "inf", None)
    assert (n["max_abs_error"], n["snr_db"], n["worst"]["a"]) == (2, None, 7)


def test_an_error_of_zero_is_a_float_among_floats_and_an_int_among_integers(tmp_path: Path) -> None:
    x = {"w": torch.zeros(3), "n": torch.zeros(3, dtype=torch.int16)}
    a = file(tmp_path / "a.pt", x)
    w, n = precconv.diff(a, a).tensors
    assert (repr(w.max_abs_error), repr(n.max_abs_error)) == ("0.0", "0")


def test_fp64_values_whose_squares_no_fp64_holds_come_first(tmp_path: Path) -> None:
    a = {"w": torch.tensor([1.0, 1.0]), "huge": torch.tensor([1e200, -1.5e308], dtype=torch.float64)}
    b = {"w": torch.tensor([1.0, 9.0]), "huge": torch.tensor([2e200, 1.5e308], dtype=torch.float64)}
    found = precconv.diff(file(tmp_path / "a.pt", a), file(tmp_path / "b.pt", b))
    assert [(t.name, t.differing, t.worst_index) for t in found.different] == [("huge", 2, (1,)), ("w", 1, (1,))]
    assert found.different[0].max_abs_error == math.inf
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_name_cannot_move_the_cursor(tmp_path: Path) -> None:
    a, b = ({"\x1b[2Jw": torch.tensor([v]), f"\x1b[3J{v}": torch.ones(1)} for v in (1.0, 2.0))
    done = run("diff", file(tmp_path / "a.pt", a), file(tmp_path / "b.pt", b))
    assert "\\x1b[2Jw" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_module_that_holds_the_whole_model_is_seen_through_on_request(tmp_path: Path) -> None:
    """As Lightning saves one: its names begin with the attribute that the model lies under."""
    state = {"model.embed.weight": torch.randn(5, 4), "lm_head.weight": torch.randn(4, 5)}
    bare, wrapped = tmp_path / "bare.safetensors", tmp_path / "epoch.ckpt"
    write_checkpoint(bare, state)
    torch.save({"state_dict": {f"net.{n}": x for n, x in state.items()}, "epoch": 3}, wrapped)
    for pair in ((bare, wrapped), (wrapped, bare)):
        assert not precconv.diff(*pair).equal
        found = precconv.diff(*pair, strip_wrappers=True)
        assert (found.equal, len(found.tensors)) == (True, 2)
        assert f"{wrapped}: names are matched without 'net.', which all of them begin with" in found.notes
    write_checkpoint(bare, {"other": torch.ones(2)})
    done = run("diff", bare, wrapped, "--strip-wrappers")
    assert done.exit_code == 3
    assert "note: no name is on both sides; --select-a" in done.stdout


def test_with_a_tolerance_a_column_says_how_many_elements_are_beyond_it(tmp_path: Path) -> None:
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    x = torch.randn(4, 4)
    write_checkpoint(a, {"far": x, "near": x, "nan": x})
    y = x.clone()
    y[0] += 0.5
    z = x.clone()
    z[1, 1] = torch.nan
    write_checkpoint(b, {"far": y, "near": x + 1e-5, "nan": z})
    lines = run("diff", a, b, "--atol", "1e-3").stdout.splitlines()
    head = next(line for line in lines if line.startswith("tensor"))
    assert head.split()[3:5] == ["differing", "beyond"]
    rows = {line.split()[0]: line for line in lines[lines.index(head) + 1 :] if line}
    assert rows["far"].split()[4:6] == ["4", "4"]
    assert rows["near"].split()[5] == "0"
    assert "inf" not in rows["nan"].partition("nan at")[0].split()
