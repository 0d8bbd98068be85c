"""Which dtype each tensor gets: an ordered list of reasons, the first that applies wins."""

from __future__ import annotations

import difflib
import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from .dtypes import FP32, FP64, DType, dtype
from .errors import RuleError, UsageError
from .tensors import TensorInfo

__all__ = ["Facts", "Policy", "Rule", "decide", "generalise", "read_rules", "suggest"]

Action = DType | Literal["keep", "drop"]
NormMode = Literal["fp32", "cast"]
MixedMode = Literal["keep", "cast"]
_KEYS = ("match", "to")
#: Kinds of names that a suggestion is chosen from; more would take seconds.
_SUGGEST_FROM = 5000


@dataclass(frozen=True)
class Rule:
    """A user's rule: what to do with the tensors whose whole name the glob matches.

    ``re:`` starts a regular expression, which may match anywhere in the name.
    """

    match: str
    to: Action  #: a dtype, ``keep`` (the source's dtype) or ``drop``
    origin: str = field(default="rule", compare=False)  #: where it was given, for messages
    given: str = field(default="", compare=False)  #: the pattern as it was given, where ``match`` is a part of it

    def __post_init__(self) -> None:
        """Raises RuleError, before any work, for what is no pattern or no action; aliases of dtypes are resolved."""
        if not isinstance(self.match, str) or not self.match:
            raise RuleError(f"{self.origin}: {self.match!r} is not a pattern of tensor names")
        object.__setattr__(self, "to", _action(self.to, str(self)))
        assert self.pattern is not None  # compiled now

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Compiled; raises RuleError when it is not a regular expression."""
        if not self.match.startswith("re:"):
            return re.compile(fnmatch.translate(self.match))
        try:
            return re.compile(self.match[3:])
        except re.error as e:
            raise RuleError(f"{self}: not a regular expression ({e})") from None

    def matches(self, name: str) -> bool:
        found = self.pattern.search(name) if self.match.startswith("re:") else self.pattern.match(name)
        return found is not None

    @property
    def why(self) -> str:
        return "component" if self.origin == "--component" else f"rule {self.given or self.match}"

    def __str__(self) -> str:
        return f"{self.origin} {self.match!r}"

    @classmethod
    def keep(cls, glob: str) -> Rule:
        """``--keep GLOB``."""
        return cls(glob, "keep", "--keep")

    @classmethod
    def parse(cls, text: str) -> Rule:
        """``GLOB=ACTION``; raises RuleError."""
        match, equals, action = text.rpartition("=")
        match, action = match.strip(), action.strip()
        if not equals:
            raise RuleError(f"--rule {text!r} has no '='", hint="write it as 'GLOB=ACTION', e.g. '*.bias=fp32'")
        return cls(match, _action(action, f"--rule {match!r}"), "--rule")


def _action(text: object, where: str) -> Action:
    if text == "keep" or text == "drop":
        return text
    try:
        found = dtype(text)
    except UsageError:
        found = None
    if found is None or not found.is_castable:
        raise RuleError(f"{where}: unknown action {text!r}", hint="actions: fp32, fp16, bf16, fp64, keep, drop")
    return found


def read_rules(path: Path) -> list[Rule]:
    """The rules of a TOML file, ``[[rule]]`` tables with ``match`` and ``to``; raises RuleError."""
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except OSError as e:
        raise RuleError(f"cannot be read: {(e.strerror or str(e)).lower()}", path=path) from None
    except RecursionError:
        raise RuleError("nests too deeply", path=path) from None
    except ValueError as e:  # bad TOML, bad UTF-8
        raise RuleError(f"is not valid TOML: {e}", path=path) from None
    try:
        return _rules_from(data)
    except RuleError as e:
        raise RuleError(e.message, path=path, hint=e.hint) from None


def _rules_from(data: dict[str, Any]) -> list[Rule]:
    _only_keys(data, ("rule",), "the file")
    tables = data.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise RuleError("'rule' is not a list of tables", hint="write each rule under its own [[rule]]")
    rules = []
    for number, table in enumerate(tables, 1):
        _only_keys(table, _KEYS, f"rule {number}")
        missing = [k for k in _KEYS if k not in table]
        if missing:
            raise RuleError(f"rule {number} has no {missing[0]!r}")
        rules.append(Rule(table["match"], table["to"]))
    return rules


def _only_keys(table: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in (k for k in table if k not in known):
        close = difflib.get_close_matches(key, known, 1, 0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        raise RuleError(f"{where} has the unknown key {key!r}", hint=hint)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user asked for, as far as dtypes go."""

    target: DType
    rules: tuple[Rule, ...] = ()
    preset: str = "auto"  #: ``auto``, ``none`` or the name of one
    norms: NormMode = "fp32"
    mixed: MixedMode = "keep"


