"""Read, cast, check, write; verify; publish: the conversion of one checkpoint file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, get_args

from .bulk import collector_paused
from .checks import Finding, Limits, OnNonfinite, OnOverflow, fallback, hint, overflow_text, run_checks
from .configs import config_beside
from .dtypes import CASTABLE, DType, target
from .errors import InputError, NumericError, OutputError, UsageError, VerificationError
from .fileio import PartFile, free_bytes, is_directory, is_taken, part_file, same_file
from .formats import Format, Layout, Reader, format_for_suffix, formats, open_checkpoint
from .plan import Plan, make_plan
from .report import Report, check_report_path
from .rules import MixedMode, NormMode, Policy, Rule, read_rules
from .runs import CHUNK_BYTES, Chunk, Progress, all_chunks, for_each, make_runs
from .stats import Stats
from .verify import VerifyMode, sample_chunks, verify_header, verify_values

__all__ = ["convert", "plan"]

StrPath = str | os.PathLike[str]
ProgressCallback = Callable[[int, int], None]


def plan(
    source: StrPath,
    *,
    to: str | DType,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
) -> Plan:
    """What ``convert`` with the same arguments would do, from the header alone.

    Raises InputError for a source that cannot be used, RuleError for a rule that cannot be read or matches nothing.
    """
    policy = _policy(to, preset, norms, mixed, _rules(keep, rule, rules))
    reader = open_checkpoint(source)
    with reader.file:
        return _plan(reader, policy)


def convert(
    source: StrPath,
    *,
    to: str | DType,
    output: StrPath | None = None,
    force: bool = False,
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
    ``force``: replace an existing output.  The source itself is refused in any case.
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
    policy = _policy(to, preset, norms, mixed, _rules(keep, rule, rules))
    limits = Limits(on_overflow, on_nonfinite, max_underflow)
    _one_of("verify", verify, VerifyMode)
    started = time.perf_counter()
    reader = open_checkpoint(source)
    with reader.file:
        final, fmt = output_path(reader, policy.target, output, force=force)
        if report is not None:
            check_report_path(Path(report), (reader.file.path, final))
        written = None if report is None else Path(report)
        job = _Job(reader, fmt, final, limits, _workers(workers), verify, force, durable, written)
        options = _options(policy, limits, verify)

        def summary(result: _Result) -> Report:
            return _report(job, result, options, time.perf_counter() - started)

        try:
            with collector_paused():
                made = _plan(reader, policy)
            return _run(job, made, progress, summary)
        except (NumericError, VerificationError) as e:
            if report is not None and e.report is not None:
                e.report.write(report)
            raise


def _policy(to: str | DType, preset: str, norms: NormMode, mixed: MixedMode, rules: Sequence[Rule]) -> Policy:
    _one_of("norms", norms, NormMode)
    _one_of("mixed", mixed, MixedMode)
    return Policy(target(to), tuple(rules), preset, norms, mixed)


def _rules(keep: Sequence[str], rule: Sequence[str | Rule], rules: StrPath | None) -> list[Rule]:
    parsed = [r if isinstance(r, Rule) else Rule.parse(r) for r in rule]
    parsed += [Rule.keep(k) for k in keep]
    return parsed if rules is None else [*parsed, *read_rules(Path(rules))]


def _plan(reader: Reader, policy: Policy) -> Plan:
    if not reader.infos:
        raise InputError("holds no tensors: there is nothing to convert", path=reader.file.path)
    path = reader.file.path
    config, notes = config_beside(path)
    made = make_plan(reader.infos, {**reader.metadata}, policy, config=config, name=path.name)
    if not made.items:
        raise UsageError("the rules drop every tensor", path=reader.file.path)
    return replace(made, notes=(*reader.notes, *notes, *made.notes))


def _one_of(name: str, value: object, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}")


def _workers(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UsageError(f"{workers} workers: at least 1 is needed")
    return workers


def output_path(reader: Reader, to: DType, output: StrPath | None, *, force: bool) -> tuple[Path, Format]:
    """Where the output goes and in which format; raises OutputError for a place it cannot or must not go to."""
    source = reader.file.path
    name = default_name(source, reader.format, to)
    final = source.with_name(name) if output is None else Path(output)
    if output is not None and is_directory(final):
        final = final / name
    elif output is not None and os.fspath(output).endswith(("/", os.sep)):
        raise OutputError("there is no such directory", path=os.fspath(output), hint="make it first")
    fmt = format_for_suffix(final)
    if fmt is None:
        known = ", ".join(s for f in formats() for s in f.suffixes)
        raise UsageError(f"the name {final.name!r} does not say a format", path=final, hint=f"end it in one of {known}")
    if not is_directory(final.parent):
        raise OutputError("there is no such directory", path=final.parent, hint="make it first")
    if same_file(source, final):
        raise OutputError("is the input itself", path=final, hint="give another name with -o")
    if not is_taken(final):
        return final, fmt
    if not (final.is_file() or final.is_symlink()):
        raise OutputError("is not a regular file", path=final, hint="give another name with -o")
    if not force:
        raise OutputError("exists", path=final, hint="replace it with --force, or give another name with -o")
    return final, fmt


def default_name(source: Path, fmt: Format, to: DType) -> str:
    """``NAME.bf16.SUFFIX``; a dtype that the source's name already says gives way."""
    stem, suffix = (source.stem, source.suffix) if source.suffix in fmt.suffixes else (source.stem, fmt.suffixes[0])
    base, dot, said = stem.rpartition(".")
    if dot and any(said.lower() in (d.name, *d.aliases) for d in CASTABLE):
        stem = base
    return f"{stem}.{to}{suffix}"


