"""What a preset table says, and how its TOML is read; anything the schema does not know is an error.

A file holds the tables of one family or source.  A table is known by its own name and by every
``model_type``, class or ``_class_name`` it serves; a preset carries the name it was asked for by.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Literal, cast

from precconv.errors import UsageError

from .patterns import compiled

__all__ = ["Preset", "Row", "Warn", "list_presets", "load", "parse", "tables"]

#: When a row holds: for FP16 alone (range) or for FP16 and BF16 (precision).
Scope = Literal["fp16", "half"]


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that one reason keeps in FP32."""

    match: tuple[str, ...]  #: patterns, see :mod:`.patterns`
    on: Scope
    kind: str  #: what the tensors are, for plans and reports
    why: str
    source: str  #: package version and ``file:line``, or a URL
    ndim: tuple[int, ...] = ()  #: numbers of dimensions it holds for; empty: any
    beside: tuple[str, ...] = ()  #: one of these stands next to where the pattern begins; empty: no matter
    beside_not: tuple[str, ...] = ()  #: none of these stands there
    at_most: int = 0  #: elements it holds for; 0: any number


@dataclass(frozen=True, slots=True)
class Warn:
    """What a user should hear before converting to ``to``."""

    to: Literal["fp16", "bf16"]
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class Preset:
    """One table, under the name that selected it."""

    name: str
    table: str  #: the table's own name, the same for every alias
    about: str
    keep: tuple[Row, ...] = ()
    warn: tuple[Warn, ...] = ()
    model_types: Mapping[str, str] = field(default_factory=dict)  #: ``model_type`` -> where its list stands
    class_names: tuple[str, ...] = ()  #: diffusers' ``_class_name``
    architectures: tuple[str, ...] = ()  #: class names without ``ForCausalLM``, ``Model`` and the like
    names: tuple[tuple[str, ...], ...] = ()  #: patterns; a group of which each is found selects the table
    always: bool = False  #: selected for every checkpoint
    manual: bool = False  #: selected by the user alone

    @property
    def aliases(self) -> tuple[str, ...]:
        """Every name the table answers to, its own first."""
        return (self.table, *self.model_types, *self.class_names)


def load(name: str) -> Preset:
    """A preset by table, model type or class name; raises UsageError with the nearest names."""
    found = _by_alias().get(name)
    if found is not None:
        return replace(found, name=name)
    near = difflib.get_close_matches(name, _by_alias(), n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "'precconv presets' lists them"
    raise UsageError(f"unknown preset {name!r}", hint=hint)


def list_presets() -> tuple[Preset, ...]:
    """Every table, by name."""
    return tuple(sorted(tables(), key=lambda preset: preset.table))


@cache
def tables() -> tuple[Preset, ...]:
    """Every table in the order of the files: the order in which automatic selection lists them."""
    files = sorted(
        (file for file in resources.files(__package__).iterdir() if file.name.endswith(".toml")),
        key=lambda file: file.name,
    )
    return tuple(preset for file in files for preset in parse(file.read_text("utf-8"), file.name))


@cache
def _by_alias() -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for preset in tables():
        for alias in dict.fromkeys(preset.aliases):
            if alias in found:
                raise ValueError(f"{alias!r} names both {found[alias].table!r} and {preset.table!r}")
            found[alias] = preset
    return found


def parse(text: str, where: str) -> tuple[Preset, ...]:
    """The tables of one TOML file; raises ValueError naming the place for whatever is not as it must be."""
    document = tomllib.loads(text)
    _known(document, {"about", "preset"}, where)
    _string(document, "about", where)
    return tuple(_preset(raw, where) for raw in _dicts(document, "preset", where))


def _preset(raw: dict[str, object], where: str) -> Preset:
    name = _string(raw, "name", where)
    where = f"{where}: preset {name!r}"
    _known(raw, {*Preset.__slots__, "source"} - {"table"}, where)
    source = _string(raw, "source", where) if "source" in raw else ""
    preset = Preset(
        name,
        name,
        _string(raw, "about", where),
        tuple(_row(row, source, where) for row in _dicts(raw, "keep", where)),
        tuple(_warn(row, where) for row in _dicts(raw, "warn", where)),
        _sources(raw, where),
        _strings(raw, "class_names", where),
        _strings(raw, "architectures", where),
        tuple(_group(group, where) for group in _list(raw, "names", where)),
        _flag(raw, "always", where),
        _flag(raw, "manual", where),
    )
    if not preset.keep and not preset.warn:
        raise ValueError(f"{where}: says nothing")
    return preset


def _row(raw: dict[str, object], source: str, where: str) -> Row:
    _known(raw, set(Row.__slots__), where)
    match = _patterns(_strings(raw, "match", where), where)
    if not match:
        raise ValueError(f"{where}: a row without 'match'")
    return Row(
        match,
        cast(Scope, _choice(raw, "on", ("fp16", "half"), where)),
        _string(raw, "kind", where),
        _string(raw, "why", where),
        source if source and "source" not in raw else _string(raw, "source", where),
        tuple(_integer(number, where) for number in _list(raw, "ndim", where)),
        _strings(raw, "beside", where),
        _strings(raw, "beside_not", where),
        _integer(raw.get("at_most", 0), where),
    )


def _warn(raw: dict[str, object], where: str) -> Warn:
    _known(raw, set(Warn.__slots__), where)
    to = cast(Literal["fp16", "bf16"], _choice(raw, "to", ("fp16", "bf16"), where))
    return Warn(to, _string(raw, "text", where), _string(raw, "source", where))


def _sources(raw: dict[str, object], where: str) -> Mapping[str, str]:
    found = raw.get("model_types", {})
    if not isinstance(found, dict):
        raise ValueError(f"{where}: 'model_types' must be a table of sources")
    return {key: _string(found, key, where) for key in found}


def _group(group: object, where: str) -> tuple[str, ...]:
    return _patterns(_strings({"names": group}, "names", where), where)


def _patterns(patterns: tuple[str, ...], where: str) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            compiled(pattern)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return patterns


def _known(raw: Mapping[str, object], keys: set[str], where: str) -> None:
    for key in raw.keys() - keys:
        near = difflib.get_close_matches(key, keys, n=1)
        raise ValueError(f"{where}: unknown key {key!r}" + "".join(f", did you mean {n!r}?" for n in near))


def _string(raw: Mapping[str, object], key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {key!r} must be text")
    return value


def _choice(raw: Mapping[str, object], key: str, allowed: tuple[str, ...], where: str) -> str:
    value = _string(raw, key, where)
    if value not in allowed:
        raise ValueError(f"{where}: {key!r} must be one of {', '.join(allowed)}, not {value!r}")
    return value


def _flag(raw: Mapping[str, object], key: str, where: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key!r} must be true or false")
    return value


def _integer(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{where}: {value!r} must be a whole number")
    return value


def _list(raw: Mapping[str, object], key: str, where: str) -> list[object]:
    value = raw.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{where}: {key!r} must be a list")
    return value


def _strings(raw: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    return tuple(_string({key: value}, key, where) for value in _list(raw, key, where))


def _dicts(raw: Mapping[str, object], key: str, where: str) -> Iterator[dict[str, object]]:
    for value in _list(raw, key, where):
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {key!r} must be a list of tables")
        yield value
