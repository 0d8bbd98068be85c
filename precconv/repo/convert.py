"""The conversion of a whole model: every checkpoint of it, its configs, and the files around them.

Outputs are made side by side in a directory of their own, see ``stage``; it gets the output's name when all is there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..bulk import collector_paused
from ..checkpoint import open_checkpoint
from ..convert import Outcome, Task, convert_checkpoint, make_task, planned_bytes, refusal, verify, write
from ..errors import NumericError, OutputError, PrecconvError, SourceChangedError, UsageError, VerificationError
from ..fileio import part_file
from ..filing import check_filing, file_refusal, filed
from ..formats import Format
from ..formats.sharded import JoinedFile
from ..outputs import output_format, output_path
from ..paths import require_space, same_file
from ..plan import Plan
from ..report import Report
from ..request import Request, StrPath, plan_for
from ..runs import Phases, Progress, ProgressCallback
from .doors import check_collisions
from .files import copied_bytes, fingerprint, model_card, output_names, write_files
from .models import Models, open_models
from .outcomes import outcome_dict, outcome_of
from .places import directory_output, require_replaceable, single_output
from .plans import ModelPlan, Output, plan_models
from .reports import Job, findings, plan_of_all, report
from .source import Files, local_files
from .stage import Stage, copy_mode, home_of, put_back, staged

__all__ = [
    "Made",
    "Needs",
    "Runner",
    "Sink",
    "as_one",
    "convert_directory",
    "convert_files",
    "needs",
    "plan_directory",
    "plan_files",
]


#: One output: whose it is, what goes into it, and how it is laid out.
Made = tuple[ModelPlan, Output, Task]
#: Makes outputs somewhere else; what became of each, by name.
Runner = Callable[[Sequence[Made], ProgressCallback | None], dict[str, Outcome]]


class Sink(Protocol):
    """Where an output's files go beside, or instead of, a directory of their own."""

    def take(self, path: Path, name: str) -> None:
        """A finished file of the output; called as they are finished, from any thread."""
        ...

    def finish(self, done: Report) -> Report:
        """All files were taken; the report with where they are now."""
        ...


