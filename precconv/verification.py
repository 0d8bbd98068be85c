"""The public ``verify``: an output, of whatever kind, held against what its source and options make."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ._version import __version__
from .batch.options import check_options
from .bulk import collector_paused
from .checkpoint import open_checkpoint
from .checks import OnOverflow
from .convert import make_task
from .dtypes import TARGETS, DType
from .errors import InputError, PrecconvError, UsageError, VerificationError
from .fileio import InputFile
from .formats import Format, detect, format_for_suffix, open_reader
from .hub.refs import parse_ref
from .outputs import FormatChoice, output_format
from .paths import exists, is_directory
from .plan import Plan
from .proof import Proof
from .provenance import KEY, Record, read_record, words
from .proving import named_as, prove_file
from .repo.proof import Held, prove_as_one, prove_files
from .repo.roles import is_ignored
from .repo.source import Files, local_files
from .repo.stage import home_of
from .request import Request, Rounding, StrPath, plan_for, plan_of, request_of, worker_count
from .rules import MixedMode, NormMode, Rule
from .runs import Progress, ProgressCallback
from .sources import checkpoint_file, fetched_whole, model_files
from .ties import SharedMode
from .values import settled
from .weights import Weights

__all__ = ["SHAPING", "verify"]

#: The options of a conversion that shape its output: what a record may say, and a caller.
SHAPING = (
    "to", "lossless_only", "preset", "norms", "mixed", "rule", "component", "on_overflow", "rounding", "seed", "format",
    "weights", "select", "strip_wrappers", "shared", "shard_size", "variant", "from_variant", "copy_all",
)  # fmt: skip
#: What the Hub puts into a repo by itself.
_OF_THE_HUB = (".gitattributes",)
_LARGEST_REPORT = 1 << 30  #: bytes


def verify(
    output: StrPath,
    *,
    against: StrPath,
    report: StrPath | None = None,
    to: str | DType | None = None,
    lossless_only: bool | None = None,
    format: FormatChoice | None = None,  # noqa: A002  the command line's name
    weights: Weights | None = None,
    select: str | None = None,
    strip_wrappers: bool | None = None,
    shared: SharedMode | None = None,
    preset: str | None = None,
    norms: NormMode | None = None,
    mixed: MixedMode | None = None,
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    component: Mapping[str, str | DType] | Sequence[str] = (),
    shard_size: str | int | None = None,
    variant: str | None = None,
    from_variant: str | None = None,
    copy_all: bool | None = None,
    on_overflow: OnOverflow | None = None,
    rounding: Rounding | None = None,
    seed: int | None = None,
    ignore: Sequence[str] = (),
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Proof:
    """Prove that an output is what ``convert`` makes of ``against``, every byte of it; nothing is written.

    The conversion is planned and laid out again, every element cast anew and compared, and so are the header, the
    metadata, configs, indexes and all files that are carried over.

    ``output``: a checkpoint file, a model directory, or either on the Hub, which is fetched to the client's cache.
    ``against``: the source, as ``convert`` takes it.
    ``report``: the JSON report of the conversion, which says with which options it was made.  Without one the record
    in the output's metadata says it.  Where there is none either, and no ``to``, the target is what most of the
    output's floats are.
    ``to`` … ``seed``: as in ``convert``; those that are given come before those of the report or the record, all rules
    in place of all of theirs.
    ``ignore``: patterns of files of a directory that do not matter, relative; weights and their indexes always do.
    ``workers``, ``progress``: as in ``convert``.

    What is wrong with the output is in the result.  Raises InputError, HubError, UsageError or RuleError for a source
    or options that cannot be used, VerificationError for an output that does not even say what it should be.
    """
    given: dict[str, Any] = {
        "to": to, "lossless_only": lossless_only, "preset": preset, "norms": norms, "mixed": mixed, "format": format,
        "weights": weights, "select": select, "strip_wrappers": strip_wrappers, "shared": shared,
        "shard_size": shard_size, "variant": variant, "from_variant": from_variant, "copy_all": copy_all,
        "on_overflow": on_overflow, "rounding": rounding, "seed": seed, "component": component or None,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if keep or rule or rules:
        given |= {"keep": keep, "rule": rule, "rules": rules}
    return _verify(output, against, report, given, ignore, worker_count(workers), progress)


def _verify(
    output: StrPath,
    against: StrPath,
    report: StrPath | None,
    given: Mapping[str, Any],
    ignore: Sequence[str],
    workers: int,
    progress: ProgressCallback | None,
) -> Proof:
    started = time.perf_counter()
    for path in (output, against):
        if not os.fspath(path):  # of a shell's variable that is not set
            raise UsageError("a name is empty", hint="name the output, and what it is held against")
    place, is_fetched = fetched_whole(output)
    said = _Said.of(place)
    options, told = _options(said, report, given, shown=output)
    request = replace(
        request_of(**options, workers=workers), provenance=said.has_record, version=said.version or __version__
    )
    ignored = [*ignore, *(_OF_THE_HUB if is_fetched else ()), *(["*"] if _is_beside(output, against, request) else [])]
    held = _held(place, against, request, Progress(0, progress), ignored)
    skipped = tuple(name for name in held.ignored if _is_ignored(name, ignore))
    return Proof(
        output=os.fspath(output),
        source=os.fspath(against),
        options=request.repo_options(),
        options_from=told,
        words=tuple(request.shaping_words()),
        version=said.version,
        plan=held.plan,
        mismatches=held.mismatches,
        notes=(*held.notes, *_notes(said, skipped, ignore)),
        files=held.files,
        compared_bytes=held.nbytes,
        seconds=time.perf_counter() - started,
        ignored=skipped,
        uncompared=held.uncompared,
    )


def _notes(said: _Said, skipped: Sequence[str], ignore: Sequence[str]) -> Iterator[str]:
    if said.version not in (None, __version__):
        yield f"made by precconv {said.version}, proven with {__version__}"
    for pattern in ignore:
        if not any(_is_ignored(name, [pattern]) for name in skipped):
            yield f"--ignore {pattern!r} left nothing out: no file but weights and their indexes has such a name"


def _is_ignored(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_checkpoint(path: Path, root: Path) -> bool:
    """By its name; what is wrong with a directory's other entries is said where they are compared."""
    inside = path.relative_to(root).parts
    return format_for_suffix(path) is not None and path.is_file() and not any(map(is_ignored, inside))


