"""Read, cast, check, write; verify; publish: the conversion of one checkpoint file.

A ``Task`` is one output, decided; ``write`` and ``verify`` do it under a temporary name, and who calls them publishes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .bulk import collector_paused
from .checkpoint import Checkpoint, open_checkpoint
from .checks import Finding, fallbacks, hint, run_checks
from .errors import NumericError, VerificationError
from .fileio import PartFile, SourceFile, part_file
from .filing import check_filing, file_refusal, filed
from .formats import Format, Layout, Place
from .formats.torch import TorchReader
from .outputs import output_format, output_path
from .passes import Seen, Writable, write_pass
from .paths import require_space
from .plan import Item, Plan
from .readback import sample_chunks, verify_header, verify_literals, verify_names, verify_values
from .report import Report
from .request import Request, StrPath, draws_for, is_flat, plan_for, plan_of
from .runs import Chunk, Phases, Progress, ProgressCallback, all_chunks, make_runs
from .stats import Stats
from .values import settled

__all__ = [
    "Outcome",
    "Task",
    "convert_checkpoint",
    "convert_file",
    "make_task",
    "open_output",
    "plan_file",
    "refusal",
    "verify",
    "write",
]


def plan_file(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Plan:
    """What ``convert_file`` with the same arguments would do, from the header alone where that decides it."""
    with (
        collector_paused(),
        open_checkpoint(
            source, weights=request.weights, select=request.select, strip_wrappers=request.strip_wrappers
        ) as found,
    ):
        fmt = output_format(found.format, None if output is None else Path(output), choice=request.format)
        return _plan(found, fmt, request, progress)


def _plan(found: Checkpoint, fmt: Format, request: Request, progress: ProgressCallback | None) -> Plan:
    def make(simple: Request) -> Plan:
        return plan_for(plan_of(found, simple), found, fmt, simple)

    return settled(make, found, request, Progress(0, progress))


def convert_file(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None = None
) -> Report:
    """Convert one checkpoint file; the output appears under its name whole and verified, or not at all."""
    phases, started = Phases(progress), time.perf_counter()
    with open_checkpoint(
        source, weights=request.weights, select=request.select, strip_wrappers=request.strip_wrappers
    ) as found:
        place = output_path(
            found.file.path, found.format, request.to, output, choice=request.format, force=request.force
        )
        check_filing(request, (found.file.path, place[0]))
        made = _plan(found, place[1], request, phases.first)
        return convert_checkpoint(found, made, *place, request, phases.second, started=started)


def convert_checkpoint(
    found: Checkpoint,
    made: Plan,
    final: Path,
    fmt: Format,
    request: Request,
    progress: ProgressCallback | None,
    *,
    started: float | None = None,
) -> Report:
    """Convert an open checkpoint to the file ``final``, as ``made`` has it; ``started`` when that was begun."""
    begun = time.perf_counter() if started is None else started
    check_filing(request, (found.file.path, final))
    task = make_task(found, made, final, fmt, request)
    require_space(final, task.layout.size)

    def report(outcome: Outcome, *, published: bool) -> Report:
        return Report(
            source=os.fspath(found.file.path),
            output=os.fspath(final) if published else None,
            plan=outcome.plan,
            seen=outcome.stats,
            findings=outcome.findings,
            options=request.options(),
            source_bytes=found.file.size,
            output_bytes=outcome.size,
            verified_bytes=outcome.verified,
            seconds=time.perf_counter() - begun,
        )

    checked = to_verify(task, task.plan, task.layout)
    shown = Progress(planned_bytes(task, checked), progress)
    try:
        with part_file(final) as part:
            outcome = write(task, part, shown)
            if outcome.errors:
                path = os.fspath(found.file.path)
                raise refusal(outcome.errors, request, path=path, report=report(outcome, published=False))
            try:
                outcome = verify(task, outcome, part, shown, checked)
            except VerificationError as e:
                e.report = report(outcome, published=False)
                raise
            done = report(outcome, published=True)
            with filed(done, request):
                part.publish(replace=request.force, durable=request.durable)
    except (NumericError, VerificationError) as e:
        file_refusal(e.report, request)
        raise
    return done


@dataclass(frozen=True, slots=True)
class Task:
    """One output file: what goes into it and where, decided before any tensor data is read."""

    found: Checkpoint
    plan: Plan
    layout: Layout
    final: Path
    fmt: Format
    request: Request

    @property
    def file(self) -> SourceFile:
        return self.found.file


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a task."""

    plan: Plan  #: as it was carried out
    size: int  #: of the output, bytes
    layout: Layout
    rest: Sequence[tuple[int, bytes]]  #: what was written after the tensor data
    stats: Mapping[int, Stats]  #: by position in the plan; those without anything to say may be missing
    findings: tuple[Finding, ...]
    verified: int = 0  #: bytes of the output

    @property
    def errors(self) -> list[Finding]:
        return [f for f in self.findings if f.level == "error"]


