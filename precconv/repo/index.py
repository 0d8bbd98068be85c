"""Reading the index of a sharded checkpoint, ``*.index.json``: which tensor lies in which file.

The index is the file's word and may come from anybody: every path in it is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from precconv.errors import CorruptCheckpointError, InputError

from .doors import json_object, listed, shown, unsafe
from .names import parse_weight

__all__ = ["MAX_INDEX", "Index", "check_shards", "read_index", "shard_order"]

#: Bytes; an index of a million tensors has about this many.
MAX_INDEX = 100 << 20
_DEEPEST = 100  #: objects and lists in one another; transformers writes two numbers


@dataclass(frozen=True, slots=True)
class Index:
    """A shard index; paths are relative to the root of the repository."""

    weight_map: Mapping[str, str]  #: tensor to file
    metadata: Mapping[str, object]
    shards: tuple[str, ...]  #: each once, in shard order


def read_index(raw: bytes, *, path: str, where: str, suffix: str) -> Index:
    """The index in ``raw``, whose directory is ``where`` and whose shards end in ``suffix``.

    ``path`` is for messages.  Raises CorruptCheckpointError.
    """
    found = json_object(raw, path=path, limit=MAX_INDEX)
    metadata = found.get("metadata", {})
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("its 'metadata' is not an object", path=path)
    if _is_deep(metadata):
        raise CorruptCheckpointError("its 'metadata' nests too deeply", path=path)
    given = found.get("weight_map")
    if not isinstance(given, dict):
        what = "its 'weight_map' is not an object" if "weight_map" in found else "it has no 'weight_map'"
        raise CorruptCheckpointError(what, path=path, hint="an index maps every tensor's name to a shard")
    if not given:
        raise CorruptCheckpointError("its 'weight_map' is empty", path=path)
    places: dict[str, str] = {}
    for tensor, shard in given.items():
        if not isinstance(shard, str):
            message = f"its shard is {type(shard).__name__}, not a file name"
            raise CorruptCheckpointError(message, path=path, tensor=tensor)
        if shard not in places:
            _check_shard(shard, suffix, path=path, tensor=tensor)
            places[shard] = f"{where}/{shard}" if where else shard
    weight_map = {tensor: places[shard] for tensor, shard in given.items()}
    return Index(weight_map, metadata, shard_order(places.values()))


def _is_deep(metadata: object) -> bool:
    """Whether it could be read but perhaps not written again, which takes more of the stack."""
    level = [metadata]
    for _ in range(_DEEPEST):
        level = [v for x in level for v in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
    return bool(level)


def _check_shard(shard: str, suffix: str, *, path: str, tensor: str) -> None:
    why = unsafe(shard)
    if why is None and ":" in shard:
        why = "holds a colon"  # a stream of another file on Windows
    if why is None and not shard.lower().endswith(suffix):
        why = f"does not end in {suffix}, as the index's own name says"
    if why is not None:
        raise CorruptCheckpointError(f"its shard {shown(shard)} {why}", path=path, tensor=tensor)


def shard_order(paths: Iterable[str]) -> tuple[str, ...]:
    """By number, then by name."""
    return tuple(sorted(paths, key=_order))


def _order(path: str) -> tuple[int, str]:
    found = parse_weight(path.rpartition("/")[2])
    return (found.number if found and found.number is not None else 0, path)


def check_shards(
    index: Index, *, path: str, exists: Callable[[str], bool], beside: Callable[[str], Collection[str]]
) -> None:
    """Compare the index with the files that are there.

    ``beside`` gives the weight files of a directory.  Raises InputError naming every shard that is missing, or every
    file that has a number of the same numbering but is not in the index.
    """
    missing = [shard for shard in index.shards if not exists(shard)]
    if missing:
        raise InputError(
            f"{len(missing):,} of its {len(index.shards):,} shards not found: {listed(missing)}",
            path=path,
            hint="download the whole checkpoint",
        )
    known = set(index.shards)
    groups = {group for shard in index.shards if (group := _group(shard))}
    directories = {shard.rpartition("/")[0] for shard in index.shards}
    extra = [p for d in sorted(directories) for p in beside(d) if p not in known and _group(p) in groups]
    if extra:
        raise InputError(
            f"it does not name {listed(extra)}, numbered as its own shards are",
            path=path,
            hint="the index or the shards are from another save; download the whole checkpoint again",
        )


def _group(path: str) -> str | None:
    """The path with ``*`` for the shard's number, None for a file that has none."""
    where, slash, name = path.rpartition("/")
    found = parse_weight(name)
    return f"{where}{slash}{found.group}" if found and found.group else None
