"""What an output says of how it was made: enough to prove it by, the same in every run, and nothing of this machine."""

from __future__ import annotations

import hashlib
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import precconv
from precconv import __version__
from precconv.provenance import KEY, Record, read_record
from precconv.request import request_of

from .command import run
from .repos import files, layers, pipeline, record, shard, sharded, single, weight


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as f:
        return dict(f.metadata() or {})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({"a.weight": weight(1), "b.weight": weight(2)}, path, metadata={"format": "pt"})
    return path


def header(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: 8 + struct.unpack("<Q", data[:8])[0]]


def test_the_record_is_the_options_the_source_and_the_version_as_sorted_json(source: Path) -> None:
    done = precconv.convert(source, to="bf16", keep=["b.*"])
    assert done.output is not None
    digest = hashlib.sha256(header(source)).hexdigest()
    want = (
        '{"options":{"rule":["b.*=keep"],"to":"bf16"},'
        f'"source":{{"bytes":{source.stat().st_size},"header":"sha256:{digest}"}},"version":"{__version__}"}}'
    )
    assert metadata(Path(done.output))[KEY] == want


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "half"}, {"to": "fp16"}),
        ({"to": "auto"}, {"to": "auto"}),
        ({"to": "bf16", "lossless_only": True}, {"to": "bf16", "lossless_only": True}),
        ({"to": "bf16", "seed": 0, "rounding": "stochastic"}, {"to": "bf16", "rounding": "stochastic"}),
        ({"to": "bf16", "seed": 9, "rounding": "stochastic"}, {"to": "bf16", "rounding": "stochastic", "seed": 9}),
        ({"to": "bf16", "shard_size": "5GB"}, {"to": "bf16", "shard_size": 5_000_000_000}),
        ({"to": "bf16", "component": ["vae=float"]}, {"to": "bf16", "component": {"vae": "fp32"}}),
        ({"to": "bf16", "keep": ["a"], "rule": ["b=half"]}, {"to": "bf16", "rule": ["b=fp16", "a=keep"]}),
        ({"to": "bf16", "on_overflow": "clamp", "shared": "clone"}, {"to": "bf16", "on_overflow": "clamp"}),
        ({"to": "bf16", "workers": 3, "verify": "full", "force": True, "durable": True}, {"to": "bf16"}),
        ({"to": "bf16", "on_nonfinite": "error", "max_underflow": 0.5}, {"to": "bf16"}),
    ],
    ids=str,
)
def test_options_are_recorded_that_shape_the_bytes_and_are_not_the_defaults(
    options: dict[str, Any], said: dict[str, Any]
) -> None:
    made = request_of(**options)
    assert made.recorded == said
    again = request_of(**said)
    assert again.recorded == said
    assert (again.policy, again.lossless, again.seed, again.components) == (
        made.policy, made.lossless, made.seed, made.components,
    )  # fmt: skip


def test_runs_of_any_kind_write_the_same_bytes(source: Path, tmp_path: Path) -> None:
    outs = []
    for n, options in enumerate(
        [{}, {"workers": 1}, {"workers": 5}, {"verify": "none"}, {"report": tmp_path / "r.json"}, {"durable": True}]
    ):
        outs.append(tmp_path / f"{n}.safetensors")
        precconv.convert(source, to="bf16", output=outs[-1], **options)  # type: ignore[arg-type]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = Path(shutil.copy(source, elsewhere / "other name.sft"))
    outs.append(elsewhere / "out.safetensors")
    precconv.convert(moved, to="bf16", output=outs[-1])
    assert len({p.read_bytes() for p in outs}) == 1