@dataclass(frozen=True, slots=True)
class _Job:
    """What stays the same throughout one conversion."""

    reader: Reader
    fmt: Format
    final: Path
    limits: Limits
    workers: int
    verify: VerifyMode
    force: bool
    durable: bool
    report: Path | None


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
    layout = _layout(job, made, held=0)
    shown = Progress(made.source_bytes, progress)
    with part_file(job.final) as part:
        stats = _write(job, made, layout, part, range(len(made.items)), shown)
        made, layout, stats, findings = _settle(job, made, layout, part, stats, shown)
        for key, item in enumerate(made.items):
            if key in stats:
                findings += run_checks(item, stats[key], job.limits)
        result = _Result(made, layout, stats, tuple(findings))
        errors = [f for f in findings if f.level == "error"]
        if errors:
            raise _refusal(job, made, errors, summary(result))
        try:
            verified = _verify(job, result, part, shown)
        except VerificationError as e:
            job.reader.file.require_unchanged()  # a source that changed is no damage to the output
            e.report = summary(result)
            raise
        job.reader.file.require_unchanged()
        done = summary(replace(result, verified=verified, published=True))
        with done.staged(job.report) if job.report else nullcontext():
            part.publish(replace=job.force, durable=job.durable)
    return done


def _layout(job: _Job, made: Plan, *, held: int) -> Layout:
    """The plan's layout; raises OutputError when the disk has no room for it beside ``held`` bytes already reserved."""
    metadata = {**made.metadata}
    if job.fmt.name == "safetensors":
        metadata.setdefault("format", "pt")  # what transformers asks of every file it loads
    with collector_paused():
        layout = job.fmt.layout([i.src for i in made.items], [i.to for i in made.items], metadata)
    free = free_bytes(job.final.parent)
    if layout.size - held > free:
        raise OutputError(f"needs {layout.size - held} bytes, the disk has {free} free", path=job.final)
    return layout


