"""Where the converted form of a model directory goes, and what is never in danger there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import precconv
from precconv import paths

from . import command
from .processes import posix, tree
from .repos import INDEX, files, layers, load, shard, sharded, single, stages, weight
from .samples import write_checkpoint
from .test_places import unprivileged


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the working directory."""
    monkeypatch.chdir(tmp_path)
    return sharded(tmp_path / "m", layers(2))


def is_model(path: Path) -> bool:
    return files(path).keys() == {shard(1, 2), shard(2, 2), INDEX, "config.json"}


# By default


@pytest.mark.parametrize(("name", "to", "output"), [
    ("m", "bf16", "m-bf16"), ("m", "half", "m-fp16"), ("m-fp32", "bf16", "m-bf16"), ("m-float32", "fp16", "m-fp16"),
    ("m-FP16", "bf16", "m-bf16"), ("m-v2", "bf16", "m-v2-bf16"), ("fp32", "bf16", "fp32-bf16"),
    ("-fp32", "bf16", "-fp32-bf16"), ("m.v1", "bf16", "m.v1-bf16"), ("m-fp8", "bf16", "m-fp8-bf16"),
])  # fmt: skip
def test_the_output_is_beside_the_source_and_says_its_dtype(tmp_path: Path, name: str, to: str, output: str) -> None:
    (tmp_path / "in").mkdir()
    root = single(tmp_path / "in" / name, layers(1)[0])
    assert precconv.convert(root, to=to).output == str(tmp_path / "in" / output)
    assert {p.name for p in root.parent.iterdir()} == {name, output}


@pytest.mark.parametrize("given", [".", "./", "../m", "../m/", "../m/.", "sub/.."])
def test_however_the_source_is_named_the_output_is_beside_it(
    root: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "sub").mkdir()
    monkeypatch.chdir(root)
    precconv.convert(given, to="bf16")
    assert is_model(root.with_name("m-bf16"))
    assert sorted(os.listdir(root.parent)) == ["m", "m-bf16"]


@posix
def test_the_output_of_a_link_to_a_directory_is_beside_the_link(root: Path) -> None:
    (root.parent / "links").mkdir()
    link = root.parent / "links/model"
    link.symlink_to(root)
    precconv.convert(link, to="bf16")
    assert is_model(root.parent / "links/model-bf16")
    assert link.is_symlink()


# Where it was asked for


def test_an_output_inside_the_source_is_no_part_of_it(root: Path) -> None:
    before = files(root)
    for force in (False, True, True):
        report = precconv.convert(root, to="bf16", output=root / "out", force=force)
        assert is_model(root / "out")
        made = files(root / "out")
        assert {n: d for n, d in files(root).items() if not n.startswith("out/")} == before
        assert stages(root) == []
        assert len(precconv.plan(root, to="bf16", output=root / "out").items) == len(report.plan.items) == 4
    assert files(root / "out") == made


@pytest.mark.parametrize("given", ["m", "m/", "m/.", "../{}/m", "link", "m/sub/.."])
@pytest.mark.parametrize("force", [False, True])
def test_the_source_itself_is_refused_as_the_output(root: Path, given: str, force: bool) -> None:
    (root / "sub").mkdir()
    (root.parent / "link").symlink_to(root)
    before = tree(root.parent)
    with pytest.raises(precconv.OutputError, match="is the input itself"):
        precconv.convert(root, to="bf16", output=given.format(root.parent.name), force=force)
    assert tree(root.parent) == before


@pytest.mark.parametrize("given", [".", "..", "m/../..", "/"])
def test_a_directory_that_the_source_lies_in_is_refused_as_the_output(root: Path, given: str) -> None:
    before = tree(root.parent)
    with pytest.raises(precconv.OutputError, match="the input lies in it"):
        precconv.convert(root, to="bf16", output=given, force=True)
    assert tree(root.parent) == before


@posix
@pytest.mark.parametrize("given", ["empty", "link", "nowhere"])
def test_an_empty_directory_takes_the_output_also_through_a_link(root: Path, given: str) -> None:
    target = root.parent / "empty"
    if given != "nowhere":
        target.mkdir()
    (root.parent / "link").symlink_to("empty")
    (root.parent / "nowhere").symlink_to("empty")  # to what is made now
    precconv.convert(root, to="bf16", output=given)
    assert is_model(target)
    assert (root.parent / "link").is_symlink()
    assert stages(root.parent) == []


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="nothing is mounted there")
def test_a_mount_point_is_refused_as_the_output_before_anything_is_done(root: Path) -> None:
    with pytest.raises(precconv.OutputError, match="/proc: is a mount point, which cannot be replaced") as caught:
        precconv.convert(root, to="bf16", output="/proc", force=True)
    assert "/proc/m" in str(caught.value.hint)


