"""What becomes of a model directory's weights, decided from headers and configs: output files and their tensors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..checkpoint import Checkpoint
from ..dtypes import FP32, DType
from ..errors import RuleError, UsageError
from ..formats import Format, format_named
from ..plan import Item, Plan, make_plan
from ..request import Request, opaque_kept, plan_for
from ..rules import Rule, suggest
from ..runs import Progress
from ..tensors import prefixed
from ..values import settled
from .models import Model, Models
from .sets import output_index, output_name
from .shards import split

__all__ = ["ModelPlan", "Output", "combined", "plan_models"]


@dataclass(frozen=True, slots=True)
class Output:
    """One file of an output's weights."""

    name: str  #: relative, with ``/``
    found: Checkpoint  #: what it is made from
    plan: Plan  #: for the output's format
    sources: tuple[str, ...] = ()  #: the files it is made from, relative; all of them where they were cut anew


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What becomes of one checkpoint."""

    model: Model
    request: Request  #: with the component's own policy
    fmt: Format
    decided: Plan  #: whatever the output's format; offsets are those of the whole
    plan: Plan  #: of all its outputs, with what their format asks for
    outputs: tuple[Output, ...]
    index: str | None  #: relative, with ``/``


def plan_models(models: Models, request: Request, progress: Progress | None = None) -> list[ModelPlan]:
    """Decide for every checkpoint; raises RuleError, UsageError or OutputError for what cannot be done.

    Of a lossless request the values are read, which ``progress`` shows; what headers have against it is said before.
    """
    if request.lossless is not None:
        plan_models(models, request.from_headers())
    _check_components(models, request)
    requests = [_request_for(m, models.models, request) for m in models.models]
    matched = _matched(models, requests, request)
    return [_plan(m, r, matched, progress) for m, r in zip(models.models, requests, strict=True)]


def _check_components(models: Models, request: Request) -> None:
    names = [m.name or "." for m in models.models] if len(models.models) > 1 else []
    for name in request.components:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            known = ", ".join(names) or "none: there is one checkpoint"
            hint = f"did you mean {close[0]!r}?" if close else f"components: {known}"
            raise UsageError(f"there is no component {name!r}", path=models.root, hint=hint)


def _request_for(model: Model, models: Sequence[Model], request: Request) -> Request:
    """The request as it holds for one component: its target, and the rules that can be about it."""
    policy = request.policy
    rules = [r for rule in policy.rules if (r := _rule_for(rule, model, models)) is not None]
    to = request.components.get(model.name or ".", policy.target)
    if to == "keep":
        rules.append(Rule("*", "keep", "--component"))
    policy = replace(policy, rules=tuple(rules), target=policy.target if to == "keep" else to)
    is_named = request.lossless is not None and isinstance(to, DType) and (model.name or ".") in request.components
    request = request.with_shared("drop" if model.is_transformers else "clone")
    return replace(request, policy=policy, lossless="only" if is_named else request.lossless)


def _rule_for(rule: Rule, model: Model, models: Sequence[Model]) -> Rule | None:
    """A rule that begins with a component's name and a slash is about the rest of the name, in that one alone."""
    for other in sorted((m.name or "." for m in models), key=len, reverse=True):
        found = re.fullmatch(rf"(re:\^?|){re.escape(other)}/(.+)", rule.match, re.DOTALL)
        if found is not None and len(models) > 1:
            mine = other == (model.name or ".")
            return replace(rule, match=found[1] + found[2], given=rule.match) if mine else None
    return rule


def _matched(models: Models, requests: Sequence[Request], request: Request) -> set[Rule]:
    """The rules that match some tensor of some component; raises RuleError where one matches none."""
    names = {m.name: [*(t.name for t in m.whole.infos), *m.whole.opaque] for m in models.models}
    matched = {
        rule
        for m, r in zip(models.models, requests, strict=True)
        for rule in r.policy.rules
        if any(map(rule.matches, names[m.name]))
    }
    for rule in request.policy.rules:
        parts = [p for m in models.models if (p := _rule_for(rule, m, models.models)) is not None]
        if not any(p in matched for p in parts):
            every = [prefixed(models.label(m), n) for m in models.models for n in names[m.name]]
            raise RuleError(f"{rule} matches no tensor", hint=suggest(rule, every))
    return matched


def _decided(model: Model, request: Request, matched: Collection[Rule]) -> Plan:
    """The plan for all of a checkpoint, whatever the output's format."""
    whole, name = model.whole, model.set.files[0].rpartition("/")[2]
    if request.format == "same" and (kinds := {s.format.name for s in model.shards} - {whole.format.name}):
        message = f"its shards are of different formats: {', '.join([whole.format.name, *sorted(kinds)])}"
        raise UsageError(message, path=whole.file.path, hint="say which to write, e.g. --format safetensors")
    made = make_plan(
        whole.infos,
        whole.metadata,
        request.policy,
        config=model.config,
        name=name,
        others=tuple(whole.opaque),
        matched_elsewhere=matched,
    )
    if not made.items:
        raise UsageError("the rules drop every tensor", path=whole.file.path)
    return replace(made, notes=(*whole.notes, *made.notes))


