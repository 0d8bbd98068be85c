"""Who runs on which input: the groups that ``run.py`` measures."""

from __future__ import annotations

import sys
from pathlib import Path

from .floor import ALLOCATE
from .measure import ROOT, Group, Job

HERE = ROOT / "benchmarks"
FLOORS = tuple(f"floor, {way}" for way in ALLOCATE)
CP = "cp"
FIVE = "five lines"
FIVE_CHECKED = "five lines, isfinite"
CLI = "precconv, whole process"
API = "precconv"
UNVERIFIED = "precconv, verification off"
UNCHECKED = "precconv, checks and verification off"
API_FP16 = "precconv to fp16"
STOCHASTIC = "precconv, stochastic rounding"
STOCHASTIC_FP16 = "precconv to fp16, stochastic rounding"
SCAN = "precconv scan"
VERIFY = "precconv verify"
TORCH = "import torch"
HELP = "precconv --help"
INSPECT = "precconv inspect"
INSPECT_MODULES = "precconv inspect, modules of torch"
#: Rounds where time is not what counts.
FEW = 2


def python(script: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, str(HERE / script), *map(str, arguments))


def floors(source: Path) -> list[Job]:
    return [
        Job(name, python("floor.py", source, "{out}", "--bytes", "{nbytes}", "--allocate", way), source)
        for name, way in zip(FLOORS, ALLOCATE, strict=True)
    ]


def cp(source: Path) -> Job:
    return Job(CP, ("cp", str(source), "{out}"), source)


def five(source: Path) -> list[Job]:
    plain = python("five_lines.py", source, "{out}", "bfloat16")
    return [Job(FIVE, plain, source), Job(FIVE_CHECKED, (*plain, "check"), source)]


def cli(source: Path) -> Job:
    argv = (sys.executable, "-m", "precconv", str(source), "--to", "bf16", "-o", "{out}", "--force")
    return Job(CLI, argv, source)


def api(source: Path, name: str = API, to: str = "bf16", options: tuple[str, ...] = ()) -> Job:
    return Job(name, python("children.py", "convert", source, "{out}", to, *options), source)


def import_torch() -> Job:
    return Job(TORCH, python("children.py", "torch"))


def conversion(key: str, title: str, source: Path, *, rounds: int, memory: int) -> Group:
    """Everybody on one input; the five lines only where there is memory for both files, and the result."""
    size = source.stat().st_size
    fits = 2 * size < memory
    jobs = [*floors(source), cp(source), *(five(source) if fits else []), cli(source), api(source)]
    jobs += [api(source, UNVERIFIED, options=("none",))]
    jobs += [api(source, UNCHECKED, options=("none", "off"))]
    jobs += [api(source, API_FP16, "fp16")]
    stochastic = ("sample", "on", "stochastic")
    jobs += [api(source, STOCHASTIC, options=stochastic), api(source, STOCHASTIC_FP16, "fp16", stochastic)]
    jobs += [Job(SCAN, python("children.py", "scan", source), source)]
    jobs += [Job(VERIFY, python("children.py", "verify", source, "{out}"), source), import_torch()]
    return Group(key, title, tuple(jobs), rounds if fits else min(rounds, FEW), warm=fits)


def peak(key: str, title: str, source: Path, *, rounds: int, memory: int) -> Group:
    """An input that is there for the memory it takes."""
    jobs = (*floors(source), cp(source), cli(source), api(source), import_torch())
    return Group(key, title, jobs, min(rounds, FEW), warm=2 * source.stat().st_size < memory)


def sharded(title: str, source: Path, *, rounds: int, memory: int) -> Group:
    """A directory of shards, beside a copy of it."""
    argv = (sys.executable, "-m", "precconv", str(source), "--to", "bf16", "-o", "{outdir}", "--force")
    convert = python("children.py", "convert", source, "{outdir}", "bf16")
    copy = Job(CP, ("cp", "-r", str(source), "{outdir}"), source)
    jobs = (copy, Job(CLI, argv, source), Job(API, convert, source), import_torch())
    size = sum(path.stat().st_size for path in source.iterdir())
    return Group("sharded", title, jobs, min(rounds, FEW), warm=2 * size < memory)


def many(title: str, small: Path, single: Path, *, rounds: int) -> Group:
    """Many small tensors beside one tensor of as many bytes."""
    jobs = []
    for suffix, source in ((MANY, small), (ONE, single)):
        jobs += [api(source, API + suffix)]
        jobs += [Job(job.name + suffix, job.argv, job.source) for job in (five(source)[0], cli(source))]
    return Group("small", title, tuple(jobs), rounds)


MANY, ONE = ", many tensors", ", one tensor"


def startup(source: Path, *, rounds: int) -> Group:
    """What must be quick because it needs no tensor data."""
    precconv = (sys.executable, "-m", "precconv")
    jobs = (
        Job(HELP, (*precconv, "--help")),
        Job(INSPECT, (*precconv, "inspect", str(source))),
        Job(INSPECT_MODULES, python("children.py", "imports", "inspect", source)),
    )
    return Group("startup", "start-up", jobs, rounds)
