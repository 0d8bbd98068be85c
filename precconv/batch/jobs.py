"""One job: a conversion in whatever process an engine runs it, and what became of it as plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..api import convert, inspect, plan
from ..errors import HubError, OutputError, PrecconvError
from ..fileio import remove_stale_parts
from ..paths import is_taken
from ..plan import Plan
from ..repo.stage import remove_stage
from ..report import Report
from ..runs import ProgressCallback

__all__ = ["Job", "error_dict", "is_output", "memory_of", "plan_job", "run_job"]

#: Options of ``convert`` that a plan does not depend on.
_NOT_PLANNED = (
    "force", "on_overflow", "on_nonfinite", "max_underflow", "rounding", "seed", "verify", "workers", "durable", "push",
    "private", "branch", "pr", "low_disk",
)  # fmt: skip


class Job(NamedTuple):
    """A source and the options of ``convert``, ``output`` among them; the same in every process."""

    source: str
    options: Mapping[str, Any]
    begun: bool = False
    """Whether what is at the output can only be there because of an earlier attempt at this job: it was not there
    before, and how the attempt ended is not known."""


def run_job(job: Job, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Convert, and say what became of it as the ledger records it; a PrecconvError is a result too, under ``error``.

    Raises KeyboardInterrupt when it is stopped; what is done of a model directory is kept then.
    """
    started = time.perf_counter()
    try:
        options = dict(job.options)
        if job.begun and "output" in options and is_output(Path(options["output"])):
            if "push" not in options:
                return {**_adopted(job), "seconds": _since(started)}
            options["force"] = True  # it is here, and whether it was published the Hub will say
        report = convert(job.source, progress=progress, **options)
    except PrecconvError as e:
        return {"error": error_dict(e), "seconds": _since(started)}
    return {**_done(report), "seconds": _since(started)}


def is_output(path: Path) -> bool:
    """Whether something is there; an empty directory is a place for an output, and none."""
    return is_taken(path) and not (path.is_dir() and not any(path.iterdir()))


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 3)


def _done(report: Report) -> dict[str, Any]:
    return {
        "source_bytes": report.source_bytes,
        "output_bytes": report.output_bytes,
        "verified_bytes": report.verified_bytes,
        "warnings": len(report.warnings) + len(report.plan.warnings),
        **({} if report.published is None else {"published": dict(report.published)}),
    }


def error_dict(error: BaseException) -> dict[str, Any]:
    """An error as the ledger has it; of one that is no PrecconvError, its type is the kind.

    What the Hub said is told apart by ``hub``: gated, not found, rate limit.
    """
    known = isinstance(error, PrecconvError)
    error = getattr(error, "cause", None) or error  # Ray's, of what a task raised
    said = str(error) if known else str(error).strip().split("\n")[0]
    return {
        "kind": type(error).__name__,
        "message": said or type(error).__name__,
        "hint": getattr(error, "hint", None) if known else None,
        "exit_code": getattr(error, "exit_code", 1) if known else 1,
        **({"hub": error.kind} if isinstance(error, HubError) else {}),
    }


def plan_job(job: Job) -> Plan:
    """What the job would do; raises as ``plan`` does."""
    return plan(job.source, **{k: v for k, v in job.options.items() if k not in _NOT_PLANNED})


# What an earlier attempt finished without anybody hearing of it


def _adopted(job: Job) -> dict[str, Any]:
    """An output has its name when it is whole and verified, so it is done; raises OutputError where it is not ours."""
    output = Path(job.options["output"])
    made = plan_job(job)
    try:
        found = inspect(output)
    except PrecconvError as e:
        raise _not_ours(output) from e
    if not {i.src.name for i in made.items} <= {t.name for t in found}:
        raise _not_ours(output)
    _sweep(output)
    return {
        "source_bytes": inspect(job.source).file_bytes,
        "output_bytes": found.file_bytes,
        "verified_bytes": None,
        "warnings": len(made.warnings),
        "found": True,
    }


def _not_ours(output: Path) -> OutputError:
    return OutputError("exists, and is not what this conversion makes", path=output, hint="move it away")


def _sweep(output: Path) -> None:
    """Remove what the attempt left beside its output."""
    remove_stale_parts(output.parent)
    remove_stage(output)


# Memory


#: With torch imported, a converting process has 250 to 400 MB, and 256 MB more at most: the bar of the benchmarks.
_BASE = 700 << 20
_PER_TENSOR = 16 << 10  #: bytes: names, places and statistics, several times over


def memory_of(job: Job) -> int:
    """Bytes that a job needs at most, as a scheduler wants to know: from its plan, where there is one."""
    try:
        made = plan_job(job)
    except PrecconvError:
        return _BASE
    return _BASE + _PER_TENSOR * (len(made.items) + len(made.dropped))