def make_task(found: Checkpoint, made: Plan, final: Path, fmt: Format, request: Request) -> Task:
    """Lay an output out; ``made`` comes from ``plan_for``.  Raises OutputError for what the format cannot hold."""
    with collector_paused():
        if isinstance(found.source.reader, TorchReader) and is_flat(made, found, request):  # see plan_for
            found = replace(found, source=replace(found.source, is_part=True))
        made, layout = _layout(found, made, final, fmt)
    return Task(found, made, layout, final, fmt, request)


def planned_bytes(task: Task, checked: Sequence[Chunk] = ()) -> int:
    """Bytes of the source that will be read at least, ``checked`` to verify the output."""
    return sum(p.src.nbytes for p in task.layout.places) + sum(c.src_bytes for c in checked)


def write(task: Task, part: Writable, progress: Progress) -> Outcome:
    """Cast and check everything, and write it unless a check refuses; what overflowed may get another dtype."""
    made, layout = task.plan, task.layout
    seen = _pass(task, layout, layout.places, part, progress)
    stats = {key: _whole(made.items[key], found) for key, found in seen.stats.items()}
    made, layout, seen, findings = _settle(task, part, replace(seen, stats=stats), progress)
    findings += [
        Finding("aliased", "warning", made.items[key].src.name, f"stays {to}: {why}")
        for key, (to, why) in layout.changes.items()
    ]
    for key, item in enumerate(made.items):
        if key in seen.stats:
            findings += run_checks(item, seen.stats[key], task.request.limits)
    outcome = Outcome(made, layout.size, layout, (), seen.stats, tuple(findings))
    if outcome.errors:
        return outcome
    rest = [] if layout.finish is None else layout.finish(seen.sums)
    for offset, data in rest:
        part.write(memoryview(data), offset)
    return replace(outcome, rest=rest)


def _layout(found: Checkpoint, made: Plan, final: Path, fmt: Format) -> tuple[Plan, Layout]:
    """The output's layout, and the plan with what the format changed in it."""
    with collector_paused():
        tensors, dtypes = [i.src for i in made.items], [i.to for i in made.items]
        layout = fmt.layout(found.source, tensors, dtypes, made.metadata, final.name)
    return made.amended(layout.changes) if layout.changes else made, layout


def _pass(task: Task, layout: Layout, places: Sequence[Place], part: Writable, progress: Progress) -> Seen:
    request = task.request
    return write_pass(
        task.file,
        part,
        layout,
        places,
        clamp=request.limits.on_overflow == "clamp",
        draws=draws_for(request, task.found, task.plan),
        norms=request.is_reported,
        exponents=request.html is not None,
        stop_at_overflow=request.limits.on_overflow == "error",
        workers=request.workers,
        progress=progress,
    )


def _whole(item: Item, stats: Stats) -> Stats:
    """Statistics of all elements: chunks in which there was nothing to say have not been counted.

    What was seen of memory that a torch checkpoint's tensors share is no histogram of one that shows part of it.
    """
    if stats.exponents is not None and stats.n != item.src.numel:
        stats = replace(stats, exponents=None)
    return Stats(n=item.src.numel - stats.n) + stats