def _plan(model: Model, request: Request, matched: Collection[Rule], progress: Progress | None) -> ModelPlan:
    whole = model.whole
    made = settled(lambda simple: _decided(model, simple, matched), whole, request, progress)
    made = replace(made, warnings=(*made.warnings, *_untold(model, made)))
    fmt = whole.format if request.format == "same" else format_named(request.format)
    groups = _by_shard(model, made, fmt, request) if request.shard_size is None else _by_size(model, made, fmt, request)
    suffix = model.set.suffix if fmt is whole.format else (".bin" if fmt.name == "pt" else fmt.suffixes[0])
    single = len(groups) == 1 and (request.shard_size is not None or model.set.is_single)
    numbers: Iterable[int | None] = [None] if single else range(1, len(groups) + 1)
    total = None if single else len(groups)
    outputs = tuple(
        replace(output, name=output_name(model.set, suffix=suffix, variant=request.variant, number=n, total=total))
        for n, output in zip(numbers, groups, strict=True)
    )
    index = None if single else output_index(model.set, suffix=suffix, variant=request.variant)
    plans = [o.plan for o in outputs]
    notes = tuple(dict.fromkeys(note for plan in plans for note in plan.notes))
    gone = {d.src.name for d in made.dropped}  # a pattern can drop a hundred thousand
    done = replace(
        made,
        items=tuple(i for plan in plans for i in plan.items),
        dropped=(*made.dropped, *(d for plan in plans for d in plan.dropped if d.src.name not in gone)),
        notes=tuple(dict.fromkeys((*made.notes, *notes))),
    )
    return ModelPlan(model, request, fmt, made, done, outputs, index)


def _untold(model: Model, made: Plan) -> list[str]:
    """A warning where loaders that go by the config will not see what the weights are."""
    config = model.config or {}
    kept = any(i.to is FP32 for i in made.items)
    if not model.is_transformers or not kept or made.target is FP32 or "dtype" in config or "torch_dtype" in config:
        return []
    name = made.target.torch
    auto = 'transformers\' dtype="auto" may then go by a tensor that stays fp32'
    way = f'load it with dtype=torch.{name}, or add "dtype": "{name}" to the config'
    return [f"config.json names no dtype, and {auto}: {way}"]


def _by_shard(model: Model, made: Plan, fmt: Format, request: Request) -> list[Output]:
    """The same shards, but for those of which nothing is left."""
    items, dropped = {i.src.name: i for i in made.items}, {i.src.name: i for i in made.dropped}
    groups = []
    for path, shard in zip(model.set.files, model.shards, strict=True):
        mine = [_placed(items[t.name], t.offset) for t in shard.infos if t.name in items]
        gone = [dropped[t.name] for t in shard.infos if t.name in dropped]
        if mine or opaque_kept(shard, request):
            part = _part(made, mine, gone, {**shard.metadata})
            groups.append(Output("", shard, plan_for(part, shard, fmt, request), (path,)))
    return groups


def _by_size(model: Model, made: Plan, fmt: Format, request: Request) -> list[Output]:
    """Shards of at most ``shard_size`` bytes, whatever the source's are."""
    assert request.shard_size is not None
    whole = model.whole
    if whole.left:
        message = "a checkpoint that wraps its weights cannot be cut into shards"
        hint = "take the weights alone: --weights model, or --select"
        raise UsageError(message, path=whole.file.path, hint=hint)
    found = replace(whole, source=replace(whole.source, is_part=True))
    whole_plan = plan_for(made, found, fmt, request)
    files = model.set.files
    parts = split(whole_plan.items, [i.nbytes for i in whole_plan.items], request.shard_size)
    return [
        Output("", found, _part(whole_plan, items, whole_plan.dropped if n == 0 else (), whole_plan.metadata), files)
        for n, items in enumerate(parts)
    ]


def _placed(item: Item, offset: int) -> Item:
    """The item as its own file has it: in the whole, offsets count on from shard to shard."""
    return Item(item.src._replace(offset=offset), item.to, item.why)


def _part(made: Plan, items: Sequence[Item], dropped: Sequence[Item], metadata: Mapping[str, str]) -> Plan:
    return replace(made, items=tuple(items), dropped=tuple(dropped), metadata=metadata, notes=(), warnings=())


def combined(request: Request, parts: Sequence[tuple[str, Plan]], notes: Iterable[str]) -> Plan:
    """The plans of all components as one, tensors named after their component where there are several."""
    alone = len(parts) == 1

    def named(component: str, items: Iterable[Item]) -> Iterable[Item]:
        if alone:
            return items
        return (Item(i.src._replace(name=prefixed(component, i.src.name)), i.to, i.why) for i in items)

    def said(component: str, lines: Iterable[str]) -> Iterable[str]:
        return lines if alone or not component else (f"{component}: {line}" for line in lines)

    return Plan(
        request.policy.target,
        tuple(i for name, p in parts for i in named(name, p.items)),
        tuple(i for name, p in parts for i in named(name, p.dropped)),
        parts[0][1].metadata if alone else {},
        tuple(dict.fromkeys((*notes, *(n for name, p in parts for n in said(name, p.notes))))),
        tuple(w for name, p in parts for w in said(name, p.warnings)),
        request.lossless,
    )
