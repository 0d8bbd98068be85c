"""The report on a whole model: all its checkpoints as one plan, with what became of each output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checks import Finding
from ..convert import Outcome, Task
from ..plan import Plan
from ..report import FileReport, Report
from ..request import Request
from ..stats import Stats
from ..tensors import prefixed
from ..text import size
from .models import Models
from .plans import ModelPlan, Output, combined

__all__ = ["Job", "findings", "plan_of_all", "report"]


@dataclass(frozen=True, slots=True)
class Job:
    """What stays the same throughout one conversion."""

    models: Models
    plans: Sequence[ModelPlan]
    request: Request
    final: Path
    tasks: Sequence[tuple[ModelPlan, Output, Task]]
    started: float
    names: frozenset[str]  #: of all files of the output, relative
    notes: tuple[str, ...] = ()  #: on what was there when it began


def findings(job: Job, outcomes: Mapping[str, Outcome]) -> list[Finding]:
    """What the checks found in all outputs, tensors named after their component where there are several."""
    return [
        replace(f, tensor=prefixed(job.models.label(made.model), f.tensor))
        for made, output, _ in job.tasks
        if output.name in outcomes
        for f in outcomes[output.name].findings
    ]


def plan_of_all(
    models: Models,
    plans: Sequence[ModelPlan],
    request: Request,
    outcomes: Mapping[str, Outcome] | None = None,
    notes: Sequence[str] = (),
) -> Plan:
    """All checkpoints' plans as one, as they were carried out: overflow may have changed a dtype."""
    done = []
    for made in plans:
        parts = [outcomes[o.name].plan if outcomes and o.name in outcomes else o.plan for o in made.outputs]
        done.append((made.model.name, replace(made.plan, items=tuple(i for p in parts for i in p.items))))
    sizes = [_component(made, plan) for made, (_, plan) in zip(plans, done, strict=True)] if len(plans) > 1 else []
    return combined(request, done, [*notes, *sizes, *models.notes, *models.left_out()])


def _component(made: ModelPlan, plan: Plan) -> str:
    """One component's target and sizes."""
    name = made.model.name or "."
    to = "kept" if made.request.components.get(name) == "keep" else f"to {made.request.to}"
    return f"{name}: {to}, {size(plan.source_bytes)} -> {size(plan.output_bytes)}"


def report(
    job: Job, outcomes: Mapping[str, Outcome], files: Sequence[FileReport] = (), *, output: str | None = None
) -> Report:
    """``output``: where it was published, None when it was not."""
    return Report(
        source=job.models.files.shown,
        output=output,
        plan=plan_of_all(job.models, job.plans, job.request, outcomes, job.notes),
        seen=dict(_stats(job, outcomes)),
        findings=tuple(findings(job, outcomes)),
        options=job.request.repo_options(),
        source_bytes=sum(m.whole.file.size for m in job.models.models),
        output_bytes=sum(outcomes[o.name].size if o.name in outcomes else t.layout.size for _, o, t in job.tasks),
        verified_bytes=sum(o.verified for o in outcomes.values()),
        seconds=time.perf_counter() - job.started,
        files=tuple(files),
    )


def _stats(job: Job, outcomes: Mapping[str, Outcome]) -> Iterator[tuple[int, Stats]]:
    """By position in the plan of all."""
    first = 0
    for _, output, task in job.tasks:
        found = outcomes.get(output.name)
        if found is not None:
            yield from ((first + key, stats) for key, stats in found.stats.items())
        first += len(found.plan.items if found is not None else task.plan.items)