def _settle(task: Task, part: Writable, seen: Seen, progress: Progress) -> tuple[Plan, Layout, Seen, list[Finding]]:
    """Give tensors that overflowed the dtype that ``on_overflow`` names, and write again what that changed."""
    made, layout = task.plan, task.layout
    changes, findings = fallbacks(made.items, seen.stats, task.request.limits)
    if not changes:
        return made, layout, seen, findings
    amended, moved = _layout(task.found, made.amended(changes), task.final, task.fmt)
    part.require_space(moved.size - layout.size)
    before = {(p.keys, p.to, p.offset) for p in layout.places}
    # checksums cover every chunk, so what has them is written whole
    again = [p for p in moved.places if moved.finish is not None or (p.keys, p.to, p.offset) not in before]
    progress.expect(sum(p.src.nbytes for p in again))
    second = _pass(task, moved, again, part, progress)
    rewritten = {key for p in again for key in p.keys}
    stats = {k: s for k, s in seen.stats.items() if k not in rewritten}
    stats |= {k: _whole(amended.items[k], s) for k, s in second.stats.items()}
    return amended, moved, Seen(stats, second.sums), findings


def refusal(errors: Sequence[Finding], request: Request, *, path: str, report: Report) -> NumericError:
    """What a check refused, tensor by tensor."""
    first, *rest = [f"tensor {f.tensor!r}: {f.text}" for f in errors]
    text = "".join([first, *(f"\n{path}: {line}" for line in rest)])
    largest = max((s.overflow_max for s in report.seen.values()), default=0.0)
    error = NumericError(text, path=path, hint=hint(errors, request.policy.target, largest), report=report)
    error.tensor = None if rest else errors[0].tensor
    return error


def to_verify(task: Task, made: Plan, layout: Layout) -> list[Chunk]:
    """What of the output is read back."""
    if task.request.verify == "none":
        return []
    with collector_paused():
        runs = make_runs(layout.places)
        if task.request.verify == "full":
            return list(all_chunks(runs))
        return list(sample_chunks(runs, lambda key: made.items[key].src.name if key >= 0 else ""))


def verify(
    task: Task, outcome: Outcome, part: PartFile, progress: Progress, checked: Sequence[Chunk] | None = None
) -> Outcome:
    """Read the output back, ``checked`` of it where that is known and still holds.

    Raises VerificationError when it is not what was planned, SourceChangedError when the source is not what it was.
    """
    expected = checked is not None
    if checked is None or outcome.layout is not task.layout:
        checked = to_verify(task, outcome.plan, outcome.layout)
    if not expected:
        progress.expect(sum(c.src_bytes for c in checked))
    try:
        verified = _verified(task, outcome, part, progress, checked) if task.request.verify != "none" else 0
    except VerificationError:
        task.file.require_unchanged()  # a source that changed is no damage to the output
        raise
    task.file.require_unchanged()
    return replace(outcome, verified=verified)


def open_output(task: Task, path: Path) -> Checkpoint:
    """What the task wrote as a checkpoint, with the weights that it was about."""
    request, is_bare = task.request, task.fmt.name != "pt" or task.found.source.is_part
    weights, select = ("auto", None) if is_bare else (request.weights, request.select)
    return open_checkpoint(path, weights=weights, select=select)


def _verified(task: Task, outcome: Outcome, part: PartFile, progress: Progress, chunks: Sequence[Chunk]) -> int:
    items, layout = outcome.plan.items, outcome.layout
    with collector_paused():
        tensors, dtypes = [i.src for i in items], [i.to for i in items]
        verify_header(part, task.fmt, layout, tensors, dtypes)
        verify_literals(part, [*layout.start, *outcome.rest])
        if task.fmt.name == "pt":
            with open_output(task, part.path) as out:
                verify_names(part, out.infos, tensors, dtypes)
    return verify_values(
        task.file,
        part,
        chunks,
        items,
        clamp=task.request.limits.on_overflow == "clamp",
        draws=draws_for(task.request, task.found, outcome.plan),
        workers=task.request.workers,
        progress=progress,
    )