@dataclass(frozen=True, slots=True)
class Facts:
    """What was recognised in the checkpoint as a whole, by tensor name."""

    quantized: Mapping[str, str] = field(default_factory=dict)  #: to the name of the format
    presets: Mapping[str, str] = field(default_factory=dict)  #: to the reason, ``preset NAME: KIND``
    norms: frozenset[str] = frozenset()
    mostly_16_bit: bool = False  #: over half of the castable bytes


def decide(t: TensorInfo, policy: Policy, facts: Facts) -> tuple[DType | None, str]:
    """The dtype a tensor gets, None to leave it out, and the reason in the words that reports print."""
    for rule in policy.rules:
        if rule.matches(t.name):
            return _by_rule(t, rule)
    if t.name in facts.quantized:  # before the dtype: packed weights too say which format was recognised
        return t.dtype, f"quantized: {facts.quantized[t.name]}"
    target = policy.target
    if t.dtype is target:
        return target, f"already {target}"
    if not t.dtype.is_castable:
        return t.dtype, f"{t.dtype} is not cast"
    if _holds(target, t.dtype):  # all that follows only ever prevents loss
        return target, "target"
    if not t.shape:
        return t.dtype, "scalar"
    if target is not FP32:
        if t.name in facts.presets:
            return FP32, facts.presets[t.name]
        if t.name in facts.norms:
            return FP32, "norm"
        if facts.mostly_16_bit and t.dtype is FP32:
            return FP32, "mixed source"
    return target, "target"


def _by_rule(t: TensorInfo, rule: Rule) -> tuple[DType | None, str]:
    if rule.to == "drop":
        return None, rule.why
    if rule.to == "keep" or not t.dtype.is_castable:
        return t.dtype, rule.why
    assert isinstance(rule.to, DType)
    return rule.to, rule.why


def _holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of ``narrow`` is a value of ``wide``."""
    return wide is FP64 or wide is narrow or (wide is FP32 and narrow is not FP64)


def generalise(name: str) -> str:
    """A glob for the tensors that stand at the same place of every layer: numbers become ``*``.

    Not a number at the very start: the place would be ``*.weight``, which is every weight there is.
    """
    literal = re.sub(r"[*?[]|^r(?=e:)", r"[\g<0>]", name)
    return re.sub(r"(?<=\.)\d+(?![^.])", "*", literal)


def suggest(rule: Rule, names: Iterable[str]) -> str | None:
    """A hint for a rule that matches nothing: the names nearest to its pattern."""
    kinds = list(dict.fromkeys(map(generalise, names)))
    wanted = re.sub(r"[*?]+", "", rule.match.removeprefix("re:"))

    def likeness(kind: str) -> float:
        return difflib.SequenceMatcher(None, wanted, kind.replace("*", "")).ratio()

    near = sorted(kinds[:_SUGGEST_FROM], key=likeness, reverse=True)[:3]
    near = [kind for kind in near if likeness(kind) > 0.4]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"the tensors are named like {', '.join(map(repr, kinds[:3]))}" if kinds else None