def _is_beside(output: StrPath, against: StrPath, request: Request) -> bool:
    """Whether a variant was published in its source's own repo, where all other files are the source's."""
    places = [parse_ref(path) for path in (output, against)]
    repos = {None if ref is None else ref.repo for ref in places}
    return request.variant is not None and len(repos) == 1 and None not in repos


# What it should have been made with


@dataclass(frozen=True, slots=True)
class _Said:
    """What an output says of itself."""

    files: Sequence[Path]  #: that are checkpoints by their names, or the one file that was given
    record: Record | None
    has_record: bool  #: whether there is one, if none that can be read

    @property
    def version(self) -> str | None:
        """Of the precconv that made it."""
        return None if self.record is None else self.record.version

    @classmethod
    def of(cls, place: Path) -> _Said:
        """Raises InputError for a place where there is nothing."""
        files = [place]
        if is_directory(place):
            files = [p for p in sorted(place.rglob("*")) if _is_checkpoint(p, place)]
        elif not exists(place):
            raise InputError("no such file or directory", path=place)
        records: list[Record | None] = []
        for path in files:
            with suppress(PrecconvError):
                reader = open_reader(path)
                reader.file.close()
                if KEY in reader.metadata:
                    records.append(read_record(reader.metadata))
        known = [r for r in records if r is not None]
        options: dict[str, Any] = {}
        for record in known:  # those of a component that are usual for it are not in its file
            options = {**record.options, **options}
        return cls(files, replace(known[0], options=options) if known else None, has_record=bool(records))

    def target(self, shown: StrPath) -> str:
        """The dtype of most of its floats.

        Raises UsageError where there are none, VerificationError where nothing of it can be read.
        """
        total: Counter[str] = Counter()
        failed: list[PrecconvError] = []
        for path in self.files:
            try:
                with open_checkpoint(path) as found:
                    for t in found.infos:
                        total[t.dtype.name] += t.nbytes if t.dtype in TARGETS else 0
            except PrecconvError as e:
                failed.append(e)
        if any(total.values()):
            return total.most_common(1)[0][0]
        if failed and len(failed) == len(self.files):
            first = failed[0]
            raise VerificationError(first.message, path=first.path, tensor=first.tensor, hint=first.hint)
        raise UsageError("nothing says what it should be", path=shown, hint="say it with --to, or give --report")

    @property
    def format(self) -> FormatChoice:
        """What its weights are, where that is one thing."""
        kinds = {f.name for path in self.files if (f := format_for_suffix(path)) is not None}
        return "same" if len(kinds) != 1 else "pt" if kinds == {"pt"} else "safetensors"


