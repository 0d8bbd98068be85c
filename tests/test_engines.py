"""Where jobs run: a job that dies takes no other with it, and none outlives who started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

import precconv
from fixtures import make
from precconv import UsageError, WorkerError
from precconv.engines import ENGINES, Engine, interrupted_by, open_engine

from .clusters import needs_ray, run_alone
from .processes import HANG, ROOT, environment, posix

Progress = Callable[[int, int], None] | None

# Jobs, which have to be found by name in other processes


def double(job: int, progress: Progress) -> int:
    if progress is not None:
        progress(job, 2 * job)
    return 2 * job


def where(job: object, progress: Progress) -> int:  # noqa: ARG001
    return os.getpid()


def fail(job: str, progress: Progress) -> None:  # noqa: ARG001
    raise ValueError(job)


def die(job: object, progress: Progress) -> None:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)


def stay(job: str, progress: Progress) -> None:
    """Report for ever, having made the file ``job``."""
    Path(job).write_text("here")
    while True:
        assert progress is not None
        progress(3, 4)


def result(future: Future[Any]) -> Any:
    return future.result(timeout=HANG)


def wait_for(condition: Callable[[], bool], future: Future[Any]) -> None:
    while not condition():
        assert not future.done(), future


@pytest.fixture(params=["inline", "local"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(request.param) as opened:
        yield opened


def test_an_engine_is_an_executor_and_its_jobs_can_say_how_far_they_are(engine: Engine) -> None:
    assert result(engine.submit(divmod, 7, 2)) == (3, 1)
    assert list(engine.map(len, ["a", "bc"])) == [1, 2]
    assert result(engine.start(double, 21, memory=1)) == 42
    failed = engine.start(fail, "why", memory=1)
    assert isinstance(failed.exception(HANG), ValueError)
    assert not interrupted_by(failed.exception(0) or ValueError())
    assert (engine.progress(), engine.workers, engine.remote) == ((0, 0), 1, False)


def test_what_runs_is_counted_and_stopped_and_what_waits_does_not_begin(engine: Engine, tmp_path: Path) -> None:
    running = engine.start(stay, str(tmp_path / "begun"), memory=1)
    waiting = engine.start(stay, str(tmp_path / "never"), memory=1)
    wait_for(lambda: engine.progress() == (3, 4), running)
    engine.interrupt()
    for future in (running, waiting):
        error = future.exception(HANG)
        assert error is not None
        assert interrupted_by(error)
    assert [p.name for p in tmp_path.iterdir()] == ["begun"]
    assert engine.progress() == (0, 0)


def test_jobs_share_the_cores() -> None:
    from precconv.request import worker_count

    for workers in (1, 2, 1000):
        with open_engine("local", workers=workers) as engine:
            assert (engine.workers, engine.threads) == (workers, max(1, worker_count(None) // workers))


def test_inline_jobs_run_here_and_local_ones_elsewhere_in_a_process_that_is_kept() -> None:
    with open_engine("inline") as inline:
        assert result(inline.start(where, 0, memory=1)) == os.getpid()
    with open_engine("local", workers=2) as local:
        seen = {result(local.start(where, n, memory=1)) for n in range(6)}
    assert os.getpid() not in seen
    assert len(seen) <= 2


@posix
def test_a_worker_that_is_killed_fails_its_own_job_and_no_other(tmp_path: Path) -> None:
    with open_engine("local", workers=2) as engine:
        beside = engine.start(stay, str(tmp_path / "beside"), memory=1)
        wait_for(lambda: (tmp_path / "beside").exists(), beside)
        dead = engine.start(die, 0, memory=1)
        after = [engine.start(double, n, memory=1) for n in range(3)]
        error = dead.exception(HANG)
        assert isinstance(error, WorkerError)
        assert "the process that worked on it died" in str(error)
        assert "memory" in (error.hint or "")
        assert [result(f) for f in after] == [0, 2, 4]
        assert not beside.done()
        engine.interrupt()
        wait([beside], timeout=HANG)


# Parents

_PARENT = """
import sys
from precconv.engines import open_engine
from tests.test_engines import stay
if __name__ == "__main__":
    with open_engine("local") as engine:
        print(type(engine.start(stay, sys.argv[1], memory=1).exception()).__name__, flush=True)