def _write(
    job: _Job, made: Plan, layout: Layout, part: PartFile, keys: Iterable[int], progress: Progress
) -> dict[int, Stats]:
    """One pass over the tensors ``keys``: read, cast, look, write.  What was seen in them, by key."""
    from . import cast

    source, found, lock = job.reader.file, dict[int, Stats](), Lock()
    clamp = job.limits.on_overflow == "clamp"
    refused = False  # once a value does not fit, the rest is only read, to name every tensor

    def start() -> Callable[[Chunk], None]:
        lane = cast.Lane(CHUNK_BYTES)

        def step(chunk: Chunk) -> None:
            nonlocal refused
            run, n = chunk.run, chunk.elements
            data = lane.source(chunk.src_bytes)
            source.read_into(data, chunk.src_offset)
            if run.is_cast:
                p = cast.pair(run.src, run.dst)
                data = lane.cast(p, n)
                seen = lane.survey(p, n, run.segments(chunk.start, n), clamp=clamp, norms=job.report is not None)
                if seen:
                    with lock:
                        for key, stats in seen:
                            found[key] = found.get(key, Stats()) + stats
                            refused |= stats.overflow > 0 and job.limits.on_overflow == "error"
            if not refused:
                part.write(data, chunk.dst_offset)
            progress.add(chunk.src_bytes)

        return step

    part.preallocate(layout.size)
    part.write(memoryview(layout.header), 0)
    source.advise_sequential()
    with collector_paused():
        runs = make_runs(made.items, layout.offsets, keys)
    with cast.one_thread():
        for_each(all_chunks(runs), start, workers=job.workers, tick=progress.show)
    return found


def _settle(
    job: _Job, made: Plan, layout: Layout, part: PartFile, stats: dict[int, Stats], progress: Progress
) -> tuple[Plan, Layout, dict[int, Stats], list[Finding]]:
    """Give tensors that overflowed the dtype that ``on_overflow`` names, and write again what that changed."""
    changes, findings = {}, []
    for key, seen in sorted(stats.items()):
        item = made.items[key]
        to = fallback(item, seen, job.limits)
        if to is not None:
            text = overflow_text(item, seen)
            changes[key] = (to, f"overflow in {item.to}")
            findings.append(Finding("overflow", "warning", item.src.name, f"{text}; {to} instead"))
    if not changes:
        return made, layout, stats, findings
    amended = made.amended(changes)
    moved = _layout(job, amended, held=layout.size)
    again = [k for k in range(len(made.items)) if k in changes or moved.offsets[k] != layout.offsets[k]]
    progress.total += sum(made.items[k].src.nbytes for k in again)
    unchanged = {k: s for k, s in stats.items() if k not in set(again)}
    return amended, moved, unchanged | _write(job, amended, moved, part, again, progress), findings


def _refusal(job: _Job, made: Plan, errors: Sequence[Finding], report: Report) -> NumericError:
    path = os.fspath(job.reader.file.path)
    first, *rest = [f"tensor {f.tensor!r}: {f.text}" for f in errors]
    text = "".join([first, *(f"\n{path}: {line}" for line in rest)])
    return NumericError(text, path=path, hint=hint(errors, made.target), report=report)


def _verify(job: _Job, result: _Result, part: PartFile, progress: Progress) -> int:
    if job.verify == "none":
        return 0
    items, offsets = result.plan.items, result.layout.offsets
    with collector_paused():
        verify_header(part, job.fmt, items, result.layout)
        runs = make_runs(items, offsets, range(len(items)))
    chunks = list(all_chunks(runs) if job.verify == "full" else sample_chunks(runs, lambda k: items[k].src.name))
    progress.total += sum(chunk.src_bytes for chunk in chunks)
    return verify_values(
        job.reader.file,
        part,
        chunks,
        items,
        clamp=job.limits.on_overflow == "clamp",
        workers=job.workers,
        progress=progress,
    )


def _report(job: _Job, result: _Result, options: Mapping[str, Any], seconds: float) -> Report:
    return Report(
        source=os.fspath(job.reader.file.path),
        output=os.fspath(job.final) if result.published else None,
        plan=result.plan,
        seen=result.stats,
        findings=result.findings,
        options=options,
        source_bytes=job.reader.file.size,
        output_bytes=result.layout.size,
        verified_bytes=result.verified,
        seconds=seconds,
    )


def _options(policy: Policy, limits: Limits, verify: VerifyMode) -> dict[str, Any]:
    return {
        "to": policy.target.name,
        "preset": policy.preset,
        "norms": policy.norms,
        "mixed": policy.mixed,
        "rules": [{"match": r.match, "to": str(r.to)} for r in policy.rules],
        **asdict(limits),
        "verify": verify,
    }
