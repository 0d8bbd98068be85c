"""The conversion of a model on the Hub: planned from headers read by range, then fetched, converted, published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

from ..bulk import collector_paused
from ..checkpoint import open_checkpoint
from ..convert import convert_file
from ..engines import Engine, open_engine
from ..errors import HubError, InputError, OutputError, UsageError
from ..fileio import InputFile, SourceFile
from ..filing import check_filing
from ..formats import Format
from ..inspection import Inspection, inspect_file
from ..outputs import output_format, output_path
from ..paths import free_bytes, is_taken
from ..plan import Plan
from ..repo.convert import Needs, Runner, Sink, convert_files, convert_to_file, needs, plan_files
from ..repo.inspection import inspect_files
from ..repo.models import CONFIG
from ..repo.places import directory_output, require_replaceable, single_output
from ..repo.source import Files, local_files
from ..repo.stage import home_of, put_back, staged
from ..report import Report
from ..request import Request, StrPath, plan_for, plan_of
from ..runs import Phases, ProgressCallback
from ..weights import Weights
from .client import quiet
from .failures import OFFLINE, OFFLINE_HINT
from .push import HubSink, Push, already, pushing
from .refs import Ref
from .source import (
    HubFile,
    HubRepo,
    cache_directory,
    fetch,
    fetched,
    find,
    is_cached,
    is_offline,
    opened_at,
    remote_files,
)
from .spread import runner as engine_runner

__all__ = [
    "convert_found",
    "convert_repo",
    "fetched_file",
    "fetched_files",
    "fetched_repo",
    "inspect_repo",
    "plan_repo",
    "push_directory",
    "ranged_file",
    "ranged_files",
]


@quiet()
def inspect_repo(ref: Ref, *, weights: Weights = "auto", select: str | None = None) -> Inspection:
    """What is in a model on the Hub, or in one of its files; no weights are downloaded."""
    repo = find(ref)
    if ref.file is None:
        with _whole(repo):
            return inspect_files(remote_files(repo), weights=weights, select=select)
    found = inspect_file(opened_at(repo, _there(ref, repo)), weights=weights, select=select)
    return replace(found, path=str(Ref(repo.id, repo.commit, ref.file)))


@quiet()
def plan_repo(ref: Ref, output: StrPath | None, request: Request) -> Plan:
    """What ``convert_repo`` with the same arguments would do; no weights are downloaded.

    Raises UsageError for a lossless request, which needs them.
    """
    if request.lossless is not None:
        option = "--to auto" if request.lossless == "auto" else "--lossless-only"
        hint = f"precconv scan {ref} --sample shows what to expect; a conversion fetches them"
        raise UsageError(f"{option} depends on the weights, which a plan does not fetch", path=str(ref), hint=hint)
    repo = find(ref)
    if ref.file is None:
        with _whole(repo):
            return plan_files(remote_files(repo), output, request)
    return _plan_one(repo, _there(ref, repo), output, request)[0]


@contextmanager
def _whole(repo: HubRepo) -> Iterator[None]:
    """Offline, what a model lacks need not be the model's fault: it may just not be in the cache."""
    try:
        yield
    except InputError as e:
        if not is_offline():
            raise
        message = f"is not whole in the cache, and the client is offline: {e.message}"
        raise HubError(message, kind="offline", path=repo.id, hint=OFFLINE_HINT) from e


def _needs(repo: HubRepo, final: Path, request: Request, *, one: bool = False) -> Needs:
    with _whole(repo):
        return needs(remote_files(repo), final, request, one=one)


def _there(ref: Ref, repo: HubRepo) -> str:
    """The file that a reference names; raises HubError where the repo has none of this name."""
    assert ref.file is not None
    if ref.file not in repo.sizes:
        if is_offline():
            raise HubError(OFFLINE, kind="offline", path=str(ref), hint=OFFLINE_HINT)
        hint = f"precconv inspect {repo.id} lists what is there"
        raise HubError("there is no such file", kind="file", path=str(ref), hint=hint)
    return ref.file


@quiet()
def convert_repo(
    ref: Ref,
    output: StrPath | None,
    request: Request,
    progress: ProgressCallback | None = None,
    push: Push | None = None,
) -> Report:
    """Convert a model on the Hub; by default to ``NAME-bf16`` in the working directory.

    With ``push`` it is published on the Hub, and kept here only where an ``output`` is named.
    """
    if push is not None:
        _check_push(push, output, request, source=ref)
    repo = find(ref)
    if ref.file is not None:
        return _convert_one(repo, _there(ref, repo), output, request, progress)
    if push is None:
        return convert_found(repo, output, request, progress)
    keeps, files, place = output is not None, remote_files(repo), output or _stage_name(push)
    final = _final(repo, place, request)
    needed = _needs(repo, final, request)  # a repo is made on the Hub only for what can be converted
    with _engine(push) as engine, pushing(push.target, files, request, at_once=push.low_disk) as sink:
        if sink.already is not None and not (keeps and not is_taken(final)):
            _tidy(final)
            return already(sink, files, _published(files, output, request), request)
        to = sink if sink.already is None else None  # what is published, but not here, is made here
        make = None if engine is None or to is None else engine_runner(repo, to, engine)
        done = convert_found(
            repo, place, request, progress, to, keeps=keeps, low_disk=push.low_disk, needed=needed, runner=make
        )
        return _with_published(done, sink)