def _options(
    said: _Said, report: StrPath | None, given: Mapping[str, Any], *, shown: StrPath
) -> tuple[dict[str, Any], str]:
    """The options of the conversion, and where they come from."""
    if report is not None:
        base, told = _of_report(Path(report)), "report"
    elif (followed := _of_record(said, shown, given)) is not None:
        base, told = followed, "record"
    else:
        told = "arguments" if "to" in given else "dtypes"
        base = {"format": said.format} | ({} if "to" in given else {"to": said.target(shown)})
    if given.get("rounding") == "nearest":
        base.pop("seed", None)
    if "rules" in given:
        base.pop("rule", None)
    return {**base, **given}, told


def _of_record(said: _Said, shown: StrPath, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of the record; None where there is none, or none that can be followed and it is not needed."""
    if said.record is None:
        return None
    options, where = dict(said.record.options), f"the record in {os.fspath(shown)}"
    if "rules" in given:
        options.pop("rule", None)
    try:
        found = _checked(options, where)
        for rule in found.get("rule", ()):
            if str(rule).startswith("re:"):  # whoever wrote it may have meant it to take for ever
                hint = f"if it is to be trusted, give the rules: {shlex.join(words({'rule': [*found['rule']]}))}"
                raise UsageError(f"{where} has a rule that is a regular expression, which is not run", hint=hint)
        return found
    except UsageError:
        if "to" not in given:
            raise
        return None


def _checked(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options as a record or a report has them; raises UsageError for what this version does not know."""
    unknown = next((name for name in options if name not in SHAPING), None)
    if unknown is not None:
        hint = "give the options on the command line, or use the version that made it"
        raise UsageError(f"{where}: the option {unknown!r} is not known", hint=hint)
    if "to" not in options:
        raise UsageError(f"{where} names no dtype", hint="say it with --to")
    return check_options(options, where)


def _of_report(path: Path) -> dict[str, Any]:
    """The options of the conversion that a report is about."""
    try:
        with InputFile(path) as file:
            data = json.loads(file.read(0, min(file.size, _LARGEST_REPORT)))
        options, rules = dict(data["options"]), data["options"]["rules"]
        options |= {"rule": [f"{r['match']}={r['to']}" for r in rules], "component": options.get("components", {})}
    except (KeyError, TypeError, ValueError, RecursionError) as e:
        raise InputError("is no report of a conversion", path=path, hint="give what --report wrote") from e
    if data.get("ok") is not True:
        raise InputError("is about a conversion that was refused", path=path, hint="give the one that made the output")
    return _checked({name: options[name] for name in SHAPING if name in options}, os.fspath(path))


# What it is held against


def _held(place: Path, against: StrPath, request: Request, progress: Progress, ignore: Sequence[str]) -> Held:
    files: Files | None
    if is_directory(against):
        whole = place.absolute()  # "." has no name, and so no stage beside it
        files = local_files(Path(against), skip=(place, *([home_of(whole)] if whole.name else [])))
    elif parse_ref(against) is None and not exists(against):
        raise InputError("no such file or directory", path=against)
    else:
        files = model_files(against, request)
    if not is_directory(place):
        return (
            _file(place, against, request, progress) if files is None else prove_as_one(files, place, request, progress)
        )
    if files is None:
        raise UsageError("is a directory, what it is held against is a file", path=place, hint="name the file in it")
    return prove_files(files, place, request, progress, ignored=lambda name: any(fnmatchcase(name, p) for p in ignore))


def _file(place: Path, against: StrPath, request: Request, progress: Progress) -> Held:
    """One file against one file."""
    request = request.with_shared()
    source, beside = checkpoint_file(against)
    with open_checkpoint(
        source, weights=request.weights, select=request.select, strip_wrappers=request.strip_wrappers
    ) as found:
        fmt = _format(place) or output_format(found.format, place, choice=request.format)

        def make(simple: Request) -> Plan:
            return plan_for(plan_of(found, simple, beside=beside), found, fmt, simple)

        made = settled(make, found, request, progress)
        with collector_paused():
            task = make_task(found, made, named_as(place, fmt), fmt, request)
        proven = prove_file(task, place, progress)
        return Held(proven.task.plan, proven.mismatches, made.notes, 1, proven.nbytes, (), proven.uncompared)


def _format(place: Path) -> Format | None:
    """By content, whatever the name says."""
    try:
        with InputFile(place) as file:
            return detect(file)
    except PrecconvError:
        return None