@posix
def test_a_loop_of_links_is_refused_as_the_output(root: Path) -> None:
    (root.parent / "a").symlink_to("b")
    (root.parent / "b").symlink_to("a")
    before = tree(root.parent)
    done = command.run(root, "--to", "bf16", "-o", "a")
    assert (done.exit_code, done.stdout) == (1, "")
    assert tree(root.parent) == before


REFUSED: dict[str, tuple[str, str]] = {
    "a file": ("file", "is a file, the output is a directory"),
    "below a file": ("file/out", "there is no such directory"),
    "below nothing": ("nowhere/out", "there is no such directory"),
    "a name that is too long": ("n" * 300, "cannot be written: file name too long"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_place_where_no_directory_can_be_is_one_sentence_with_exit_1(root: Path, what: str, force: list[str]) -> None:
    (root.parent / "file").write_text("x")
    before = tree(root.parent)
    given, sentence = REFUSED[what]
    done = command.run(root, "--to", "bf16", "-o", given, *force)
    assert (done.exit_code, done.stdout) == (1, "")
    assert sentence in done.stderr.splitlines()[0]
    assert tree(root.parent) == before


# Replacing


def test_a_directory_with_something_in_it_is_replaced_only_by_force(root: Path) -> None:
    out = root.with_name("m-bf16")
    out.mkdir()
    (out / "config.json").write_text("old")
    before = tree(root.parent)
    steps: list[int] = []
    with pytest.raises(precconv.OutputError, match="m-bf16: exists") as caught:
        precconv.convert(root, to="bf16", progress=lambda done, _: steps.append(done))
    assert "--force" in str(caught.value.hint)
    assert (tree(root.parent), steps) == (before, [])
    precconv.convert(root, to="bf16", force=True)
    assert is_model(out)


def test_an_older_output_is_replaced_with_all_its_shards(root: Path) -> None:
    precconv.convert(root, to="bf16", shard_size=50)
    out = root.with_name("m-bf16")
    assert len(files(out)) > 4
    for name in ("pytorch_model.bin", "model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"):
        (out / name).write_bytes(b"stale, and loaded by nobody")
    precconv.convert(root, to="bf16", force=True)
    assert is_model(out)
    assert stages(root.parent) == []


@pytest.mark.parametrize("name", [
    "notes.txt", "sub/notes.txt", ".git/HEAD", "link", "sdxl.safetensors", "llama.pt", "unet/model.safetensors",
    "llama-00001-of-00002.safetensors", "llama.safetensors.index.json", "model.pt/x.bin",
])  # fmt: skip
def test_a_foreign_file_in_the_output_is_never_replaced(root: Path, name: str) -> None:
    out = root.with_name("m-bf16")
    precconv.convert(root, to="bf16")
    (out / name).parent.mkdir(exist_ok=True)
    if name == "link":
        (out / name).symlink_to(root)
    else:
        (out / name).write_text("mine")
    before = tree(root.parent)
    with pytest.raises(precconv.OutputError, match=f"holds '{name}', which is not part of the output"):
        precconv.convert(root, to="fp16", output=out, force=True)
    assert tree(root.parent) == before


@pytest.mark.parametrize("force", [False, True])
def test_what_somebody_puts_there_during_the_conversion_is_not_replaced(root: Path, force: bool) -> None:
    out = root.with_name("m-bf16")

    def meanwhile(_done: int, _total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")

    what = "holds 'notes.txt', which is not part of the output" if force else "exists"
    with pytest.raises(precconv.OutputError, match=f"m-bf16: {what}") as caught:
        precconv.convert(root, to="bf16", force=force, progress=meanwhile)
    assert "goes on from there" in str(caught.value.hint)
    assert files(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").unlink()
    precconv.convert(root, to="bf16")
    assert is_model(out)
    assert stages(root.parent) == []


def test_a_file_that_gets_the_outputs_name_during_the_conversion_is_not_replaced(root: Path) -> None:
    out = root.with_name("m-bf16")

    def meanwhile(_done: int, _total: int) -> None:
        out.write_text("mine")

    with pytest.raises(precconv.OutputError, match="m-bf16: cannot be read: not a directory"):
        precconv.convert(root, to="bf16", force=True, progress=meanwhile)
    assert out.read_text() == "mine"


@posix
def test_what_a_link_in_a_replaced_output_leads_to_is_left_alone(root: Path) -> None:
    out, theirs = root.with_name("m-bf16"), root.with_name("theirs.safetensors")
    write_checkpoint(theirs, {"w": weight(1)})
    out.mkdir()
    (out / shard(1, 2)).symlink_to(theirs)
    data = theirs.read_bytes()
    precconv.convert(root, to="bf16", force=True)
    assert is_model(out)
    assert not (out / shard(1, 2)).is_symlink()
    assert theirs.read_bytes() == data


@pytest.mark.parametrize("force", [False, True])
def test_a_failed_conversion_leaves_an_older_output_as_it_was(root: Path, force: bool) -> None:
    precconv.convert(root, to="bf16")
    os.truncate(root / shard(2, 2), 200)
    before = tree(root.parent)
    with pytest.raises(precconv.InputError):
        precconv.convert(root, to="bf16", force=force)
    assert tree(root.parent) == before


# What this user, or the disk, does not allow


@posix
@pytest.mark.parametrize("mode", [0o555, 0o444, 0o000])
def test_a_directory_that_may_not_be_written_is_refused(root: Path, mode: int) -> None:
    import torch  # while it may be read  # noqa: F401

    root.parent.chmod(0o777)
    (root.parent / "closed").mkdir(mode=mode)
    (root.parent / "closed").chmod(mode)
    try:
        with unprivileged(), pytest.raises(precconv.OutputError, match="permission denied"):
            precconv.convert("m", to="bf16", output="closed/out")
        if mode == 0:
            with unprivileged(), pytest.raises(precconv.OutputError, match="closed: cannot be read: permission denied"):
                precconv.convert("m", to="bf16", output="closed", force=True)
    finally:
        (root.parent / "closed").chmod(0o700)
    assert files(root.parent / "closed") == {}
    assert stages(root.parent) == []


@posix
@pytest.mark.parametrize("name", [shard(2, 2), INDEX, "config.json", "tokenizer.json"])
def test_a_file_of_the_source_that_may_not_be_read_is_named(root: Path, name: str) -> None:
    import torch  # while it may be read  # noqa: F401

    (root / "tokenizer.json").write_text("{}")
    root.parent.chmod(0o777)
    (root / name).chmod(0)
    with unprivileged(), pytest.raises(precconv.InputError, match=f"^m/{name}: .*permission denied"):
        precconv.convert("m", to="bf16", workers=1)
    (root / name).chmod(0o600)
    assert not root.with_name("m-bf16").exists()
    precconv.convert("m", to="bf16")
    assert stages(root.parent) == []


def test_space_is_asked_for_the_whole_before_anything_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "tokenizer.json").write_bytes(b" " * 10_000)
    need = 10_000 + sum((root / name).stat().st_size for name in ("config.json",))
    precconv.convert(root, to="bf16")
    need += sum((root.with_name("m-bf16") / shard(n, 2)).stat().st_size for n in (1, 2))
    shutil.rmtree(root.with_name("m-bf16"))
    before = tree(root.parent)
    free = need - 1
    monkeypatch.setattr(paths, "free_bytes", lambda _directory: free)
    with pytest.raises(precconv.OutputError, match=f"m-bf16: needs {need} bytes, the disk has {free} free"):
        precconv.convert(root, to="bf16")
    assert tree(root.parent) == before
    free = need
    precconv.convert(root, to="bf16")
    assert is_model(root.with_name("m-bf16")) is False  # the tokenizer is there too
    assert len(load(root.with_name("m-bf16"))) == 4


# Reports


@pytest.mark.parametrize("name", [
    "m/config.json", f"m/{INDEX}", f"m/{shard(1, 2)}", "m/tokenizer.json", "m/model.onnx", "nowhere/r.json", "out",
])  # fmt: skip
@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_a_report_replaces_nothing_of_the_source(root: Path, name: str, output: str) -> None:
    (root / "tokenizer.json").write_text("{}")
    (root / "model.onnx").write_text("{}")
    before = tree(root.parent)
    kinds: dict[str, Any] = {"report": name if name != "out" else output}
    with pytest.raises(precconv.OutputError) as caught:
        precconv.convert(root, to="bf16", output=output, **kinds)
    assert "report cannot go" in str(caught.value) or "no such directory" in str(caught.value)
    assert tree(root.parent) == before


def test_a_report_into_the_output_that_is_replaced_is_refused(root: Path) -> None:
    precconv.convert(root, to="bf16")
    (root.parent / "link").symlink_to("m-bf16")
    before = tree(root.parent)
    for name in ("m-bf16/r.json", "link/r.json", f"m-bf16/{INDEX}"):
        with pytest.raises(precconv.OutputError, match="the report cannot go into the output"):
            precconv.convert(root, to="bf16", report=name, force=True)
        assert tree(root.parent) == before
    precconv.convert(root, to="bf16", report="m/r.json", force=True)
    assert is_model(root.with_name("m-bf16"))
    assert (root / "r.json").read_text().startswith('{"schema"')
