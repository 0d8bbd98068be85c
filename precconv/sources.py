"""A source opened for its values, whatever it is: a file, a directory, or a model on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import FP32
from .fileio import SourceFile
from .hub.convert import fetched_file, fetched_files, fetched_repo, ranged_file, ranged_files
from .hub.refs import parse_ref
from .paths import is_directory
from .repo.models import open_models
from .repo.source import Files, local_files
from .request import Request, StrPath
from .rules import Policy
from .runs import ProgressCallback
from .weights import Weights

__all__ = ["checkpoint_file", "fetched_whole", "model_files", "opened"]


@contextmanager
def opened(
    source: StrPath, *, weights: Weights = "auto", select: str | None = None, strip_wrappers: bool = False
) -> Iterator[Mapping[str, Checkpoint]]:
    """The checkpoints of a source under their names; that of a single file, or a directory's only one, is empty.

    A model on the Hub is fetched to the client's cache.  Raises InputError, HubError, or UsageError where the weights
    are the user's choice.
    """
    request = Request(policy=Policy(FP32), weights=weights, select=select, strip_wrappers=strip_wrappers)
    files = model_files(source, request)
    if files is None:
        path, _ = checkpoint_file(source)
        with open_checkpoint(path, weights=weights, select=select, strip_wrappers=strip_wrappers) as found:
            yield {"": found}
        return
    with open_models(files, request) as models:
        yield {models.label(m): m.whole for m in models.models}


def model_files(
    source: StrPath, request: Request, *, ranged: bool = False, progress: ProgressCallback | None = None
) -> Files | None:
    """The files of a model, in a directory or on the Hub; None where the source is a checkpoint file, here or there.

    Those on the Hub are fetched to the client's cache; with ``ranged`` they are read where they are.
    """
    if is_directory(source):
        return local_files(Path(os.fspath(source)))
    ref = parse_ref(source)
    if ref is None or ref.file is not None:
        return None
    return ranged_files(ref) if ranged else fetched_files(ref, request, progress)


def checkpoint_file(
    source: StrPath, *, ranged: bool = False, progress: ProgressCallback | None = None
) -> tuple[StrPath | SourceFile, Path | None]:
    """What to open of a source that is a checkpoint file, and where its config would be beside it, if not there.

    One on the Hub is fetched to the client's cache; with ``ranged`` it is read where it is.
    """
    ref = parse_ref(source)
    if ref is None:
        return source, None
    return ranged_file(ref) if ranged else (fetched_file(ref, progress), None)


def fetched_whole(source: StrPath) -> tuple[Path, bool]:
    """Where a source lies with every file it has, and whether it was on the Hub and is now in the client's cache."""
    ref = None if is_directory(source) else parse_ref(source)
    if ref is None:
        return Path(os.fspath(source)), False
    return (fetched_repo(ref) if ref.file is None else fetched_file(ref)), True
