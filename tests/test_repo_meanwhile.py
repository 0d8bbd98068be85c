"""A conversion whose source or place changes hands: other files under the same names, links, names that are gone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import precconv
from precconv.convert import Outcome, Task
from precconv.convert import write as write_weights
from precconv.fileio import PartFile, try_lock
from precconv.repo import convert, stage
from precconv.runs import Progress

from . import command
from .processes import posix, tree
from .repos import files, layers, sharded, single, stages, weight
from .samples import write_checkpoint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return sharded(tmp_path / "m", layers(2))


def stopped(root: Path, out: Path) -> None:
    """A conversion of which the first shard is done."""

    def stop(_done: int, _total: int) -> None:
        if list(out.parent.glob(f".{out.name}.*/done/*.json")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="1 of 2 weight files are done, and the same command goes on"):
        precconv.convert(root, to="bf16", output=out, workers=1, progress=stop)


def test_another_model_of_the_same_sizes_and_times_does_not_go_on_with_the_firsts_shards(
    root: Path, tmp_path: Path
) -> None:
    other = sharded(tmp_path / "other", [{name: x + 1 for name, x in part.items()} for part in layers(2)])
    for at in (root, other):
        for path in at.iterdir():
            os.utime(path, (1, 1))  # as unpacked from an archive that is the same wherever it is made
    precconv.convert(other, to="bf16", output=tmp_path / "wanted")
    stopped(root, tmp_path / "out")
    precconv.convert(other, to="bf16", output=tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "wanted")


@posix
@pytest.mark.parametrize("below", ["", "files", "done"])
def test_a_link_in_place_of_the_stage_is_refused_and_what_it_leads_to_stays(
    root: Path, tmp_path: Path, below: str
) -> None:
    theirs, home = tmp_path / "theirs", stage.home_of(tmp_path / "m-bf16")
    for name in ("files/a", "done/b", "c"):
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text("theirs")
    (home / below).parent.mkdir(exist_ok=True)
    (home / below).symlink_to(theirs)
    before = tree(theirs)
    with pytest.raises(precconv.OutputError, match="is a link where the output is to be made"):
        precconv.convert(root, to="bf16")
    stage.remove_stage(tmp_path / "m-bf16")
    assert tree(theirs) == before


@posix
def test_a_run_that_waited_for_a_lock_that_was_removed_does_not_run_beside_the_next(tmp_path: Path) -> None:
    final = tmp_path / "out"

    def overtaken(fd: int) -> bool:
        """Between opening and locking, the run before ends, and another begins."""
        home = stage.home_of(final)
        shutil.rmtree(home)
        home.mkdir()
        (home / "lock").touch()
        return try_lock(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "try_lock", overtaken)
        with (
            pytest.raises(precconv.OutputError, match="another run is writing it"),
            stage.staged(final, "a", durable=False),
        ):
            pytest.fail("two runs have it")


@posix
@pytest.mark.parametrize("gone", ["model.safetensors", "config.json", "notes.txt"])
def test_a_source_that_loses_a_name_meanwhile_is_one_sentence(
    tmp_path: Path, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = single(tmp_path / "m", {"w": weight(1)})
    (root / "notes.txt").write_text("notes")

    def write(task: Task, part: PartFile, progress: Progress) -> Outcome:
        (root / gone).unlink()
        return write_weights(task, part, progress)

    monkeypatch.setattr(convert, "write", write)
    refused = command.run(root, "--to", "bf16")
    assert refused.exit_code == 1
    assert f"{gone}: " in refused.stderr
    assert "no such file or directory" in refused.stderr
    assert not (tmp_path / "m-bf16").exists()


def test_a_checkpoint_with_the_stages_name_is_no_stage(root: Path, tmp_path: Path) -> None:
    write_checkpoint(stage.home_of(tmp_path / "m-bf16"), {"w": weight(1)})
    with pytest.raises(precconv.OutputError, match="cannot be written: not a directory"):
        precconv.convert(root, to="bf16")
    assert stages(tmp_path) == [stage.home_of(tmp_path / "m-bf16")]


def test_what_a_killed_run_was_writing_is_gone_before_anything_else_is_written(root: Path, tmp_path: Path) -> None:
    stopped(root, tmp_path / "out")
    home = stage.home_of(tmp_path / "out")
    left = [home / where / ".x.00000000.precconv-part" for where in ("", "done", "files", "files/sub")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half of a large shard")
    seen: list[bool] = []
    precconv.convert(
        root, to="bf16", output=tmp_path / "out", progress=lambda *_: seen.append(any(p.exists() for p in left))
    )
    assert set(seen) == {False}
