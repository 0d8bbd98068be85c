"""EMA twins of LDM and Stable Diffusion checkpoints: ``model_ema.`` and a name that lost its dots.

``LitEma`` keeps each averaged parameter under its name without dots, in the same state dict as the model,
with ``decay`` and ``num_updates`` beside.  It was built on ``self.model`` in diffusion models (their names
start with ``model.``) and on the whole model in autoencoders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from .errors import UsageError

__all__ = ["Split", "ema_only", "without_twins"]

_TWIN = re.compile(r"(?P<outer>(?:[^.]+\.)*?)model_ema\.(?P<body>[^.]+)")
_COUNTERS = ("decay", "num_updates")


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...] | None: ...


T = TypeVar("T", bound=_Shaped)


@dataclass(frozen=True, slots=True)
class Split(Generic[T]):
    """What to take, under which names, and what is left of a state dict with twins."""

    tensors: dict[str, T]
    left: dict[str, T]
    renamed: dict[str, str]  #: new name to the name in the file


def _twins(tensors: Mapping[str, object]) -> dict[str, re.Match[str]]:
    return {name: found for name in tensors if (found := _TWIN.fullmatch(name))}


def without_twins(tensors: dict[str, T]) -> Split[T] | None:
    """The model alone; None where there are no twins."""
    twins = _twins(tensors)
    if not twins:
        return None
    kept = {name: ref for name, ref in tensors.items() if name not in twins}
    return Split(kept, {name: tensors[name] for name in twins}, {})


def ema_only(tensors: dict[str, T]) -> Split[T] | None:
    """The model with each parameter that has a twin replaced by it; None where there are no twins.

    Raises UsageError for a twin that stands for no tensor, or for several.
    """
    twins = _twins(tensors)
    if not twins:
        return None
    originals = _undotted([name for name in tensors if name not in twins])
    chosen: dict[str, str] = {}
    for name, found in twins.items():
        if found["body"] not in _COUNTERS:
            chosen[_original(name, found, originals, tensors)] = name
    kept = {name: tensors[chosen.get(name, name)] for name in tensors if name not in twins}
    dropped = {name: ref for name, ref in tensors.items() if name not in kept and name not in chosen.values()}
    replaced = {name: tensors[name] for name in chosen}
    return Split(kept, dropped | replaced, dict(chosen))


def _undotted(names: list[str]) -> dict[str, list[str]]:
    """Names by what is left of them without dots, with and without the ``model.`` they start with."""
    found: dict[str, list[str]] = {}
    for name in names:
        outer, marker, inner = ("", "model.", name[6:]) if name.startswith("model.") else _split_model(name)
        if marker:
            found.setdefault(f"{outer}\0{inner.replace('.', '')}", []).append(name)
        found.setdefault(f"\0{name.replace('.', '')}", []).append(name)
    return found


def _split_model(name: str) -> tuple[str, str, str]:
    """A wrapper's prefix, ``model.`` and the rest: ``module.model.x``."""
    head, marker, tail = name.partition(".model.")
    return (head + ".", "model.", tail) if marker else ("", "", name)


def _original(name: str, found: re.Match[str], originals: dict[str, list[str]], tensors: Mapping[str, _Shaped]) -> str:
    """The name that a twin stands for."""
    outer, body = found["outer"], found["body"]
    names = originals.get(f"{outer}\0{body}") or originals.get(f"\0{outer.replace('.', '')}{body}") or []
    if len(names) > 1:
        names = [one for one in names if tensors[one].shape == tensors[name].shape]
    if len(names) != 1:
        how = "several tensors" if names else "no tensor of the model"
        raise UsageError(f"EMA weight {name!r} stands for {how}", hint="use --weights model, or all")
    return names[0]
