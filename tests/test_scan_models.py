"""Scans of whole models, in directories and on the Hub, and of a sample of the values."""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from pathlib import Path

import pytest
import torch

import precconv
from precconv.dtypes import BF16, FP16
from precconv.measures import Measure
from precconv.runs import Chunk, RunReader

from .command import run
from .hub.server import HubServer
from .repos import pipeline, sharded, single, weight
from .samples import write_checkpoint
from .test_spectrum import measured
from .torch_files import saved

REPO = "acme/model"


def by_name(found: precconv.Scan) -> dict[str, precconv.TensorScan]:
    return {t.name: t for t in found.tensors}


def measure_of(t: precconv.TensorScan) -> Measure:
    assert t.measure is not None
    return t.measure


# --- directories ------------------------------------------------------------------------------------------


def test_shards_are_one_checkpoint_and_give_the_numbers_of_one_file(tmp_path: Path) -> None:
    parts = [{f"layer.{n}.a": weight(n), f"layer.{n}.b": weight(n + 9) * 1e5} for n in range(3)]
    found = precconv.scan(sharded(tmp_path / "model", parts), workers=2)
    whole = write_checkpoint(tmp_path / "whole.safetensors", {n: x for p in parts for n, x in p.items()})
    alone = precconv.scan(whole, workers=1)
    assert {t.name: t.measure for t in found.tensors} == {t.name: t.measure for t in alone.tensors}
    assert found.totals == alone.totals
    assert found.verdict.unsafe == alone.verdict.unsafe
    assert {t.file for t in found.tensors} == {"model.safetensors.index.json"}


def test_the_tensors_of_a_pipeline_are_named_after_their_component(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"w": weight(1)}, vae={"w": weight(2) * 1e6})
    found = precconv.scan(root)
    assert [t.name for t in found.tensors] == ["unet/w", "vae/w"]
    assert by_name(found)["vae/w"].file == "vae/diffusion_pytorch_model.safetensors"
    assert found.verdict.unsafe.startswith("fp16: 1 tensor overflows (largest |x| ")
    assert found.verdict.unsafe.endswith("in 'vae/w')")
    assert found.judgements[0].overflowing[0].name == "vae/w"
    assert measure_of(by_name(found)["unet/w"]) == measured(weight(1).reshape(-1))


def test_each_component_is_judged_by_its_own_target_rules_and_config(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"w": weight(1), "v": weight(3)}, vae={"w": weight(2) * 1e6})
    found = precconv.scan(root, to="fp16", component={"vae": "bf16"}, keep=["unet/v"])
    vae, kept = by_name(found)["vae/w"].judged(FP16), by_name(found)["unet/v"].judged(FP16)
    assert vae is not None
    assert vae.item.to is BF16
    assert kept is None
    assert found.judgements[0].is_safe
    tensors = {f"encoder.block.0.layer.1.DenseReluDense.{n}.weight": weight(k) for k, n in enumerate(("wi", "wo"))}
    t5 = single(tmp_path / "t5", tensors, config='{"model_type": "t5"}')
    whys = {n: t.items[FP16].why for n, t in by_name(precconv.scan(t5)).items()}
    assert whys == {i.src.name: i.why for i in precconv.plan(t5, to="fp16").items}
    assert any(why.startswith("preset t5") for why in whys.values())


def test_a_component_that_is_not_there_and_a_rule_that_matches_nothing_are_refused(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"w": weight(1)}, vae={"w": weight(2)})
    with pytest.raises(precconv.UsageError, match="there is no component"):
        precconv.scan(root, component=["vea=fp16"])
    with pytest.raises(precconv.RuleError):
        precconv.scan(root, keep=["unet/x"])


def test_the_verdicts_command_repeats_what_the_plans_depend_on(tmp_path: Path) -> None:
    root = pipeline(tmp_path / "a pipe", unet={"w": weight(1), "norm.weight": weight(3, (4,))}, vae={"w": weight(2)})
    args = ["--norms", "cast", "--component", "vae=keep", "--rule", "unet/n*=fp32", "--keep", "re:w$"]
    result = run("scan", root, "-q", "--to", "bf16", "--preset", "none", *args)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("run:")]
    assert line == "run: nothing: there is nothing to cast to bf16"
    result = run("scan", root, "-q", "--to", "bf16", "--preset", "none", *args[:-2], "--keep", "re:^no")
    assert result.stdout.splitlines()[-1] == (
        f"run: precconv '{root}' --to bf16 --preset none --norms cast --component vae=keep --rule 'unet/n*=fp32' "
        "--keep 're:^no'"
    )