def test_a_model_is_recorded_the_same_in_every_run_and_each_shard_names_its_own_source(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source", layers(3))
    precconv.convert(source, to="bf16", output=tmp_path / "a")
    copy = tmp_path / "copy" / "of"
    shutil.copytree(source, copy)
    precconv.convert(copy, to="bf16", output=tmp_path / "b", workers=1)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    for n in (1, 2, 3):
        found = record(tmp_path / "a" / shard(n, 3))["source"]
        assert found["header"] == f"sha256:{hashlib.sha256(header(source / shard(n, 3))).hexdigest()}"


def test_shards_that_become_one_file_are_named_together(tmp_path: Path) -> None:
    source, out = sharded(tmp_path / "source", layers(2)), tmp_path / "one.safetensors"
    precconv.convert(source, to="bf16", output=out)
    lines = "".join(f"sha256:{hashlib.sha256(header(source / shard(n, 2))).hexdigest()}\n" for n in (1, 2))
    assert record(out)["source"] == {
        "bytes": sum((source / shard(n, 2)).stat().st_size for n in (1, 2)),
        "header": f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}",
    }


def test_without_it_the_output_is_what_the_library_writes(source: Path, tmp_path: Path) -> None:
    out, theirs = tmp_path / "out.safetensors", tmp_path / "theirs.safetensors"
    assert run(source, "--to", "bf16", "--no-provenance", "-o", out).exit_code == 0
    assert metadata(out) == {"format": "pt"}
    save_file({n: x.bfloat16() for n, x in load_file(source).items()}, theirs, metadata={"format": "pt"})
    assert out.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    "spelled",
    [{"shared": "clone"}, {"format": "safetensors"}, {"norms": "fp32", "preset": "auto"}, {"on_overflow": "error"}],
    ids=str,
)
def test_a_default_that_is_spelled_out_changes_nothing(source: Path, tmp_path: Path, spelled: dict[str, Any]) -> None:
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=plain)
    precconv.convert(source, to="bf16", output=out, **spelled)
    assert out.read_bytes() == plain.read_bytes()
    assert precconv.verify(plain, against=source, **spelled).proven


def test_a_report_proves_what_it_is_about_record_and_all(source: Path, tmp_path: Path) -> None:
    torch.save({"state_dict": load_file(source), "epoch": 1}, tmp_path / "m.ckpt")
    directory = sharded(tmp_path / "source", layers(2))
    report = tmp_path / "r.json"
    made: list[tuple[Path, str, dict[str, Any]]] = [
        (source, "a.safetensors", {}),
        (source, "b.safetensors", {"rounding": "stochastic", "keep": ["a.*"]}),
        (tmp_path / "m.ckpt", "c.safetensors", {"shared": "clone"}),
        (tmp_path / "m.ckpt", "d.safetensors", {"shared": "drop"}),
        (directory, "e.safetensors", {}),
        (directory, "f", {}),
        (directory, "g", {"shared": "drop"}),
    ]
    for path, name, options in made:
        precconv.convert(path, to="bf16", output=tmp_path / name, report=report, force=True, **options)
        assert precconv.verify(tmp_path / name, against=path, report=report).proven, name
        assert precconv.verify(tmp_path / name, against=path).proven, name


def test_what_components_record_is_put_together(tmp_path: Path) -> None:
    """What is usual for one component, and so not in its file, need not be for another."""
    state = {"t": weight(1), "u": weight(2)}
    source = pipeline(tmp_path / "source", aaa=state, text_encoder=state)
    (source / "text_encoder" / "config.json").write_text('{"model_type": "toy"}')
    precconv.convert(source, to="bf16", output=tmp_path / "out", shared="clone")
    kinds = {p.parent.name: record(p)["options"] for p in (tmp_path / "out").rglob("*.safetensors")}
    assert kinds == {"aaa": {"to": "bf16"}, "text_encoder": {"to": "bf16", "shared": "clone"}}
    found = precconv.verify(tmp_path / "out", against=source)
    assert (found.proven, found.options["shared"]) == (True, "clone")


def test_what_a_source_says_of_how_it_was_made_is_not_said_of_what_is_made_of_it(source: Path, tmp_path: Path) -> None:
    first, second, bare = (tmp_path / f"{n}.safetensors" for n in ("first", "second", "bare"))
    precconv.convert(source, to="bf16", output=first)
    precconv.convert(first, to="fp32", output=second)
    assert record(second)["options"] == {"to": "fp32"}
    assert record(second)["source"]["bytes"] == first.stat().st_size
    precconv.convert(first, to="fp32", output=bare, provenance=False)
    assert KEY not in metadata(bare)
    assert precconv.verify(second, against=first).proven
    assert precconv.verify(bare, against=first).proven


