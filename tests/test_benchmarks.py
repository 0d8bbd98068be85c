"""The benchmarks: inputs are what they claim, the table is whole, the exhaustive check finds faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from benchmarks import exhaustive, floor, inputs, jobs, patterns, record, reference, render, run
from benchmarks.bars import BARS, Bar
from benchmarks.measure import Group, Job, run_group
from benchmarks.record import Run, Series
from precconv.cast import cast_chunk
from precconv.dtypes import DType
from precconv.stats import Stats

MB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]


# Inputs


def test_a_llama_has_about_the_bytes_asked_for_and_the_names_of_a_llama(tmp_path: Path) -> None:
    path = inputs.ensure(inputs.llama(4 * MB), tmp_path)
    tensors = load_file(path)
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(4 * MB, rel=0.05)
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "lm_head.weight",
    } < tensors.keys()
    assert {t.dtype for t in tensors.values()} == {np.dtype(np.float32)}


@pytest.mark.parametrize("gb", [1, 4, 16])
def test_the_large_llamas_are_as_large_as_they_are_called(gb: int) -> None:
    assert inputs.llama(gb * inputs.GB).nbytes == pytest.approx(gb * inputs.GB, rel=0.001)


def test_values_are_like_trained_weights(tmp_path: Path) -> None:
    tensors = load_file(inputs.ensure(inputs.llama(4 * MB), tmp_path))
    weight, norm = tensors["model.layers.3.mlp.down_proj.weight"], tensors["model.norm.weight"]
    assert weight.std() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean()) < 0.001
    assert norm.mean() == pytest.approx(1, abs=0.1)


def test_an_input_reads_as_torch_wrote_it(tmp_path: Path) -> None:
    path = inputs.ensure(inputs.llama(MB), tmp_path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert sorted(file.keys()) == list(inputs.llama(MB).shapes)


def test_the_same_input_has_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first, second = (inputs.ensure(inputs.llama(MB), d) for d in (tmp_path, tmp_path / "again"))
    assert first.read_bytes() == second.read_bytes()


def test_a_whole_input_is_reused_and_a_broken_one_made_again(tmp_path: Path) -> None:
    path = inputs.ensure(inputs.llama(MB), tmp_path)
    whole, made = path.read_bytes(), path.stat().st_mtime_ns
    inputs.ensure(inputs.llama(MB), tmp_path)
    assert path.stat().st_mtime_ns == made
    path.write_bytes(whole[:-1])
    inputs.ensure(inputs.llama(MB), tmp_path)
    assert path.read_bytes() == whole


def test_an_input_is_made_in_constant_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    inputs.ensure(inputs.single(64 * MB), tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * MB


def test_small_tensors_are_1_kb_each_beside_one_of_as_many_bytes(tmp_path: Path) -> None:
    many = load_file(inputs.ensure(inputs.small(250), tmp_path))
    (one,) = load_file(inputs.ensure(inputs.single_as_small(250), tmp_path)).values()
    assert len(many) == 250
    assert {t.nbytes for t in many.values()} == {1024}
    assert one.nbytes == 250 * 1024


def test_a_ckpt_is_a_lightning_checkpoint_of_the_llama(tmp_path: Path) -> None:
    path = inputs.ensure_ckpt(MB, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    tensors = load_file(path.with_suffix(".safetensors"))
    assert {"state_dict", "epoch", "optimizer_states", "pytorch-lightning_version"} < checkpoint.keys()
    assert checkpoint["state_dict"].keys() == tensors.keys()
    assert all(np.array_equal(t.numpy(), tensors[n]) for n, t in checkpoint["state_dict"].items())


def test_what_does_not_fit_on_the_disk_is_said_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2 * MB}))
    assert inputs.main(["--dir", str(tmp_path), "--sizes", "0.001,4", "--tensor", "0", "--small", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == "llama-0.001GB.safetensors\n"
    assert err == "skipped llama-4GB.safetensors: needs 4.00 GB of disk, 0.00 GB are free\n"
    assert [p.name for p in tmp_path.iterdir()] == ["llama-0.001GB.safetensors"]


# The floor


@pytest.mark.parametrize("allocate", floor.ALLOCATE)
@pytest.mark.parametrize("nbytes", [0, 1, 3 * MB // 2 + 5, 3 * MB + 7, 6 * MB])
def test_the_floor_writes_as_many_bytes_as_asked(tmp_path: Path, allocate: str, nbytes: int) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"\1" * (3 * MB + 7))
    assert floor.copy(str(source), str(target), nbytes, allocate=allocate) > 0
    assert target.stat().st_size == nbytes
    if nbytes <= 3 * MB + 7:  # beyond, there is more to write than was read
        assert target.read_bytes()[: 3 * MB // 2].strip(b"\1") == b""


# The harness


def test_the_harness_runs_end_to_end_and_its_table_has_every_row(tmp_path: Path) -> None:
    page, work = tmp_path / "page.md", tmp_path / "work"
    options: list[str | Path] = ["--dir", work, "--write", page, "--sizes", "4", "--without", "tensor"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", *options, "--scale", "0.001", "--rounds", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert {bar.what for bar in BARS} < rows.keys()
    measured = [bar for bar in BARS if "not in this run" not in rows[bar.what]]
    assert {bar.key for bar in measured} == _KEYS_OF_A_SHORT_RUN
    assert all("met" in rows[bar.what] or "missed" in rows[bar.what] for bar in measured)
    assert "| torch | " + torch.__version__.split("+")[0] in text
    assert str(tmp_path) not in text
    assert not list((work / "out").iterdir())


_KEYS_OF_A_SHORT_RUN = {
    *("floor", "cp", "five-lines", "memory-4", "checks", "stochastic", "stochastic-fp16", "scan"),
    *("small", "help", "inspect", "inspect-torch", "memory-sharded", "sharded-cp"),
}


def _run(**seconds: list[float]) -> Run:
    """A run whose jobs on 4 GB, named as in ``jobs``, took these times."""
    group = {
        getattr(jobs, name): Series(wall=list(times), peak=[300 * MB] * len(times), told=[{}] * len(times))
        for name, times in seconds.items()
    }
    return Run(1, 100_000, {"torch": "2"}, {"4": "4 GB"}, {"4": group})


def _bar(key: str) -> Bar:
    return next(bar for bar in BARS if bar.key == key)


def test_ratios_are_taken_within_a_round_and_the_floor_is_the_faster_of_its_ways() -> None:
    measured = _run(API=[2.0, 30.0, 4.0], CP=[4.0, 30.0, 8.0])
    measured.groups["4"]["floor, ftruncate"] = Series([1.0, 1.0, 9.0], [0] * 3, [{}] * 3)
    measured.groups["4"]["floor, fallocate"] = Series([2.0, 2.0, 2.0], [0] * 3, [{}] * 3)
    assert _bar("cp").values(measured) == [0.5, 1.0, 0.5]
    assert _bar("floor").values(measured) == [2.0, 30.0, 4.0 / 9]


def test_the_childs_own_time_counts_where_it_took_one() -> None:
    assert Series([5.0], [0], [{"seconds": 3.0}]).seconds == [3.0]


def test_memory_is_what_import_torch_does_not_take() -> None:
    measured = _run(CLI=[1.0], TORCH=[1.0])
    measured.groups["4"][jobs.CLI].peak = [340 * MB]
    assert _bar("memory-4").values(measured) == [40.0]


def test_small_tensors_are_counted_above_one_tensor() -> None:
    measured = _run()
    measured.groups["small"] = {
        jobs.API + jobs.MANY: Series([3.0], [0], [{}]),
        jobs.API + jobs.ONE: Series([1.0], [0], [{}]),
    }
    assert _bar("small").values(measured) == pytest.approx([20.0])
    assert not _bar("small").met(20.0)


def test_a_missed_bar_says_by_how_much_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = tmp_path / "reasons.toml"
    reasons.write_text('cp = "the disk was behind"')
    monkeypatch.setattr(render, "REASONS", reasons)
    text = render.page(_run(API=[3.0], CP=[2.0]))
    assert "| 4 GB to bf16, after `import torch` / `cp` | 1.50 x | 1.50 x to 1.50 x | below 1.00 x " in text
    assert "**missed by 50 %**" in text
    assert "- 4 GB to bf16, after `import torch` / `cp`: the disk was behind" in text


def test_a_reason_for_a_row_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "reasons.toml"
    path.write_text('flor = "no"')
    with pytest.raises(ValueError, match="no such rows: flor; rows: floor, cp"):
        render.load_reasons(path)


def test_the_reasons_kept_here_are_for_rows_there_are() -> None:
    render.load_reasons(render.REASONS)


def test_a_job_that_fails_leaves_a_row_without_numbers_that_says_why(tmp_path: Path) -> None:
    job = Job("broken", (sys.executable, "-c", "import sys; sys.exit('no such thing')"))
    good = Job("good", (sys.executable, "-c", "print('{\"seconds\": 2}')"))
    found = run_group(Group("g", "g", (job, good), rounds=2), tmp_path, lambda _: None)
    assert found["broken"].failed == "exit 1: no such thing"
    assert not found["broken"].wall
    assert found["good"].seconds == [2, 2]
    assert all(peak > MB for peak in found["good"].peak)


def test_a_run_is_rendered_again_from_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = _run(API=[3.0], CP=[2.0])
    record.save(measured, tmp_path / "results.json")
    assert record.load(tmp_path / "results.json") == measured
    assert run.main(["--from", str(tmp_path / "results.json")]) == 0
    assert capsys.readouterr().out.strip() == render.page(measured).strip()
    assert json.loads((tmp_path / "results.json").read_text())["small"] == 100_000


# The exhaustive check


@pytest.mark.parametrize("dst", ["bf16", "fp16"])
def test_the_integer_reference_agrees_with_torch_on_every_exponent(dst: str) -> None:
    for x in patterns.every_exponent(reference.FORMATS["fp32"], 32):
        theirs = exhaustive.as_patterns(exhaustive.as_tensor(x, "fp32").to(getattr(torch, _TORCH[dst])), dst)
        ours = reference.round_patterns(x, reference.FORMATS["fp32"], reference.FORMATS[dst])
        nan = reference.is_nan(theirs, reference.FORMATS[dst])
        assert np.array_equal(nan, reference.is_nan(ours, reference.FORMATS[dst]))
        assert np.array_equal(theirs[~nan], ours[~nan])


_TORCH = {"bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize(("dst", "kind"), [("fp16", np.float16), ("fp32", np.float32)])
def test_the_integer_reference_rounds_fp64_once_as_numpy_does(dst: str, kind: Any) -> None:
    layout = reference.FORMATS[dst]
    around = np.arange(0, layout.inf, max(1, layout.inf // 4096), dtype=np.int64)
    for x in patterns.fp64_hard(layout, around):
        with np.errstate(over="ignore", under="ignore"):
            theirs = x.view(np.float64).astype(kind).view(f"u{layout.bits // 8}").astype(np.int64)
        assert np.array_equal(theirs, reference.round_patterns(x, reference.FORMATS["fp64"], layout))


@pytest.mark.parametrize("dst", ["bf16", "fp16"])
def test_the_hard_fp64_cases_are_those_that_two_roundings_get_wrong(dst: str) -> None:
    wrong = 0
    layout = reference.FORMATS[dst]
    for x in patterns.fp64_hard(layout, np.arange(0, layout.inf, 16, dtype=np.int64)):
        twice = torch.from_numpy(x).view(torch.float64).float().to(getattr(torch, _TORCH[dst]))
        once = reference.round_patterns(x, reference.FORMATS["fp64"], layout)
        wrong += int((exhaustive.as_patterns(twice, dst) != once).sum())
    assert wrong > 1000


def test_the_full_check_covers_every_fp32_pattern() -> None:
    for dst in ("bf16", "fp16"):
        spans = [t for t in exhaustive.tasks(sample=False) if (t.src, t.dst, t.kind) == ("fp32", dst, "span")]
        edges = [(t.start, t.end) for t in spans]
        assert edges[0][0] == 0
        assert edges[-1][1] == 1 << 32
        assert all(end == start for (_, end), (start, _) in pairwise(edges))


@pytest.mark.parametrize(
    "task",
    [
        exhaustive.Task("fp32", "fp16", "exponents", end=8),
        exhaustive.Task("fp32", "bf16", "weights"),
        exhaustive.Task("bf16", "fp16", "span", 0, 1 << 16),
        exhaustive.Task("fp16", "bf16", "span", 0, 1 << 16),
        exhaustive.Task("fp64", "fp16", "hard", end=256),
    ],
    ids=lambda t: f"{t.src}-{t.dst}-{t.kind}",
)
def test_the_kernel_is_right_on(task: exhaustive.Task) -> None:
    kernels = [cast_chunk, exhaustive.lane_kernel()]
    total = exhaustive.Tally()
    for x in exhaustive.slices(task):
        total += exhaustive.compare(x, task.src, task.dst, kernels)
    assert total.is_clean, total.example
    assert total.patterns > 1000


def _truncating(x: torch.Tensor, to: DType) -> tuple[torch.Tensor, Stats]:
    _, stats = cast_chunk(x, to)
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16), stats


def _miscounting(x: torch.Tensor, to: DType) -> tuple[torch.Tensor, Stats]:
    y, stats = cast_chunk(x, to)
    return y, stats + Stats(underflow=1)


@pytest.mark.parametrize(("kernel", "fault"), [(_truncating, "gave bf16"), (_miscounting, "counts are")])
def test_a_wrong_kernel_is_found(
    kernel: Callable[[torch.Tensor, DType], tuple[torch.Tensor, Stats]], fault: str
) -> None:
    x = np.arange(0x3F800000, 0x3F800000 + 0x10000, dtype=np.int64)
    tally = exhaustive.compare(x, "fp32", "bf16", [kernel])
    assert not tally.is_clean
    assert fault in tally.example
