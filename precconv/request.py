"""What a caller asks for, checked, and the plan that it gives for a checkpoint and an output."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ._version import __version__
from .checkpoint import Checkpoint
from .checks import Limits, OnNonfinite, OnOverflow
from .components import find_components
from .configs import config_beside
from .draws import Draws
from .dtypes import FP32, DType, target
from .errors import InputError, OutputError, UsageError
from .formats import Format
from .outputs import FormatChoice
from .plan import Lossless, Plan, make_plan
from .provenance import KEY, Record, words
from .readback import VerifyMode
from .rules import MixedMode, NormMode, Policy, Rule, read_rules
from .sizes import shard_bytes
from .ties import SharedMode, drop_ties, ties
from .weights import Weights

__all__ = [
    "Request",
    "Rounding",
    "draws_for",
    "is_flat",
    "opaque_kept",
    "plan_for",
    "plan_of",
    "request_of",
    "worker_count",
]

StrPath = str | os.PathLike[str]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of a conversion, the same for a file and for a whole model; ``convert`` documents them."""

    policy: Policy
    lossless: Lossless | None = None  #: with ``auto`` the policy's target is FP32, and only a name for the widest
    limits: Limits = field(default_factory=Limits)
    seed: int | None = None  #: of stochastic rounding; None rounds to nearest
    format: FormatChoice = "same"
    weights: Weights = "auto"
    select: str | None = None
    strip_wrappers: bool = False
    shared: SharedMode | None = None
    usually_shared: SharedMode = "clone"  #: where ``shared`` is None
    verify: VerifyMode = "sample"
    workers: int = 1
    force: bool = False
    durable: bool = False
    report: Path | None = None  #: for the report as JSON
    html: Path | None = None  #: for the report as a page
    shard_size: int | None = None  #: bytes
    variant: str | None = None
    from_variant: str | None = None
    components: Mapping[str, DType | Literal["keep"]] = field(default_factory=dict)
    copy_all: bool = False
    provenance: bool = True  #: whether outputs say how they were made, where their format has a place for it
    recorded: Mapping[str, Any] = field(default_factory=dict)  #: what they say of the options
    version: str = __version__  #: and of the tool that made them

    @property
    def is_reported(self) -> bool:
        """Whether every tensor's errors are wanted."""
        return self.report is not None or self.html is not None

    @property
    def to(self) -> str:
        """What is asked for: the target's name, or ``auto``."""
        return "auto" if self.lossless == "auto" else self.policy.target.name

    def with_shared(self, usual: SharedMode = "clone") -> Request:
        """The same where tied tensors usually are treated so."""
        return replace(self, shared=self.shared or usual, usually_shared=usual)

    def from_headers(self) -> Request:
        """The same without what only the values decide: for all that can be refused before they are read."""
        return replace(self, lossless=None)

    def options(self) -> dict[str, Any]:
        """What the output and the report depend on, as plain data."""
        policy = self.policy
        return {
            "to": self.to,
            **({"lossless_only": True} if self.lossless == "only" else {}),
            "preset": policy.preset,
            "norms": policy.norms,
            "mixed": policy.mixed,
            "rules": [{"match": r.match, "to": str(r.to)} for r in policy.rules],
            **asdict(self.limits),
            "rounding": "nearest" if self.seed is None else "stochastic",
            "seed": self.seed,
            "verify": self.verify,
            "weights": self.weights,
            "select": self.select,
            "strip_wrappers": self.strip_wrappers,
            "shared": self.shared or "clone",
            "provenance": self.provenance,
            **({"components": {name: str(to) for name, to in self.components.items()}} if self.components else {}),
        }

    def plan_words(self) -> list[str]:
        """The options that a plan depends on, but for the target, as on the command line."""
        return words({name: self.recorded[name] for name in _PLANNING if name in self.recorded})

    def shaping_words(self) -> list[str]:
        """The options that shape an output's bytes, as on the command line."""
        is_shared = self.shared not in (None, self.usually_shared)
        return words({**self.recorded, **({"shared": self.shared} if is_shared else {})})

    def repo_options(self) -> dict[str, Any]:
        """The same for a model directory."""
        return {
            **self.options(),
            "shared": self.shared,
            "format": self.format,
            "shard_size": self.shard_size,
            "variant": self.variant,
            "from_variant": self.from_variant,
            "copy_all": self.copy_all,
        }


