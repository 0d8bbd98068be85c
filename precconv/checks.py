"""What counts as trouble: a check is a function from one tensor's statistics to findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .dtypes import BF16, FP32, DType
from .errors import UsageError
from .plan import Item
from .rules import generalise
from .stats import Stats

__all__ = ["Finding", "Limits", "fallback", "fallbacks", "hint", "overflow_text", "run_checks"]

Level = Literal["error", "warning"]
OnOverflow = Literal["error", "keep", "fp32", "bf16", "clamp", "ieee"]
OnNonfinite = Literal["warn", "error"]
#: Share of a tensor's nonzero values that may become zero without a word.
UNDERFLOW_WARNING = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user wants done about trouble."""

    on_overflow: OnOverflow = "error"
    on_nonfinite: OnNonfinite = "warn"
    max_underflow: float | None = None  #: share of a tensor's nonzero values, 0 to 1

    def __post_init__(self) -> None:
        for name, choices in (("on_overflow", OnOverflow), ("on_nonfinite", OnNonfinite)):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise UsageError(f"{name} {getattr(self, name)!r} is not one of {known}")
        if self.max_underflow is not None and not 0 <= self.max_underflow <= 1:
            raise UsageError(f"max_underflow {self.max_underflow} is not a share from 0 to 1")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about one tensor."""

    check: str
    level: Level
    tensor: str
    text: str


def overflow_text(item: Item, stats: Stats) -> str:
    """How much of a tensor does not fit, with both numbers."""
    return (
        f"{stats.overflow} of {stats.finite} finite values do not fit {item.to} "
        f"(largest |x| {stats.overflow_max:.4g}, limit {item.to.overflow_bound:.6g})"
    )


def overflow(item: Item, stats: Stats, limits: Limits) -> Iterator[Finding]:
    if not stats.overflow:
        return
    text = overflow_text(item, stats)
    if limits.on_overflow == "clamp":
        yield Finding("overflow", "warning", item.src.name, f"{text}; clamped to {item.to.max:.6g}")
    elif limits.on_overflow == "ieee":
        yield Finding("overflow", "warning", item.src.name, f"{text}; now Inf")
    else:
        yield Finding("overflow", "error", item.src.name, text)


def nonfinite(item: Item, stats: Stats, limits: Limits) -> Iterator[Finding]:
    if stats.nan or stats.inf:
        text = f"the source holds {stats.nan} NaN and {stats.inf} Inf among {stats.n} values"
        yield Finding("nonfinite", "error" if limits.on_nonfinite == "error" else "warning", item.src.name, text)


def underflow(item: Item, stats: Stats, limits: Limits) -> Iterator[Finding]:
    share = stats.underflow_share
    text = f"{stats.underflow} nonzero values ({share:.2%}) become 0 in {item.to}"
    if limits.max_underflow is not None and share > limits.max_underflow:
        yield Finding("underflow", "error", item.src.name, f"{text}, more than {limits.max_underflow:.2%}")
    elif share > UNDERFLOW_WARNING:
        yield Finding("underflow", "warning", item.src.name, text)


Check = Callable[[Item, Stats, Limits], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (overflow, nonfinite, underflow)


def run_checks(item: Item, stats: Stats, limits: Limits) -> list[Finding]:
    """Every finding about one tensor."""
    return [finding for check in CHECKS for finding in check(item, stats, limits)]


def fallback(item: Item, stats: Stats, limits: Limits) -> DType | None:
    """The dtype that ``--on-overflow`` gives a tensor that overflowed; None when it gives none, or the same."""
    if not stats.overflow:
        return None
    to = {"keep": item.src.dtype, "fp32": FP32, "bf16": BF16}.get(limits.on_overflow)
    return None if to is item.to else to


def fallbacks(
    items: Sequence[Item], stats: Mapping[int, Stats], limits: Limits
) -> tuple[dict[int, tuple[DType, str]], list[Finding]]:
    """What ``--on-overflow`` changes in a plan, dtype and reason by position, and a finding on each change."""
    changes: dict[int, tuple[DType, str]] = {}
    findings = []
    for key, found in sorted(stats.items()):
        item = items[key]
        to = fallback(item, found, limits)
        if to is not None:
            changes[key] = (to, f"overflow in {item.to}")
            text = f"{overflow_text(item, found)}; {to} instead"
            findings.append(Finding("overflow", "warning", item.src.name, text))
    return changes, findings


def hint(errors: Sequence[Finding], target: DType, largest: float = 0.0) -> str:
    """The ways out of a refusal, with a pattern for the tensors it names.

    ``largest``: of the finite values that do not fit.
    """
    kinds = {f.check for f in errors}
    tensors = dict.fromkeys(f.tensor for f in errors if f.check != "nonfinite")
    globs = list(dict.fromkeys(map(generalise, tensors)))
    keep = " ".join(f"--keep {g!r}" for g in globs[:3])
    ways = []
    if keep:
        ways.append(f"keep {'it' if len(tensors) == 1 else 'them'} ({keep}{' …' if len(globs) > 3 else ''})")
    if "overflow" in kinds:
        ways += ["keep whatever overflows (--on-overflow keep)", "clamp it (--on-overflow clamp)"]
        if target.max < BF16.max and largest < BF16.overflow_bound:
            ways.append("use --to bf16")
    if "underflow" in kinds:
        ways.append("raise --max-underflow")
    if "nonfinite" in kinds:
        ways.append("accept NaN and Inf of the source (--on-nonfinite warn)")
    return ", or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