"""


def start_parent(tmp_path: Path) -> subprocess.Popen[str]:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    return subprocess.Popen(
        [sys.executable, script, tmp_path / "begun"],
        env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
        start_new_session=True,
    )  # fmt: skip


@posix
def test_a_worker_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    try:
        while not (tmp_path / "begun").exists():
            assert parent.poll() is None, parent.communicate()
        parent.kill()
        # both ends of the pipes are the worker's too: this returns when the last of them is gone
        parent.communicate(timeout=HANG)
    finally:
        parent.kill()
    assert parent.returncode == -signal.SIGKILL


@posix
def test_a_signal_to_the_whole_group_is_for_the_parent_alone(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    try:
        while not (tmp_path / "begun").exists():
            assert parent.poll() is None, parent.communicate()
        os.killpg(parent.pid, signal.SIGTERM)
        _, stderr = parent.communicate(timeout=HANG)
    finally:
        parent.kill()
    assert parent.returncode == -signal.SIGTERM, "the parent took the default; the worker went with it"
    assert "Traceback" not in stderr


_UNGUARDED = """
import sys
import precconv
report = precconv.convert_many(["a", "b"], to="bf16", output_dir=sys.argv[1], workers=2)
print([r.data["error"]["kind"] for r in report.failed], report.failed[0].data["error"]["hint"])
"""


def test_a_script_without_a_guard_is_told_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_UNGUARDED)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "out"],
        env=environment(), cwd=ROOT, capture_output=True, encoding="utf-8", timeout=HANG, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("['WorkerError', 'WorkerError'] a script that starts it needs 'if __name__ ==")


# Names


def test_engines_have_names_and_the_wrong_ones_are_usage_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(ENGINES) == {"local", "inline", "ray"}
    with pytest.raises(UsageError, match="no engine 'dask'") as refused:
        open_engine("dask")
    assert refused.value.hint == "engines: local, inline, ray"
    with pytest.raises(UsageError, match="0 workers"):
        open_engine("local", workers=0)
    with pytest.raises(UsageError, match="2 workers in one process"):
        open_engine("inline", workers=2)
    with pytest.raises(UsageError, match="--address is a Ray cluster's"):
        open_engine("local", address="auto")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="needs Ray") as missing:
        open_engine("ray")
    assert missing.value.hint == "pip install 'precconv[ray]'"


# Ray

_DRIVER = """
import json, os, subprocess, sys
from pathlib import Path
import precconv
from precconv import InputError
from precconv.engines import interrupted_by, open_engine
from tests.clusters import start_ray
home = Path(sys.argv[1])
SAID = {}
if sys.argv[2:] == ["alone"]:
    try:
        open_engine("ray")
    except InputError as e:
        (home / "alone").write_text(str(e))
    sys.exit()
subprocess.run([sys.executable, __file__, home, "alone"], check=True)
start_ray()


def shipped(job, progress):
    import precconv
    return precconv.__file__


def survives(job, progress):
    if not os.path.exists(job):
        open(job, "w").close()
        os._exit(1)
    return "survived"


def refuses(job, progress):
    raise ValueError(job)


def stays(job, progress):
    open(job, "w").close()
    while True:
        pass


with open_engine("ray", workers=2) as engine:
    SAID["engine"] = [engine.workers, engine.threads, engine.remote, engine.progress()]
    SAID["shipped"] = engine.start(shipped, 0, memory=1 << 40).result()
    SAID["survives"] = engine.start(survives, str(home / "died"), memory=1 << 20).result()
    SAID["refuses"] = isinstance(engine.start(refuses, "why", memory=0).exception(), ValueError)
    sources = sorted(home.glob("*.safetensors"))
    report = precconv.convert_many(sources, to="bf16", output_dir=home / "ray-out", engine=engine)
    SAID["outcomes"] = [r.outcome for r in report.results]
    SAID["errors"] = [r.data["error"]["kind"] for r in report.failed]
    running = engine.start(stays, str(home / "stays"), memory=0)
    while not (home / "stays").exists():
        assert not running.done()
    engine.interrupt()
    error = running.exception()
    SAID["interrupted"] = interrupted_by(error) or repr(error)
(home / "said.json").write_text(json.dumps(SAID))
"""


@needs_ray
def test_ray_runs_the_same_jobs_with_the_same_results(tmp_path: Path) -> None:
    for name in ("good/tiny-llama", "good/metadata", "hostile/data-hole"):
        shutil.copy(make.ROOT / f"{name}.safetensors", tmp_path)
    (tmp_path / "driver.py").write_text(_DRIVER)
    done = run_alone(tmp_path / "driver.py")
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["engine"] == [2, 1, True, [0, 0]]
    assert "runtime_resources" in said["shipped"], "the package came with the job"
    assert said["survives"] == "survived"
    assert said["refuses"]
    assert said["interrupted"] is True
    assert (tmp_path / "alone").read_text() == "no Ray cluster answers on this machine"
    assert said["outcomes"] == ["failed", "done", "done"]
    assert said["errors"] == ["CorruptCheckpointError"]
    precconv.convert_many(sorted(tmp_path.glob("*.safetensors")), to="bf16", output_dir=tmp_path / "out")
    outputs = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.safetensors")}
    assert len(outputs) == 2
    assert {p.name: p.read_bytes() for p in (tmp_path / "ray-out").glob("*.safetensors")} == outputs
