"""Running precconv as its users do, in a process of its own, and looking at what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Long enough for any machine: whoever waits this long hangs.
HANG = 120.0

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only: limits, signals, pipes or links")

_PREPARED = """
import runpy, signal, sys
for limit in sys.argv[1].split():
    import resource
    name, _, value = limit.partition("=")
    if name == "AS" and sys.platform != "linux":
        continue  # elsewhere it cannot be set so low
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (int(value), int(value)))
for name in sys.argv[2].split():
    signal.signal(getattr(signal, name), signal.SIG_IGN)
if "SIGINT" not in sys.argv[2]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
for name in ("SIGTERM", "SIGHUP"):
    if name not in sys.argv[2]:
        signal.signal(getattr(signal, name), signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
sys.argv = ["precconv", *sys.argv[3:]]
runpy.run_module("precconv", run_name="__main__", alter_sys=True)
"""


def command(args: Sequence[str | Path], limits: str = "", ignored: str = "") -> list[str]:
    """``python -m precconv``, with ``limits`` (``FSIZE=1000 CPU=60``) and ignored signals set in the process itself."""
    return [sys.executable, "-c", _PREPARED, limits, ignored, *(os.fspath(a) for a in args)]


def environment() -> dict[str, str]:
    path = [os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUTF8": "1"}


def run(*args: str | Path, cwd: Path, limits: str = "") -> subprocess.CompletedProcess[str]:
    """Run to the end; a process that hangs is killed and fails the test."""
    return subprocess.run(
        command(args, limits),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=HANG,
        check=False,
    )


def start(*args: str | Path, cwd: Path, ignored: str = "") -> subprocess.Popen[str]:
    """Run beside the test, which must see to the end of it."""
    return subprocess.Popen(
        command(args, ignored=ignored),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Poll; fails when the process ends, or nothing happens for very long, before it is so."""
    deadline = time.monotonic() + HANG
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} too early: {process.communicate()}"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.001)


def assert_refused(done: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    """One calm sentence with the exit code, and at most a hint; nothing on stdout."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    first, *rest = done.stderr.splitlines()
    assert first.startswith("error: "), done.stderr
    assert sentence in first
    assert [line for line in rest if not line.startswith("hint: ")] == [], done.stderr
    assert len(rest) <= 1


def tree(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory: mode, time of change and bytes of each name."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() else b""
        found[path.relative_to(root).as_posix()] = (status.st_mode, status.st_mtime_ns, data)
    return found
