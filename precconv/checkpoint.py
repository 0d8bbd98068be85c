"""A checkpoint as a conversion sees it: the file, and which of its tensors are the weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from .errors import UsageError
from .fileio import SourceFile
from .formats import Format, Source, open_reader
from .formats.elements import ElementReader
from .formats.safetensors import SafetensorsReader
from .formats.torch import TorchReader
from .formats.torch_file import TorchFile, file_offset
from .formats.torch_tensors import OpaqueTensor, TensorRef
from .names import canonical
from .outline import Entry, outline
from .tensors import TensorInfo
from .tree import Tally
from .twins import ema_only, without_twins
from .weights import Selection, Weights
from .weights import select as select_weights

__all__ = ["Checkpoint", "open_checkpoint", "renamed"]

#: Bytes of a strided tensor gathered at a time, in each thread.
_TILE = 8 << 20
_LISTED = 8  #: entries left behind that are named one by one


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open checkpoint; close ``file``, or use it as a context manager."""

    source: Source
    notes: tuple[str, ...]
    left: tuple[Entry, ...] = ()  #: what else is in the file
    opaque: Mapping[str, OpaqueTensor] = field(default_factory=dict)  #: chosen tensors that are no plain arrays

    @property
    def file(self) -> SourceFile:
        return self.source.file

    @property
    def format(self) -> Format:
        return self.source.reader.format

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.source.reader.metadata

    @property
    def infos(self) -> Sequence[TensorInfo]:
        """The weights, by offset in a safetensors file, in the file's own order in a torch checkpoint."""
        return self.source.infos

    def left_note(self, *, kept: bool) -> list[str]:
        """What is done with the rest of the file: kept as it is, or left out."""
        if not self.left:
            return []
        shown = "; ".join(map(str, self.left[:_LISTED]))
        more = f"; and {len(self.left) - _LISTED} more" if len(self.left) > _LISTED else ""
        return [f"{'kept as it is' if kept else 'not in the output'}: {shown}{more}"]

    def structure(self) -> list[Entry]:
        """The first levels of what a torch checkpoint wraps its tensors in; empty for a safetensors file."""
        reader = self.source.reader
        return outline(reader.index.root) if isinstance(reader, TorchReader) else []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.file.close()


def open_checkpoint(
    path: str | os.PathLike[str] | SourceFile,
    *,
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
) -> Checkpoint:
    """Open a checkpoint file, read its header and choose the weights; no tensor data is read.

    ``weights``, ``select``: which weights of a training checkpoint; ``select`` is a key path in a torch checkpoint.
    ``strip_wrappers``: take wrapper modules (``module.``, ``_orig_mod.``) out of the names.

    An open file is taken over: it is closed with the checkpoint, and when there is none in it.

    Raises InputError for a file that cannot be used, UsageError where the choice is the user's.
    """
    reader = open_reader(path)
    path = reader.file.path
    try:
        if isinstance(reader, TorchReader):
            found = _of_torch(reader, weights, select)
        elif not isinstance(reader, SafetensorsReader):
            raise TypeError(f"no weights are chosen in {reader.format.name} files")
        elif select is not None:
            raise UsageError("--select is for torch checkpoints; this file has no key paths", path=path)
        else:
            found = _of_names(Source(reader, reader.infos), weights)
        return _unwrapped(found) if strip_wrappers else found
    except BaseException:
        reader.file.close()
        raise


def _of_names(source: Source, weights: Weights) -> Checkpoint:
    """A file of tensors only, in which an LDM model may have its EMA twins."""
    notes = tuple(source.reader.notes)
    if weights not in ("model", "ema"):
        return Checkpoint(source, notes)
    infos = {t.name: t for t in source.infos}
    split = (without_twins if weights == "model" else ema_only)(infos)
    if split is None:
        if weights == "ema":
            raise UsageError("there are no EMA weights in this file", path=source.file.path, hint="use --weights auto")
        return Checkpoint(source, notes)
    chosen = [t._replace(name=name) for name, t in split.tensors.items()]
    left = tuple(Entry(name, f"{t.dtype} tensor", Tally(1, t.nbytes)) for name, t in split.left.items())
    return Checkpoint(replace(source, infos=chosen, is_part=True), notes, left)


def _of_torch(reader: TorchReader, weights: Weights, path: str | None) -> Checkpoint:
    where = os.fspath(reader.file.path)
    chosen = select_weights(reader.index.root, weights, path, where=where)
    refs = {name: found for name, found in chosen.tensors.items() if isinstance(found, TensorRef)}
    opaque = {name: found for name, found in chosen.tensors.items() if isinstance(found, OpaqueTensor)}
    infos = [_info(reader.index, name, ref) for name, ref in refs.items()]
    is_part = path is not None or weights in ("model", "ema")
    source = Source(reader, infos, refs, partial(ElementReader, reader.index, tile=_TILE), is_part)
    notes = (*reader.notes, *_chosen_notes(chosen))
    return Checkpoint(source, notes, chosen.left, opaque)


def _info(index: TorchFile, name: str, ref: TensorRef) -> TensorInfo:
    """A tensor of a torch checkpoint as one of a flat file; FP4 elements are two values each in torch."""
    offset = file_offset(index, ref)
    shape = (*ref.shape[:-1], ref.shape[-1] * 2) if ref.dtype == "fp4" and ref.shape else ref.shape
    return TensorInfo(name, ref.dtype, shape, -1 if offset is None else offset, ref.nbytes)


def _chosen_notes(chosen: Selection) -> Iterable[str]:
    paths = [repr(p) for p in chosen.chosen if p]
    if paths:
        yield f"weights: those at {', '.join(paths)}"
    if chosen.renamed:
        yield f"{len(chosen.renamed)} EMA weights take the place of the model's"


def _unwrapped(found: Checkpoint) -> Checkpoint:
    names = {t.name: canonical(t.name) for t in found.infos}
    if len(set(names.values())) < len(names):
        taken: dict[str, str] = {}
        for name, short in names.items():
            if taken.setdefault(short, name) != name:
                message = f"without wrappers, {taken[short]!r} and {name!r} would both be {short!r}"
                raise UsageError(message, path=found.file.path)
    return renamed(found, names)


def renamed(found: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """The same tensors under other names, which differ among themselves; ``names`` has one for each."""
    source = found.source
    infos = [t._replace(name=names[t.name]) for t in source.infos]
    refs = {names[name]: ref for name, ref in source.refs.items()}
    return replace(found, source=replace(source, infos=infos, refs=refs, is_part=True))
