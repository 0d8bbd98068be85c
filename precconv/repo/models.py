"""The checkpoints of a model directory, opened: each set of shards as one checkpoint, checked against its index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, open_checkpoint
from ..configs import read_config
from ..errors import CorruptCheckpointError, InputError, UnknownFormatError
from ..fileio import InputFile
from ..formats.sharded import join
from ..names import canonical
from ..request import Request
from .sets import Survey, WeightSet
from .source import Files
from .survey import survey

__all__ = ["Model", "Models", "open_models"]

CONFIG = "config.json"
_LISTED = 5  #: names shown one by one


@dataclass(frozen=True, slots=True)
class Model:
    """One checkpoint of a model directory, open."""

    set: WeightSet
    shards: tuple[Checkpoint, ...]  #: one a file
    whole: Checkpoint  #: all of them as one
    config: Mapping[str, Any] | None  #: of its directory

    @property
    def name(self) -> str:
        """What the user calls it; empty for the only one in the root."""
        return self.set.name

    @property
    def is_transformers(self) -> bool:
        """Whether transformers wrote it, which leaves tied tensors out of what it saves."""
        return self.config is not None and ("model_type" in self.config or "architectures" in self.config)


@dataclass(frozen=True, slots=True)
class Models:
    """A model directory: what every file of it is, and its checkpoints."""

    files: Files
    survey: Survey  #: files that turned out to be no checkpoints are among ``others``
    models: tuple[Model, ...]
    notes: tuple[str, ...]

    @property
    def root(self) -> Path:
        """The directory; of a repo, what its files' names begin with in messages."""
        return self.files.root

    def label(self, model: Model) -> str:
        """What a checkpoint's tensors have before their names where there are several; empty for the only one."""
        return model.name if len(self.models) > 1 else ""

    def read(self, path: str) -> bytes:
        """A small file of it."""
        return self.files.read(path)

    def left_out(self) -> list[str]:
        """A note a reason on the files that are neither converted nor carried over."""
        paths: dict[str, list[str]] = {}
        for file in self.survey.left_out:
            paths.setdefault(file.why, []).append(file.path)
        return [f"left out, {why}: {_listed(held)}" for why, held in paths.items()]


@contextmanager
def open_models(files: Files, request: Request) -> Iterator[Models]:
    """Open every checkpoint of a model and read the headers; no tensor data is read.

    Raises InputError for a directory without weights, for files that are missing, damaged or contradict an index.
    """
    root = files.root
    found = survey(files.paths, files.read, root=str(root), variant=request.from_variant, copy_all=request.copy_all)
    with ExitStack() as stack:
        models, others = [], list(found.others)
        for weights in found.sets:
            opened = _open(files, weights, request, stack)
            if opened is None:
                others += weights.files
            else:
                models.append(opened)
        if not models:
            raise InputError("there are no weights", path=root, hint="give the directory that the model was saved to")
        yield Models(files, replace(found, others=tuple(sorted(others))), tuple(models), found.notes)


def _open(files: Files, weights: WeightSet, request: Request, stack: ExitStack) -> Model | None:
    """None for a file of which only the suffix said that it is a checkpoint."""
    root, shards = files.root, []
    for path in weights.files:
        try:
            shard = open_checkpoint(
                files.open(path),
                weights=request.weights,
                select=request.select,
                strip_wrappers=request.strip_wrappers,
            )
        except UnknownFormatError:
            if weights.is_guess:
                return None
            raise
        stack.callback(shard.file.close)
        if isinstance(shard.file, InputFile):
            shard.file.park()
        shards.append(shard)
    if not any(s.infos or s.opaque for s in shards):
        if weights.is_guess:
            return None
        raise InputError("holds no tensors: there is nothing to convert", path=root / weights.files[0])
    _require_distinct(weights, shards, root)
    notes = _check_index(weights, shards, root, request)
    whole = shards[0] if len(shards) == 1 else _joined(root / (weights.index or weights.where), shards)
    return Model(weights, tuple(shards), replace(whole, notes=(*whole.notes, *notes)), _config(files, weights.where))


def _joined(path: Path, shards: Sequence[Checkpoint]) -> Checkpoint:
    notes = tuple(dict.fromkeys(note for s in shards for note in s.notes))
    opaque = {name: found for s in shards for name, found in s.opaque.items()}
    return Checkpoint(join(path, [s.source for s in shards]), notes, tuple(e for s in shards for e in s.left), opaque)


def _names(shard: Checkpoint) -> list[str]:
    return [*(t.name for t in shard.infos), *shard.opaque]


def _require_distinct(weights: WeightSet, shards: Sequence[Checkpoint], root: Path) -> None:
    owner: dict[str, str] = {}
    for path, shard in zip(weights.files, shards, strict=True):
        for name in _names(shard):
            if owner.setdefault(name, path) != path:
                message = f"is in two shards, {owner[name]!r} and {path!r}"
                hint = "remove the shard that is not the model's, or fetch the model again"
                raise InputError(message, path=root / (weights.index or weights.where), tensor=name, hint=hint)


def _check_index(weights: WeightSet, shards: Sequence[Checkpoint], root: Path, request: Request) -> list[str]:
    """Notes on tensors that the index does not name; raises CorruptCheckpointError for those it names wrongly."""
    if weights.index is None or request.weights not in ("auto", "all") or request.select is not None:
        return []
    where = {name: path for path, shard in zip(weights.files, shards, strict=True) for name in _names(shard)}
    for name, path in weights.weight_map.items():
        held = where.get(name, where.get(canonical(name)))
        if held != path:
            message = f"should be in {path!r}" + (f", is in {held!r}" if held else ", which does not hold it")
            hint = "the index and the shards are not of one model: fetch both again"
            raise CorruptCheckpointError(message, path=root / weights.index, tensor=name, hint=hint)
    named = {canonical(name) for name in weights.weight_map}
    extra = [name for name in where if canonical(name) not in named]
    if not extra:
        return []
    return [f"not in {weights.index}, but in its shards, and so in the output: {_listed([*map(repr, extra)])}"]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")


def _config(files: Files, where: str) -> dict[str, Any] | None:
    path = f"{where}/{CONFIG}" if where else CONFIG
    return read_config(files.read(path), str(files.root / path)) if path in files.paths else None
