"""Read, cast, check, write; verify; publish: the conversion of one checkpoint file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .bulk import collector_paused
from .checkpoint import Checkpoint, open_checkpoint
from .checks import Finding, Limits, OnNonfinite, OnOverflow, fallback, hint, overflow_text, run_checks
from .dtypes import DType
from .errors import NumericError, OutputError, UsageError, VerificationError
from .fileio import InputFile, PartFile, free_bytes, part_file
from .formats import Format, Layout, Place
from .formats.torch import TorchReader
from .outputs import FormatChoice, output_format, output_path
from .passes import Seen, write_pass
from .plan import Item, Plan
from .report import Report, check_report_path
from .request import check_choices, plan_for, plan_of, policy_of, rules_of
from .rules import MixedMode, NormMode, Policy, Rule
from .runs import Chunk, Progress, all_chunks, make_runs
from .stats import Stats
from .ties import SharedMode
from .verify import VerifyMode, sample_chunks, verify_header, verify_literals, verify_names, verify_values
from .weights import Weights

__all__ = ["convert", "plan"]

StrPath = str | os.PathLike[str]
ProgressCallback = Callable[[int, int], None]


def plan(
    source: StrPath,
    *,
    to: str | DType,
    output: StrPath | None = None,
    format: FormatChoice = "same",  # noqa: A002  the command line's name
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
    shared: SharedMode = "clone",
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
) -> Plan:
    """What ``convert`` with the same arguments would do, from the header alone.

    Of ``output`` only the suffix matters here.  Raises InputError for a source that cannot be used, UsageError where
    its weights are the user's choice, RuleError for a rule that cannot be read or matches nothing.
    """
    policy = policy_of(to, preset, norms, mixed, rules_of(keep, rule, rules))
    check_choices(weights=weights, format=format, shared=shared)
    with (
        collector_paused(),
        open_checkpoint(source, weights=weights, select=select, strip_wrappers=strip_wrappers) as found,
    ):
        fmt = output_format(found.format, None if output is None else Path(output), choice=format)
        return plan_for(plan_of(found, policy), found, fmt, policy, shared)


def convert(
    source: StrPath,
    *,
    to: str | DType,
    output: StrPath | None = None,
    format: FormatChoice = "same",  # noqa: A002  the command line's name
    force: bool = False,
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
    shared: SharedMode = "clone",
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    on_overflow: OnOverflow = "error",
    on_nonfinite: OnNonfinite = "warn",
    max_underflow: float | None = None,
    verify: VerifyMode = "sample",
    workers: int | None = None,
    durable: bool = False,
    report: StrPath | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """Convert one checkpoint file; the output appears under its name whole and verified, or not at all.

    ``source``: a checkpoint file, which is never changed.
    ``to``: the target dtype; ``fp32``, ``fp16``, ``bf16`` or an alias.
    ``output``: a file, or an existing directory to put it in; by default beside the source as ``NAME.bf16.SUFFIX``.
    ``format``: the output's, where its name does not say it: the source's, ``safetensors`` or ``pt``.
    ``force``: replace an existing output.  The source itself is refused in any case.
    ``weights``, ``select``: which weights of a training checkpoint, or those at a key path.
    ``strip_wrappers``: take wrapper modules (``module.``, ``_orig_mod.``) out of the names.
    ``shared``: tied tensors in safetensors: each gets the data (``clone``), or one does and the metadata names the
    others (``drop``).
    ``keep``, ``rule``, ``rules``: the user's own rules; ``rule`` before ``keep`` before the file ``rules``, the first
    that matches a name wins.
    ``preset``, ``norms``, ``mixed``: what stays FP32 without a rule: what the architecture needs, normalisation
    layers, and the FP32 tensors of a source that is mostly 16-bit.
    ``on_overflow``, ``on_nonfinite``, ``max_underflow``: what to do about values that do not survive.
    ``verify``: compare a ``sample`` of every tensor, everything (``full``) or nothing with a fresh cast.
    ``workers``: threads; by default one for each usable core.  The output does not depend on it.
    ``durable``: wait until the output is on the disk before it gets its name.
    ``report``: a file for the report as JSON, written also when a check or the verification refuses; every tensor's
    sizes and errors are then measured, which takes longer.
    ``progress``: called in this thread with (done, total) bytes of the source.

    Raises InputError, OutputError, UsageError (also RuleError), NumericError or VerificationError; the last two
    carry the report.  After any of them, and after KeyboardInterrupt, the output path is as it was.
    """
    policy = policy_of(to, preset, norms, mixed, rules_of(keep, rule, rules))
    limits = Limits(on_overflow, on_nonfinite, max_underflow)
    check_choices(verify=verify, weights=weights, format=format, shared=shared)
    started = time.perf_counter()
    with open_checkpoint(source, weights=weights, select=select, strip_wrappers=strip_wrappers) as found:
        path = found.file.path
        final, fmt = output_path(path, found.format, policy.target, output, choice=format, force=force)
        written = None if report is None else Path(report)
        if written is not None:
            check_report_path(written, (path, final))
        with collector_paused():
            made = plan_for(plan_of(found, policy), found, fmt, policy, shared)
        if made.dropped and isinstance(found.source.reader, TorchReader):  # there is nothing beside them, see above
            found = replace(found, source=replace(found.source, is_part=True))
        job = _Job(found, fmt, final, limits, _workers(workers), verify, force, durable, written, (weights, select))
        options = _options(policy, limits) | {
            "verify": verify, "weights": weights, "select": select, "strip_wrappers": strip_wrappers, "shared": shared,
        }  # fmt: skip

        def summary(result: _Result) -> Report:
            return _report(job, result, options, time.perf_counter() - started)

        try:
            return _run(job, made, progress, summary)
        except (NumericError, VerificationError) as e:
            if report is not None and e.report is not None:
                e.report.write(report)
            raise


def _workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UsageError(f"{workers} workers: at least 1 is needed")
    return workers


@dataclass(frozen=True, slots=True)
class _Job:
    """What stays the same throughout one conversion."""

    found: Checkpoint
    fmt: Format
    final: Path
    limits: Limits
    workers: int
    verify: VerifyMode
    force: bool
    durable: bool
    report: Path | None
    chosen: tuple[Weights, str | None]

    @property
    def file(self) -> InputFile:
        return self.found.file


@dataclass(frozen=True, slots=True)
class _Result:
    """How far a conversion got."""

    plan: Plan
    layout: Layout
    stats: Mapping[int, Stats]  #: by position in the plan; those without anything to say may be missing
    findings: tuple[Finding, ...]
    verified: int = 0
    published: bool = False


def _run(job: _Job, made: Plan, progress: ProgressCallback | None, summary: Callable[[_Result], Report]) -> Report:
    made, layout = _layout(job, made, held=0)
    checked = _to_verify(job, made, layout)
    shown = Progress(sum(p.src.nbytes for p in layout.places) + sum(c.src_bytes for c in checked), progress)
    with part_file(job.final) as part:
        seen = _write(job, layout, layout.places, part, shown)
        stats = {key: _whole(made.items[key], found) for key, found in seen.stats.items()}
        made, settled, seen, findings = _settle(job, made, layout, part, replace(seen, stats=stats), shown)
        if settled is not layout:
            layout, checked = settled, _to_verify(job, made, settled)
        findings += [
            Finding("aliased", "warning", made.items[key].src.name, f"stays {to}: {why}")
            for key, (to, why) in layout.changes.items()
        ]
        for key, item in enumerate(made.items):
            if key in seen.stats:
                findings += run_checks(item, seen.stats[key], job.limits)
        result = _Result(made, layout, seen.stats, tuple(findings))
        errors = [f for f in findings if f.level == "error"]
        if errors:
            raise _refusal(job, made, errors, summary(result))
        rest = [] if layout.finish is None else layout.finish(seen.sums)
        for offset, data in rest:
            part.write(memoryview(data), offset)
        try:
            verified = _verify(job, result, part, rest, checked, shown)
        except VerificationError as e:
            job.file.require_unchanged()  # a source that changed is no damage to the output
            e.report = summary(result)
            raise
        job.file.require_unchanged()
        done = summary(replace(result, verified=verified, published=True))
        with done.staged(job.report) if job.report else nullcontext():
            part.publish(replace=job.force, durable=job.durable)
    return done


def _layout(job: _Job, made: Plan, *, held: int) -> tuple[Plan, Layout]:
    """The output's layout, and the plan with what the format changed in it.

    Raises OutputError when the disk has no room for it beside ``held`` bytes already reserved.
    """
    with collector_paused():
        tensors, dtypes = [i.src for i in made.items], [i.to for i in made.items]
        layout = job.fmt.layout(job.found.source, tensors, dtypes, made.metadata, job.final.name)
    free = free_bytes(job.final.parent)
    if layout.size - held > free:
        message = f"needs {layout.size - held} bytes, the disk has {free} free"
        raise OutputError(message, path=job.final, hint="make room, or give a place on another disk with -o")
    return made.amended(layout.changes) if layout.changes else made, layout


def _write(job: _Job, layout: Layout, places: Sequence[Place], part: PartFile, progress: Progress) -> Seen:
    return write_pass(
        job.file,
        part,
        layout,
        places,
        clamp=job.limits.on_overflow == "clamp",
        norms=job.report is not None,
        stop_at_overflow=job.limits.on_overflow == "error",
        workers=job.workers,
        progress=progress,
    )


def _whole(item: Item, stats: Stats) -> Stats:
    """Statistics of all elements: chunks in which there was nothing to say have not been counted."""
    return Stats(n=item.src.numel - stats.n) + stats


def _settle(
    job: _Job, made: Plan, layout: Layout, part: PartFile, seen: Seen, progress: Progress
) -> tuple[Plan, Layout, Seen, list[Finding]]:
    """Give tensors that overflowed the dtype that ``on_overflow`` names, and write again what that changed."""
    changes, findings = {}, []
    for key, found in sorted(seen.stats.items()):
        item = made.items[key]
        to = fallback(item, found, job.limits)
        if to is not None:
            text = overflow_text(item, found)
            changes[key] = (to, f"overflow in {item.to}")
            findings.append(Finding("overflow", "warning", item.src.name, f"{text}; {to} instead"))
    if not changes:
        return made, layout, seen, findings
    amended, moved = _layout(job, made.amended(changes), held=layout.size)
    before = {(p.keys, p.to, p.offset) for p in layout.places}
    # checksums cover every chunk, so what has them is written whole
    again = [p for p in moved.places if moved.finish is not None or (p.keys, p.to, p.offset) not in before]
    progress.total += sum(p.src.nbytes for p in again)
    second = _write(job, moved, again, part, progress)
    rewritten = {key for p in again for key in p.keys}
    stats = {k: s for k, s in seen.stats.items() if k not in rewritten}
    stats |= {k: _whole(amended.items[k], s) for k, s in second.stats.items()}
    return amended, moved, Seen(stats, second.sums), findings


def _refusal(job: _Job, made: Plan, errors: Sequence[Finding], report: Report) -> NumericError:
    path = os.fspath(job.file.path)
    first, *rest = [f"tensor {f.tensor!r}: {f.text}" for f in errors]
    text = "".join([first, *(f"\n{path}: {line}" for line in rest)])
    return NumericError(text, path=path, hint=hint(errors, made.target), report=report)


def _to_verify(job: _Job, made: Plan, layout: Layout) -> list[Chunk]:
    """What of the output is read back."""
    if job.verify == "none":
        return []
    with collector_paused():
        runs = make_runs(layout.places)
        if job.verify == "full":
            return list(all_chunks(runs))
        return list(sample_chunks(runs, lambda key: made.items[key].src.name if key >= 0 else ""))


def _verify(
    job: _Job,
    result: _Result,
    part: PartFile,
    rest: Sequence[tuple[int, bytes]],
    chunks: Sequence[Chunk],
    progress: Progress,
) -> int:
    if job.verify == "none":
        return 0
    items, layout = result.plan.items, result.layout
    with collector_paused():
        tensors, dtypes = [i.src for i in items], [i.to for i in items]
        verify_header(part, job.fmt, layout, tensors, dtypes)
        verify_literals(part, [*layout.start, *rest])
        if job.fmt.name == "pt":
            weights, select = ("auto", None) if job.found.source.is_part else job.chosen
            with open_checkpoint(part.path, weights=weights, select=select) as out:
                verify_names(part, out.infos, tensors, dtypes)
    return verify_values(
        job.file,
        part,
        chunks,
        items,
        clamp=job.limits.on_overflow == "clamp",
        workers=job.workers,
        progress=progress,
    )


def _report(job: _Job, result: _Result, options: Mapping[str, Any], seconds: float) -> Report:
    return Report(
        source=os.fspath(job.file.path),
        output=os.fspath(job.final) if result.published else None,
        plan=result.plan,
        seen=result.stats,
        findings=result.findings,
        options=options,
        source_bytes=job.file.size,
        output_bytes=result.layout.size,
        verified_bytes=result.verified,
        seconds=seconds,
    )


def _options(policy: Policy, limits: Limits) -> dict[str, Any]:
    return {
        "to": policy.target.name,
        "preset": policy.preset,
        "norms": policy.norms,
        "mixed": policy.mixed,
        "rules": [{"match": r.match, "to": str(r.to)} for r in policy.rules],
        **asdict(limits),
    }
