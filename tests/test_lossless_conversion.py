"""Conversions that lose nothing: ``--to auto`` and ``--lossless-only``, of files and of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import precconv
from precconv.report import Report

from .command import run
from .hub.server import HubServer
from .repos import files, load, pipeline, read_index, sharded, single
from .samples import write_checkpoint
from .torch_files import saved

FP16_ONLY = torch.tensor([[1 + 2**-10, 0.5], [3.0, -0.0]])
BF16_ONLY = torch.tensor([[2.0**100, 0.5], [torch.inf, -1.0]])
NEITHER = torch.tensor([[1 + 2**-20, 0.5], [2.0**-140, 1.0]])
EVERY = {
    "a.weight": FP16_ONLY,
    "b.weight": BF16_ONLY,
    "c.weight": NEITHER,
    "d.weight": torch.tensor([[torch.nan, 1.0]]),
    "norm.weight": torch.ones(2),
    "scale": torch.tensor(2.0),
    "wide": NEITHER.double(),
    "wider": torch.tensor([[1 + 2**-40]], dtype=torch.float64),
    "ids": torch.arange(3),
    "empty": torch.empty(0, 3),
}
WANT = {
    "a.weight": ("fp16", "lossless in fp16"),
    "b.weight": ("bf16", "lossless in bf16"),
    "c.weight": ("fp32", "not exactly representable in 16 bits"),
    "d.weight": ("bf16", "lossless in bf16"),
    "norm.weight": ("fp32", "norm"),
    "scale": ("fp32", "scalar"),
    "wide": ("fp32", "lossless in fp32"),
    "wider": ("fp64", "not exactly representable in fp32"),
    "ids": ("int64", "int64 is not cast"),
    "empty": ("bf16", "lossless in bf16"),
}


def fates(made: precconv.Plan) -> dict[str, tuple[str, str]]:
    return {i.src.name: (i.to.name, i.why) for i in made.items}


def require_same_values(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Every value is the one it was; NaN is NaN."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert torch.equal(got[name].to(x.dtype).nan_to_num(12345.0), x.nan_to_num(12345.0)), name


# --- a file -----------------------------------------------------------------------------------------------


def test_auto_gives_each_tensor_the_smallest_type_that_holds_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    report = precconv.convert(path, to="auto")
    assert fates(report.plan) == WANT
    assert report.output == str(tmp_path / "x.auto.safetensors")
    out = load_file(report.output)
    require_same_values(out, EVERY)
    assert {n: str(x.dtype) for n, x in out.items() if n[1:] == ".weight"} == {
        "a.weight": "torch.float16", "b.weight": "torch.bfloat16", "c.weight": "torch.float32",
        "d.weight": "torch.bfloat16",
    }  # fmt: skip
    assert report.verified_bytes > 0
    data = report.to_dict()
    assert data["to"] == data["options"]["to"] == "auto"
    assert "decided from the values: no cast changes one" in data["notes"]


def test_lossless_only_keeps_what_would_lose(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    report = precconv.convert(path, to="bf16", lossless_only=True, verify="full")
    assert report.output == str(tmp_path / "x.bf16.safetensors")
    require_same_values(load_file(report.output), EVERY)
    found = fates(report.plan)
    assert found["a.weight"] == ("fp32", "not exactly representable in bf16")
    assert found["b.weight"] == ("bf16", "target")
    assert found["wide"] == ("fp64", "not exactly representable in bf16")
    assert report.options["lossless_only"] is True
    assert report.options["to"] == "bf16"
    assert "lossless_only" not in precconv.convert(path, to="bf16", output=tmp_path / "y.safetensors").options


def test_the_plan_is_what_is_carried_out_whatever_the_workers(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    outputs = []
    for workers in (1, 3):
        report = precconv.convert(path, to="auto", output=tmp_path / f"{workers}.safetensors", workers=workers)
        assert report.plan == precconv.plan(path, to="auto")
        outputs.append((tmp_path / f"{workers}.safetensors").read_bytes())
    assert outputs[0] == outputs[1]


def test_the_users_rules_hold_but_never_lose_a_value(tmp_path: Path) -> None:
    tensors = {"a": FP16_ONLY, "b": FP16_ONLY, "c": FP16_ONLY.half(), "d": NEITHER, "e": NEITHER, "f": FP16_ONLY}
    path = write_checkpoint(tmp_path / "x.safetensors", tensors)
    rules = ["a=bf16", "b=keep", "c=fp32", "d=fp64", "e=fp16"]
    report = precconv.convert(path, to="auto", rule=rules, mixed="cast")
    assert fates(report.plan) == {
        "a": ("fp32", "not exactly representable in bf16"),
        "b": ("fp32", "rule b"),
        "c": ("fp32", "rule c"),
        "d": ("fp64", "rule d"),
        "e": ("fp32", "not exactly representable in fp16"),
        "f": ("fp16", "lossless in fp16"),
    }
    assert report.output is not None
    require_same_values(load_file(report.output), tensors)


def test_a_torch_checkpoint_keeps_its_structure_and_its_ties(tmp_path: Path) -> None:
    x = FP16_ONLY.repeat(3, 4)
    path = saved({"state_dict": {"a": x, "tied": x, "t": BF16_ONLY.t(), "n": NEITHER}, "epoch": 3}, tmp_path / "x.ckpt")
    report = precconv.convert(path, to="auto", verify="full")
    assert report.output == str(tmp_path / "x.auto.ckpt")
    out = torch.load(report.output, weights_only=True)
    assert out["epoch"] == 3
    state = out["state_dict"]
    assert state["a"].dtype == torch.float16
    assert state["a"].data_ptr() == state["tied"].data_ptr()
    require_same_values(state, {"a": x, "tied": x, "t": BF16_ONLY.t(), "n": NEITHER})


def test_progress_covers_the_look_at_the_values_too(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.randn(100), "y": FP16_ONLY.half()})
    seen: list[tuple[int, int]] = []
    precconv.convert(path, to="auto", mixed="cast", workers=1, progress=lambda *state: seen.append(state))
    assert seen == sorted(seen, key=lambda state: state[0])
    assert (400, 800) in seen, "what is 16-bit already is not looked at"
    assert seen[-1][0] == seen[-1][1] > 800


def test_an_output_that_exists_is_refused_before_a_value_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    (tmp_path / "x.auto.safetensors").write_text("mine")
    seen: list[tuple[int, int]] = []
    with pytest.raises(precconv.OutputError, match="exists"):
        precconv.convert(path, to="auto", progress=lambda *state: seen.append(state))
    assert seen == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"lossless_only": True}, precconv.UsageError),
        ({"keep": ["nothing"]}, precconv.RuleError),
        ({"shard_size": "1MB"}, precconv.UsageError),
    ],
)
def test_what_contradicts_auto_is_refused(
    options: dict[str, Any], error: type[precconv.PrecconvError], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    with pytest.raises(error):
        precconv.convert(path, to="auto", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_other_commands_say_what_to_do_instead(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    scan, inspect = run("scan", path, "--to", "auto"), run("inspect", path, "--to", "auto")
    assert (scan.exit_code, inspect.exit_code) == (2, 2)
    assert "leave out --to" in scan.stderr
    assert "convert --dry-run" in inspect.stderr
    with pytest.raises(precconv.UsageError, match="not for a state dict"):
        precconv.cast_state_dict({"x": torch.ones(2)}, to="auto")


# --- the command ------------------------------------------------------------------------------------------


def test_a_dry_run_reads_the_values_and_prints_the_reasons(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    result = run(path, "--to", "auto", "--dry-run")
    assert result.exit_code == 0
    for line in ("lossless in fp16", "lossless in bf16", "not exactly representable in 16 bits", "note: decided from"):
        assert line in result.stdout
    data = json.loads(run(path, "--to", "AUTO", "--dry-run", "--json").stdout)
    assert data["to"] == "auto"
    assert {t["name"]: (t["to"], t["why"]) for t in data["tensors"]} == WANT
    only = run(path, "--to", "fp16", "--lossless-only", "--dry-run", "-v").stdout
    assert "not exactly representable in fp16" in only
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert "unless --to auto or --lossless-only needs it" in " ".join(run("convert", "--help").stdout.split())


def test_a_report_records_how_it_was_decided(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", EVERY)
    assert run(path, "--to", "auto", "--report", tmp_path / "r.json", "-q").exit_code == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["options"]["to"] == "auto"
    assert {t["name"]: t["why"] for t in data["tensors"]} == {n: why for n, (_, why) in WANT.items()}


def test_what_a_sample_recommends_cannot_lose_anything(tmp_path: Path) -> None:
    x = torch.ones(300_000)
    x[20_000] = 1 + 2**-20
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": x})
    line = run("scan", path, "-q", "--sample-size", "64KiB").stdout.splitlines()[-1]
    assert line == f"run: precconv {path} --to bf16 --lossless-only"
    assert run(*line.split()[2:], "-q").exit_code == 0
    assert torch.equal(load_file(tmp_path / "x.bf16.safetensors")["x"], x)


# --- whole models -----------------------------------------------------------------------------------------


def model(root: Path, *, config: str | None = '{"model_type": "toy", "torch_dtype": "float32"}\n') -> Path:
    parts = [{"l.0.a": FP16_ONLY, "l.0.b": FP16_ONLY * 2}, {"l.1.a": FP16_ONLY * 4, "l.1.n": NEITHER[:1]}]
    return sharded(root, parts, config=config)


def dtypes(root: Path) -> dict[str, str]:
    return {name: str(x.dtype).removeprefix("torch.") for name, x in sorted(load(root).items())}


def converted(root: Path, **options: Any) -> tuple[Report, Path]:
    report = precconv.convert(root, **options)
    assert report.output is not None
    return report, Path(report.output)


def test_a_sharded_model_is_decided_tensor_by_tensor_over_all_shards(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    report, out = converted(root, to="auto")
    assert out == tmp_path / "model-auto"
    require_same_values(load(out), load(root))
    assert dtypes(out) == {"l.0.a": "float16", "l.0.b": "float16", "l.1.a": "float16", "l.1.n": "float32"}
    read_index(out)
    assert report.plan == precconv.plan(root, to="auto")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float16"
    assert report.to_dict()["to"] == "auto"
    assert report.options["to"] == "auto"


def test_a_config_is_changed_only_where_all_that_was_cast_agrees_and_is_the_most(tmp_path: Path) -> None:
    config = '{"model_type": "toy", "torch_dtype": "float32"}\n'
    cases = {
        "differ": {"a": FP16_ONLY.repeat(9, 9), "b": BF16_ONLY},
        "few": {"a": FP16_ONLY, "b": NEITHER.repeat(2, 2)},
        "none": {"a": NEITHER},
        "most": {"a": BF16_ONLY.repeat(2, 2), "b": NEITHER},
    }
    said = {}
    for name, tensors in cases.items():
        _, out = converted(single(tmp_path / name, tensors, config=config), to="auto")
        said[name] = json.loads((out / "config.json").read_text())["torch_dtype"]
    assert said == {"differ": "float32", "few": "float32", "none": "float32", "most": "bfloat16"}


def test_shards_can_be_cut_anew_by_what_the_tensors_become(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    _, out = converted(root, to="auto", shard_size=16)
    index = read_index(out)
    assert len(set(index["weight_map"].values())) == 2
    require_same_values(load(out), load(root))


def test_each_component_is_decided_by_itself_and_one_that_is_named_loses_nothing_either(tmp_path: Path) -> None:
    root = pipeline(
        tmp_path / "pipe", unet={"a": FP16_ONLY, "b": BF16_ONLY}, vae={"a": FP16_ONLY}, clip={"a": FP16_ONLY}
    )
    report, out = converted(root, to="auto", component={"vae": "bf16", "clip": "keep"})
    assert {n: to for n, (to, _) in fates(report.plan).items()} == {
        "unet/a": "fp16", "unet/b": "bf16", "vae/a": "fp32", "clip/a": "fp32",
    }  # fmt: skip
    for name in ("unet", "vae", "clip"):
        require_same_values(load(out / name), load(root / name))


def test_lossless_only_holds_for_directories(tmp_path: Path) -> None:
    root = single(tmp_path / "model", {"a": FP16_ONLY, "b": BF16_ONLY})
    _, out = converted(root, to="bf16", lossless_only=True, verify="full")
    assert out == tmp_path / "model-bf16"
    assert dtypes(out) == {"a": "float32", "b": "bfloat16"}


def test_a_directory_becomes_one_file(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    report = precconv.convert(root, to="auto", output=tmp_path / "one.safetensors")
    require_same_values(load_file(tmp_path / "one.safetensors"), load(root))
    assert report.plan == precconv.plan(root, to="auto", output=tmp_path / "one.safetensors")
    assert fates(report.plan)["l.0.a"] == ("fp16", "lossless in fp16")


def test_a_model_card_says_what_auto_did(tmp_path: Path) -> None:
    root = single(tmp_path / "model", {"a": FP16_ONLY, "b": NEITHER})
    (root / "README.md").write_text("# Toy\n")
    _, out = converted(root, to="auto")
    text = (out / "README.md").read_text()
    assert "## Converted without loss" in text
    assert "each tensor to the smallest dtype that holds its values" in text
    assert "(`--to auto`): 1 tensor, 16 B before and 8 B after." in text
    assert "| lossless in fp16 | fp16 | 1 | 8 B |" in text
    assert "| not exactly representable in 16 bits | fp32 | 1 | 16 B |" in text
    _, again = converted(root, to="bf16", lossless_only=True)
    assert "(`--to bf16 --lossless-only`)" in (again / "README.md").read_text()


def test_an_output_directory_that_exists_is_refused_before_a_value_is_read(tmp_path: Path) -> None:
    root = model(tmp_path / "model")
    single(tmp_path / "model-auto", {"x": NEITHER})
    before = files(tmp_path / "model-auto")
    seen: list[tuple[int, int]] = []
    with pytest.raises(precconv.OutputError, match="exists"):
        precconv.convert(root, to="auto", progress=lambda *state: seen.append(state))
    assert (seen, files(tmp_path / "model-auto")) == ([], before)
    converted(root, to="auto", force=True)


def test_progress_of_a_directory_goes_up_to_its_end(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"a": FP16_ONLY}, vae={"a": NEITHER})
    seen: list[tuple[int, int]] = []
    precconv.convert(root, to="auto", workers=1, progress=lambda *state: seen.append(state))
    assert seen == sorted(seen, key=lambda state: state[0])
    assert seen[-1][0] == seen[-1][1] >= 64


def test_a_target_of_its_own_is_kept_without_loss_also_for_the_component_at_the_root(tmp_path: Path) -> None:
    root = single(tmp_path / "model", {"a": FP16_ONLY, "c": NEITHER}, config=None)
    single(root / "more", {"a": FP16_ONLY}, config=None)
    made = precconv.plan(root, to="auto", component={".": "bf16"})
    assert {name: to for name, (to, _) in fates(made).items()} == {"a": "fp32", "c": "fp32", "more/a": "fp16"}


def test_a_batch_loses_nothing_where_it_is_asked_to(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path / f"{n}.safetensors", {"w": x}) for n, x in (("a", FP16_ONLY), ("b", NEITHER))]
    done = precconv.convert_many(paths, to="auto", output_dir=tmp_path / "out")
    assert done.ok
    got = {p.name: load_file(p)["w"].dtype for p in (tmp_path / "out").glob("*.safetensors")}
    assert got == {"a.auto.safetensors": torch.float16, "b.auto.safetensors": torch.float32}
    assert precconv.convert_many(paths, to="bf16", lossless_only=True, output_dir=tmp_path / "kept").ok
    for path in paths:
        (kept,) = load_file(tmp_path / "kept" / f"{path.stem}.bf16.safetensors").values()
        assert kept.dtype is torch.float32


# --- models on the Hub ------------------------------------------------------------------------------------

REPO = "acme/model"


@pytest.fixture
def on_hub(in_process: HubServer, tmp_path: Path) -> Path:
    """A model in a directory, and the same in a repo."""
    root = model(tmp_path / "model")
    in_process.create(REPO, {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()})
    return root


def test_a_model_on_the_hub_is_fetched_and_decided(on_hub: Path, tmp_path: Path) -> None:
    report, out = converted(Path(REPO), to="auto", output=tmp_path / "out")
    require_same_values(load(out), load(on_hub))
    assert fates(report.plan) == fates(precconv.plan(on_hub, to="auto"))
    name = f"hf://{REPO}/model-00001-of-00002.safetensors"
    one = precconv.convert(name, to="auto", output=tmp_path / "one.safetensors")
    assert {to for to, _ in fates(one.plan).values()} == {"fp16"}


def test_what_would_need_weights_that_are_not_here_is_refused(on_hub: Path, in_process: HubServer) -> None:
    assert on_hub.exists()
    for args in (["--to", "auto"], ["--to", "fp16", "--lossless-only"]):
        dry = run(REPO, *args, "--dry-run")
        assert dry.exit_code == 2
        assert "depends on the weights, which a plan does not fetch" in dry.stderr
        assert f"precconv scan {REPO} --sample" in dry.stderr
    assert in_process.bytes_of_weights() == 0
    by_shard: list[dict[str, Any]] = [{"low_disk": True}, {"engine": "local"}]
    for options in by_shard:
        with pytest.raises(precconv.UsageError, match=r"--(low-disk|engine) takes a shard at a time"):
            precconv.convert(REPO, to="auto", push="tester/out", **options)
    assert in_process.repos() == [REPO]
    assert in_process.bytes_of_weights() == 0


def test_what_auto_made_is_published_once(
    on_hub: Path, in_process: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", in_process.tokens.write)
    monkeypatch.chdir(tmp_path)
    first = precconv.convert(REPO, to="auto", push="tester/out")
    assert first.published is not None
    assert not first.published["already"]
    assert in_process.commits("tester/out")[0].title.startswith(f"Convert {REPO} to auto (precconv ")
    before = in_process.bytes_of_weights()
    again = precconv.convert(REPO, to="auto", push="tester/out")
    assert again.published is not None
    assert again.published["already"]
    assert again.plan.to == "auto"
    assert again.plan.items == (), "they are not decided again"
    assert "were not read again" in again.plan.notes[-1]
    assert in_process.bytes_of_weights() <= before + 2 * (1 << 16)
    local = precconv.convert(on_hub, to="bf16", lossless_only=True, push="tester/local")
    assert local.published is not None
    assert not local.published["already"]
