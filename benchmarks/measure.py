"""Runs jobs as child processes, interleaved over rounds, and keeps what each took.

This process stays small and never imports torch: Linux counts a parent's memory towards the peak of the
child that it starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .record import Series

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 1 << 20
#: ru_maxrss is in KB on Linux, in bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True, slots=True)
class Job:
    """A command to time; ``{out}`` (``{outdir}``) and ``{nbytes}`` in it are the output's path and size."""

    name: str
    argv: tuple[str, ...]
    source: Path | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs whose numbers are compared with each other: they run in turn, round after round."""

    key: str
    title: str
    jobs: tuple[Job, ...]
    rounds: int
    warm: bool = True  #: the sources are read before every job, so that they are in the page cache


def run_group(group: Group, directory: Path, log: Callable[[str], None]) -> dict[str, Series]:
    """All rounds of a group.  A job that fails is left out from then on, and says why."""
    series = {job.name: Series() for job in group.jobs}
    nbytes = _output_bytes(group, directory)
    for turn in range(group.rounds):
        for job in group.jobs:
            kept = series[job.name]
            if kept.failed:
                continue
            settle(job, directory, warm=group.warm)
            run_job(job, directory, nbytes, kept)
            log(f"{group.title}, round {turn + 1}: {job.name}: {kept.failed or f'{kept.seconds[-1]:.3f} s'}")
    clear(directory)
    return series


def _output_bytes(group: Group, directory: Path) -> int:
    """Size of what precconv writes, learned from a run that is not counted; failing that, half the source."""
    sources = [size_of(job.source) for job in group.jobs if job.source]
    for job in group.jobs:
        if job.name.startswith("precconv"):
            settle(job, directory, warm=group.warm)
            run_job(job, directory, 0, Series())
            break
    out = next((path for path in (_out(directory), _outdir(directory)) if path.exists()), None)
    return size_of(out) if out is not None else sources[0] // 2 if sources else 0


def size_of(path: Path) -> int:
    """Bytes of a file, or of all that are right in a directory."""
    return sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else [path]))


def settle(job: Job, directory: Path, *, warm: bool) -> None:
    """Remove the last output, let the disk catch up, and bring the source into the page cache."""
    clear(directory)
    if hasattr(os, "sync"):
        os.sync()
    if warm and job.source:
        buffer = bytearray(CHUNK)
        for path in sorted(job.source.iterdir()) if job.source.is_dir() else [job.source]:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def run_job(job: Job, directory: Path, nbytes: int, kept: Series) -> None:
    """Run a job once and add its numbers to ``kept``."""
    places = {"{out}": _out(directory), "{outdir}": _outdir(directory), "{nbytes}": nbytes}
    argv = [str(places.get(part, part)) for part in job.argv]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        child = subprocess.Popen(argv, stdout=out, stderr=err, cwd=directory, env=environment())
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if child.returncode:
            last = (err.read().decode(errors="replace").strip().splitlines() or ["nothing on stderr"])[-1]
            last = last.replace(str(directory) + os.sep, "").replace(sys.executable, "python")
            kept.failed = f"exit {child.returncode}: {last}"[:200]
            return
        kept.told.append(_json_line(out.read()))
    kept.wall.append(wall)
    kept.peak.append(usage.ru_maxrss * RSS_UNIT)


def _json_line(output: bytes) -> dict[str, float]:
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines or not lines[-1].startswith('{"'):
        return {}
    told: dict[str, float] = json.loads(lines[-1])
    return told


def environment() -> dict[str, str]:
    """This process's, with the repository's precconv first on the path."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path}


def clear(directory: Path) -> None:
    for path in _out(directory).parent.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _outdir(directory: Path) -> Path:
    return _out(directory).with_suffix("")


def _out(directory: Path) -> Path:
    path = directory / "out" / "out.safetensors"
    path.parent.mkdir(exist_ok=True)
    return path