def request_of(
    *,
    to: str | DType,
    lossless_only: bool = False,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    on_overflow: OnOverflow = "error",
    on_nonfinite: OnNonfinite = "warn",
    max_underflow: float | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    workers: int | None = None,
    report: StrPath | None = None,
    html: StrPath | None = None,
    component: Mapping[str, str | DType] | Sequence[str] = (),
    shard_size: str | int | None = None,
    variant: str | None = None,
    **rest: Any,
) -> Request:
    """The request; raises UsageError for what is not among the choices, RuleError for rules that cannot be read."""
    _check_choices(
        norms=norms,
        mixed=mixed,
        rounding=rounding,
        **{k: v for k, v in rest.items() if k in _CHOICES and v is not None},
    )
    lossless = _lossless(to, only=lossless_only)
    made = Request(
        policy=Policy(
            FP32 if lossless == "auto" else target(to), tuple(_rules_of(keep, rule, rules)), preset, norms, mixed
        ),
        lossless=lossless,
        limits=Limits(on_overflow, on_nonfinite, max_underflow),
        seed=_seed(rounding, seed),
        workers=worker_count(workers),
        report=None if report is None else Path(report),
        html=None if html is None else Path(html),
        components=_components(component),
        variant=_variant(variant),
        shard_size=None if shard_size is None else shard_bytes(shard_size),
        **rest,
    )
    return replace(made, recorded=_recorded(made))


def _recorded(request: Request) -> dict[str, Any]:
    """The options that shape an output's bytes and differ from the defaults, as ``request_of`` takes them."""
    policy, is_random = request.policy, request.seed is not None
    said: dict[str, Any] = {
        "lossless_only": request.lossless == "only",
        "preset": policy.preset,
        "norms": policy.norms,
        "mixed": policy.mixed,
        "rule": [f"{r.match}={r.to}" for r in policy.rules],
        "component": {name: str(to) for name, to in request.components.items()},
        "on_overflow": request.limits.on_overflow,
        "rounding": "stochastic" if is_random else "nearest",
        "seed": request.seed,
        **{name: getattr(request, name) for name in _SHAPING},
    }
    usual = {"preset": "auto", "norms": "fp32", "mixed": "keep", "on_overflow": "error", "rounding": "nearest"}
    usual |= {"weights": "auto"}
    return {"to": request.to} | {name: value for name, value in said.items() if value and value != usual.get(name)}


#: What a plan depends on besides the target.
_PLANNING = (
    "weights", "select", "preset", "norms", "mixed", "from_variant", "strip_wrappers", "component", "rule",
)  # fmt: skip
_SHAPING = ("weights", "select", "strip_wrappers", "shard_size", "variant", "from_variant", "copy_all")


def _lossless(to: str | DType, *, only: bool) -> Lossless | None:
    if str(to).lower() != "auto":
        return "only" if only else None
    if only:
        raise UsageError("--to auto never loses anything: --lossless-only is for another dtype", hint="leave it out")
    return "auto"


def _rules_of(keep: Sequence[str], rule: Sequence[str | Rule], rules: StrPath | None) -> list[Rule]:
    """The user's rules in the order in which they apply."""
    parsed = [r if isinstance(r, Rule) else Rule.parse(r) for r in ([rule] if isinstance(rule, str) else rule)]
    parsed += [Rule.keep(k) for k in ([keep] if isinstance(keep, str) else keep)]
    return parsed if rules is None else [*parsed, *read_rules(Path(rules))]


def _components(given: Mapping[str, str | DType] | Sequence[str]) -> dict[str, DType | Literal["keep"]]:
    """From ``{"unet": "fp16"}``, or the command line's ``unet=fp16,vae=keep``."""
    pairs = list(given.items()) if isinstance(given, Mapping) else [_pair(p) for text in given for p in text.split(",")]
    found: dict[str, DType | Literal["keep"]] = {}
    for name, to in pairs:
        wanted: DType | Literal["keep"] = "keep" if to == "keep" else target(to)
        if found.setdefault(name, wanted) != wanted:
            raise UsageError(f"component {name!r} is asked for as {found[name]} and as {wanted}")
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, to = text.rpartition("=")
    if not equals or not name.strip() or not to.strip():
        hint = "write it as NAME=DTYPE, e.g. unet=fp16,vae=keep"
        raise UsageError(f"--component {text!r} is not a component and a dtype", hint=hint)
    return name.strip(), to.strip()


def _variant(name: str | None) -> str | None:
    if name is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UsageError(f"variant {name!r} is not a word", hint="letters, digits, - and _, e.g. fp16")
    return name