def test_what_the_run_line_says_can_be_run(tmp_path: Path) -> None:
    path = saved({"model": {"module.w": weight(1)}, "ema": {"module.w": weight(2)}}, tmp_path / "x.pt")
    result = run("scan", path, "-q", "--select", "ema", "--strip-wrappers", "--mixed", "cast")
    line = result.stdout.splitlines()[-1]
    assert line == f"run: precconv {path} --to fp16 --select ema --mixed cast --strip-wrappers"
    assert run(*line.split()[2:]).exit_code == 0


# --- a sample ---------------------------------------------------------------------------------------------


def windows(x: torch.Tensor, sample: int, count: int) -> Measure:
    """The measure of ``count`` stretches spread over a tensor, ``sample`` bytes together."""
    flat, width = x.reshape(-1), sample // count // x.element_size()
    starts = [(flat.numel() - width) * n // max(count - 1, 1) for n in range(count)]
    return reduce(add, (measured(flat[s : s + width]) for s in starts), Measure())


@pytest.mark.parametrize("workers", [1, 3])
def test_of_a_large_tensor_stretches_are_read_from_its_start_to_its_end(workers: int, tmp_path: Path) -> None:
    large, small = torch.randn(500_000, generator=torch.Generator().manual_seed(1)), torch.randn(1000)
    path = write_checkpoint(tmp_path / "x.safetensors", {"large": large, "small": small})
    seen: list[tuple[int, int]] = []
    found = precconv.scan(path, sample="256KiB", workers=workers, progress=lambda *state: seen.append(state))
    assert measure_of(by_name(found)["large"]) == windows(large, 1 << 18, 4)
    assert measure_of(by_name(found)["small"]) == measured(small)
    assert [t.is_sampled for t in found.tensors] == [True, False]
    assert seen[-1] == ((1 << 18) + 4000,) * 2
    assert found.share == (65_536 + 1000) / 501_000


@pytest.mark.parametrize("sample", [1, 3, 4, 100, 70_000, 1 << 20])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_a_sample_is_never_larger_than_asked_but_for_one_element(
    sample: int, kind: torch.dtype, tmp_path: Path
) -> None:
    x = torch.randn(300, 1000).to(kind)
    found = precconv.scan(write_checkpoint(tmp_path / "x.safetensors", {"x": x}), sample=sample)
    n = measure_of(found.tensors[0]).n
    assert 1 <= n <= max(sample // x.element_size(), 1)
    assert n * x.element_size() > sample // 2 - x.element_size() * 8 or n == 1


def test_tensors_that_have_no_place_in_the_file_are_sampled_too(tmp_path: Path) -> None:
    x = torch.randn(400, 600)
    path = saved({"x": x.t(), "tied": x.t()}, tmp_path / "x.pt")
    found = precconv.scan(path, sample=1 << 17)
    assert measure_of(by_name(found)["x"]) == measure_of(by_name(found)["tied"]) == windows(x.t(), 1 << 17, 2)


def test_a_sample_as_large_as_the_tensors_is_a_scan_of_everything(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.randn(100)})
    found = precconv.scan(path, sample=400)
    assert found.share is None
    assert found.verdict == precconv.scan(path).verdict


def test_what_a_sample_shows_is_never_called_lossless_or_safe_without_saying_so(tmp_path: Path) -> None:
    x = torch.ones(300_000)
    x[7] = 1 + 2**-20  # outside of every stretch but the first, and not in a sample of one
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": x})
    found = precconv.scan(path, to="bf16", sample="64KiB")
    assert found.judgements[0].is_exact, "the odd value was not seen"
    safe, unsafe, _ = found.verdict.lines
    assert safe == (
        "safe in a sample of 5.5%: bf16: every value that was read and is cast is exactly a bf16 value; "
        "others may not be"
    )
    assert unsafe == "not safe in a sample of 5.5%: nothing was found, in what was read"
    assert "loses nothing" not in "".join(found.verdict.lines)
    random = precconv.scan(write_checkpoint(tmp_path / "y.safetensors", {"y": torch.randn(300_000)}), sample=4000)
    assert random.verdict.safe.startswith("fp16: everything that was read fits")


def test_json_and_the_table_mark_what_is_from_a_sample(tmp_path: Path) -> None:
    tensors = {"large": torch.ones(100_000), "small": torch.ones(10), "numbers": torch.arange(3)}
    path = write_checkpoint(tmp_path / "x.safetensors", tensors)
    data = json.loads(run("scan", path, "--json", "--sample-size", "64KiB").stdout)
    assert data["sample"] == {"bytes": 65536, "share": (16384 + 10) / 100_010}
    assert data["verdict"]["sampled"] is data["totals"]["sampled"] is True
    rows = {row["name"]: row for row in data["tensors"]}
    assert [rows[n].get("sampled") for n in tensors] == [True, False, None]
    assert rows["large"]["n"] == 16384
    lines = run("scan", path, "--sample-size", "64KiB").stdout.splitlines()
    assert lines[1] == "a sample: of tensors larger than 65.5 kB so much, and all numbers are about that"
    assert lines[3].split()[3] == "read"
    cells = {line.split()[0]: line for line in lines[4:7]}
    assert cells["large"].split()[3] == "16.38%"
    assert cells["large"].endswith("exact so far  exact so far")
    assert cells["small"].split()[3] == "all"
    whole = json.loads(run("scan", path, "--json", "--sample").stdout)
    assert whole["sample"] is None


def test_the_share_of_a_sample_is_never_rounded_to_all_or_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.ones(300_000)})
    lines = {n: precconv.scan(path, sample=n).verdict.lines[0].partition(":")[0] for n in (4, 600, 1_199_996)}
    assert lines == {
        4: "safe in a sample of less than 0.01%",
        600: "safe in a sample of 0.050%",
        1_199_996: "safe in a sample of 99%",
    }


