"""A conversion of a model directory that is killed, interrupted or refused, and the one that goes on from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import precconv
from precconv.repo import stage as stage_module

from .forked import Ended, Runner, commands
from .pages import data_of
from .processes import HANG, assert_refused, posix, start, tree, wait_until
from .processes import run as run_process
from .repos import CONFIG, files, layers, shard, sharded, stages, weight
from .samples import write_checkpoint

pytestmark = posix

SHARDS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with commands(tmp_path_factory.mktemp("said")) as runner:
        yield runner


def model(root: Path, count: int = SHARDS) -> Path:
    sharded(root, layers(count))
    (root / "tokenizer.json").write_text("{}")
    (root / "README.md").write_text("# Model\n")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return model(tmp_path / "m")


def arguments(root: Path, *more: str) -> tuple[str | Path, ...]:
    return (root, "--to", "bf16", "--workers", "1", *more)


def out(root: Path) -> Path:
    return root.with_name(f"{root.name}-bf16")


def step(ended: Ended, text: str, nth: int = 0) -> int:
    """The number of a step of a run."""
    return [n for n, said in enumerate(ended.steps) if said == text][nth]


@pytest.fixture
def clean(run: Runner, root: Path) -> Ended:
    """What an uninterrupted run does; its output is taken away again."""
    ended = run(*arguments(root))
    assert ended.code == 0, ended.stderr
    out(root).rename(root.with_name("clean"))
    assert stages(root.parent) == []
    return ended


def assert_whole(root: Path) -> None:
    assert files(out(root)) == files(root.with_name("clean"))
    assert stages(root.parent) == []


# Killed


def test_a_run_killed_at_any_step_is_gone_on_with_and_ends_as_if_it_never_was(
    run: Runner, root: Path, clean: Ended
) -> None:
    names = [shard(n, SHARDS) for n in range(1, SHARDS + 1)]
    went_on = 0
    for at in range(len(clean.steps)):
        killed = run(*arguments(root), at=at)
        assert killed.code == -signal.SIGKILL
        assert killed.steps == clean.steps[:at]
        if step(clean, "renamed files") <= at:
            assert files(out(root)) == files(root.with_name("clean"))
        else:
            assert not out(root).exists(), "nothing looks complete until it is"
            finished = {name for name in names if step(clean, f"recorded {name}") <= at + 1}  # the record has its name
            again = run(*arguments(root))
            assert again.code == 0, again.stderr
            assert again.written() & set(names) == set(names) - finished
            assert_whole(root)
            went_on += bool(finished)
        shutil.rmtree(out(root))
        for left in stages(root.parent):
            shutil.rmtree(left)
    assert went_on > 10


def test_an_output_that_is_being_replaced_is_old_or_new_after_a_run_was_killed_at_any_step(
    run: Runner, root: Path
) -> None:
    precconv.convert(root, to="bf16", output=root.with_name("clean"))
    old = root.with_name("old")
    old.mkdir()
    write_checkpoint(old / "model.safetensors", {"w": weight(1)})
    new, before = files(root.with_name("clean")), files(old)
    shutil.copytree(old, out(root))
    whole = run(*arguments(root, "--force"))
    assert files(out(root)) == new
    late = [n for n, said in enumerate(whole.steps) if n >= step(whole, "publish")]
    assert whole.steps[late[1]].startswith("rename m-bf16")
    between = 0
    for at in [step(whole, f"recorded {shard(2, SHARDS)}"), *late]:
        shutil.rmtree(out(root))
        shutil.copytree(old, out(root))
        assert run(*arguments(root, "--force"), at=at).code == -signal.SIGKILL
        between += not out(root).exists()
        if out(root).exists():
            assert files(out(root)) in (before, new)
        refused = run(*arguments(root))
        assert (refused.code, "m-bf16: exists" in refused.stderr) == (1, True), refused.stderr
        assert files(out(root)) in (before, new)
        again = run(*arguments(root, "--force"))
        assert again.code == 0
        assert_whole(root)
    assert between >= 1


def test_an_output_that_is_being_replaced_is_never_away_after_an_interruption(run: Runner, root: Path) -> None:
    precconv.convert(root, to="bf16", output=root.with_name("clean"))
    new = files(root.with_name("clean"))
    write_checkpoint(root.with_name("model.safetensors"), {"w": weight(1)})
    out(root).mkdir()
    shutil.copy(root.with_name("model.safetensors"), out(root))
    before = files(out(root))
    whole = run(*arguments(root, "--force"))
    kept = 0
    for at in range(step(whole, "publish"), step(whole, "renamed files")):
        shutil.rmtree(out(root))
        out(root).mkdir()
        shutil.copy(root.with_name("model.safetensors"), out(root))
        ended = run(*arguments(root, "--force"), at=at, by=signal.SIGINT)
        assert ended.code == 130
        assert files(out(root)) in (before, new)
        kept += files(out(root)) == before
        for left in stages(root.parent):
            shutil.rmtree(left)
    assert kept >= 2


def test_a_real_process_killed_from_outside_is_gone_on_with(tmp_path: Path) -> None:
    root = tmp_path / "m"
    sharded(root, [{"a": torch.ones(8)}, {"b": torch.ones(1)}])
    size = 1 << 28  # of zeros that need no place on the disk
    header = f'{{"b":{{"dtype":"F32","shape":[{size // 4}],"data_offsets":[0,{size}]}}}}'.encode()
    with (root / shard(2, 2)).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)

    def is_in_the_second() -> bool:
        found = list(root.parent.glob(".m-bf16.*/files/.model-00002*"))
        return any(p.exists() and p.stat().st_size for p in found)

    process = start(*arguments(root), cwd=tmp_path)
    try:
        wait_until(is_in_the_second, process)
    finally:
        process.kill()
        process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGKILL
    (left,) = stages(tmp_path)
    first = (left / "files" / shard(1, 2)).stat()
    second = run_process(*arguments(root), cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    found = (out(root) / shard(1, 2)).stat()
    assert (found.st_ino, found.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert (out(root) / shard(2, 2)).stat().st_size > size // 2
    assert stages(tmp_path) == []
    shutil.rmtree(out(root))


def test_the_report_of_a_run_that_went_on_is_that_of_one_that_was_not_killed(run: Runner, tmp_path: Path) -> None:
    parts = [*layers(2), {"big": torch.full((3,), 1e6), "nan": torch.tensor([float("nan"), 1e-9])}, {"z": weight(9)}]
    root, report = sharded(tmp_path / "m", parts), tmp_path / "r.json"
    command = (root, "--to", "fp16", "--workers", "1", "--on-overflow", "fp32", "--report", report)
    whole = run(*command)
    assert whole.code == 0
    want, output = json.loads(report.read_text()), files(tmp_path / "m-fp16")
    shutil.rmtree(tmp_path / "m-fp16")
    report.unlink()
    assert run(*command, at=step(whole, f"recorded {shard(3, 4)}") + 1).code == -signal.SIGKILL
    assert not report.exists()
    again = run(*command)
    assert again.code == 0
    assert shard(3, 4) not in again.written()
    found = json.loads(report.read_text())
    assert found["notes"] == ["an earlier run had finished 3 weight files: gone on from there"]
    assert {**found, "seconds": 0, "notes": []} == {**want, "seconds": 0}
    assert again.stderr == whole.stderr
    assert files(tmp_path / "m-fp16") == output


def test_a_page_of_a_run_that_was_gone_on_with_has_what_both_runs_saw(run: Runner, root: Path) -> None:
    page = root.with_name("p.html")
    command = arguments(root, "--html", str(page))
    whole = run(*command)
    want = data_of(page.read_text("utf-8"))
    shutil.rmtree(out(root))
    page.unlink()
    assert run(*command, at=step(whole, f"recorded {shard(2, SHARDS)}") + 1).code == -signal.SIGKILL
    assert not page.exists()
    again = run(*command)
    assert (again.code, shard(2, SHARDS) in again.written()) == (0, False)
    found = data_of(page.read_text("utf-8"))
    assert found["heat"] == want["heat"]
    assert found["tensors"] == want["tensors"]
    assert found["result"]["notes"] == ["an earlier run had finished 2 weight files: gone on from there"]


def test_a_run_without_a_page_is_not_gone_on_with_for_one(run: Runner, root: Path, half: Path) -> None:
    """Its records have no histograms."""
    page = root.with_name("p.html")
    again = run(*arguments(root, "--html", str(page)))
    assert {shard(n, SHARDS) for n in range(1, SHARDS + 1)} <= again.written()
    assert all(row["read"] == 1 for row in data_of(page.read_text("utf-8"))["heat"]["rows"])
    assert not half.exists()


# What a run goes on with


@pytest.fixture
def half(run: Runner, root: Path, clean: Ended) -> Path:
    """The stage of a run killed after its second shard."""
    assert run(*arguments(root), at=step(clean, f"recorded {shard(2, SHARDS)}") + 1).code == -signal.SIGKILL
    (left,) = stages(root.parent)
    return left


def numbers_made(ended: Ended) -> set[int]:
    return {n for n in range(1, SHARDS + 1) if shard(n, SHARDS) in ended.written()}


def test_the_same_command_makes_only_what_was_not_finished(run: Runner, root: Path, half: Path) -> None:
    assert len(list((half / "done").glob("*.json"))) == 2
    assert numbers_made(run(*arguments(root))) == {3}
    assert_whole(root)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("more", [("--workers", "2"), ("--durable",), ("-q",), ("--json",)])
def test_options_that_do_not_change_the_output_go_on(run: Runner, root: Path, more: tuple[str, ...]) -> None:
    assert numbers_made(run(*arguments(root, *more))) == {3}
    assert_whole(root)


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize(
    "more", [("--keep", "layer.0.a"), ("--norms", "cast"), ("--verify", "full"), ("--on-overflow", "clamp")]
)
def test_other_options_start_afresh(run: Runner, root: Path, more: tuple[str, ...]) -> None:
    assert numbers_made(run(*arguments(root, *more))) == {1, 2, 3}
    assert stages(root.parent) == []
    again = root.with_name("again")
    run(*arguments(root, *more, "-o", os.fspath(again)))
    assert files(out(root)) == files(again)


@pytest.mark.usefixtures("half")
def test_another_version_starts_afresh(run: Runner, root: Path) -> None:
    assert numbers_made(run(*arguments(root), values={"precconv.repo.files:__version__": "9"})) == {1, 2, 3}


@pytest.mark.usefixtures("half")
@pytest.mark.parametrize("name", [shard(1, SHARDS), shard(3, SHARDS), "tokenizer.json", "config.json"])
def test_a_source_that_changed_starts_afresh(run: Runner, root: Path, name: str) -> None:
    os.utime(root / name, ns=(1, 1))
    assert numbers_made(run(*arguments(root))) == {1, 2, 3}
    assert_whole(root)


def test_a_finished_shard_that_was_damaged_since_is_made_again(run: Runner, root: Path, half: Path) -> None:
    first = half / "files" / shard(1, SHARDS)
    os.truncate(first, first.stat().st_size - 1)
    assert numbers_made(run(*arguments(root))) == {1, 3}
    assert_whole(root)


@pytest.mark.parametrize("damage", ["touched", "removed", "record", "records", "state"])
def test_whatever_happened_to_the_stage_the_output_is_right(run: Runner, root: Path, half: Path, damage: str) -> None:
    path, records = half / "files" / shard(1, SHARDS), sorted((half / "done").glob("*.json"))
    if damage == "touched":
        os.utime(path, ns=(1, 1))
    elif damage == "removed":
        path.unlink()
    elif damage == "state":
        (half / "state.json").write_text("[")
    else:
        for record in records if damage == "records" else records[:1]:
            record.write_bytes(b"")
    made = numbers_made(run(*arguments(root)))
    assert 3 in made
    assert len(made) == (3 if damage in ("state", "records") else 2)
    assert_whole(root)


def test_after_a_restart_only_what_was_on_the_disk_counts(run: Runner, root: Path, clean: Ended) -> None:
    for durable, want in ((False, {1, 2, 3}), (True, {3})):
        more = ("--durable",) if durable else ()
        whole = run(*arguments(root, *more))
        shutil.rmtree(out(root))
        assert run(*arguments(root, *more), at=step(whole, f"recorded {shard(2, SHARDS)}") + 1).code < 0
        assert numbers_made(run(*arguments(root, *more), values={"precconv.repo.stage:boot_id": "another"})) == want
        assert_whole(root)
        shutil.rmtree(out(root))
    assert not [said for said in clean.steps if said.startswith("sync")]


def test_a_system_that_does_not_tell_of_a_restart_waits_for_the_disk(run: Runner, root: Path, clean: Ended) -> None:
    unknown = {"precconv.repo.stage:boot_id": None}
    whole = run(*arguments(root), values=unknown)
    shutil.rmtree(out(root))
    assert {f"sync {shard(n, SHARDS)}" for n in range(1, SHARDS + 1)} <= set(whole.steps)
    assert run(*arguments(root), at=step(whole, f"recorded {shard(2, SHARDS)}") + 1, values=unknown).code < 0
    assert numbers_made(run(*arguments(root), values=unknown)) == {3}
    assert_whole(root)
    assert clean.code == 0


def test_durable_outputs_are_on_the_disk_before_they_have_their_name(run: Runner, root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub/vocab.txt").write_text("a")
    ended = run(*arguments(root, "--durable"))
    renamed = step(ended, "rename files")
    synced = {said for said in ended.steps[:renamed] if said.startswith("sync ")}
    weights = {shard(n, SHARDS) for n in range(1, SHARDS + 1)}
    assert {f"sync {name}" for name in (*weights, "config.json", "README.md", "sub/", "files/")} <= synced
    assert ended.steps[renamed + 1 :].count(f"sync {root.parent.name}/") == 1


# Interrupted, refused


def test_an_interruption_keeps_what_is_done_and_says_so(run: Runner, root: Path, clean: Ended) -> None:
    before = tree(root.parent)
    for text, finished in ((f"write {shard(3, SHARDS)}", 2), ("copy tokenizer.json", 3), ("write config.json", 3)):
        ended = run(*arguments(root), at=step(clean, text), by=signal.SIGINT)
        said = f"interrupted; {finished} of 3 weight files are done, and the same command goes on from there\n"
        assert (ended.code, ended.stdout, ended.stderr) == (130, "", said)
        (left,) = stages(root.parent)
        kept = {name for name in tree(root.parent) if not name.startswith(left.name)}
        assert kept == before.keys()
        assert len(numbers_made(run(*arguments(root)))) == 3 - finished
        assert_whole(root)
        shutil.rmtree(out(root))


def test_an_interruption_before_anything_is_done_leaves_nothing(run: Runner, root: Path, clean: Ended) -> None:
    before = tree(root.parent)
    ended = run(*arguments(root), at=step(clean, f"write {shard(1, SHARDS)}"), by=signal.SIGINT)
    assert (ended.code, ended.stderr) == (130, "interrupted; nothing was written\n")
    assert tree(root.parent) == before


def test_a_failure_keeps_what_is_done_and_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stage_module.Stage.copy

    def full(*_: object) -> None:
        raise precconv.OutputError("cannot be written: no space left on device", path=out(root))

    monkeypatch.setattr(stage_module.Stage, "copy", full)
    with pytest.raises(precconv.OutputError) as caught:
        precconv.convert(root, to="bf16")
    assert caught.value.hint == "what is done is kept: the same command goes on from there"
    assert not out(root).exists()
    (left,) = stages(root.parent)
    inode = (left / "files" / shard(1, SHARDS)).stat().st_ino
    monkeypatch.setattr(stage_module.Stage, "copy", real)
    precconv.convert(root, to="bf16")
    assert (out(root) / shard(1, SHARDS)).stat().st_ino == inode
    assert stages(root.parent) == []


def test_a_numeric_refusal_leaves_nothing_also_of_a_run_that_went_on(run: Runner, tmp_path: Path) -> None:
    root = sharded(tmp_path / "m", [*layers(2), {"x": torch.tensor([1e6])}])
    before = tree(tmp_path)
    command = (root, "--to", "fp16", "--workers", "1")
    refused = run(*command)
    assert refused.code == 3
    assert tree(tmp_path) == before
    assert run(*command, at=step(refused, f"recorded {shard(2, 3)}") + 1).code == -signal.SIGKILL
    again = run(*command)
    assert (again.code, again.stderr) == (3, refused.stderr)
    assert tree(tmp_path) == before


def test_a_second_run_of_the_same_output_is_refused_and_the_first_ends_well(root: Path, tmp_path: Path) -> None:
    final = out(root)
    with stage_module.staged(final, "a", durable=False) as first:
        first.write("x", b"1")
        before = tree(tmp_path)
        assert_refused(run_process(root, "--to", "bf16", cwd=tmp_path), 1, "m-bf16: another run is writing it")
        assert tree(tmp_path) == before
        precconv.convert(root, to="bf16", output=tmp_path / "other")  # which is nobody's
        first.publish()
    assert files(final) == {"x": b"1"}
    assert stages(tmp_path) == []


def test_a_stage_is_removed_before_another_run_can_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = shutil.rmtree, []

    def remove(path: Path, *, ignore_errors: bool) -> None:
        with (
            pytest.raises(precconv.OutputError, match="another run is writing it"),
            stage_module.staged(tmp_path / "out", "b", durable=False),
        ):
            pytest.fail("two runs have it")
        tried.append(path)
        real(path, ignore_errors=ignore_errors)

    with stage_module.staged(tmp_path / "out", "a", durable=False) as made:
        made.write("x", CONFIG.encode())
        monkeypatch.setattr(shutil, "rmtree", remove)
    monkeypatch.undo()
    assert tried == [stage_module.home_of(tmp_path / "out")]
    assert tree(tmp_path) == {}


def test_an_interruption_with_several_workers_ends_all_of_them(run: Runner, root: Path, clean: Ended) -> None:
    for at in range(5, len(clean.steps) - 5, 12):
        ended = run(root, "--to", "bf16", "--workers", "2", at=at, by=signal.SIGINT)
        assert (ended.code, ended.stdout) == (130, "")
        assert ended.stderr.startswith("interrupted; ")
        assert not out(root).exists()
        assert bool(stages(root.parent)) == ("goes on from there" in ended.stderr)
        assert run(root, "--to", "bf16", "--workers", "2").code == 0
        assert_whole(root)
        shutil.rmtree(out(root))


def test_the_parts_of_other_runs_do_not_get_into_the_output(run: Runner, root: Path, half: Path) -> None:
    (half / "files/stray.bin").write_bytes(b"x")
    (half / "files/.x.00000000.precconv-part").write_bytes(b"x")
    assert numbers_made(run(*arguments(root))) == {3}
    assert_whole(root)