def _engine(push: Push) -> AbstractContextManager[Engine | None]:
    """Opened before a repo is made: it may not answer."""
    if push.engine is None:
        return nullcontext()
    return open_engine(push.engine, workers=push.workers, address=push.address)


def _stage_name(push: Push) -> str:
    """Of what stays here only until it is published: no two models that are published lie in each other's way."""
    return "@".join(filter(None, (push.target.repo, push.target.branch))).replace("/", "--")


def _check_push(push: Push, output: StrPath | None, request: Request, *, source: StrPath | Ref) -> None:
    """Raises UsageError for what contradicts publishing."""
    path = str(source) if isinstance(source, Ref) else source
    if isinstance(source, Ref) and source.file is not None:
        raise UsageError("--push publishes whole models", path=path, hint="leave the file's name out")
    if single_output(output) is not None:
        raise UsageError("--push publishes a model's directory, -o names a file", path=path, hint="give a directory")
    what = "--low-disk" if push.low_disk else "--engine" if push.engine is not None else None
    if what is None:
        return
    if not isinstance(source, Ref):
        raise UsageError(f"{what} is for models on the Hub", path=path, hint="leave it out")
    if output is not None:
        raise UsageError(f"{what} keeps nothing here, -o does", path=path, hint="leave one of them out")
    if request.shard_size is not None:
        hint = "leave one of them out"
        raise UsageError(f"{what} writes the source's shards, --shard-size others", path=path, hint=hint)
    if request.lossless is not None:
        message = f"{what} takes a shard at a time, what loses nothing depends on the values of all of them"
        hint = f"leave out {what}, or name a dtype without --lossless-only"
        raise UsageError(message, path=path, hint=hint)


def _with_published(done: Report, sink: HubSink) -> Report:
    return done if sink.already is None else replace(done, published=asdict(sink.already))


def push_directory(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None, push: Push
) -> Report:
    """Convert a local model and publish it; it is kept here only where an ``output`` is named."""
    _check_push(push, output, request, source=source)
    final, keeps = directory_output(Path(source), request.to, output or _stage_name(push)), output is not None
    put_back(final)
    files = local_files(Path(source), skip=(final, home_of(final)))
    needs(files, final, request)
    with pushing(push.target, files, request, at_once=False) as sink:
        if sink.already is not None and not (keeps and not is_taken(final)):
            _tidy(final)
            return already(sink, files, _published(files, output, request), request)
        to = sink if sink.already is None else None
        return _with_published(convert_files(files, final, request, progress, to, keeps=keeps), sink)


def _tidy(final: Path) -> None:
    """Remove what a run left that was killed between its commit and its end; no other would."""
    put_back(final)
    if is_taken(home_of(final)):
        with suppress(OutputError), staged(final, "", durable=False):  # another run may be at it
            pass


def _final(repo: HubRepo, output: StrPath | None, request: Request) -> Path:
    return single_output(output) or directory_output(Path(repo.id.rpartition("/")[2]), request.to, output)


def _published(files: Files, output: StrPath | None, request: Request) -> Plan:
    """The plan of what was published already; what the values decided then is not decided again."""
    made = plan_files(files, output, request.from_headers())
    if request.lossless is None:
        return made
    notes = (*made.notes, "what became of each tensor was decided from the values, which were not read again")
    return replace(made, items=(), notes=notes, lossless=request.lossless)


def convert_found(
    repo: HubRepo,
    output: StrPath | None,
    request: Request,
    progress: ProgressCallback | None = None,
    sink: Sink | None = None,
    *,
    keeps: bool = True,
    low_disk: bool = False,
    needed: Needs | None = None,
    runner: Runner | None = None,
) -> Report:
    """Convert a repo at its commit.

    What the plan, the rules or the output's place have against it is said before anything large is fetched.
    ``sink``, ``keeps``: as in ``convert_files``.  ``low_disk``: weights are fetched one at a time, and removed.
    ``needed``: what ``needs`` has said, where it was asked already.  ``runner``: as in ``convert_files``.
    """
    final, one = _final(repo, output, request), single_output(output) is not None
    put_back(final)
    if needed is None:
        needed = _needs(repo, final, request, one=one)
    if keeps and not one:
        require_replaceable(final, needed.names, force=request.force)
    by_shard = low_disk or runner is not None
    near = () if by_shard else needed.weights
    _require_room(repo, [*needed.others, *near], final, 0 if by_shard else needed.nbytes)
    shown = Phases(progress, then=sum(repo.sizes[name] for name in needed.weights))
    root = fetch(repo, [*needed.others, *near], shown.first)
    files = _files(repo, root, needed.weights if by_shard else (), home_of(final))
    if one:
        return convert_to_file(files, final, request, shown.second)
    return convert_files(files, final, request, shown.second, sink, keeps=keeps, runner=runner)


