"""What a caller asks for, checked: the policy, and the plan that it gives for a checkpoint and an output."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from .checkpoint import Checkpoint
from .configs import config_beside
from .dtypes import DType, target
from .errors import InputError, OutputError, UsageError
from .formats import Format
from .outputs import FormatChoice
from .plan import Plan, make_plan
from .rules import MixedMode, NormMode, Policy, Rule, read_rules
from .ties import SharedMode, drop_ties, ties
from .verify import VerifyMode
from .weights import Weights

__all__ = ["check_choices", "plan_for", "plan_of", "policy_of", "rules_of"]

StrPath = str | os.PathLike[str]


def policy_of(to: str | DType, preset: str, norms: NormMode, mixed: MixedMode, rules: Sequence[Rule]) -> Policy:
    """The policy; raises UsageError for what is not among the choices."""
    check_choices(norms=norms, mixed=mixed)
    return Policy(target(to), tuple(rules), preset, norms, mixed)


def rules_of(keep: Sequence[str], rule: Sequence[str | Rule], rules: StrPath | None) -> list[Rule]:
    """The user's rules in the order in which they apply; raises RuleError."""
    parsed = [r if isinstance(r, Rule) else Rule.parse(r) for r in ([rule] if isinstance(rule, str) else rule)]
    parsed += [Rule.keep(k) for k in ([keep] if isinstance(keep, str) else keep)]
    return parsed if rules is None else [*parsed, *read_rules(Path(rules))]


def plan_of(found: Checkpoint, policy: Policy) -> Plan:
    """The plan for an open checkpoint, whatever the output's format."""
    path = found.file.path
    if not found.infos and not found.opaque:
        raise InputError("holds no tensors: there is nothing to convert", path=path)
    config, notes = config_beside(path)
    made = make_plan(found.infos, {**found.metadata}, policy, config=config, name=path.name, others=tuple(found.opaque))
    if not made.items:
        raise UsageError("the rules drop every tensor", path=path)
    return replace(made, notes=(*found.notes, *notes, *made.notes))


def plan_for(made: Plan, found: Checkpoint, fmt: Format, policy: Policy, shared: SharedMode) -> Plan:
    """The plan with what the output's format asks for; raises OutputError for tensors that it cannot hold."""
    flat = fmt.name == "safetensors" or found.source.is_part
    made = replace(made, notes=(*made.notes, *found.left_note(kept=not flat)))
    for name, tensor in found.opaque.items():
        if flat and not any(rule.to == "drop" and rule.matches(name) for rule in policy.rules):
            hint = f"leave it out (--rule {name!r}=drop), or keep the checkpoint's structure (--format pt)"
            message = f"is {tensor.kind}, which cannot be written"
            raise OutputError(message, tensor=name, path=found.file.path, hint=hint)
    if fmt.name != "safetensors":
        if made.dropped and found.left and not found.source.is_part:
            hint = "take the weights alone (--weights model, or --select), or write safetensors"
            message = f"{made.dropped[0].why} cannot drop tensors from a checkpoint that keeps its structure"
            raise UsageError(message, path=found.file.path, hint=hint)
        return made
    metadata = {**made.metadata}
    metadata.setdefault("format", "pt")  # what transformers asks of every file it loads
    if shared == "drop":
        return drop_ties(replace(made, metadata=metadata), ties(found.source.refs))
    return replace(made, metadata=metadata)


_CHOICES: Mapping[str, object] = {
    "verify": VerifyMode, "weights": Weights, "format": FormatChoice, "shared": SharedMode, "norms": NormMode,
    "mixed": MixedMode,
}  # fmt: skip


def check_choices(**given: object) -> None:
    """Raises UsageError for an argument whose value is not one of its choices."""
    for name, value in given.items():
        known = get_args(_CHOICES[name])
        if value not in known:
            raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}")
