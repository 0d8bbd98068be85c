"""What is inside a model directory, from headers alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ..dtypes import FP32
from ..errors import UsageError
from ..inspection import Inspection
from ..request import Request
from ..rules import Policy
from ..tensors import prefixed
from ..weights import Weights
from .models import Models, open_models
from .source import Files, local_files

__all__ = ["inspect_directory", "inspect_files"]


def inspect_directory(
    source: str | os.PathLike[str], *, weights: Weights = "auto", select: str | None = None
) -> Inspection:
    """Read the headers of a directory's checkpoints; where ``weights`` leaves a choice, all are shown."""
    return inspect_files(local_files(Path(source)), weights=weights, select=select)


def inspect_files(files: Files, *, weights: Weights = "auto", select: str | None = None) -> Inspection:
    """The same for a model's files wherever they lie."""
    request = Request(policy=Policy(FP32), weights=weights, select=select)  # what becomes of them is not asked
    notes: tuple[str, ...] = ()
    try:
        return _inspect(files, request, notes)
    except UsageError as e:
        if weights != "auto" or select is not None or e.path is None or Path(e.path) == files.root:
            raise
        return _inspect(files, replace(request, weights="all"), (e.message,))


def _inspect(files: Files, request: Request, notes: tuple[str, ...]) -> Inspection:
    with open_models(files, request) as found:
        alone = len(found.models) == 1
        rows = [
            (t._replace(name=prefixed(found.label(m), t.name)), path)
            for m in found.models
            for path, shard in zip(m.set.files, m.shards, strict=True)
            for t in shard.infos
        ]
        formats = dict.fromkeys(m.whole.format.name for m in found.models)
        return Inspection(
            path=files.shown,
            format=" and ".join(formats),
            file_bytes=sum(m.whole.file.size for m in found.models),
            metadata=dict(found.models[0].whole.metadata) if alone else {},
            tensors=tuple(t for t, _ in rows),
            notes=(*notes, *_notes(found)),
            files=tuple(path for _, path in rows),
        )


def _notes(found: Models) -> list[str]:
    notes = [*found.notes, *(note for m in found.models for note in m.whole.notes), *found.left_out()]
    return list(dict.fromkeys(notes))
