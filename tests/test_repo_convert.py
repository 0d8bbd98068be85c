"""Crafted model directories: what the output is, and that bad ones are one sentence with nothing written."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import precconv
from precconv.convert import write as write_task
from precconv.runs import Stopped

from . import command
from .processes import HANG, posix, tree
from .repos import CONFIG, INDEX, files, layers, load, read_index, shard, sharded, single, stages, weight, write_index
from .samples import write_checkpoint

# The index


def test_the_index_says_what_was_written_and_keeps_its_other_metadata(tmp_path: Path) -> None:
    parts = layers(3)
    root = sharded(tmp_path / "m", parts, metadata={"by": {"who": "ü"}, "total_size": 12345, "total_parameters": 141})
    precconv.convert(root, to="bf16")
    index = read_index(tmp_path / "m-bf16")  # compares it with the shards
    size = sum(2 * x.numel() for p in parts for x in p.values())
    assert list(index["metadata"].items()) == [
        ("by", {"who": "ü"}), ("total_size", size), ("total_parameters", 141),
    ]  # fmt: skip
    assert set(index["weight_map"].values()) == {shard(n, 3) for n in (1, 2, 3)}
    got = load(tmp_path / "m-bf16")
    assert all(torch.equal(got[name], x.bfloat16()) for p in parts for name, x in p.items())


@pytest.mark.parametrize("metadata", [{"note": "\ud800"}, {"note": "\u2028"}, {"n": 10**300, "x": 1e308, "y": None}])
def test_any_metadata_that_is_json_survives(tmp_path: Path, metadata: Mapping[str, object]) -> None:
    root = sharded(tmp_path / "m", layers(2), metadata=metadata)
    precconv.convert(root, to="bf16")
    found = read_index(tmp_path / "m-bf16")["metadata"]
    assert {key: found[key] for key in metadata} == metadata


def test_shards_with_names_of_their_own_keep_them(tmp_path: Path) -> None:
    names = ["weights_b.safetensors", "sub/weights_a.safetensors"]
    (tmp_path / "m/sub").mkdir(parents=True)
    root = sharded(tmp_path / "m", layers(2), names=names)
    precconv.convert(root, to="bf16")
    assert set(read_index(tmp_path / "m-bf16")["weight_map"].values()) == set(names)
    assert files(tmp_path / "m-bf16").keys() == {"config.json", INDEX, *names}


def test_a_tensor_that_the_index_does_not_name_is_kept_and_said(tmp_path: Path) -> None:
    parts = layers(2)
    known = {name: shard(n, 2) for n, p in enumerate(parts, 1) for name in p if name != "layer.1.a"}
    root = sharded(tmp_path / "m", parts, weight_map=known)
    report = precconv.convert(root, to="bf16")
    assert f"not in {INDEX}, but in its shards, and so in the output: 'layer.1.a'" in report.plan.notes
    assert read_index(tmp_path / "m-bf16")["weight_map"]["layer.1.a"] == shard(2, 2)


def test_stray_weight_files_are_named_and_not_merged(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(2))
    write_checkpoint(root / "extra.safetensors", {"x": weight(9)})
    torch.save({"x": weight(9)}, root / "pytorch_model.bin")
    report = precconv.convert(root, to="bf16")
    left = {f.path: f.why for f in report.files if f.action == "left out"}
    assert left.keys() == {"extra.safetensors", "pytorch_model.bin"}
    assert "x" not in load(tmp_path / "m-bf16")
    assert "left out, not part of model.safetensors.index.json: extra.safetensors" in report.plan.notes


# Bad input

Craft = Callable[[Path], object]


def _in_another_shard(root: Path) -> None:
    sharded(root, layers(2), weight_map={"layer.0.a": shard(2, 2), "layer.1.a": shard(1, 2)})


def _in_no_shard(root: Path) -> None:
    sharded(root, layers(2), weight_map={"nowhere": shard(1, 2), "layer.1.a": shard(2, 2)})


def _twice(root: Path) -> None:
    sharded(root, [{"u": weight(0), "w": weight(1)}, {"w": weight(1), "v": weight(2)}])


def _truncated(root: Path) -> None:
    path = sharded(root, layers(2)) / shard(2, 2)
    os.truncate(path, path.stat().st_size - 1)


def _missing(root: Path) -> None:
    sharded(root, layers(4))
    (root / shard(2, 4)).unlink()
    (root / shard(4, 4)).unlink()


def _extra(root: Path) -> None:
    shutil.copy(sharded(root, layers(2)) / shard(1, 2), root / shard(3, 2))


def _missing_without_index(root: Path) -> None:
    _missing(root)
    (root / INDEX).unlink()


def _mapped(value: object) -> Craft:
    return lambda root: sharded(root, layers(2), weight_map={"layer.0.a": value, "layer.1.a": shard(2, 2)})


def _index(text: str) -> Craft:
    return lambda root: (sharded(root, layers(2)) / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))


def _config(data: bytes) -> Craft:
    return lambda root: (sharded(root, layers(2)) / "config.json").write_bytes(data)


def _colliding(root: Path) -> None:
    (single(root, layers(1)[0]) / "notes.txt").touch()
    (root / "Notes.TXT").touch()


def _weightless(root: Path) -> None:
    root.mkdir()
    (root / "config.json").write_text(CONFIG)


def _dangling(root: Path) -> None:
    (single(root, layers(1)[0]) / "tokenizer.json").symlink_to("../blobs/gone")


def _circle(root: Path) -> None:
    (single(root, layers(1)[0]) / "a").symlink_to("b")
    (root / "b").symlink_to("a")


CRAFTED: dict[str, tuple[Craft, str]] = {
    "a tensor in another shard": (_in_another_shard, f"'layer.0.a': should be in '{shard(2, 2)}', is in"),
    "a tensor in no shard": (_in_no_shard, f"'nowhere': should be in '{shard(1, 2)}', which does not hold it"),
    "a name in two shards": (_twice, f"'w': is in two shards, '{shard(1, 2)}' and '{shard(2, 2)}'"),
    "a truncated shard": (_truncated, f"{shard(2, 2)}: "),
    "missing shards": (_missing, f"2 of its 4 shards not found: {shard(2, 4)}, {shard(4, 4)}"),
    "missing shards, no index": (_missing_without_index, "4 shards without an index, not found: number 2, 4"),
    "a shard too many": (_extra, f"it does not name {shard(3, 2)}"),
    "a path that leaves": (_mapped("../x.safetensors"), "'../x.safetensors' leaves the directory"),
    "an absolute path": (_mapped("/etc/x.safetensors"), "is absolute"),
    "a drive": (_mapped("C:x.safetensors"), "is absolute"),
    "a backslash": (_mapped("a\\x.safetensors"), "holds a backslash"),
    "a newline": (_mapped("a\n.safetensors"), "holds a control character"),
    "no file name": (_mapped(5), "its shard is int, not a file name"),
    "a config as shard": (_mapped("config.json"), "does not end in .safetensors"),
    "a directory as shard": (_mapped("x/.safetensors/"), "is not a plain path"),
    "no map": (_index('{"metadata": {}}'), "it has no 'weight_map'"),
    "a list as map": (_index('{"weight_map": []}'), "its 'weight_map' is not an object"),
    "an empty map": (_index('{"weight_map": {}}'), "its 'weight_map' is empty"),
    "metadata that is none": (_index('{"metadata": [], "weight_map": {"a": "b"}}'), "its 'metadata' is not an object"),
    "deep metadata": (_index('{"metadata": {"a": %s}}' % ("[" * 500 + "]" * 500)), "its 'metadata' nests too deeply"),
    "very deep JSON": (_index("[" * 100_000), "nests too deeply"),
    "an infinite number": (_index('{"metadata": {"a": 1e999}}'), "not valid JSON"),
    "a key twice": (_index('{"weight_map": {"a": "b", "a": "c"}}'), "has the key 'a' twice"),
    "an index that is text": (_index("<html>"), f"{INDEX}: not valid JSON"),
    "an index in no encoding": (_index("\udc80"), f"{INDEX}: not valid JSON"),
    "a config that is text": (_config(b"<html>"), "config.json: not valid JSON"),
    "a config that is a list": (_config(b"[]"), "config.json: not an object"),
    "a config in no encoding": (_config(b'{"a": "\xff"}'), "config.json: not valid JSON"),
    "names that differ in case": (_colliding, "'Notes.TXT' and 'notes.txt' are one name where case"),
    "no weights": (_weightless, "there are no weights"),
    "a link to nothing": (_dangling, "is a link to '../blobs/gone', which is not there"),
    "links in a circle": (_circle, ": too many levels of symbolic links"),
    "nothing at all": (lambda root: root.mkdir(), "there are no files"),
}  # fmt: skip


@pytest.mark.parametrize("what", CRAFTED)
def test_a_bad_directory_is_one_sentence_with_exit_1_and_nothing_is_written(tmp_path: Path, what: str) -> None:
    craft, sentence = CRAFTED[what]
    craft(tmp_path / "m")
    before = tree(tmp_path)
    for options in ([], ["-o", tmp_path / "one.safetensors"], ["--dry-run"]):
        done = command.run(tmp_path / "m", "--to", "bf16", *options)
        assert (done.exit_code, done.stdout) == (1, ""), done.output
        first, *rest = done.stderr.splitlines()
        assert first.startswith("error: ")
        assert sentence in first
        assert len(rest) <= 1
        assert all(line.startswith("hint: ") for line in rest)
        assert tree(tmp_path) == before


@pytest.mark.parametrize("craft", [_in_another_shard, _in_no_shard])
def test_an_index_that_contradicts_its_shards_is_corrupt(tmp_path: Path, craft: Craft) -> None:
    craft(tmp_path / "m")
    with pytest.raises(precconv.CorruptCheckpointError) as caught:
        precconv.convert(tmp_path / "m", to="bf16")
    assert caught.value.tensor in ("layer.0.a", "nowhere")
    assert caught.value.path == tmp_path / "m" / INDEX


@posix
def test_a_pipe_in_a_directory_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(single(tmp_path / "m", layers(1)[0]) / "pipe")
    with pytest.raises(precconv.InputError, match="is neither a file nor a directory"):
        precconv.convert(tmp_path / "m", to="bf16")


@pytest.mark.parametrize(
    ("options", "name"), [({"variant": "fp16"}, "model.fp16.safetensors"), ({"format": "pt"}, "pytorch_model.bin")]
)
def test_a_file_that_is_carried_over_never_takes_the_place_of_a_converted_one(
    tmp_path: Path, options: dict[str, Any], name: str
) -> None:
    root = single(tmp_path / "m", layers(1)[0])
    (root / name).write_bytes((root / "model.safetensors").read_bytes())
    with pytest.raises(precconv.InputError, match=f"'{name}' would be written twice"):
        precconv.convert(root, to="bf16", copy_all=True, **options)
    assert stages(tmp_path) == []
    report = precconv.convert(root, to="bf16", **options)
    assert [f.path for f in report.files if f.action == "converted"] == [name]


# Permissions


@posix
def test_files_keep_their_permissions_also_where_nobody_may_write_them(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(2))
    (root / "README.md").write_text("# Model\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    modes = {shard(1, 2): 0o444, shard(2, 2): 0o640, "config.json": 0o444, "README.md": 0o600, "run.sh": 0o555}
    for name, mode in modes.items():
        (root / name).chmod(mode)
    for _ in range(2):  # the second time over read-only files
        precconv.convert(root, to="bf16", force=True)
        found = {name: (tmp_path / "m-bf16" / name).stat().st_mode & 0o7777 for name in modes}
        assert found == modes
    assert b"bfloat16" in (tmp_path / "m-bf16/config.json").read_bytes()
    assert stages(tmp_path) == []


# Workers


def report_data(report: precconv.Report) -> dict[str, Any]:
    return {**report.to_dict(), "seconds": 0, "output": ""}


def test_any_number_of_workers_gives_the_same_bytes_and_the_same_report(tmp_path: Path) -> None:
    parts = [*layers(6), {"big": torch.full((3, 7), 1e6), "norm.weight": weight(50, (8,))}]
    root = sharded(tmp_path / "m", parts)
    made = []
    for workers in (1, 2, 5):
        report = precconv.convert(
            root, to="fp16", output=tmp_path / "out", workers=workers, force=True, on_overflow="fp32",
            report=tmp_path / "r.json",
        )  # fmt: skip
        made.append((files(tmp_path / "out"), report_data(report)))
    assert made[0] == made[1] == made[2]
    assert made[0][1]["findings"][0]["tensor"] == "big"
    assert read_index(tmp_path / "out")["metadata"]["total_size"] == sum(g["bytes"] for g in made[0][1]["groups"])


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_progress_comes_in_the_callers_thread_grows_and_ends_at_its_total(tmp_path: Path, workers: int) -> None:
    root = sharded(tmp_path / "m", layers(8))
    steps: list[tuple[int, int]] = []
    threads: set[int] = set()

    def show(done: int, total: int) -> None:
        steps.append((done, total))
        threads.add(threading.get_ident())

    precconv.convert(root, to="bf16", workers=workers, progress=show, verify="full")
    assert threads == {threading.get_ident()}
    assert steps == sorted(steps)
    assert all(done <= total for done, total in steps)
    size = sum(x.nbytes for p in layers(8) for x in p.values())
    assert steps[-1] == (2 * size, 2 * size)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_shard_that_fails_stops_the_others_and_is_the_one_named(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sharded(tmp_path / "m", layers(30))
    begun: list[str] = []
    module = sys.modules["precconv.repo.convert"]
    real = write_task

    def write(task: Any, part: Any, progress: Any) -> Any:
        begun.append(task.final.name)
        if task.final.name == shard(3, 30):
            raise precconv.SourceChangedError("changed while it was read", path=task.file.path)
        return real(task, part, progress)

    monkeypatch.setattr(module, "write", write)
    with pytest.raises(precconv.SourceChangedError, match=shard(3, 30)):
        precconv.convert(root, to="bf16", workers=workers)
    assert len(begun) < 30
    assert tree(tmp_path).keys() == {"m", *(f"m/{name}" for name in files(root))}


def test_a_shard_that_is_being_written_when_another_fails_is_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sharded(tmp_path / "m", layers(2))
    begun, called_off = threading.Event(), []

    def write(task: Any, _part: Any, progress: Any) -> Any:
        if task.final.name == shard(2, 2):
            assert begun.wait(HANG)
            raise precconv.SourceChangedError("changed while it was read", path=task.file.path)
        begun.set()
        deadline = time.monotonic() + HANG
        try:
            while time.monotonic() < deadline:
                progress.show()  # as a long pass does
        except Stopped:
            called_off.append(task.final.name)
            raise
        pytest.fail("nobody said that it was over")

    monkeypatch.setattr(sys.modules["precconv.repo.convert"], "write", write)
    with pytest.raises(precconv.SourceChangedError, match=shard(2, 2)):
        precconv.convert(root, to="bf16", workers=2)
    assert called_off == [shard(1, 2)]


# Reports


def test_the_report_names_all_files_and_all_tensors(tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", layers(2))
    (root / "tokenizer.json").write_text("{}")
    (root / "model.onnx").write_bytes(b"x")
    report = precconv.convert(root, to="bf16", report=tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert data == {**report.to_dict()}
    assert [(f["path"], f["action"]) for f in data["files"]] == [
        (shard(1, 2), "converted"), (shard(2, 2), "converted"), ("tokenizer.json", "copied"), (INDEX, "written"),
        ("config.json", "written"), ("model.onnx", "left out"),
    ]  # fmt: skip
    out = tmp_path / "m-bf16"
    sizes = {f["path"]: f["nbytes"] for f in data["files"] if f["nbytes"] is not None}
    assert sizes == {name: len(content) for name, content in files(out).items()}
    assert [t["name"] for t in data["tensors"]] == [name for p in layers(2) for name in p]
    assert data["output_bytes"] == sum(sizes[shard(n, 2)] for n in (1, 2))
    assert {t["to"] for t in data["tensors"]} == {"bf16"}


def test_a_cast_checkpoint_is_the_one_that_safetensors_itself_would_save(tmp_path: Path) -> None:
    tensors = {"b": weight(1), "a": weight(2), "n": torch.arange(4)}
    root = tmp_path / "m"
    root.mkdir()
    save_file(tensors, root / "model.safetensors")
    precconv.convert(root, to="fp16", format="pt", output=tmp_path / "bin")
    precconv.convert(tmp_path / "bin", to="fp16", format="safetensors", output=tmp_path / "safe")
    assert files(tmp_path / "bin").keys() == {"pytorch_model.bin"}
    got = load_file(tmp_path / "safe/model.safetensors")
    assert {n: x.dtype for n, x in got.items()} == {"a": torch.float16, "b": torch.float16, "n": torch.int64}
    assert all(torch.equal(got[n], x.to(got[n].dtype)) for n, x in tensors.items())


def test_a_stale_index_beside_a_whole_file_is_left_out(tmp_path: Path) -> None:
    root = single(tmp_path / "m", layers(1)[0])
    write_index(root, {"gone": shard(1, 1)}, {})
    report = precconv.convert(root, to="bf16")
    assert [f.path for f in report.files if f.action == "left out"] == [INDEX]
    assert files(tmp_path / "m-bf16").keys() == {"config.json", "model.safetensors"}