def plan_directory(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Plan:
    """What ``convert_directory`` with the same arguments would do, from headers and configs where they decide it."""
    skip = () if output is None or single_output(output) is not None else (Path(output),)
    return plan_files(local_files(Path(source), skip=skip), output, request, progress)


def plan_files(
    files: Files, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Plan:
    """The same for a model's files wherever they lie."""
    one = single_output(output)
    with open_models(files, request) as models, collector_paused():
        if one is not None:
            made, _ = as_one(models, request.with_shared(), one, Progress(0, progress))
            return made
        return plan_of_all(models, plan_models(models, request, Progress(0, progress)), request)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a conversion reads of a model, relative paths, and the bytes of tensors that it writes."""

    weights: tuple[str, ...]
    others: tuple[str, ...]
    nbytes: int
    names: frozenset[str] = frozenset()  #: of the output's files, where it is a directory


def needs(files: Files, final: Path, request: Request, *, one: bool = False) -> Needs:
    """What ``convert_files`` will need, or ``convert_to_file`` where the output is ``one`` file.

    Raises what headers and the request have against it: nobody waits hours for that.
    """
    with open_models(files, request) as models, collector_paused():
        if one:
            made, plan = as_one(models, request.from_headers().with_shared(), final)
            _check_report(models, final, request)
            _place(models, plan, final, request)
            names, nbytes = [], sum(i.nbytes for i in made.items)
        else:
            plans = plan_models(models, request.from_headers())
            names, nbytes = output_names(models, plans), sum(i.nbytes for p in plans for i in p.plan.items)
            _check_output(models, names, final, request)
        if request.lossless == "auto":  # the values decide
            nbytes = 0
        sets = [m.set for m in models.models]
        indexes = [s.index for s in sets if s.index is not None]
        others = (*models.survey.others, *indexes)
        return Needs(tuple(path for s in sets for path in s.files), others, nbytes, frozenset(names))


def convert_directory(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Report:
    """Convert every checkpoint below a directory; the output directory appears whole and verified, or not at all.

    With an ``output`` whose name is that of a checkpoint file, the directory's one checkpoint becomes that file.
    """
    root, one = Path(source), single_output(output)
    if one is not None:
        return convert_to_file(local_files(root), one, request, progress)
    final = directory_output(root, request.to, output)
    put_back(final)
    return convert_files(local_files(root, skip=(final, home_of(final))), final, request, progress)


def convert_files(
    files: Files,
    final: Path,
    request: Request,
    progress: ProgressCallback | None = None,
    sink: Sink | None = None,
    *,
    keeps: bool = True,
    runner: Runner | None = None,
) -> Report:
    """Convert a model's files to the directory ``final``.

    ``sink``: takes the output's files too; without ``keeps`` they go there alone.  ``runner``: makes the weights
    elsewhere, and sends them to the sink itself.
    """
    with open_models(files, request) as models:
        started, phases = time.perf_counter(), Phases(progress)
        plans = plan_models(models, request.from_headers())
        names = _checked_names(models, plans, final, request, keeps=keeps)
        if request.lossless is not None:
            plans = plan_models(models, request, Progress(0, phases.first))
            names = _checked_names(models, plans, final, request, keeps=keeps)
        with staged(final, fingerprint(models, plans, request), durable=request.durable) as stage:
            tasks = [
                (p, o, make_task(o.found, o.plan, stage.place(o.name), p.fmt, p.request))
                for p in plans
                for o in p.outputs
            ]
            job = Job(models, plans, request, final, tasks, started, frozenset(names), stage.notes)
            try:
                return _convert(job, stage, phases.second, sink, keeps=keeps, runner=runner)
            except (NumericError, VerificationError) as e:
                file_refusal(e.report, request)
                raise


def _checked_names(
    models: Models, plans: Sequence[ModelPlan], final: Path, request: Request, *, keeps: bool
) -> Sequence[str]:
    """The output's files; refuses what is in the way of one."""
    names = output_names(models, plans)
    _check_output(models, names, final, request)
    if keeps:
        require_replaceable(final, frozenset(names), force=request.force)
    return names


def _check_output(models: Models, names: Sequence[str], final: Path, request: Request) -> None:
    """Refuse files of an output that are in each other's way, and a report that is."""
    check_collisions(names, root=os.fspath(models.root))
    _check_report(models, final, request)


def _check_report(models: Models, final: Path, request: Request) -> None:
    """Refuse a report that would replace a file of the source, or be replaced with the output's directory."""
    check_filing(request, [final, *(models.root / path for path in models.survey.files)])
    for path in (request.report, request.html):
        if path is not None and final.resolve() in path.resolve().parents:
            raise OutputError("the report cannot go into the output", path=path, hint="give it another name")


def _convert(
    job: Job, stage: Stage, progress: ProgressCallback | None, sink: Sink | None, *, keeps: bool, runner: Runner | None
) -> Report:
    """Do it; what is done when something comes between is kept, unless another run could not use it."""
    try:
        return _done(job, stage, progress, sink, keeps=keeps, runner=runner)
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


def _done(
    job: Job, stage: Stage, progress: ProgressCallback | None, sink: Sink | None, *, keeps: bool, runner: Runner | None
) -> Report:
    todo = [row for row in job.tasks if row[1].name not in stage.done]
    if runner is None:
        _require_space(job, todo)
    outcomes = {o.name: outcome_of(task, stage.done[o.name]) for _, o, task in job.tasks if o.name in stage.done}
    if sink is not None:
        for name in outcomes:
            sink.take(stage.place(name), name)
    try:
        outcomes |= _write_all(job, stage, todo, progress, sink) if runner is None else runner(todo, progress)
    except VerificationError as e:
        e.report = report(job, outcomes)
        raise
    errors = [f for f in findings(job, outcomes) if f.level == "error"]
    if errors:
        raise refusal(errors, job.request, path=job.models.files.shown, report=report(job, outcomes))
    plan = plan_of_all(job.models, job.plans, job.request, outcomes)
    files = write_files(job.models, job.plans, outcomes, stage, model_card(job.models, plan, job.request))
    done = report(job, outcomes, files, output=os.fspath(job.final))
    if sink is not None:
        for f in files:
            if f.action in ("written", "copied"):
                sink.take(stage.place(f.path), f.path)
        there = sink.finish(done)
        done = replace(there, output=done.output) if keeps else there
    stage.only({f.path for f in files if f.action != "left out"})
    with filed(done, job.request):
        if keeps:
            stage.publish(lambda at: require_replaceable(job.final, job.names, force=job.request.force, at=at))
    return done


def _require_space(job: Job, todo: Sequence[Made]) -> None:
    sizes = [task.layout.size for *_, task in todo]
    if job.models.files.near is not None:  # a file at a time, and what it is made from
        sources = job.models.files.sizes
        sizes = [max([0, *(task.layout.size + sum(sources[p] for p in o.sources) for _, o, task in todo)])]
    require_space(job.final, sum(sizes) + copied_bytes(job.models))


# The weights


def _write_all(
    job: Job,
    stage: Stage,
    todo: Sequence[Made],
    callback: ProgressCallback | None,
    sink: Sink | None,
) -> dict[str, Outcome]:
    """Make all outputs, as many side by side as there are workers; the first failure stops the others."""
    progress = Progress(sum(planned_bytes(task) for *_, task in todo), callback)
    workers = job.request.workers
    if workers == 1 or len(todo) <= 1 or job.models.files.near is not None:
        return {output.name: _make(job, stage, output, task, progress, sink) for _, output, task in todo}
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
                running[pool.submit(_make, job, stage, output, narrowed, progress, sink)] = output.name
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


def _make(job: Job, stage: Stage, output: Output, task: Task, progress: Progress, sink: Sink | None) -> Outcome:
    """One output, whole and recorded, unless a check refused it."""
    if job.models.files.near is not None:
        return _near(job, stage, output, task, progress, sink)
    keeps_mode = not job.models.files.sizes  # those of the client's cache are nobody's wish
    outcome = _written(stage, output, task, progress, keeps_mode=keeps_mode)
    if not outcome.errors:
        stage.record(output.name, outcome_dict(task, outcome))
        if sink is not None:
            sink.take(task.final, output.name)
    return outcome


def _near(job: Job, stage: Stage, output: Output, task: Task, progress: Progress, sink: Sink | None) -> Outcome:
    """One output of a source that is brought here for it and removed again, and the output after it."""
    assert job.models.files.near is not None
    request = task.request
    with ExitStack() as stack:
        (path,) = [stack.enter_context(job.models.files.near(p)) for p in output.sources]
        found = stack.enter_context(
            open_checkpoint(path, weights=request.weights, select=request.select, strip_wrappers=request.strip_wrappers)
        )
        local = make_task(found, output.plan, task.final, task.fmt, request)
        outcome = _written(stage, replace(output, found=found), local, progress, keeps_mode=False)
    if not outcome.errors:
        assert sink is not None
        sink.take(task.final, output.name)
        task.final.unlink()
    return outcome


def _written(stage: Stage, output: Output, task: Task, progress: Progress, *, keeps_mode: bool) -> Outcome:
    with task.file.held(), part_file(task.final, sweeps=False) as part:
        outcome = write(task, part, progress)
        if not outcome.errors:
            outcome = verify(task, outcome, part, progress)
            if keeps_mode:
                copy_mode(_first_file(output), part.path)
            part.publish(replace=True, durable=stage.must_sync)
    return outcome


def _first_file(output: Output) -> Path:
    file = output.found.file
    return file.files[0].path if isinstance(file, JoinedFile) else file.path


# One file


def as_one(models: Models, request: Request, final: Path, progress: Progress | None = None) -> tuple[Plan, ModelPlan]:
    """The plan for a directory's one checkpoint as one file."""
    if len(models.models) > 1:
        names = ", ".join(m.name for m in models.models)
        message = f"holds several checkpoints ({names}), which one file cannot"
        raise UsageError(
            message, path=models.root, hint="give a directory with -o, or convert one component's directory"
        )
    if request.shard_size is not None:
        raise UsageError("one file cannot have shards", path=final, hint="give a directory with -o")
    (made,) = plan_models(models, request, progress)
    fmt = output_format(made.model.whole.format, final, choice=request.format)
    return plan_for(made.decided, made.model.whole, fmt, made.request), made


def convert_to_file(files: Files, final: Path, request: Request, progress: ProgressCallback | None) -> Report:
    """Convert a model's one checkpoint to one file."""
    request = request.with_shared()
    root, started, phases = files.root, time.perf_counter(), Phases(progress)
    with open_models(files, request) as models:
        made, plan = as_one(models, request.from_headers(), final)
        whole = plan.model.whole
        for path in plan.model.set.files:
            if same_file(root / path, final):
                raise OutputError("is part of the input", path=final, hint="give another name with -o")
        _check_report(models, final, request)
        place = _place(models, plan, final, request)
        if request.lossless is not None:
            made, plan = as_one(models, request, final, Progress(0, phases.first))
        return convert_checkpoint(whole, made, *place, plan.request, phases.second, started=started)


def _place(models: Models, plan: ModelPlan, final: Path, request: Request) -> tuple[Path, Format]:
    source_format = plan.model.whole.format
    return output_path(models.root, source_format, request.to, final, choice=request.format, force=request.force)
