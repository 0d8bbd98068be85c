"""One checkpoint of a model repository, and what its files are called when they are written.

A set says which files hold one model's tensors; it has not looked into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .names import index_name, is_guess, parse_weight, renamed, weight_name

__all__ = ["LeftOut", "Survey", "WeightSet", "output_index", "output_name"]


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One checkpoint: a file, or shards with or without an index.  All paths are relative to the root."""

    where: str  #: directory, "" for the root
    stem: str  #: ``model``, ``my-lora``: without variant, shard number and suffix
    variant: str | None  #: ``fp16`` of ``model.fp16.safetensors``
    suffix: str  #: one of ``names.SUFFIXES``
    files: tuple[str, ...]  #: in shard order
    index: str | None = None  #: None for a single file and for shards without one
    weight_map: Mapping[str, str] = field(default_factory=dict)  #: tensor to file; empty without an index
    index_metadata: Mapping[str, object] = field(default_factory=dict)  #: as it stands there, ``total_size`` included
    name: str = ""  #: what the user calls it, unique: "" for the root's only set, ``unet``, ``sub/stem``

    @property
    def is_single(self) -> bool:
        """Whether it is one file that is no shard."""
        return self.index is None and len(self.files) == 1 and not _is_numbered(self.files[0])

    @property
    def is_guess(self) -> bool:
        """Whether only the suffix says that it is a checkpoint: ``vocab.bin`` may be anything."""
        return self.index is None and is_guess(self.stem, self.suffix)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that is neither converted nor carried over."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What every file of a model directory is."""

    sets: tuple[WeightSet, ...]
    others: tuple[str, ...]  #: carried over as they are; no index of a converted set
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
    pipeline: Mapping[str, object] | None  #: the root's ``model_index.json``

    @property
    def files(self) -> list[str]:
        """Every file that is part of the model or was looked at."""
        weights = [path for s in self.sets for path in (*s.files, s.index) if path is not None]
        return [*weights, *self.others, *(left.path for left in self.left_out)]


def output_name(
    source: WeightSet, *, suffix: str, variant: str | None, number: int | None = None, total: int | None = None
) -> str:
    """Where one file of a set goes, relative to the root; ``number`` counts from 1 and is None for a single file.

    A file keeps its name where suffix, variant and number of shards stay; else it is named as the Hub's libraries do.
    """
    stays = (suffix, variant, total or 1) == (source.suffix, source.variant, len(source.files))
    if stays and (number is None) == (source.is_single):
        return source.files[(number or 1) - 1]
    stem = renamed(source.stem, old=source.suffix, new=suffix)
    return _join(source.where, weight_name(stem, suffix=suffix, variant=variant, number=number, total=total))


def output_index(source: WeightSet, *, suffix: str, variant: str | None) -> str:
    """Where the index of a set's shards goes, relative to the root."""
    if source.index is not None and (suffix, variant) == (source.suffix, source.variant):
        return source.index
    stem = renamed(source.stem, old=source.suffix, new=suffix)
    return _join(source.where, index_name(stem, suffix=suffix, variant=variant))


def _join(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name


def _is_numbered(path: str) -> bool:
    found = parse_weight(path.rpartition("/")[2])
    return found is not None and found.number is not None
