"""Tied tensors: several names for one tensor, of which a safetensors file can hold one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from .formats.torch_tensors import TensorRef
from .plan import Item, Plan

__all__ = ["SharedMode", "drop_ties", "ties"]

SharedMode = Literal["clone", "drop"]
#: Output layers tied to an embedding: loaders make them from it, never the other way round.
_HEAD = re.compile(
    r"(?:^|\.)(?:lm_head|embed_out|output_projection|proj_out|output|decoder|predictions\.decoder|head|classifier)"
    r"(?:\.decoder)?\.(?:weight|bias)$"
)


def ties(refs: Mapping[str, TensorRef]) -> list[list[str]]:
    """Names of the same elements seen in the same way, in groups of two and more, in the file's order."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, ref in refs.items():
        if ref.numel:
            groups.setdefault(ref.view, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def drop_ties(made: Plan, groups: Iterable[Sequence[str]]) -> Plan:
    """Keep one of each group of tied tensors that go to one dtype; the metadata names it for each of the others.

    An embedding stays rather than the output layer tied to it; else the first stays.
    """
    items = {i.src.name: i for i in made.items}
    kept: dict[str, str] = {}  # what goes, and what stays in its place
    for names in groups:
        by_dtype: dict[str, list[str]] = {}
        for name in names:
            if name in items:
                by_dtype.setdefault(items[name].to.name, []).append(name)
        for alike in by_dtype.values():
            stays = min(alike, key=lambda name: (_HEAD.search(name) is not None, alike.index(name)))
            kept |= {name: stays for name in alike if name != stays}
    dropped = [Item(i.src, i.to, f"tied to {kept[i.src.name]}") for i in made.items if i.src.name in kept]
    return replace(
        made,
        items=tuple(i for i in made.items if i.src.name not in kept),
        dropped=(*made.dropped, *dropped),
        metadata={**made.metadata, **kept},
    )
