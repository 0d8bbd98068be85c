"""A source opened for its values, whatever it is: a file, a directory, or a model on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import FP32
from .hub.convert import fetched_file, fetched_files
from .hub.refs import parse_ref
from .paths import is_directory
from .repo.models import open_models
from .repo.source import local_files
from .request import Request, StrPath
from .rules import Policy
from .weights import Weights

__all__ = ["opened"]


@contextmanager
def opened(
    source: StrPath, *, weights: Weights = "auto", select: str | None = None, strip_wrappers: bool = False
) -> Iterator[Mapping[str, Checkpoint]]:
    """The checkpoints of a source under their names; that of a single file, or a directory's only one, is empty.

    A model on the Hub is fetched to the client's cache.  Raises InputError, HubError, or UsageError where the weights
    are the user's choice.
    """
    ref = None if is_directory(source) else parse_ref(source)
    if not is_directory(source) and (ref is None or ref.file is not None):
        path = source if ref is None else fetched_file(ref)
        with open_checkpoint(path, weights=weights, select=select, strip_wrappers=strip_wrappers) as found:
            yield {"": found}
        return
    request = Request(policy=Policy(FP32), weights=weights, select=select, strip_wrappers=strip_wrappers)
    files = local_files(Path(os.fspath(source))) if ref is None else fetched_files(ref, request)
    with open_models(files, request) as models:
        alone = len(models.models) == 1
        yield {"" if alone else m.name: m.whole for m in models.models}
