"""The conversion of a whole model: every checkpoint of a directory, its configs, and the files around them.

Shards are made side by side in a directory of their own, see ``stage``; it gets the output's name when all is there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ..bulk import collector_paused
from ..checks import Finding
from ..convert import Outcome, Task, convert_checkpoint, make_task, planned_bytes, refusal, require_space, verify, write
from ..errors import NumericError, OutputError, PrecconvError, SourceChangedError, UsageError, VerificationError
from ..fileio import part_file
from ..formats.sharded import JoinedFile
from ..outputs import output_format, output_path
from ..paths import same_file
from ..plan import Plan
from ..report import FileReport, Report, check_report_path
from ..request import Request, StrPath, plan_for
from ..runs import Progress, ProgressCallback
from ..stats import Stats
from .doors import check_collisions
from .files import copied_bytes, fingerprint, model_card, output_names, write_files
from .models import Models, open_models
from .outcomes import outcome_dict, outcome_of
from .places import directory_output, require_replaceable, single_output
from .plans import ModelPlan, Output, combined, plan_models, prefixed
from .source import local_files
from .stage import Stage, home_of, put_back, staged

__all__ = ["convert_directory", "plan_directory"]


@dataclass(frozen=True, slots=True)
class _Job:
    """What stays the same throughout one conversion."""

    models: Models
    plans: Sequence[ModelPlan]
    request: Request
    final: Path
    tasks: Sequence[tuple[ModelPlan, Output, Task]]
    started: float

    @property
    def alone(self) -> bool:
        return len(self.plans) == 1


def plan_directory(source: StrPath, output: StrPath | None, request: Request) -> Plan:
    """What ``convert_directory`` with the same arguments would do, from headers and configs alone."""
    root, one = Path(source), single_output(output)
    skip = () if output is None or one is not None else (Path(output),)
    with open_models(local_files(root, skip=skip), request) as models, collector_paused():
        if one is not None:
            made, _ = _as_one(models, replace(request, shared=request.shared or "clone"), one)
            return made
        return _combined(models, plan_models(models, request), request)


def convert_directory(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Report:
    """Convert every checkpoint below a directory; the output directory appears whole and verified, or not at all.

    With an ``output`` whose name is that of a checkpoint file, the directory's one checkpoint becomes that file.
    """
    root, one = Path(source), single_output(output)
    if one is not None:
        return _convert_to_file(root, one, request, progress)
    final = directory_output(root, request.policy.target, output)
    put_back(final)
    with open_models(local_files(root, skip=(final, home_of(final))), request) as models:
        started = time.perf_counter()
        plans = plan_models(models, request)
        check_collisions(output_names(models, plans), root=os.fspath(root))
        require_replaceable(final, set(output_names(models, plans)), force=request.force)
        _check_report(models, final, request)
        with staged(final, fingerprint(models, plans, request), durable=request.durable) as stage:
            tasks = [(p, o, _task(p, o, stage, request)) for p in plans for o in p.outputs]
            job = _Job(models, plans, request, final, tasks, started)
            try:
                return _convert(job, stage, progress)
            except (NumericError, VerificationError) as e:
                if request.report is not None and e.report is not None:
                    e.report.write(request.report)
                raise


def _check_report(models: Models, final: Path, request: Request) -> None:
    """Refuse a report that would replace a file of the source, or be replaced with the output's directory."""
    if request.report is None:
        return
    check_report_path(request.report, [final, *(models.root / path for path in models.survey.files)])
    if final.resolve() in request.report.resolve().parents:
        raise OutputError("the report cannot go into the output", path=request.report, hint="give it another name")


def _task(made: ModelPlan, output: Output, stage: Stage, request: Request) -> Task:
    norms = replace(made.request, report=request.report)
    return make_task(output.found, output.plan, stage.place(output.name), made.fmt, norms)


def _convert(job: _Job, stage: Stage, progress: ProgressCallback | None) -> Report:
    """Do it; what is done when something comes between is kept, unless another run could not use it."""
    try:
        return _done(job, stage, progress)
    except (NumericError, SourceChangedError, VerificationError):
        raise
    except KeyboardInterrupt:
        stage.kept = bool(stage.done)
        if not stage.kept:
            raise
        finished = f"{len(stage.done)} of {len(job.tasks)} weight files"
        message = f"interrupted; {finished} are done, and the same command goes on from there"
        raise KeyboardInterrupt(message) from None
    except BaseException as e:
        stage.kept = bool(stage.done)
        if stage.kept and isinstance(e, PrecconvError):
            e.hint = "; ".join(filter(None, (e.hint, "what is done is kept: the same command goes on from there")))
        raise


def _done(job: _Job, stage: Stage, progress: ProgressCallback | None) -> Report:
    todo = [row for row in job.tasks if row[1].name not in stage.done]
    require_space(job.final, sum(task.layout.size for *_, task in todo) + copied_bytes(job.models))
    outcomes = {o.name: outcome_of(task, stage.done[o.name]) for _, o, task in job.tasks if o.name in stage.done}
    try:
        outcomes |= _write_all(job, stage, todo, progress)
    except VerificationError as e:
        e.report = _report(job, outcomes, (), published=False)
        raise
    errors = [f for f in _findings(job, outcomes) if f.level == "error"]
    if errors:
        report = _report(job, outcomes, (), published=False)
        raise refusal(errors, job.request, path=os.fspath(job.models.root), report=report)
    plan = _combined(job.models, _carried_out(job.plans, outcomes), job.request)
    files = write_files(job.models, job.plans, outcomes, stage, model_card(job.models, plan, job.request))
    done = _report(job, outcomes, files, published=True)
    stage.only({f.path for f in files if f.action != "left out"})
    with done.staged(job.request.report) if job.request.report else nullcontext():
        stage.publish()
    return done


