"""Decide everything before reading a weight.  ``make_plan`` is pure: same inputs, same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from .dtypes import DType
from .errors import RuleError
from .norms import find_norms
from .rules import Facts, Policy, decide, suggest
from .tensors import TensorInfo

__all__ = ["Group", "Item", "Plan", "make_plan"]


class Item(NamedTuple):
    """The fate of one tensor."""

    src: TensorInfo
    to: DType
    why: str  #: ``norm``, ``rule *.bias``, ``scalar``, ``already bf16``, ``target`` …

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return prod(self.src.shape) * self.to.bits // 8


class Group(NamedTuple):
    """Tensors that share a reason and both dtypes."""

    why: str
    source: DType
    to: DType
    tensors: int
    elements: int
    nbytes: int  #: in the output


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do; plain data, printable and comparable."""

    target: DType
    items: tuple[Item, ...]  #: in the source's order
    dropped: tuple[Item, ...]  #: left out by a rule
    metadata: Mapping[str, str]  #: of the output
    notes: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(i.src.nbytes for i in self.items)

    @property
    def output_bytes(self) -> int:
        """Bytes of tensor data in the output; its header comes on top."""
        return sum(i.nbytes for i in self.items)

    def groups(self) -> list[Group]:
        """Items by (reason, from, to), the most bytes first."""
        tensors: Counter[tuple[str, DType, DType]] = Counter()
        elements: Counter[tuple[str, DType, DType]] = Counter()
        nbytes: Counter[tuple[str, DType, DType]] = Counter()
        for i in self.items:
            key = (i.why, i.src.dtype, i.to)
            tensors[key] += 1
            elements[key] += i.src.numel
            nbytes[key] += i.nbytes
        groups = [Group(*key, tensors[key], elements[key], nbytes[key]) for key in tensors]
        return sorted(groups, key=lambda g: -g.nbytes)

    def amended(self, changes: Mapping[int, tuple[DType, str]]) -> Plan:
        """The same plan with other dtypes and reasons for some items, by their position."""
        items = [Item(i.src, *changes.get(n, (i.to, i.why))) for n, i in enumerate(self.items)]
        return replace(self, items=tuple(items))


def make_plan(infos: Sequence[TensorInfo], metadata: Mapping[str, str], policy: Policy) -> Plan:
    """Decide for every tensor of a checkpoint.  Raises RuleError for a rule that matches none of them."""
    facts = Facts(find_norms(infos) if policy.norms == "fp32" else frozenset())
    items, dropped = [], []
    for t in infos:
        to, why = decide(t, policy, facts)
        if to is None:
            dropped.append(Item(t, t.dtype, why))
        else:
            items.append(Item(t, to, why))
    notes = _check_rules(infos, policy)
    return Plan(policy.target, tuple(items), tuple(dropped), {**metadata}, tuple(notes))


def _check_rules(infos: Sequence[TensorInfo], policy: Policy) -> list[str]:
    """Every rule must match something: a typo is the common case.  Notes on those that change nothing."""
    notes = []
    for rule in policy.rules:
        matched = [t for t in infos if rule.matches(t.name)]
        if not matched:
            raise RuleError(f"{rule} matches no tensor", hint=suggest(rule, [t.name for t in infos]))
        if isinstance(rule.to, DType) and not any(t.dtype.is_castable for t in matched):
            kinds = ", ".join(sorted({t.dtype.name for t in matched}))
            notes.append(f"{rule} matches only tensors that are never cast ({kinds})")
    return notes
