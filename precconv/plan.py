"""Decide everything before reading a weight.  ``make_plan`` is pure: same inputs, same plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from . import presets
from .advice import advise
from .dtypes import DType
from .errors import RuleError
from .norms import find_norms
from .quantized import find_quantized
from .rules import Facts, Policy, Rule, decide, suggest
from .tensors import TensorInfo

__all__ = ["Group", "Item", "Lossless", "Plan", "make_plan"]

#: How a plan loses nothing: the smallest dtype that holds all values, or the target where it holds them.
Lossless = Literal["auto", "only"]

#: Characters up to which names are recognised: no module lies deeper, and a hostile name has a million components.
MAX_NAME = 1000


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

    target: DType  #: with ``lossless`` ``auto`` FP32, which is what no 16-bit type holds
    items: tuple[Item, ...]  #: in the source's order
    dropped: tuple[Item, ...]  #: left out by a rule
    metadata: Mapping[str, str]  #: of the output
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  #: what names, shapes and config say against it
    lossless: Lossless | None = None  #: how the values were taken into account, where they were

    @property
    def to(self) -> str:
        """What was asked for: the target's name, or ``auto``."""
        return "auto" if self.lossless == "auto" else self.target.name

    @property
    def source_bytes(self) -> int:
        return sum(i.src.nbytes for i in self.items)

    @property
    def output_bytes(self) -> int:
        """Bytes of tensor data in the output; its header comes on top."""
        return sum(i.nbytes for i in self.items)

    def groups(self) -> list[Group]:
        """Items by (reason, from, to), the most bytes first."""
        totals: dict[tuple[str, DType, DType], list[int]] = {}
        for src, to, why in self.items:
            total = totals.setdefault((why, src.dtype, to), [0, 0, 0])
            elements = src.numel
            total[0] += 1
            total[1] += elements
            total[2] += elements * to.bits // 8
        groups = [Group(*key, *total) for key, total in totals.items()]
        return sorted(groups, key=lambda g: -g.nbytes)

    def amended(self, changes: Mapping[int, tuple[DType, str]]) -> Plan:
        """The same plan with other dtypes and reasons for some items, by their position."""
        items = [Item(i.src, *changes.get(n, (i.to, i.why))) for n, i in enumerate(self.items)]
        return replace(self, items=tuple(items))


def make_plan(
    infos: Sequence[TensorInfo],
    metadata: Mapping[str, str],
    policy: Policy,
    *,
    config: Mapping[str, object] | None = None,
    name: str = "",
    others: Sequence[str] = (),
    matched_elsewhere: Collection[Rule] = (),
    targets: Sequence[tuple[tuple[str, ...], DType | Literal["keep"]]] = (),
) -> Plan:
    """Decide for every tensor of a checkpoint.

    ``config``: the model's ``config.json``, where there is one.  ``name``: what the source is called, for warnings.
    ``others``: names that rules may match too, of what is no plain tensor.  ``matched_elsewhere``: rules that need not
    match here.  ``targets``: other targets for the tensors whose names begin in certain ways.
    Raises RuleError for a rule that matches no tensor, UsageError for a preset that does not exist.
    """
    known = infos if all(len(t.name) <= MAX_NAME for t in infos) else [t for t in infos if len(t.name) <= MAX_NAME]
    keys = [] if policy.preset == "none" else presets.templates(known)
    tables = _tables(known, keys, policy, config)
    quantized = find_quantized(known, config, metadata)
    facts = Facts(
        quantized,
        {},
        find_norms(known) if policy.norms == "fp32" else frozenset(),
        policy.mixed == "keep" and _mostly_16_bit(infos, quantized),
    )
    parts = [
        (prefixes, part, replace(facts, presets=presets.match(tables, known, part.target, keys) if tables else {}))
        for prefixes, part in _parts(policy, targets)
    ]
    items, dropped = [], []
    for t in infos:
        _, part, known_of_it = next(p for p in parts if t.name.startswith(p[0])) if len(parts) > 1 else parts[0]
        to, why = decide(t, part, known_of_it)
        if to is None:
            dropped.append(Item(t, t.dtype, why))
        else:
            items.append(Item(t, to, why))
    notes = [*_check_rules(infos, policy, others, matched_elsewhere), *_mixed_note(items)]
    warnings = advise(infos, config, policy.target, name, tables)
    return Plan(policy.target, tuple(items), tuple(dropped), {**metadata}, tuple(notes), tuple(warnings))


def _parts(
    policy: Policy, targets: Sequence[tuple[tuple[str, ...], DType | Literal["keep"]]]
) -> list[tuple[tuple[str, ...], Policy]]:
    """The policy for tensors whose names begin in certain ways, and last that for all others."""
    parts = []
    for prefixes, to in targets:
        if to == "keep":
            part = replace(policy, rules=(*policy.rules, Rule("*", "keep", "--component")))
        else:
            part = replace(policy, target=to)
        parts.append((prefixes, part))
    return [*parts, (("",), policy)]


def _tables(
    infos: Sequence[TensorInfo], keys: Sequence[str], policy: Policy, config: Mapping[str, object] | None
) -> tuple[presets.Preset, ...]:
    """The architecture tables that hold for a checkpoint; a named one brings the universal one with it."""
    if policy.preset == "none":
        return ()
    if policy.preset == "auto":
        return presets.select(config, infos, keys)
    named = presets.load(policy.preset)
    return (named, *(p for p in presets.select(None, ()) if p.table != named.table))


def _mostly_16_bit(infos: Sequence[TensorInfo], quantized: Mapping[str, str]) -> bool:
    castable = [t for t in infos if t.dtype.is_castable and t.name not in quantized]
    return sum(t.nbytes for t in castable if t.dtype.bits == 16) * 2 > sum(t.nbytes for t in castable)


def _mixed_note(items: Sequence[Item]) -> list[str]:
    kept = sum(i.why == "mixed source" for i in items)
    if not kept:
        return []
    return [f"the source is mostly 16-bit, so its {kept} FP32 tensors without another reason stay FP32 (--mixed cast)"]


def _check_rules(
    infos: Sequence[TensorInfo], policy: Policy, others: Sequence[str], elsewhere: Collection[Rule]
) -> list[str]:
    """Every rule must match something: a typo is the common case.  Notes on those that change nothing."""
    notes = []
    for rule in policy.rules:
        matched = [t for t in infos if rule.matches(t.name)]
        if not matched and (rule in elsewhere or any(map(rule.matches, others))):
            continue
        if not matched:
            raise RuleError(f"{rule} matches no tensor", hint=suggest(rule, [t.name for t in infos]))
        if isinstance(rule.to, DType) and not any(t.dtype.is_castable for t in matched):
            kinds = ", ".join(sorted({t.dtype.name for t in matched}))
            notes.append(f"{rule} matches only tensors that are never cast ({kinds})")
    return notes
