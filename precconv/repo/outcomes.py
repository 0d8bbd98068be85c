"""What became of one output as plain data, for the run that goes on after this one was killed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ..checks import Finding
from ..convert import Outcome, Task
from ..dtypes import dtype
from ..exponents import Exponents
from ..stats import Norms, Stats

__all__ = ["outcome_dict", "outcome_of"]


def outcome_dict(task: Task, outcome: Outcome) -> dict[str, Any]:
    """All that a report needs and the task does not say."""
    changes = {
        key: [item.to.name, item.why]
        for key, (item, planned) in enumerate(zip(outcome.plan.items, task.plan.items, strict=True))
        if item != planned
    }
    return {
        "size": outcome.size,
        "verified": outcome.verified,
        "changes": changes,
        "stats": {key: _row(stats) for key, stats in outcome.stats.items()},
        "findings": [asdict(f) for f in outcome.findings],
    }


def outcome_of(task: Task, data: Mapping[str, Any]) -> Outcome:
    """The outcome that was recorded for a task."""
    changes = {int(key): (dtype(to), why) for key, (to, why) in data["changes"].items()}
    return Outcome(
        task.plan.amended(changes) if changes else task.plan,
        data["size"],
        task.layout,
        (),
        {int(key): _stats(row) for key, row in data["stats"].items()},
        tuple(Finding(**f) for f in data["findings"]),
        data["verified"],
    )


def _row(stats: Stats) -> dict[str, Any]:
    e = stats.exponents
    return {**asdict(replace(stats, exponents=None)), "exponents": None if e is None else [e.first, e.counts]}


def _stats(row: Mapping[str, Any]) -> Stats:
    norms, exponents = row["norms"], row["exponents"]
    return Stats(
        **{
            **row,
            "norms": None if norms is None else Norms(**norms),
            "exponents": None if exponents is None else Exponents(exponents[0], tuple(exponents[1])),
        }
    )