def worker_count(workers: int | None) -> int:
    """Threads: one for each usable core where none is said; raises UsageError for fewer than 1."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers < 1:
        raise UsageError(f"{workers} workers: at least 1 is needed")
    return workers


def _seed(rounding: Rounding, seed: int | None) -> int | None:
    if rounding == "nearest":
        if seed is not None:
            raise UsageError(
                f"seed {seed} is of no use: nearest rounding is not random", hint="add --rounding stochastic"
            )
        return None
    if seed is not None and not 0 <= seed < 1 << 64:
        raise UsageError(f"seed {seed} is not a number from 0 to 2^64 - 1")
    return seed or 0


_CHOICES: Mapping[str, object] = {
    "verify": VerifyMode, "weights": Weights, "format": FormatChoice, "shared": SharedMode, "norms": NormMode,
    "mixed": MixedMode, "rounding": Rounding,
}  # fmt: skip


def _check_choices(**given: object) -> None:
    for name, value in given.items():
        known = get_args(_CHOICES[name])
        if value not in known:
            raise UsageError(f"{name} {value!r} is not one of {', '.join(known)}")


def plan_of(found: Checkpoint, request: Request, *, beside: Path | None = None) -> Plan:
    """The plan for an open checkpoint file, whatever the output's format.

    ``beside``: where the file would be if it was here, with its config.
    """
    path = found.file.path
    require_tensors(found)
    config, notes = config_beside(beside or path)
    made = make_plan(
        found.infos,
        {**found.metadata},
        request.policy,
        config=config,
        name=path.name,
        others=tuple(found.opaque),
        targets=_targets(found, request),
    )
    if not made.items:
        raise UsageError("the rules drop every tensor", path=path)
    return replace(made, notes=(*found.notes, *notes, *made.notes))


def _targets(found: Checkpoint, request: Request) -> list[tuple[tuple[str, ...], DType | Literal["keep"]]]:
    """What ``--component`` asks for, by how names begin; raises UsageError for a component that is not there."""
    if not request.components:
        return []
    known = find_components([t.name for t in found.infos])
    for name in request.components:
        if name not in known:
            there = f"components: {', '.join(known)}" if known else "it is no single file of a pipeline: use --rule"
            raise UsageError(f"there is no component {name!r} in it", path=found.file.path, hint=there)
    return [(known[name].prefixes, to) for name, to in request.components.items()]


def require_tensors(found: Checkpoint) -> None:
    """Raises InputError for a checkpoint in which there is nothing to convert."""
    if not found.infos and not found.opaque:
        raise InputError("holds no tensors: there is nothing to convert", path=found.file.path)


def plan_for(made: Plan, found: Checkpoint, fmt: Format, request: Request) -> Plan:
    """The plan with what the output's format asks for; raises OutputError for tensors that it cannot hold."""
    if fmt.name != "safetensors" and not found.source.is_part and found.left and is_flat(made, found, request):
        hint = "take the weights alone (--weights model, or --select), or write safetensors"
        why = made.dropped[0].why if made.dropped else "a rule"
        message = f"{why} cannot drop tensors from a checkpoint that keeps its structure"
        raise UsageError(message, path=found.file.path, hint=hint)
    flat = fmt.name == "safetensors" or is_flat(made, found, request)
    made = replace(made, notes=(*made.notes, *found.left_note(kept=not flat)))
    for name in opaque_kept(found, request) if flat else ():
        hint = (
            f"leave it out (--rule {name!r}=drop), or keep the checkpoint's structure (--format pt, no tensor dropped)"
        )
        message = f"is {found.opaque[name].kind}, which cannot be written"
        raise OutputError(message, tensor=name, path=found.file.path, hint=hint)
    if fmt.name != "safetensors":
        return made
    metadata = {**made.metadata}
    metadata.setdefault("format", "pt")  # what transformers asks of every file it loads
    if not _is_copy(made, found, fmt):
        metadata.pop(KEY, None)  # of what the source was made from
        if request.provenance:
            metadata[KEY] = _record(found, fmt, request).text()
    if request.shared == "drop":
        return drop_ties(replace(made, metadata=metadata), ties(found.source.refs))
    return replace(made, metadata=metadata)


def _is_copy(made: Plan, found: Checkpoint, fmt: Format) -> bool:
    """Whether an output has the source's tensors as they are: what made those still holds."""
    same = fmt is found.format and not found.source.is_part and not made.dropped
    return same and all(to is src.dtype for src, to, _ in made.items)


def _record(found: Checkpoint, fmt: Format, request: Request) -> Record:
    """What an output says of how it was made from a checkpoint: the same, however the same was asked for."""
    said = {**request.recorded}
    if fmt is not found.format:
        said["format"] = fmt.name
    if request.shared not in (None, request.usually_shared):
        said["shared"] = request.shared
    return Record(said, found.file.size, found.source.reader.digest, request.version)


def opaque_kept(found: Checkpoint, request: Request) -> list[str]:
    """The opaque tensors that no rule drops: they go where their checkpoint's structure goes, or nowhere."""
    rules = request.policy.rules
    first = {name: next((rule.to for rule in rules if rule.matches(name)), None) for name in found.opaque}
    return [name for name, to in first.items() if to != "drop"]


def is_flat(made: Plan, found: Checkpoint, request: Request) -> bool:
    """Whether a torch file is written as names and tensors alone: what is dropped leaves no structure to keep."""
    return found.source.is_part or bool(made.dropped) or len(opaque_kept(found, request)) < len(found.opaque)


def draws_for(request: Request, found: Checkpoint, made: Plan) -> Draws | None:
    """The random bits of a stochastic conversion: tied tensors get those of the first of their names."""
    if request.seed is None:
        return None
    first = {name: names[0] for names in ties(found.source.refs) for name in names}
    return Draws(request.seed, [first.get(i.src.name, i.src.name) for i in made.items])
