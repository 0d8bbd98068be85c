"""Where sources are read from and outputs go: no source is harmed, nothing hangs, nothing of others is replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import precconv
from fixtures import make

from .processes import ROOT, assert_refused, posix, run, tree

LLAMA = make.ROOT / "good/tiny-llama.safetensors"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.safetensors"
    path.write_bytes(LLAMA.read_bytes())
    return path


# The output is the source


def other_names(source: Path) -> dict[str, str]:
    """Every way to name the source as the output."""
    here = source.parent
    (here / "link.safetensors").symlink_to(source)
    (here / "relative-link.safetensors").symlink_to(source.name)
    (here / "link-to-link.safetensors").symlink_to("link.safetensors")
    (here / "hard.safetensors").hardlink_to(source)
    (here / "folder").symlink_to(here, target_is_directory=True)
    (here / "sub").mkdir()
    return {
        "the same path": str(source),
        "a relative path": "m.safetensors",
        "a path that goes round": "sub/../m.safetensors",
        "a symlink": "link.safetensors",
        "a relative symlink": "relative-link.safetensors",
        "a symlink to a symlink": "link-to-link.safetensors",
        "a hard link": "hard.safetensors",
        "a path through a linked folder": "folder/m.safetensors",
    }


@posix
@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_the_source_is_refused_by_whatever_name_and_the_source_is_unchanged(
    source: Path, force: bool
) -> None:
    names = other_names(source)
    before = tree(source.parent)
    for how, name in names.items():
        for given in (source, Path(name)):
            if given != source and not given.exists():
                continue
            with pytest.raises(precconv.OutputError, match="is the input itself"):
                precconv.convert(given, to="bf16", output=name, force=force)
            assert tree(source.parent) == before, how


@posix
def test_the_command_refuses_to_write_over_its_source_with_exit_code_1(source: Path) -> None:
    (source.parent / "link.safetensors").symlink_to(source)
    before = tree(source.parent)
    for name in ("m.safetensors", "link.safetensors"):
        done = run(source, "--to", "bf16", "-o", name, "--force", cwd=source.parent)
        assert_refused(done, 1, "is the input itself")
    assert tree(source.parent) == before


def test_a_default_name_that_is_the_sources_own_is_refused(source: Path) -> None:
    own = source.rename(source.with_name("m.bf16.safetensors"))
    with pytest.raises(precconv.OutputError, match="is the input itself"):
        precconv.convert(own, to="bf16", force=True)
    assert own.read_bytes() == LLAMA.read_bytes()


@posix
@pytest.mark.parametrize("name", ["m.safetensors", "link.safetensors", "hard.safetensors", "out.safetensors"])
def test_a_report_over_the_source_or_the_output_is_refused(source: Path, name: str) -> None:
    (source.parent / "link.safetensors").symlink_to(source)
    (source.parent / "hard.safetensors").hardlink_to(source)
    before = tree(source.parent)
    with pytest.raises(precconv.OutputError, match="the report cannot go there"):
        precconv.convert(source, to="bf16", output="out.safetensors", report=name)
    assert tree(source.parent) == before


# The output is something else


@pytest.mark.parametrize("data", [b"", b"old"])
def test_an_existing_output_is_replaced_only_by_force(source: Path, data: bytes) -> None:
    out = source.with_name("out.safetensors")
    out.write_bytes(data)
    steps: list[int] = []
    with pytest.raises(precconv.OutputError, match="exists") as caught:
        precconv.convert(source, to="bf16", output=out, progress=lambda done, _total: steps.append(done))
    assert "--force" in str(caught.value.hint)
    assert steps == []
    assert out.read_bytes() == data
    precconv.convert(source, to="bf16", output=out, force=True)
    assert len(precconv.inspect(out)) == len(precconv.inspect(source))


@posix
@pytest.mark.parametrize("target", ["nowhere/x.safetensors", "victim.safetensors", os.devnull])
def test_a_link_as_the_output_is_replaced_itself_and_only_by_force(source: Path, target: str) -> None:
    out, victim = source.with_name("out.safetensors"), source.with_name("victim.safetensors")
    victim.write_bytes(b"theirs")
    out.symlink_to(target)
    with pytest.raises(precconv.OutputError, match="exists"):
        precconv.convert(source, to="bf16", output=out)
    assert out.is_symlink()
    precconv.convert(source, to="bf16", output=out, force=True)
    assert out.is_file()
    assert not out.is_symlink()
    assert victim.read_bytes() == b"theirs"
    assert sorted(p.name for p in source.parent.iterdir()) == ["m.safetensors", "out.safetensors", "victim.safetensors"]
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


@posix
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_pipe_as_the_output_is_refused_and_stays_a_pipe(source: Path, force: list[str]) -> None:
    os.mkfifo("pipe.safetensors")
    before = tree(source.parent)
    done = run("m.safetensors", "--to", "bf16", "-o", "pipe.safetensors", *force, cwd=source.parent)
    assert_refused(done, 1, "pipe.safetensors: is not a regular file")
    assert tree(source.parent) == before


@posix
def test_the_null_device_as_the_output_is_refused(source: Path) -> None:
    done = run("m.safetensors", "--to", "bf16", "-o", os.devnull, "--force", cwd=source.parent)
    assert_refused(done, 2, "does not say a format")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)


def test_a_directory_as_the_output_takes_the_file_in(source: Path) -> None:
    for name in ("out", "out.safetensors"):
        source.with_name(name).mkdir()
        report = precconv.convert(source, to="bf16", output=name)
        assert report.output == os.path.join(name, "m.bf16.safetensors")
        assert sorted(os.listdir(name)) == ["m.bf16.safetensors"]


@pytest.mark.parametrize("force", [False, True])
def test_a_directory_that_has_the_default_outputs_name_is_refused(source: Path, force: bool) -> None:
    source.with_name("m.bf16.safetensors").mkdir()
    source.with_name("out").mkdir()
    source.with_name("out").joinpath("m.bf16.safetensors").mkdir()
    before = tree(source.parent)
    for output in (None, "out"):
        with pytest.raises(precconv.OutputError, match="is not a regular file"):
            precconv.convert(source, to="bf16", output=output, force=force)
    assert tree(source.parent) == before


@pytest.mark.parametrize("output", ["nowhere/out.safetensors", "nowhere/", "m.safetensors/out.safetensors"])
def test_an_output_in_a_directory_that_does_not_exist_is_refused(source: Path, output: str) -> None:
    before = tree(source.parent)
    with pytest.raises(precconv.OutputError, match="there is no such directory"):
        precconv.convert(source, to="bf16", output=output)
    assert tree(source.parent) == before


# The source is something else


@posix
@pytest.mark.parametrize(("name", "sentence"), [
    ("nowhere.safetensors", "nowhere.safetensors: no such file or directory"),
    ("folder", "folder: there are no files"),
    ("", ": is a directory"),
    ("m.safetensors/x", "m.safetensors/x: not a directory"),
    ("n" * 300, "n: file name too long"),
    ("folder/" + "n" * 300, "n: file name too long"),
])  # fmt: skip
def test_a_source_that_is_no_file_is_named_in_one_sentence(source: Path, name: str, sentence: str) -> None:
    source.with_name("folder").mkdir()
    for call in (precconv.inspect, lambda path: precconv.convert(path, to="bf16")):
        with pytest.raises(precconv.InputError) as caught:
            call(name)
        assert sentence in str(caught.value)


@pytest.mark.parametrize("argument", ["-o", "--report"])
def test_a_name_that_is_too_long_is_refused_before_any_work(source: Path, argument: str) -> None:
    before = tree(source.parent)
    for name in ("n" * 300 + ".safetensors", "n" * 300 + "/out.safetensors"):
        done = run("m.safetensors", "--to", "bf16", argument, name, cwd=source.parent)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        if argument == "-o":
            assert tree(source.parent) == before


@posix
@pytest.mark.parametrize(
    "command", [["inspect"], ["convert", "--to", "bf16"], ["convert", "--to", "bf16", "--dry-run"]]
)
def test_a_pipe_or_device_as_the_source_is_refused_and_not_waited_for(source: Path, command: list[str]) -> None:
    os.mkfifo("pipe.safetensors")
    Path("link.safetensors").symlink_to(os.devnull)
    for name in ("pipe.safetensors", os.devnull, "link.safetensors", "/dev/zero"):
        assert_refused(run(*command, name, cwd=source.parent), 1, f"error: {name}: is not a regular file")
    assert stat.S_ISFIFO(Path("pipe.safetensors").stat().st_mode)


@posix
def test_a_loop_of_links_is_refused(source: Path) -> None:
    source.with_name("a.safetensors").symlink_to("b.safetensors")
    source.with_name("b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(precconv.InputError, match="symbolic links"):
        precconv.inspect("a.safetensors")


# What this user may not do


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may do anything: become somebody who may not.  Paths must be relative to the working directory."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@posix
def test_a_source_that_may_not_be_read_is_refused(source: Path) -> None:
    source.parent.chmod(0o777)
    closed = source.with_name("closed")
    closed.mkdir()
    (closed / "m.safetensors").write_bytes(LLAMA.read_bytes())
    closed.chmod(0)
    source.chmod(0)
    try:
        for name in ("m.safetensors", "closed/m.safetensors"):
            with unprivileged(), pytest.raises(precconv.InputError, match=f"^{name}: permission denied$"):
                precconv.inspect(name)
            with unprivileged(), pytest.raises(precconv.InputError, match=f"^{name}: permission denied$"):
                precconv.convert(name, to="bf16")
    finally:
        closed.chmod(0o700)


@posix
@pytest.mark.parametrize("mode", [0o555, 0o666, 0o444, 0o000])
def test_a_directory_that_may_not_be_written_or_entered_is_refused_as_the_outputs(source: Path, mode: int) -> None:
    import torch  # while it may be read  # noqa: F401

    precconv.plan("m.safetensors", to="bf16")  # and what that imports
    source.parent.chmod(0o777)
    source.chmod(0o644)
    closed = source.with_name("closed")
    closed.mkdir()
    closed.chmod(mode)
    try:
        with unprivileged(), pytest.raises(precconv.OutputError) as caught:
            precconv.convert("m.safetensors", to="bf16", output="closed/out.safetensors")
    finally:
        closed.chmod(0o700)
    assert str(caught.value) == "closed/out.safetensors: cannot be written: permission denied"
    assert list(closed.iterdir()) == []


@pytest.mark.parametrize("kind", ["fifo", "link", "checkpoint"])
def test_a_report_replaces_nothing_but_a_report(kind: str, tmp_path: Path) -> None:
    source, report, out = tmp_path / "in.safetensors", tmp_path / "r", tmp_path / "out.safetensors"
    source.write_bytes((ROOT / "fixtures/good/tiny-llama.safetensors").read_bytes())
    if kind == "fifo":
        os.mkfifo(report)
    elif kind == "link":
        report.symlink_to(tmp_path / "elsewhere")
    else:
        report.write_bytes(source.read_bytes())
    before = os.lstat(report)
    with pytest.raises(precconv.OutputError, match="the report cannot go there"):
        precconv.convert(source, to="bf16", output=out, report=report)
    assert os.lstat(report) == before
    assert not out.exists()


def test_a_directory_whose_name_is_not_unicode_holds_a_source_and_its_output(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/n\xff"
    os.mkdir(folder)
    source = Path(os.fsdecode(folder + b"/in.safetensors"))
    source.write_bytes((ROOT / "fixtures/good/tiny-llama.safetensors").read_bytes())
    for suffix in ("safetensors", "pt"):
        report = precconv.convert(source, to="bf16", output=source.with_name(f"out.{suffix}"))
        assert report.ok
        assert report.verified_bytes > 0