def _require_room(repo: HubRepo, names: Sequence[str], final: Path, nbytes: int) -> None:
    """Raises OutputError where the cache's disk has no room for what is fetched, or the output's for it as well."""
    missing = sum(repo.sizes[name] for name in names if not is_cached(repo, name))
    done = sum(p.stat().st_size for p in home_of(final).rglob("*") if p.is_file())  # an earlier run's, to go on with
    made, cache = max(0, nbytes - done), cache_directory()
    if cache.stat().st_dev == final.parent.stat().st_dev:
        made += missing
    for where, needed in ((cache, missing), (final.parent, made)):
        if needed > (free := free_bytes(where)):
            hint = "make room, or have it on another disk: HF_HOME for the cache, -o for the output"
            message = f"{repo.id} needs {needed} bytes here, the disk has {free} free"
            raise OutputError(message, path=where.absolute(), hint=f"{hint}; --push with --low-disk needs far less")


@quiet()
def fetched_file(ref: Ref, progress: ProgressCallback | None = None) -> Path:
    """One file of a model, in the client's cache with the config beside it."""
    repo = find(ref)
    name = _there(ref, repo)
    return fetch(repo, _with_config(repo, name), progress) / name


@quiet()
def ranged_file(ref: Ref) -> tuple[SourceFile, Path]:
    """One file of a model where it is, read by range, and where it would be beside its config."""
    repo = find(ref)
    name = _there(ref, repo)
    return opened_at(repo, name), _beside_config(repo, name)


@quiet()
def fetched_files(ref: Ref, request: Request, progress: ProgressCallback | None = None) -> Files:
    """A model's files in the client's cache."""
    repo = find(ref)
    needed = _needs(repo, Path(), request)
    return _files(repo, fetch(repo, [*needed.others, *needed.weights], progress), (), Path())


@quiet()
def fetched_repo(ref: Ref) -> Path:
    """All files of a repo, in the client's cache."""
    repo = find(ref)
    return fetch(repo, sorted(repo.sizes))


@quiet()
def ranged_files(ref: Ref) -> Files:
    """A model's files where they are, read by range."""
    return remote_files(find(ref))


def _files(repo: HubRepo, root: Path, remote: Sequence[str], home: Path) -> Files:
    """Files in the snapshot ``root``; those in ``remote`` are read on the Hub, and brought to ``home`` one by one."""
    known = frozenset(remote)

    def opened(path: str) -> SourceFile:
        return HubFile(repo, path) if path in known else InputFile(root / path)

    @contextmanager
    def near(path: str) -> Iterator[Path]:
        place = home / "source"
        shutil.rmtree(place, ignore_errors=True)
        try:
            yield fetched(repo, path, to=place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    return Files(
        root, sorted(repo.sizes), opened, repo.shown, repo.id, repo.commit, repo.sizes, near if remote else None
    )


# One file


def _with_config(repo: HubRepo, name: str) -> list[str]:
    beside = os.fspath(PurePosixPath(name).parent / CONFIG)
    return [path for path in (name, beside) if path in repo.sizes]


def _beside_config(repo: HubRepo, name: str) -> Path:
    """Where a file would be if it was here, with its config, which is fetched."""
    config = _with_config(repo, name)[1:]
    return fetch(repo, config) / name if config else Path(repo.commit, name)


def _plan_one(repo: HubRepo, name: str, output: StrPath | None, request: Request) -> tuple[Plan, Format]:
    """The plan from the header, and the format that the file has now."""
    beside, simple = _beside_config(repo, name), request.from_headers()
    file, wrappers = opened_at(repo, name), request.strip_wrappers
    with (
        collector_paused(),
        open_checkpoint(file, weights=request.weights, select=request.select, strip_wrappers=wrappers) as found,
    ):
        fmt = output_format(found.format, None if output is None else Path(output), choice=request.format)
        return plan_for(plan_of(found, simple, beside=beside), found, fmt, simple), found.format


def _convert_one(
    repo: HubRepo, name: str, output: StrPath | None, request: Request, progress: ProgressCallback | None
) -> Report:
    """One file of a repo, by default to the working directory."""
    place = "." if output is None else output
    made, fmt = _plan_one(repo, name, place, request)
    final, _ = output_path(Path(repo.id, name), fmt, request.to, place, choice=request.format, force=request.force)
    check_filing(request, [final])
    names = _with_config(repo, name)
    nbytes = 0 if request.lossless == "auto" else sum(i.nbytes for i in made.items)
    _require_room(repo, names, final, nbytes)
    shown = Phases(progress, then=repo.sizes[name])
    root = fetch(repo, names, shown.first)
    done = convert_file(root / name, place, request, shown.second)
    return replace(done, source=str(Ref(repo.id, repo.commit, name)))
