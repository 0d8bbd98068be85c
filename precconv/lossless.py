"""Plans that lose nothing: what the values say, on top of what names and shapes said.

A scan's measures only ever keep a tensor from being narrowed: what the rules, norms and presets keep stays kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .dtypes import BF16, FP16, FP32, FP64, DType
from .measures import Measure, holders
from .plan import Item, Plan

__all__ = ["automatic", "lossless_only", "undecided"]


def lossless_only(made: Plan, measures: Mapping[str, Measure]) -> Plan:
    """The plan without the casts that would change a value: those tensors keep their dtype.

    ``measures``: of every tensor that ``made`` casts, by name.
    """
    return replace(made, lossless="only", items=tuple(_kept(item, measures) for item in made.items))


def automatic(bf16: Plan, fp16: Plan, measures: Mapping[str, Measure]) -> Plan:
    """For each tensor the smallest dtype that holds its values, of those that the plans for both 16-bit types allow.

    A tensor that both types hold becomes BF16; one that is 16-bit already stays what it is.
    ``measures``: of every tensor that either plan casts, by name.
    """
    others = {item.src.name: item for item in fp16.items}
    items = tuple(_smallest(item, others[item.src.name], measures) for item in bf16.items)
    warnings = dict.fromkeys((*bf16.warnings, *fp16.warnings))
    notes = dict.fromkeys((*bf16.notes, *fp16.notes))
    return replace(bf16, target=FP32, lossless="auto", items=items, notes=tuple(notes), warnings=tuple(warnings))


def undecided(plan: Plan, other: Plan | None = None) -> set[str]:
    """The tensors whose values ``lossless_only``, or ``automatic`` with two plans, asks for."""
    found = {item.src.name for item in plan.items if item.to is not item.src.dtype}
    if other is None:
        return found
    found |= {item.src.name for item in other.items if item.to is not item.src.dtype}
    pairs = zip(plan.items, other.items, strict=True)
    return found - {a.src.name for a, b in pairs if a.to is not b.to and a.src.dtype.bits == 16}


def _kept(item: Item, measures: Mapping[str, Measure]) -> Item:
    """The item, or its tensor as it is where the item would change a value."""
    if item.to in (item.src.dtype, FP64) or item.to in holders(measures[item.src.name]):
        return item
    return item._replace(to=item.src.dtype, why=f"not exactly representable in {item.to}")


def _smallest(bf16: Item, fp16: Item, measures: Mapping[str, Measure]) -> Item:
    src, why = bf16.src, "not exactly representable in 16 bits"
    if bf16.to is fp16.to:  # whatever the target: a rule, or nothing is to be done
        return _kept(bf16, measures)
    if src.dtype.bits == 16:
        return bf16._replace(to=src.dtype, why=f"already {src.dtype}")
    exact = holders(measures[src.name])
    for item, to in ((bf16, BF16), (fp16, FP16)):
        if item.to is to and to in exact:
            return item._replace(why=f"lossless in {to}")
    if src.dtype is FP32:
        narrowed = bf16.to is BF16 or fp16.to is FP16
        return Item(src, FP32, why if narrowed else bf16.why)
    return _widest(bf16, src.dtype, exact)


def _widest(item: Item, dtype: DType, exact: frozenset[DType]) -> Item:
    """FP64 that no 16-bit type may have."""
    if FP32 in exact:
        return item._replace(to=FP32, why="lossless in fp32")
    return item._replace(to=dtype, why="not exactly representable in fp32")