# The weights


def _write_all(
    job: _Job, stage: Stage, todo: Sequence[tuple[ModelPlan, Output, Task]], callback: ProgressCallback | None
) -> dict[str, Outcome]:
    """Make all outputs, as many side by side as there are workers; the first failure stops the others."""
    progress = Progress(sum(planned_bytes(task) for *_, task in todo), callback)
    workers = job.request.workers
    if workers == 1 or len(todo) <= 1:
        return {output.name: _make(stage, output, task, progress) for _, output, task in todo}
    side_by_side = min(workers, len(todo))
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(side_by_side) as pool:
        running: dict[Future[Outcome], str] = {}
        try:
            for n, (_, output, task) in enumerate(todo):
                while len(running) >= side_by_side:
                    _collect(running, outcomes, progress)
                threads = workers if n + 1 == len(todo) else max(1, workers // side_by_side)
                narrowed = replace(task, request=replace(task.request, workers=threads))
                running[pool.submit(_make, stage, output, narrowed, progress)] = output.name
            while running:
                _collect(running, outcomes, progress)
        except BaseException:
            progress.stopped = True
            raise
    return outcomes


def _collect(running: dict[Future[Outcome], str], outcomes: dict[str, Outcome], progress: Progress) -> None:
    """Wait a moment; take in what is finished, or raise why it is not."""
    done, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
    progress.show()
    for future in done:
        outcomes[running.pop(future)] = future.result()


def _make(stage: Stage, output: Output, task: Task, progress: Progress) -> Outcome:
    """One output, whole and recorded, unless a check refused it."""
    with task.file.held(), part_file(task.final) as part:
        outcome = write(task, part, progress)
        if not outcome.errors:
            outcome = verify(task, outcome, part, progress)
            shutil.copymode(_first_file(output), part.path)
            part.publish(replace=True, durable=stage.must_sync)
            stage.record(output.name, outcome_dict(task, outcome))
    return outcome


def _first_file(output: Output) -> Path:
    file = output.found.file
    return file.files[0].path if isinstance(file, JoinedFile) else file.path


# The report


def _findings(job: _Job, outcomes: Mapping[str, Outcome]) -> list[Finding]:
    return [
        replace(f, tensor=prefixed(made.model.name, f.tensor, alone=job.alone))
        for made, output, _ in job.tasks
        if output.name in outcomes
        for f in outcomes[output.name].findings
    ]


def _carried_out(plans: Sequence[ModelPlan], outcomes: Mapping[str, Outcome]) -> list[ModelPlan]:
    """The plans with what became of them: overflow may have changed a dtype."""
    done = []
    for made in plans:
        parts = [outcomes[o.name].plan if o.name in outcomes else o.plan for o in made.outputs]
        done.append(replace(made, plan=replace(made.plan, items=tuple(i for p in parts for i in p.items))))
    return done


def _combined(models: Models, plans: Sequence[ModelPlan], request: Request) -> Plan:
    return combined(request.policy, [(p.model.name, p.plan) for p in plans], [*models.notes, *models.left_out()])


def _report(job: _Job, outcomes: Mapping[str, Outcome], files: Sequence[FileReport], *, published: bool) -> Report:
    return Report(
        source=job.models.files.shown,
        output=os.fspath(job.final) if published else None,
        plan=_combined(job.models, _carried_out(job.plans, outcomes), job.request),
        seen=dict(_stats(job, outcomes)),
        findings=tuple(_findings(job, outcomes)),
        options=job.request.repo_options(),
        source_bytes=sum(m.whole.file.size for m in job.models.models),
        output_bytes=sum(outcomes[o.name].size if o.name in outcomes else t.layout.size for _, o, t in job.tasks),
        verified_bytes=sum(o.verified for o in outcomes.values()),
        seconds=time.perf_counter() - job.started,
        files=tuple(files),
    )


def _stats(job: _Job, outcomes: Mapping[str, Outcome]) -> Iterator[tuple[int, Stats]]:
    """By position in the combined plan."""
    first = 0
    for _, output, task in job.tasks:
        found = outcomes.get(output.name)
        if found is not None:
            yield from ((first + key, stats) for key, stats in found.stats.items())
        first += len(found.plan.items if found is not None else task.plan.items)


# One file


def _as_one(models: Models, request: Request, final: Path) -> tuple[Plan, ModelPlan]:
    """The plan for a directory's one checkpoint as one file."""
    if len(models.models) > 1:
        names = ", ".join(m.name for m in models.models)
        message = f"holds several checkpoints ({names}), which one file cannot"
        raise UsageError(
            message, path=models.root, hint="give a directory with -o, or convert one component's directory"
        )
    if request.shard_size is not None:
        raise UsageError("one file cannot have shards", path=final, hint="give a directory with -o")
    (made,) = plan_models(models, request)
    fmt = output_format(made.model.whole.format, final, choice=request.format)
    return plan_for(made.decided, made.model.whole, fmt, made.request), made


def _convert_to_file(root: Path, final: Path, request: Request, progress: ProgressCallback | None) -> Report:
    request = replace(request, shared=request.shared or "clone")
    with open_models(local_files(root), request) as models:
        made, plan = _as_one(models, request, final)
        whole = plan.model.whole
        for path in plan.model.set.files:
            if same_file(root / path, final):
                raise OutputError("is part of the input", path=final, hint="give another name with -o")
        _check_report(models, final, request)
        place = output_path(
            root, whole.format, request.policy.target, final, choice=request.format, force=request.force
        )
        return convert_checkpoint(whole, made, *place, plan.request, progress)