def test_a_directory_of_any_format_has_it_where_its_files_have_a_place_for_it(tmp_path: Path) -> None:
    source = single(tmp_path / "source", {"w": weight(1)})
    precconv.convert(source, to="bf16", output=tmp_path / "pt", format="pt")
    assert sorted(files(tmp_path / "pt")) == ["config.json", "pytorch_model.bin"]
    precconv.convert(tmp_path / "pt", to="fp16", output=tmp_path / "st", format="safetensors")
    assert record(tmp_path / "st" / "model.safetensors")["options"] == {"to": "fp16", "format": "safetensors"}
    assert precconv.verify(tmp_path / "st", against=tmp_path / "pt").proven
    assert precconv.verify(tmp_path / "pt", against=source, to="bf16").proven


def test_what_is_not_changed_is_not_said_to_be_made_anew(source: Path, tmp_path: Path) -> None:
    """A file of which no tensor changes stays the same file, whatever it says of what made it."""
    once, twice, same = (tmp_path / f"{n}.safetensors" for n in ("once", "twice", "same"))
    precconv.convert(source, to="bf16", output=once)
    precconv.convert(once, to="bf16", output=twice)
    assert twice.read_bytes() == once.read_bytes()
    assert precconv.verify(twice, against=source).proven
    assert precconv.verify(twice, against=once).proven
    precconv.convert(source, to="fp32", output=same)
    assert same.read_bytes() == source.read_bytes()


def test_a_component_that_is_kept_is_the_same_file(tmp_path: Path) -> None:
    source = pipeline(tmp_path / "source", unet={"u": weight(1)}, vae={"v": weight(2)})
    save_file({"v": weight(2)}, next((source / "vae").glob("*.safetensors")), metadata={"format": "pt"})
    precconv.convert(source, to="bf16", output=tmp_path / "out", component=["vae=keep"])
    kept = {n: data for n, data in files(tmp_path / "out").items() if n.startswith("vae/")}
    assert kept == {n: data for n, data in files(source).items() if n.startswith("vae/")}
    assert precconv.verify(tmp_path / "out", against=source).proven


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_source_is_told_from_another_of_its_size(tmp_path: Path, zipped: bool) -> None:
    digests: list[str] = []
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        path = tmp_path / name / "m.pt"
        path.parent.mkdir()
        torch.save({"w": weight(seed, (9, 9))}, path, _use_new_zipfile_serialization=zipped)
        if name == "c":
            shutil.copy(tmp_path / "a" / "m.pt", path)  # the older form has addresses of the memory in it
        out = tmp_path / f"{name}.safetensors"
        precconv.convert(path, to="bf16", output=out)
        digests.append(record(out)["source"]["header"])
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_a_model_card_names_the_options_that_the_record_has(tmp_path: Path) -> None:
    source = single(tmp_path / "source", {"w": weight(1), "x": weight(2)})
    (source / "README.md").write_text("# A model\n")
    options: dict[str, Any] = {"rounding": "stochastic", "seed": 3, "keep": ["x"], "rule": ["w=fp16"]}
    precconv.convert(source, to="bf16", output=tmp_path / "out", **options)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "`--to bf16 --rule w=fp16 --keep x --rounding stochastic --seed 3`" in card
    assert precconv.verify(tmp_path / "out", against=source).proven


def test_an_unreadable_record_is_none() -> None:
    good = Record({"to": "bf16"}, 1, "sha256:0", "1")
    assert read_record({KEY: good.text()}) == good
    for text in ("", "{", "[]", "7", "null", '{"options":{}}', good.text().replace('"bf16"}', '"bf16"')):
        assert read_record({KEY: text}) is None
    assert read_record({}) is None


def test_the_record_can_be_seen(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    precconv.convert(source, to="bf16", output=out)
    assert f"metadata {KEY}: " in run("inspect", out).stdout
