"""Which tables a checkpoint calls for, and which of its tensors they keep in FP32."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from precconv.dtypes import BF16, FP16, DType
from precconv.names import canonical
from precconv.tensors import TensorInfo

from .patterns import compiled, literals, template
from .tables import Preset, Row, Warn, tables

__all__ = ["match", "select", "templates", "warnings"]

#: Nested configs looked into; a hostile ``config.json`` is bounded by this, not by the stack.
_MAX_CONFIGS = 1000
#: What a transformers class name adds to the name of its architecture.
_HEADS = re.compile(r"(?:For[A-Z]\w*|(?:Text|Vision|Encoder|LMHead|PreTrained)?Model)$")

#: Components that half of all names have: they say little about which rows to try.
_COMMON = frozenset({"weight", "bias", "#"})
#: Component -> (order, preset, row, pattern) of the rows whose pattern has it; "" where only ``*`` will do.
Index = dict[str, list[tuple[int, str, Row, re.Pattern[str]]]]
#: A row under the name of its preset, and how many components before the name's end its pattern begins.
Candidate = tuple[str, Row, int]


def select(
    config: Mapping[str, object] | None, infos: Iterable[TensorInfo], keys: Iterable[str] | None = None
) -> tuple[Preset, ...]:
    """The tables for a checkpoint: by its configs, nested ones too, and the universal one last.

    Tensor names are asked where no config selects anything, as in single files.  A table is listed once,
    under the name that selected it first.  ``keys``: ``templates(infos)``, where it is known already.
    """
    chosen: dict[str, Preset] = {}
    specific = tuple(_by_config(config)) or tuple(_by_names(templates(infos) if keys is None else keys))
    for preset in (*specific, *(p for p in tables() if p.always)):
        chosen.setdefault(preset.table, preset)
    return tuple(chosen.values())


def match(
    presets: Iterable[Preset], infos: Iterable[TensorInfo], target: DType, keys: Iterable[str] | None = None
) -> dict[str, str]:
    """Tensor name -> why it must be FP32 when the checkpoint is converted to ``target``.

    Integers, FP8 and other types that are never cast are not in the result.  ``keys``: as for ``select``.
    """
    if target not in (FP16, BF16):
        return {}
    infos = tuple(infos)
    scopes = ("half", "fp16") if target == FP16 else ("half",)
    index = _index(presets, scopes)
    present = _Present(infos)
    cache: dict[str, tuple[Candidate, ...]] = {}
    found: dict[str, str] = {}
    for info, key in zip(infos, templates(infos) if keys is None else keys, strict=True):
        candidates = cache.get(key)
        if candidates is None:
            candidates = cache[key] = _candidates(index, canonical(key))
        for name, row, depth in candidates:
            if info.dtype.is_castable and _fits(row, info, depth, present):
                found[info.name] = f"preset {name}: {row.kind}"
                break
    return found


def templates(infos: Iterable[TensorInfo]) -> list[str]:
    """The template of each tensor's name; ``select`` and ``match`` both ask for them."""
    return [template(info.name) for info in infos]


def warnings(presets: Iterable[Preset], target: DType) -> tuple[Warn, ...]:
    """What the tables have to say about converting to ``target`` at all."""
    return tuple(warn for preset in presets for warn in preset.warn if target == warn.to)


class _Present:
    """The names of a checkpoint, as a set that is built when the first row asks for it."""

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        self._infos = infos
        self._names: set[str] | None = None

    def __contains__(self, name: str) -> bool:
        if self._names is None:
            self._names = {info.name for info in self._infos}
        return name in self._names


def _index(presets: Iterable[Preset], scopes: tuple[str, ...]) -> Index:
    """The rows that hold, by the component a name must have for their pattern to match at all."""
    index: Index = {}
    order = 0
    for preset in presets:
        for row in preset.keep:
            order += 1
            for pattern in row.match if row.on in scopes else ():
                key = max(literals(pattern), key=lambda part: (part not in _COMMON, len(part)), default="")
                index.setdefault(key, []).append((order, preset.name, row, compiled(pattern)))
    return index


def _candidates(index: Index, key: str) -> tuple[Candidate, ...]:
    """The rows whose pattern finds ``key``, in order, and from how many components before its end."""
    parts = key.split(".")
    rows = index.get("", [])
    if not index.keys().isdisjoint(parts):
        rows = sorted((row for part in {"", *parts} if part in index for row in index[part]), key=lambda row: row[0])
    hits = [(name, row, pattern.search(key)) for _, name, row, pattern in rows]
    return tuple((name, row, key.count(".", hit.start()) + 1) for name, row, hit in hits if hit is not None)


def _fits(row: Row, info: TensorInfo, depth: int, present: _Present) -> bool:
    if row.ndim and len(info.shape) not in row.ndim:
        return False
    if row.at_most and info.numel > row.at_most:
        return False
    if not row.beside and not row.beside_not:
        return True
    parts = info.name.rsplit(".", depth)
    owner = parts[0] + "." if len(parts) > depth else ""
    if any(owner + sibling in present for sibling in row.beside_not):
        return False
    return not row.beside or any(owner + sibling in present for sibling in row.beside)


def _by_config(config: Mapping[str, object] | None) -> Iterator[Preset]:
    aliases, architectures = _config_index()
    for part in _configs(config):
        for key in ("model_type", "_class_name"):
            value = part.get(key)
            if isinstance(value, str) and value in aliases:
                yield replace(aliases[value], name=value)
        listed = part.get("architectures")
        for value in listed[:_MAX_CONFIGS] if isinstance(listed, list) else ():
            if isinstance(value, str) and (preset := architectures.get(_HEADS.sub("", value))):
                yield preset


def _configs(config: Mapping[str, object] | None) -> Iterator[Mapping[str, object]]:
    """The config and every config nested in it, outermost first."""
    queue: list[object] = [config]
    for part in queue:
        if isinstance(part, Mapping):
            yield part
            room = max(0, _MAX_CONFIGS - len(queue))
            queue.extend([value for value in part.values() if isinstance(value, Mapping | list)][:room])
        elif isinstance(part, list):
            room = max(0, _MAX_CONFIGS - len(queue))
            queue.extend([value for value in part if isinstance(value, Mapping)][:room])


@cache
def _config_index() -> tuple[dict[str, Preset], dict[str, Preset]]:
    automatic = [preset for preset in tables() if not preset.manual]
    aliases = {name: p for p in automatic for name in (*p.model_types, *p.class_names)}
    return aliases, {name: p for p in automatic for name in p.architectures}


def _by_names(keys: Iterable[str]) -> Iterator[Preset]:
    keys = set(keys)
    components = {part for key in keys for part in key.split(".")}
    text = ""
    for preset, group, needed in _name_groups():
        if not needed <= components:
            continue
        text = text or "\n".join(map(canonical, keys))
        if all(_within_lines(pattern).search(text) for pattern in group):
            yield preset


@cache
def _name_groups() -> tuple[tuple[Preset, tuple[str, ...], frozenset[str]], ...]:
    return tuple(
        (preset, group, frozenset().union(*map(literals, group)))
        for preset in tables()
        if not preset.manual
        for group in preset.names
    )


@lru_cache(maxsize=1024)
def _within_lines(pattern: str) -> re.Pattern[str]:
    """The pattern for a text of one name a line."""
    return re.compile(compiled(pattern).pattern.replace("[^.]", r"[^.\n]"), re.MULTILINE)
