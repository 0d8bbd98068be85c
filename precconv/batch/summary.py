"""A batch's results and plans as data and as tables."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import text
from .._version import __version__
from ..errors import PrecconvError
from ..plan import Plan
from ..report import plan_dict
from .jobs import error_dict, plan_job
from .prepare import Planned
from .run import Result

__all__ = ["BatchReport", "PlannedBatch", "plan_batch"]

#: Version of the JSON below, as of the report's.
SCHEMA = 1
#: Of a job, what the ledger knows too.
_DATA = ("source_bytes", "output_bytes", "seconds", "warnings", "published", "error")


@dataclass(frozen=True, slots=True)
class BatchReport:
    """What became of every job, in the order they were given."""

    results: tuple[Result, ...]
    ledger: Path
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not any(r.outcome in ("failed", "interrupted") for r in self.results)

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome == "failed")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes in bytes."""
        counts = Counter(r.outcome for r in self.results)
        return {
            "schema": SCHEMA,
            "tool": f"precconv {__version__}",
            "ok": self.ok,
            "counts": {o: counts[o] for o in ("done", "skipped", "failed", "interrupted", "not run")},
            "seconds": round(self.seconds, 3),
            "ledger": os.fspath(self.ledger),
            "jobs": [
                {
                    "source": r.planned.source,
                    "output": r.planned.place,
                    "outcome": r.outcome,
                    "key": r.planned.key,
                    **{k: r.data.get(k) for k in _DATA},
                }
                for r in self.results
            ],
        }

    def table(self) -> str:
        """A line a job, and one for all."""
        head = ["source", "output", "size", "", "time", "outcome"]
        lines = text.table([head, *map(_row, self.results)], right="  rrr")
        counts = Counter(r.outcome for r in self.results)
        said = [f"{counts[o]} {o}" for o in ("done", "skipped", "failed", "interrupted", "not run") if counts[o]]
        written = sum(r.data.get("output_bytes") or 0 for r in self.results if r.outcome == "done")
        return "\n".join([*lines, f"{', '.join(said)}; {text.size(written)} written in {self.seconds:.1f} s"])


def _row(result: Result) -> list[str]:
    data = result.data
    sizes = [_size(data.get(k)) for k in ("source_bytes", "output_bytes")]
    seconds = data.get("seconds")
    taken = f"{seconds:.1f} s" if isinstance(seconds, float) and result.outcome != "skipped" else ""
    return [
        result.planned.source, _shown(result.planned), sizes[0], f"-> {sizes[1]}" if sizes[1] else "", taken,
        _outcome(result),
    ]  # fmt: skip


def _outcome(result: Result) -> str:
    warnings = result.data.get("warnings")
    if result.outcome == "failed":
        error = result.data["error"]
        return f"failed ({error['kind']})"
    if result.outcome in ("done", "skipped") and warnings:
        return f"{result.outcome}, {text.count(warnings, 'warning')}"
    return result.outcome


def _size(nbytes: object) -> str:
    return text.size(nbytes) if isinstance(nbytes, int) else ""


def _shown(planned: Planned) -> str:
    """A path relative to the working directory where it lies in it."""
    path = planned.output
    if path is None:
        return planned.place
    return os.fspath(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else os.fspath(path)


# Plans


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What a batch would do: the plan of each job, the error that it would end with, or None where it is done."""

    rows: tuple[tuple[Planned, Plan | PrecconvError | None], ...]

    @property
    def ok(self) -> bool:
        return not any(isinstance(found, PrecconvError) for _, found in self.rows)

    @property
    def plans(self) -> list[Plan]:
        return [found for _, found in self.rows if isinstance(found, Plan)]

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for planned, found in self.rows:
            row: dict[str, Any] = {"source": planned.source, "output": planned.place, "key": planned.key}
            if isinstance(found, Plan):
                row |= {"source_bytes": found.source_bytes, "output_bytes": found.output_bytes}
                row["plan"] = plan_dict(found, items=False)
            elif found is not None:
                row["error"] = error_dict(found)
            rows.append({**row, "done": found is None})
        sizes = {k: sum(getattr(p, k) for p in self.plans) for k in ("source_bytes", "output_bytes")}
        return {"schema": SCHEMA, "tool": f"precconv {__version__}", "ok": self.ok, **sizes, "jobs": rows}

    def table(self) -> str:
        rows = [["source", "output", "tensors", "size", "", "plan"]]
        for planned, found in self.rows:
            names = [planned.source, _shown(planned)]
            if isinstance(found, Plan):
                sizes = [text.size(found.source_bytes), f"-> {text.size(found.output_bytes)}"]
                rows.append([*names, f"{len(found.items):,}", *sizes, found.target.name])
            else:
                rows.append([*names, "", "", "", "done" if found is None else f"fails: {found}"])
        rows.append(["total", "", f"{sum(len(p.items) for p in self.plans):,}", *_totals(self.plans), ""])
        return "\n".join(text.table(rows, right="  rrr"))


def _totals(plans: Sequence[Plan]) -> list[str]:
    return [text.size(sum(p.source_bytes for p in plans)), f"-> {text.size(sum(p.output_bytes for p in plans))}"]


def plan_batch(rows: Sequence[tuple[Planned, Result | None]]) -> PlannedBatch:
    """The plans of jobs that are to do; what cannot be planned is part of the result."""
    meant = [(planned, result) for planned, result in rows if result is None or result.outcome != "not run"]
    return PlannedBatch(tuple((planned, _plan(planned) if result is None else None) for planned, result in meant))


def _plan(planned: Planned) -> Plan | PrecconvError:
    try:
        return plan_job(planned.job)
    except PrecconvError as e:
        return e
