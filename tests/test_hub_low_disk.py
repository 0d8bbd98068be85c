"""Models that are larger than the disk: a shard at a time is fetched, converted, sent and removed, as is measured."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import precconv
from precconv.fileio import PartFile
from precconv.hub import source as hub_source

from .hub import faults
from .hub.refusals import Refused
from .hub_runs import Work, model_files
from .repos import files, shard, sharded, stages, weight
from .test_hub_fetch import torch_shards

SOURCE, OUT = "acme/m", "acme/out"
PUSH = (SOURCE, "--to", "bf16", "--push", OUT, "--low-disk")
ELEMENTS = 250_000  #: of a tensor: 1 MB
SHARD = 2 * 4 * ELEMENTS  #: bytes of a source shard, nearly
SMALL = 200_000  #: all small files, directories and headers, with room for blocks that are not full

Save = Callable[[Path, list[dict[str, torch.Tensor]]], Path]


def three_shards() -> list[dict[str, torch.Tensor]]:
    return [{f"layer.{n}.a": weight(n, (ELEMENTS,)), f"layer.{n}.b": weight(-n, (ELEMENTS,))} for n in (1, 2, 3)]


def on_disk(*roots: Path) -> int:
    """Bytes that the files below take, each once whatever its names."""
    found: dict[tuple[int, int], int] = {}
    below = (Path(at, name) for root in roots for at, folders, names in os.walk(root) for name in (*folders, *names))
    for path in below:
        try:
            status = path.lstat()
        except FileNotFoundError:  # a file comes and goes
            continue
        found[status.st_dev, status.st_ino] = max(status.st_size, getattr(status, "st_blocks", 0) * 512)
    return sum(found.values())


class Meter:
    """The most that lay in the working directory and the client's cache, looked at whenever something happens."""

    def __init__(self, here: Work, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peak, self._roots = 0, (here.path, here.home)
        publish, fetched = PartFile.publish, hub_source.fetched

        def published(part: PartFile, *, replace: bool, durable: bool) -> None:
            self.look()  # an output is whole, and what it was made from still there
            publish(part, replace=replace, durable=durable)

        def seen(*args: object, **options: object) -> Path:
            path: Path = fetched(*args, **options)  # type: ignore[arg-type]
            self.look()
            return path

        monkeypatch.setattr(PartFile, "publish", published)
        monkeypatch.setattr("precconv.hub.convert.fetched", seen)
        here.hub.fail(faults.before(self.look), times=10**6)

    def look(self) -> None:
        self.peak = max(self.peak, on_disk(*self._roots))


def published(here: Work) -> dict[str, bytes]:
    found = {name: here.hub.read(OUT, name) for name in here.hub.files(OUT)}
    del found[".gitattributes"]
    return found


def fill(here: Work, root: Path) -> Mapping[str, bytes]:
    """Put a directory into a repo; what a conversion of it gives."""
    here.hub.create(SOURCE, model_files(root))
    out = root.with_name("expected")
    precconv.convert(root, to="bf16", output=out)
    return files(out)


@pytest.mark.parametrize("save", [sharded, torch_shards])
def test_the_disk_holds_less_than_two_shards_at_any_time(
    save: Save, here: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = fill(here, save(tmp_path / "source", three_shards()))
    meter = Meter(here, monkeypatch)
    here.ok(*PUSH, token=here.hub.tokens.write)
    assert published(here) == wanted
    assert SHARD < meter.peak < 2 * SHARD + SMALL
    assert meter.peak < 1.5 * SHARD + SMALL
    assert here.left() == []
    assert on_disk(here.home) < SMALL
    assert not [p for p in here.home.rglob("*") if p.name.endswith(".incomplete")]


def test_without_it_the_disk_holds_all_of_it(here: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(here, sharded(tmp_path / "source", three_shards()))
    meter = Meter(here, monkeypatch)
    here.ok(*PUSH[:-1], token=here.hub.tokens.write)
    assert meter.peak > 3 * SHARD


def test_with_xet_it_holds_no_more(here: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = fill(here, sharded(tmp_path / "source", three_shards()))
    meter = Meter(here, monkeypatch)
    with here.start(*PUSH, token=here.hub.tokens.write) as process:
        while process.poll() is None:
            meter.look()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=0.02)
    assert process.returncode == 0
    assert here.hub.seen("GET", "^/xorbs/")
    assert published(here) == wanted
    assert SHARD < meter.peak < 2 * SHARD + SMALL
    assert here.left() == []
    assert on_disk(here.home) < SHARD


def test_what_a_run_left_that_failed_is_gone_after_the_next(here: Work, tmp_path: Path) -> None:
    wanted = fill(here, sharded(tmp_path / "source", three_shards()))
    here.hub.fail(faults.refuse(Refused(403, "storage limit reached")), path="/commit/")
    assert here(*PUSH, token=here.hub.tokens.write).exit_code == 5
    assert stages(here.path) == []
    assert here.left() == []
    sent = len(here.hub.seen("PUT"))
    here.ok(*PUSH, token=here.hub.tokens.write)
    assert published(here) == wanted
    assert (sent, len(here.hub.seen("PUT"))) == (3, 3)


def test_a_disk_that_is_too_small_for_a_shard_is_refused_before_it_is_fetched(
    here: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(here, sharded(tmp_path / "source", three_shards()))
    for free, code in ((SHARD, 1), (2 * SHARD, 0)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: type("Usage", (), {"free": free}))
        done = here(*PUSH, token=here.hub.tokens.write)
        assert done.exit_code == code, done.stderr
        assert bool(here.hub.seen("PUT")) is (code == 0)


def test_a_shard_that_is_in_the_cache_stays_there(here: Work, tmp_path: Path) -> None:
    wanted = fill(here, sharded(tmp_path / "source", three_shards()))
    here.ok(SOURCE, "--to", "bf16", "-o", "out")
    here.hub.requests.clear()
    here.ok(*PUSH, token=here.hub.tokens.write)
    assert published(here) == wanted
    assert [e for e in here.hub.seen("GET", "/objects/") if not e.range] == []
    assert len(list(here.home.rglob(shard(1, 3)))) == 1
