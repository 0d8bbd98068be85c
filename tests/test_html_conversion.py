"""What a page says of the values that a conversion cast: the same as a scan's, whatever the source and the way."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import precconv
from precconv import passes, runs, spectrum
from precconv.checks import OnOverflow
from precconv.html import page

from .command import run
from .hub.server import HubServer
from .hub_models import llama
from .hub_runs import Work, model_files
from .pages import data_of, tensor_rows
from .repos import layers, pipeline, sharded, weight
from .samples import write_checkpoint
from .test_scan import every_kind

Histograms = dict[str, dict[str, Any]]


def read(path: Path) -> Any:
    return data_of(path.read_text("utf-8"))


def histograms(data: Mapping[str, Any]) -> Histograms:
    """By tensor, of those that were looked at."""
    return {row["name"]: row["exponents"] for row in tensor_rows(data["tensors"]) if "exponents" in row}


def scanned(source: Path, **options: Any) -> Any:
    return data_of(page(precconv.scan(source, **options)))


def same_map(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """The same histograms, of every tensor and of every row."""
    assert histograms(got) == histograms(want) != {}
    for key in ("axis", "ranges", "rows", "unread"):
        assert got["heat"][key] == want["heat"][key]
    assert rows_of(got) == rows_of(want)


def rows_of(data: Mapping[str, Any]) -> dict[str, str]:
    labels = [row["label"] for row in data["heat"]["rows"]]
    return {row["name"]: labels[n] for row, n in zip(tensor_rows(data["tensors"]), data["heat"]["of"], strict=True)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "x.safetensors", every_kind())


# --- one file ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["fp32", "bf16", "fp16", "auto"])
@pytest.mark.parametrize("on_overflow", ["keep", "ieee", "clamp"])
def test_a_page_of_a_conversion_has_the_histograms_of_a_scan(
    to: str, on_overflow: OnOverflow, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "p.html"
    precconv.convert(source, to=to, on_overflow=on_overflow, html=target)
    same_map(read(target), scanned(source))


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 14])
@pytest.mark.parametrize("workers", [1, 3])
def test_no_histogram_depends_on_threads_chunks_or_rounding(
    workers: int, chunk: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = scanned(source)
    for module in (passes, runs):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(spectrum, "BLOCK", 64)
    target = tmp_path / "p.html"
    precconv.convert(source, to="bf16", rounding="stochastic", on_overflow="keep", workers=workers, html=target)
    same_map(read(target), want)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_tied_and_strided_tensors_of_a_torch_checkpoint_have_the_histograms_of_their_elements_or_none(
    suffix: str, tmp_path: Path
) -> None:
    """A torch checkpoint is written as the memory that its tensors show: of what shows part of it, no more is known."""
    base = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    tensors = {"a.w": base, "b.w": base, "c.t": base.t(), "d.part": base[10:20, ::3], "e.n": torch.arange(9)}
    source = tmp_path / "x.pt"
    torch.save(tensors, source)
    target = tmp_path / "p.html"
    precconv.convert(source, to="bf16", output=tmp_path / f"o.{suffix}", html=target)
    found, want = read(target), scanned(source)
    if suffix == "safetensors":
        same_map(found, want)
        return
    assert histograms(found) == {k: v for k, v in histograms(want).items() if k != "d.part"}
    part = "The values of 1 of 5 tensors were not looked at by themselves: they share memory with others, and show "
    integers = "1 of 5 tensors holds what no cast changes (int64): not looked at."
    assert found["heat"]["unread"] == [f"{part}part of it.", integers]


def test_a_refused_conversion_has_seen_everything(source: Path, tmp_path: Path) -> None:
    done = run(source, "--to", "fp16", "--html", tmp_path / "p.html")
    assert done.exit_code == 3
    found = read(tmp_path / "p.html")
    assert found["lines"][0].startswith("not written: ")
    same_map(found, scanned(source))


def test_what_is_copied_bit_for_bit_is_looked_at_where_it_is_a_float_and_said_where_it_is_not(tmp_path: Path) -> None:
    tensors = {
        "a.half": weight(1).bfloat16(),
        "a.kept": weight(2),
        "b.ids": torch.arange(7),
        "b.mask": torch.ones(3, dtype=torch.bool),
        "b.small": weight(3).to(torch.float8_e4m3fn),
    }
    target = tmp_path / "p.html"
    source = write_checkpoint(tmp_path / "x.safetensors", tensors)
    precconv.convert(source, to="bf16", keep=["a.kept"], html=target)
    found = read(target)
    assert histograms(found).keys() == {"a.half", "a.kept"}
    assert found["heat"]["unread"] == [
        "3 of 5 tensors hold what no cast changes (int64, bool, fp8_e4m3): not looked at."
    ]
    assert [row["read"] for row in found["heat"]["rows"]] == [1, 1, 0, 0, 0]


def test_a_report_without_histograms_says_that_the_values_were_not_looked_at(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", {"w": weight(1), "empty": weight(2)[:0]})
    found = data_of(page(precconv.convert(source, to="bf16")))
    assert found["heat"]["unread"] == ["The values of 1 of 2 tensors were not looked at."]
    assert [row["counts"] for row in found["heat"]["rows"]] == [[], []]


def test_a_json_report_has_no_histograms(source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "bf16", "on_overflow": "keep", "force": True}
    plain = precconv.convert(source, report=tmp_path / "a.json", **options)
    precconv.convert(source, report=tmp_path / "b.json", html=tmp_path / "p.html", **options)
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    del one["seconds"], other["seconds"]
    assert one == other
    assert "exponents" not in (tmp_path / "b.json").read_text()
    assert all(t.stats.exponents is None for t in plain.tensors)


ODD: Mapping[str, torch.Tensor] = {
    "only NaN": torch.full((5,), math.nan),
    "only Inf": torch.tensor([math.inf, -math.inf]),
    "only zeros": torch.zeros(4),
    "only subnormals": torch.full((3,), 2.0**-140),
    "empty": torch.zeros(0),
    "empty matrix": torch.zeros(3, 0, 7),
    "scalar": torch.tensor(1.5),
}


@pytest.mark.parametrize("case", [*ODD])
@pytest.mark.parametrize("command", ["scan", "convert"])
def test_a_file_of_one_odd_tensor_has_a_page(command: str, case: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "x.safetensors", {"t": ODD[case]})
    arguments = ["--to", "bf16", "-o", tmp_path / "o.safetensors"] if command == "convert" else []
    done = run(command, source, *arguments, "--html", tmp_path / "p.html")
    assert done.exit_code == 0, done.stderr
    found = read(tmp_path / "p.html")
    want = {"only subnormals": {"first": -140, "counts": (3,)}, "scalar": {"first": 0, "counts": (1,)}}
    (row,) = found["heat"]["rows"]
    (histogram,) = histograms(found).values()
    expected = want.get(case, {"first": 0, "counts": ()})
    assert (row["first"], tuple(row["counts"])) == (expected["first"], expected["counts"])
    assert tuple(histogram["counts"]) == expected["counts"]
    assert row["read"] == 1


# --- whole models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_side_by_side_are_one_map(workers: int, tmp_path: Path) -> None:
    root, target = sharded(tmp_path / "m", layers(5)), tmp_path / "p.html"
    precconv.convert(root, to="bf16", workers=workers, html=target)
    same_map(read(target), scanned(root))


def test_shards_that_are_cut_anew_are_the_same_map(tmp_path: Path) -> None:
    root, target = sharded(tmp_path / "m", layers(5)), tmp_path / "p.html"
    precconv.convert(root, to="bf16", shard_size=256, html=target)
    same_map(read(target), scanned(root))


@pytest.mark.parametrize("to", ["fp16", "auto"])
def test_components_of_a_pipeline_are_rows_of_one_map(to: str, tmp_path: Path) -> None:
    large = weight(3) * 1e6
    root = pipeline(tmp_path / "m", unet={"mid.w": weight(1)}, vae={"mid.w": large, "out.n": torch.arange(3)})
    target = tmp_path / "p.html"
    precconv.convert(root, to=to, on_overflow="fp32", html=target)
    found = read(target)
    same_map(found, scanned(root))
    assert {row["label"] for row in found["heat"]["rows"]} == {"unet/mid.w", "vae/mid.w", "vae/out.n"}


def test_a_refused_model_has_a_page_and_no_output(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", [{"a": weight(1)}, {"b": weight(2) * 1e6}])
    done = run(root, "--to", "fp16", "--html", tmp_path / "p.html")
    assert done.exit_code == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "p.html"]
    same_map(read(tmp_path / "p.html"), scanned(root))


# --- the Hub ----------------------------------------------------------------------------------------------


@pytest.fixture
def repo(here: Work, tmp_path: Path) -> Path:
    """A model in three shards, and the same in the repo ``acme/m``."""
    root = sharded(tmp_path / "source", layers(3))
    here.hub.create("acme/m", model_files(root))
    return root


@pytest.mark.parametrize("source", ["acme/m", "hf://acme/m/model-00002-of-00003.safetensors"])
def test_a_model_on_the_hub_has_the_page_of_the_same_model_here(source: str, repo: Path, here: Work) -> None:
    local = repo if "/model-" not in source else repo / source.rpartition("/")[2]
    want = scanned(local)
    here.ok("scan", source, "--html", "s.html")
    here.ok(source, "--to", "bf16", "--html", "c.html")
    for name in ("s.html", "c.html"):
        same_map(read(here.path / name), want)
    assert read(here.path / "s.html")["result"]["source"] == source


def test_a_sample_of_a_model_on_the_hub_has_a_page(repo: Path, here: Work) -> None:
    here.ok("scan", "acme/m", "--sample-size", "64", "--html", "s.html")
    found = read(here.path / "s.html")
    assert found["result"]["verdict"]["sampled"] is True
    assert histograms(found) == histograms(scanned(repo, sample=64))


def test_a_model_that_is_published_has_a_page_and_one_that_was_has_one_that_says_so(repo: Path, here: Work) -> None:
    push = ("acme/m", "--to", "bf16", "--push", "acme/out", "--html", "p.html")
    here.ok(*push, token=here.hub.tokens.write)
    same_map(read(here.path / "p.html"), scanned(repo))
    here.ok(*push, token=here.hub.tokens.write)
    found = read(here.path / "p.html")
    assert found["result"]["published"]["already"] is True
    url = found["result"]["published"]["url"]
    assert found["lines"][0] == f"published already: {url}; nothing was read, nothing was written"
    assert found["heat"]["unread"] == ["The values of 6 of 6 tensors were not looked at."]


@pytest.mark.parametrize("way", ["--low-disk", "--engine local"])
def test_shards_that_are_made_one_at_a_time_or_elsewhere_are_one_map(
    way: str, in_process: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in in_process.environment(tmp_path / "home", token=in_process.tokens.write, xet=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    in_process.create("tester/m", llama(3))
    for target, args in (("plain", ()), ("other", way.split())):
        done = run("tester/m", "--to", "fp16", "--push", f"tester/{target}", *args, "--html", f"{target}.html")
        assert done.exit_code == 0, done.stderr
    same_map(read(tmp_path / "other.html"), read(tmp_path / "plain.html"))
