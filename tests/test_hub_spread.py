"""One model whose shards are converted by processes: published as without them, in one commit, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from precconv import InputError, WorkerError
from precconv.hub.spread import _result

from .command import run
from .hub import faults
from .hub.server import HubServer
from .hub_models import HEADER, is_half_of, keyed, llama, model, published
from .hub_work import Place
from .processes import HANG, posix

SHARDS = 4
SPREAD = ("--engine", "local", "--workers", "2")


@pytest.fixture
def place(in_process: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Where runs in this process work, too; the processes that they start have the same Hub from the environment."""
    made = Place(in_process, tmp_path)
    for name, value in in_process.environment(made.home, token=in_process.tokens.write, xet=False).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(made.path)
    in_process.site.xet = False
    yield made
    assert made.left() == []


def convert(source: str, to: str, *args: str) -> tuple[str, ...]:
    return ("convert", source, "--to", "fp16", "--push", to, *args)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that an engine has started, from Linux's table of them."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
            line = Path("/proc", entry, "cmdline").read_text()
        except OSError:
            continue
        if parent == process.pid and "spawn_main" in line:
            found.append(int(entry))
    return found


def test_an_engine_publishes_what_is_published_without_one_in_one_commit_and_once(hub: HubServer, place: Place) -> None:
    hub.create("tester/m", llama(SHARDS))
    alone = run(*convert("tester/m", "tester/alone"))
    assert alone.exit_code == 0, alone.stderr
    fetched = hub.bytes_of_weights()
    spread = run(*convert("tester/m", "tester/spread", *SPREAD))
    assert spread.exit_code == 0, spread.stderr
    assert published(hub, "tester/spread") == published(hub, "tester/alone")
    assert is_half_of(published(hub, "tester/spread"), published(hub, "tester/m"))
    assert keyed(hub, "tester/spread") == keyed(hub, "tester/alone")
    assert len(keyed(hub, "tester/spread")) == 1
    assert hub.commits("tester/spread")[0].description == hub.commits("tester/alone")[0].description
    assert place.tokens_in(spread.stdout, spread.stderr) == []
    size = sum(len(d) for name, d in published(hub, "tester/m").items() if name.endswith(".safetensors"))
    assert hub.bytes_of_weights() - fetched <= size + 3 * SHARDS * HEADER, "each shard was fetched once"

    before = len(hub.requests)
    again = run(*convert("tester/m", "tester/spread", *SPREAD))
    assert again.exit_code == 0, again.stderr
    seen = hub.requests[before:]
    assert [e for e in seen if e.method == "PUT" or "/commit/" in e.path] == []
    assert all(e.sent <= HEADER for e in seen)


@pytest.mark.usefixtures("place")
def test_a_shard_that_overflows_refuses_the_model_and_is_named(hub: HubServer) -> None:
    hub.create("tester/m", llama(SHARDS, large=3))
    done = run(*convert("tester/m", "tester/out", *SPREAD))
    alone = run(*convert("tester/m", "tester/alone"))
    assert (done.exit_code, done.stdout) == (3, "")
    assert "model.layers.1.self_attn.q_proj.weight" in done.stderr
    assert done.stderr == alone.stderr
    assert keyed(hub, "tester/out") == []
    assert hub.seen("POST", "/commit/") == []


@posix
@pytest.mark.skipif(sys.platform != "linux", reason="finds workers in /proc")
def test_a_worker_that_is_killed_ends_the_run_and_the_same_command_goes_well(hub: HubServer, place: Place) -> None:
    hub.create("tester/m", llama(SHARDS))
    process = place.start(*convert("tester/m", "tester/out", *SPREAD))

    def kill_one() -> None:
        os.kill(workers_of(process)[0], signal.SIGKILL)

    hub.fail(faults.before(kill_one), method="PUT")
    with process:
        _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert "the process that worked on it died" in stderr
    assert "Traceback" not in stderr
    assert hub.seen("POST", "/commit/") == []
    again = run(*convert("tester/m", "tester/out", *SPREAD))
    assert again.exit_code == 0, again.stderr
    assert is_half_of(published(hub, "tester/out"), published(hub, "tester/m"))
    assert len(keyed(hub, "tester/out")) == 1


@posix
def test_an_interruption_publishes_nothing(hub: HubServer, place: Place) -> None:
    hub.create("tester/m", llama(SHARDS))
    process = place.start(*convert("tester/m", "tester/out", *SPREAD))
    hub.fail(faults.before(lambda: process.send_signal(signal.SIGINT)), method="PUT")
    with process:
        _, stderr = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert stderr.startswith("interrupted")
    assert "Traceback" not in stderr
    assert hub.seen("POST", "/commit/") == []


@pytest.mark.usefixtures("place")
def test_a_report_has_the_errors_that_workers_measured(hub: HubServer, tmp_path: Path) -> None:
    hub.create("tester/m", llama(SHARDS))
    found = []
    for name, args in (("alone", ()), ("spread", ("--engine", "local"))):
        report = tmp_path / f"{name}.json"
        done = run(*convert("tester/m", f"tester/{name}", *args), "--report", report)
        assert done.exit_code == 0, done.stderr
        found.append(json.loads(report.read_text())["tensors"])
    assert found[0] == found[1]
    assert any(t.get("max_abs_error", 0) > 0 for t in found[0])


@pytest.mark.usefixtures("place")
def test_a_model_in_one_file_is_one_shard(hub: HubServer) -> None:
    hub.create("tester/m", model())
    done = run(*convert("tester/m", "tester/out", "--engine", "local"))
    assert done.exit_code == 0, done.stderr
    assert is_half_of(published(hub, "tester/out"), published(hub, "tester/m"))


REFUSED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "kept": (("-o", "here"), "keeps nothing here"),
    "other shards": (("--shard-size", "1MB"), "writes the source's shards"),
    "an address": (("--address", "auto"), "is a Ray cluster's"),
}


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("case", [*REFUSED])
def test_what_an_engine_cannot_do_is_a_matter_of_usage_and_makes_no_repo(case: str, hub: HubServer) -> None:
    hub.create("tester/m", llama(3))
    args, said = REFUSED[case]
    done = run(*convert("tester/m", "tester/out", *SPREAD, *args))
    assert done.exit_code == 2, done.stderr
    assert said in done.stderr
    assert hub.repos() == ["tester/m"]


def test_what_a_worker_raises_is_raised_here_and_what_is_no_sentence_becomes_one() -> None:
    def failed(error: BaseException) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(error)
        return future

    with pytest.raises(InputError, match="why"):
        _result(failed(InputError("why")))
    of_ray = RuntimeError("a page of text")
    of_ray.cause = InputError("why")  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"^why$"):
        _result(failed(of_ray))
    with pytest.raises(WorkerError, match=r"^a worker failed: one$"):
        _result(failed(RuntimeError("one\ntwo")))
    with pytest.raises(WorkerError, match=r"^a worker failed: MemoryError$"):
        _result(failed(MemoryError()))
