"""The conversion of a model on the Hub: planned from headers read by range, then fetched, converted, published."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

from ..bulk import collector_paused
from ..convert import convert_file
from ..errors import HubError, UsageError
from ..fileio import InputFile, SourceFile
from ..inspection import Inspection
from ..plan import Plan
from ..repo.convert import Sink, convert_files, convert_to_file, plan_files
from ..repo.inspection import inspect_files
from ..repo.models import CONFIG, open_models
from ..repo.places import directory_output, single_output
from ..repo.plans import plan_models
from ..repo.source import Files, local_files
from ..repo.stage import home_of, put_back
from ..report import Report
from ..request import Request, StrPath
from ..runs import ProgressCallback
from ..weights import Weights
from .push import Push, already, pushing
from .refs import Ref
from .source import HubFile, HubRepo, fetch, fetched, find, remote_files

__all__ = [
    "convert_found",
    "convert_repo",
    "fetched_files",
    "inspect_repo",
    "plan_repo",
    "push_directory",
    "ranged_files",
]


def inspect_repo(ref: Ref, *, weights: Weights = "auto", select: str | None = None) -> Inspection:
    """What is in a model on the Hub; no weights are downloaded."""
    return inspect_files(ranged_files(ref), weights=weights, select=select)


def plan_repo(ref: Ref, output: StrPath | None, request: Request) -> Plan:
    """What ``convert_repo`` with the same arguments would do; no weights are downloaded.

    Raises UsageError for a lossless request, which needs them.
    """
    if request.lossless is not None:
        option = "--to auto" if request.lossless == "auto" else "--lossless-only"
        hint = f"precconv scan {ref} --sample shows what to expect; a conversion fetches them"
        raise UsageError(f"{option} depends on the weights, which a plan does not fetch", path=str(ref), hint=hint)
    return plan_files(ranged_files(ref), output, request)


def _asked_for(ref: Ref) -> HubRepo:
    """The repo at its commit; of a reference to a file, that file and the config beside it alone."""
    repo = find(ref)
    if ref.file is None:
        return repo
    if ref.file not in repo.sizes:
        hint = f"precconv inspect {repo.id} lists what is there"
        raise HubError("there is no such file", kind="file", path=str(ref), hint=hint)
    beside = str(PurePosixPath(ref.file).parent / CONFIG)
    names = [name for name in (ref.file, beside) if name in repo.sizes]
    return replace(repo, sizes={name: repo.sizes[name] for name in names})


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
    if push is not None and push.low_disk and request.lossless is not None:
        hint = "leave out --low-disk, or name a dtype without --lossless-only"
        raise UsageError("--low-disk fetches a shard at a time, what loses nothing depends on all of them", hint=hint)
    repo = _asked_for(ref)
    if push is None:
        if ref.file is not None:
            return _convert_one(repo, ref.file, output, request, progress)
        return convert_found(repo, output, request, progress)
    if ref.file is not None:
        raise UsageError("--push publishes whole models", path=str(ref), hint="leave the file's name out")
    files = remote_files(repo)
    with pushing(push.target, files, request, at_once=push.low_disk) as sink:
        if sink.already is not None:
            return already(sink, files, _published(files, output, request), request)
        keeps, low_disk = output is not None, push.low_disk
        done = convert_found(repo, output, request, progress, sink, keeps=keeps, low_disk=low_disk)
        assert sink.published is not None
        return replace(done, published=asdict(sink.published))


def push_directory(
    source: StrPath, output: StrPath | None, request: Request, progress: ProgressCallback | None, push: Push
) -> Report:
    """Convert a local model and publish it; it is kept here only where an ``output`` is named."""
    if push.low_disk:
        raise UsageError("--low-disk is for models on the Hub", path=source, hint="leave it out")
    final = directory_output(Path(source), request.to, output)
    put_back(final)
    files = local_files(Path(source), skip=(final, home_of(final)))
    with pushing(push.target, files, request, at_once=False) as sink:
        if sink.already is not None:
            return already(sink, files, _published(files, output, request), request)
        done = convert_files(files, final, request, progress, sink, keeps=output is not None)
        assert sink.published is not None
        return replace(done, published=asdict(sink.published))


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
) -> Report:
    """Convert a repo at its commit.

    What the plan, the rules or the output's place have against it is said before anything large is fetched.
    ``sink``, ``keeps``: as in ``convert_files``.  ``low_disk``: weights are fetched one at a time, and removed.
    """
    one = single_output(output)
    final = directory_output(Path(repo.id.rpartition("/")[2]), request.to, output) if one is None else one
    if low_disk and (one is not None or request.shard_size is not None):
        hint = "leave out --low-disk, or write the same shards"
        raise UsageError("--low-disk converts a shard at a time, this output needs all of them", hint=hint)
    put_back(final)
    weights, others = _needed(repo, request)
    sizes = [sum(repo.sizes[name] for name in names) for names in (weights, others)]
    near = [] if low_disk else weights
    shown = _Phases(progress, sum(sizes) if not low_disk else sizes[1], sizes[0])
    root = fetch(repo, [*others, *near], shown.fetching)
    files = _files(repo, root, weights if low_disk else (), home_of(final))
    if one is not None:
        return convert_to_file(files, final, request, shown.converting)
    return convert_files(files, final, request, shown.converting, sink, keeps=keeps)


def fetched_files(ref: Ref, request: Request, progress: ProgressCallback | None = None) -> Files:
    """A model's files in the client's cache."""
    repo = _asked_for(ref)
    weights, others = _needed(repo, request)
    return _files(repo, fetch(repo, [*others, *weights], progress), (), Path())


def ranged_files(ref: Ref) -> Files:
    """A model's files where they are, read by range."""
    return remote_files(_asked_for(ref))


def _needed(repo: HubRepo, request: Request) -> tuple[list[str], list[str]]:
    """The weights that are converted, and what else is part of the model.

    All that can be decided is, from headers, so that nobody waits hours for a refusal.
    """
    with open_models(remote_files(repo), request) as models, collector_paused():
        plan_models(models, request.from_headers())
        sets = [m.set for m in models.models]
    weights = [name for s in sets for name in s.files]
    indexes = [s.index for s in sets if s.index is not None]
    return weights, [*models.survey.others, *indexes]


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


def _convert_one(
    repo: HubRepo, name: str, output: StrPath | None, request: Request, progress: ProgressCallback | None
) -> Report:
    """One file of a repo, by default to the working directory."""
    shown = _Phases(progress, sum(repo.sizes.values()), repo.sizes[name])
    root = fetch(repo, list(repo.sizes), shown.fetching)
    done = convert_file(root / name, "." if output is None else output, request, shown.converting)
    return replace(done, source=str(Ref(repo.id, repo.commit, name)))


class _Phases:
    """One progress over fetching and converting."""

    def __init__(self, callback: ProgressCallback | None, fetched: int, converted: int) -> None:
        self._callback, self._fetched, self._converted = callback, fetched, converted

    def fetching(self, done: int, total: int) -> None:
        if self._callback is not None:
            self._callback(done, total + self._converted)

    def converting(self, done: int, total: int) -> None:
        if self._callback is not None:
            self._callback(self._fetched + done, self._fetched + total)
