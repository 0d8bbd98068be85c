"""A batch that is killed at any point, interrupted, or started twice: every output exists once and whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures import build
from precconv import fileio

from .processes import HANG, assert_refused, environment, posix, run, start, wait_until
from .samples import write_checkpoint

pytestmark = posix

LEDGER = "precconv-batch.jsonl"
ARGUMENTS = ("batch", "sources/*", "--to", "bf16", "--output-dir", "out")


def sources(home: Path) -> list[str]:
    """Two files and a directory of three shards; names of the outputs."""
    for name in ("a", "z"):
        path = home / "sources" / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_checkpoint(path, {"w": torch.ones(4, 8), "norm.weight": torch.ones(8)})
    model = home / "sources" / "m"
    model.mkdir()
    weight_map = {}
    for n in (1, 2, 3):
        file = f"model-0000{n}-of-00003.safetensors"
        write_checkpoint(model / file, {f"l{n}.weight": torch.full((1 << 20,), float(n))})
        weight_map[f"l{n}.weight"] = file
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    return ["a.bf16.safetensors", "m-bf16", "z.bf16.safetensors"]


def contents(directory: Path) -> dict[str, bytes]:
    """Everything below but the ledger, hidden files included."""
    found = {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    found.pop(LEDGER, None)
    return found


def events(home: Path) -> list[tuple[str, str]]:
    """Event and source of every record that is whole."""
    said = []
    path = home / "out" / LEDGER
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        said.append((record["event"], Path(record["source"]).name))
    return said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the batch makes when nothing happens to it."""
    home = tmp_path_factory.mktemp("undisturbed")
    names = sources(home)
    done = run(*ARGUMENTS, "--workers", "2", cwd=home)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (home / "out").iterdir()) == sorted([*names, LEDGER])
    return contents(home / "out")


POINTS: dict[str, Callable[[Path], bool]] = {
    "the first has started": lambda home: ("started", "a.safetensors") in events(home),
    "something is being written": lambda home: any((home / "out").glob(f".*{fileio.PART_SUFFIX}")),
    "a shard is done": lambda home: any((home / "out").glob(".*/done/*.json")),
    "the directory has its name": lambda home: (home / "out" / "m-bf16").exists(),
}


@pytest.mark.parametrize("point", [*POINTS])
def test_a_batch_killed_at_any_point_and_run_again_makes_everything_once(
    tmp_path: Path, undisturbed: dict[str, bytes], point: str
) -> None:
    sources(tmp_path)
    process = start(*ARGUMENTS, "--ledger", f"out/{LEDGER}", cwd=tmp_path)
    try:
        wait_until(lambda: POINTS[point](tmp_path), process)
    finally:
        process.kill()
        process.communicate(timeout=HANG)  # returns when the worker, which has the same pipes, is gone too
    again = run(*ARGUMENTS, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert contents(tmp_path / "out") == undisturbed
    done = [source for event, source in events(tmp_path) if event == "done"]
    assert sorted(done) == ["a.safetensors", "m", "z.safetensors"], "each is done once"


_DIES = """
import os, signal, sys
import precconv
from precconv.batch.jobs import run_job
from precconv.engines.inline import Inline
from precconv.engines.base import Slots


class Dies(Inline):
    def run_job(self, slot, function, job):
        done = function(job, lambda done, total: None)
        os.kill(os.getpid(), signal.SIGKILL)


engine = Dies(1, 1, [0] * Slots.board_size(1))
precconv.convert_many([sys.argv[1]], to="bf16", output_dir="out", engine=engine)
"""


@pytest.mark.parametrize("name", ["sources/a.safetensors", "sources/m"])
def test_a_run_killed_between_an_output_and_its_record_has_made_it(
    tmp_path: Path, undisturbed: dict[str, bytes], name: str
) -> None:
    import precconv

    sources(tmp_path)
    died = subprocess.run(
        [sys.executable, "-c", _DIES, name], cwd=tmp_path, env=environment(), timeout=HANG, check=False
    )
    assert died.returncode == -signal.SIGKILL
    made = contents(tmp_path / "out")
    assert made == {n: data for n, data in undisturbed.items() if n.split("/")[0][0] == Path(name).name[0]}
    assert [event for event, _ in events(tmp_path)] == ["started"]
    report = precconv.convert_many([tmp_path / name], to="bf16", output_dir=tmp_path / "out")
    assert [r.outcome for r in report.results] == ["done"]
    assert report.results[0].data["found"] is True
    assert contents(tmp_path / "out") == made


# Interruptions


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of a small shard and one of a gigabyte, all of it zeros that need no place on the disk."""
    root = tmp_path_factory.mktemp("large") / "model"
    root.mkdir()
    sizes = {"model-00001-of-00002.safetensors": 1 << 12, "model-00002-of-00002.safetensors": 1 << 30}
    for n, (file, size) in enumerate(sizes.items()):
        header = f'{{"w{n}":{{"dtype":"F32","shape":[{size // 4}],"data_offsets":[0,{size}]}}}}'
        (root / file).write_bytes(build.raw(header))
        os.truncate(root / file, 8 + len(header) + size)
    weight_map = {f"w{n}": file for n, file in enumerate(sizes)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    yield root
    for file in sizes:
        (root / file).unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_stops_cleanly_and_says_what_was_under_way(
    tmp_path: Path, large: Path, number: signal.Signals
) -> None:
    sources(tmp_path)
    args: list[Any] = ["batch", "sources/a.safetensors", large, "sources/z.safetensors", "--output-dir", "out"]
    process = start(*args, "--to", "bf16", "--verify", "full", cwd=tmp_path)
    try:
        wait_until(lambda: any((tmp_path / "out").glob(".*/done/*.json")), process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (130, "")
    sentence = "interrupted; 1 of 3 are done, 1 were under way, and the same command goes on from there\n"
    assert stderr == sentence
    a, m = "a.safetensors", "model"
    assert events(tmp_path) == [("started", a), ("done", a), ("started", m), ("interrupted", m)]
    (stage,) = (tmp_path / "out").glob(f".*{fileio.PART_SUFFIX}")
    assert [p.name for p in (stage / "files").iterdir() if not p.name.startswith(".")] == [
        "model-00001-of-00002.safetensors"
    ]
    assert not (tmp_path / "out" / "model-bf16").exists()


# Two at once


def test_a_second_run_is_refused_while_the_first_is_at_work(tmp_path: Path, large: Path) -> None:
    args: list[Any] = ["batch", large, "--output-dir", "out", "--to", "bf16", "--verify", "full"]
    process = start(*args, cwd=tmp_path)
    try:
        wait_until(lambda: ("started", "model") in events(tmp_path), process)
        second = run(*args, cwd=tmp_path)
        elsewhere = run(*args, "--dry-run", cwd=tmp_path)
    finally:
        process.kill()
        process.communicate(timeout=HANG)
    assert_refused(second, 1, "another run is at work on this batch")
    assert elsewhere.returncode == 0
    assert events(tmp_path) == [("started", "model")]