@pytest.mark.parametrize("sample", ["much", 0, "-1MB"])
def test_what_is_no_sample_is_refused(sample: str | int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    with pytest.raises(precconv.UsageError, match="sample"):
        precconv.scan(path, sample=sample)


def test_a_sample_of_a_large_tensor_reads_no_more_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path / "x.safetensors", {"x": torch.zeros(1 << 20)})
    read: list[int] = []
    real = RunReader.read

    def counted(self: RunReader, chunk: Chunk, out: memoryview) -> None:
        read.append(len(out))
        real(self, chunk, out)

    monkeypatch.setattr(RunReader, "read", counted)
    precconv.scan(path, sample="1MB")
    assert sum(read) <= 1_000_000
    assert len(read) == 8


# --- models on the Hub ------------------------------------------------------------------------------------


def uploaded(hub: HubServer, root: Path) -> None:
    files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
    hub.create(REPO, files)


def large_model(root: Path) -> Path:
    return sharded(root, [{f"layer.{n}": weight(n, (500, 1000))} for n in range(2)])


def test_a_model_on_the_hub_is_fetched_and_gives_the_numbers_of_its_files(
    in_process: HubServer, tmp_path: Path
) -> None:
    root = large_model(tmp_path / "model")
    uploaded(in_process, root)
    seen: list[tuple[int, int]] = []
    found = precconv.scan(REPO, progress=lambda *state: seen.append(state))
    assert found.totals == precconv.scan(root).totals
    assert found.source == REPO
    assert found.verdict.run.startswith(f"precconv {REPO} --to ")
    assert seen == sorted(seen, key=lambda state: state[0])
    assert seen[-1][0] == seen[-1][1]
    before = in_process.bytes_of_weights()
    precconv.scan(REPO)
    headers = 2 * (1 << 16)
    assert in_process.bytes_of_weights() <= before + headers, "the rest is in the cache now"


def test_a_sample_of_a_model_on_the_hub_fetches_no_more_than_that(in_process: HubServer, tmp_path: Path) -> None:
    root = large_model(tmp_path / "model")
    uploaded(in_process, root)
    found = precconv.scan(REPO, sample=1 << 18)
    assert {t.name: t.measure for t in found.tensors} == {
        t.name: t.measure for t in precconv.scan(root, sample=1 << 18).tensors
    }
    headers = 2 * (1 << 16)
    assert 2 * (1 << 18) <= in_process.bytes_of_weights() <= 2 * (1 << 18) + headers
    assert not [p for p in tmp_path.rglob("*.safetensors") if "hf-home" in p.parts]
    assert found.verdict.lines[0].startswith("safe in a sample of 13%: ")


def test_small_tensors_of_a_model_on_the_hub_are_sampled_whole(in_process: HubServer, tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"w": weight(1), "v": weight(3)}, vae={"w": weight(2).half()})
    uploaded(in_process, root)
    found = precconv.scan(REPO, sample="1MB", to="bf16")
    assert [t.name for t in found.tensors] == [t.name for t in precconv.scan(root).tensors]
    assert found.share is None
    assert [t.measure for t in found.tensors] == [t.measure for t in precconv.scan(root).tensors]


def test_one_file_of_a_repo_is_scanned(in_process: HubServer, tmp_path: Path) -> None:
    root = pipeline(tmp_path / "pipe", unet={"w": weight(1)}, vae={"w": weight(2)})
    uploaded(in_process, root)
    name = f"hf://{REPO}/vae/diffusion_pytorch_model.safetensors"
    for sample in (None, "1MB"):
        found = precconv.scan(name, sample=sample)
        assert [measure_of(t) for t in found.tensors] == [measured(weight(2).reshape(-1))]


@pytest.mark.usefixtures("in_process")
def test_a_model_that_is_not_there_ends_with_5() -> None:
    assert run("scan", "acme/nothing").exit_code == 5
    assert run("scan", "acme/nothing", "--sample").exit_code == 5
