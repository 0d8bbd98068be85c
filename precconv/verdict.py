"""What a scan means: for each target what is safe and what is not, and the command to run.

Only what a conversion would cast is judged: norms and whatever else its plan keeps can lose nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .checks import UNDERFLOW_WARNING
from .dtypes import BF16, FP32, DType
from .measures import Loss, Measure, total_loss
from .plan import Item
from .rules import generalise

__all__ = ["Judged", "Judgement", "Verdict", "judge", "verdict"]


class Judged(NamedTuple):
    """A tensor that a conversion would cast, and what that would do."""

    item: Item
    measure: Measure

    @property
    def name(self) -> str:
        return self.item.src.name

    @property
    def loss(self) -> Loss:
        return self.measure.loss(self.item.to)

    @property
    def underflow_share(self) -> float:
        return self.measure.underflow_share(self.item.to)

    @property
    def risk(self) -> tuple[int, float, float]:
        """Sorts by what matters: overflow, then underflow, then error."""
        return self.loss.overflow, self.underflow_share, self.loss.relative_rms_error


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a conversion to one target would do."""

    to: DType
    cast: tuple[Judged, ...]  #: what it would cast, in the source's order
    is_upcast: bool  #: whether every value of the source, in whatever tensor, is one of the target's
    loss: Loss  #: of all that would be cast

    @property
    def is_exact(self) -> bool:
        """Whether no value would change."""
        return self.loss.is_exact

    @property
    def exact(self) -> list[Judged]:
        """Tensors of which no value would change."""
        return [t for t in self.cast if t.loss.is_exact]

    @property
    def is_nearly_exact(self) -> bool:
        """Whether most of what would be cast loses nothing, but not all: an upcast in which something was changed."""
        return not self.is_exact and 2 * sum(t.measure.n for t in self.exact) > sum(t.measure.n for t in self.cast)

    @property
    def overflowing(self) -> list[Judged]:
        return [t for t in self.cast if t.loss.overflow]

    @property
    def underflowing(self) -> list[Judged]:
        """Tensors of which so many values become zero that a conversion warns."""
        return [t for t in self.cast if t.underflow_share > UNDERFLOW_WARNING]

    @property
    def is_safe(self) -> bool:
        return not self.overflowing and not self.underflowing


@dataclass(frozen=True, slots=True)
class Verdict:
    """Three sentences."""

    safe: str
    unsafe: str
    run: str
    share: float | None = None  #: of the values that were read; None where that is all of them

    @property
    def lines(self) -> tuple[str, str, str]:
        part = "" if self.share is None else f" in a sample of {_percent(self.share)}"
        return f"safe{part}: {self.safe}", f"not safe{part}: {self.unsafe}", f"run: {self.run}"


def judge(to: DType, items: Iterable[tuple[Item, Measure]]) -> Judgement:
    """Judge the castable tensors of a plan for ``to``."""
    known = [Judged(item, measure) for item, measure in items]
    cast = tuple(t for t in known if t.item.to is not t.item.src.dtype)
    upcast = bool(cast) and all(t.item.src.dtype.bits >= to.bits and t.measure.loss(to).is_exact for t in known)
    return Judgement(to, cast, upcast, total_loss(t.loss for t in cast))


def verdict(
    source: str,
    judgements: Sequence[Judgement],
    total: Measure,
    *,
    odd: Sequence[str] = (),
    share: float | None = None,
    options: Sequence[str] = (),
) -> Verdict:
    """The verdict over what was judged; ``total`` is the measure of the whole source.

    ``odd``: names of the tensors that hold NaN or Inf.
    ``share``: of the values, where only a sample was read.  ``options``: of the command line, for the plans.
    """
    sampled = share is not None
    safe = [f"{j.to}: {_praise(j, sampled=sampled)}" for j in judgements if j.is_safe]
    unsafe = [f"{j.to}: {_blame(j)}" for j in judgements if not j.is_safe]
    if total.nan or total.inf:
        holder = "the sample" if sampled else "the source"
        others = f" and {_tensors(len(odd) - 1)} more" if odd[1:] else ""
        where = f" (in {odd[0]!r}{others})" if odd else ""
        unsafe.append(f"{holder} holds {total.nan:,} NaN and {total.inf:,} Inf among {_values(total.n)}{where}")
    nothing = "nothing was found, in what was read" if sampled else "nothing was found"
    command = _command(source, judgements, options, sampled=sampled)
    return Verdict("; ".join(safe) or "nothing", "; ".join(unsafe) or nothing, command, share)


def _praise(j: Judgement, *, sampled: bool) -> str:
    """Nothing is called lossless that was not read."""
    if not j.cast:
        return "there is nothing to cast"
    if sampled and j.is_exact:
        return f"every value that was read and is cast is exactly a {j.to} value; others may not be"
    if j.is_upcast and j.to.bits < max(t.item.src.dtype.bits for t in j.cast):
        sources = " and ".join(sorted({t.item.src.dtype.name for t in j.cast}))
        return f"every {sources} value is exactly a {j.to} value: --to {j.to} loses nothing"
    if j.is_exact:
        return f"every value that is cast is exactly a {j.to} value: --to {j.to} loses nothing"
    worst = max(j.cast, key=lambda t: t.loss.relative_rms_error)
    zeros = f", {_values(j.loss.underflow)} to 0" if j.loss.underflow else ""
    everything = "everything that was read" if sampled else "everything"
    exact = f", {len(j.exact)} of {_tensors(len(j.cast))} lose nothing" if j.is_nearly_exact and not sampled else ""
    least = f"least {worst.loss.snr:.1f} dB in {worst.name!r}"
    return f"{everything} fits{zeros}{exact}, SNR {j.loss.snr:.1f} dB ({least})"


def _blame(j: Judgement) -> str:
    parts = []
    if over := j.overflowing:
        worst = max(over, key=lambda t: t.measure.max_abs)
        overflow = "overflows" if len(over) == 1 else "overflow"
        largest = f"largest |x| {worst.measure.max_abs:.2g} in {worst.name!r}"
        parts.append(f"{_tensors(len(over))} {overflow} ({largest})")
    if under := j.underflowing:
        worst = max(under, key=lambda t: t.underflow_share)
        share = f"up to {worst.underflow_share:.1%} in {worst.name!r}"
        parts.append(f"{_tensors(len(under))} of which more than {UNDERFLOW_WARNING:.0%} becomes 0 ({share})")
    return ", ".join(parts)


def _percent(share: float) -> str:
    """A share with two digits that say something, never as much as all nor as little as nothing."""
    for digits in (0, 1, 2, 3):
        if share >= 10.0 ** (-1 - digits):
            return f"{min(share, 1 - 10.0 ** (-2 - digits)):.{digits}%}"
    return "less than 0.01%"


def _tensors(n: int) -> str:
    return f"{n:,} tensor{'' if n == 1 else 's'}"


def _values(n: int) -> str:
    return f"{n:,} value{'' if n == 1 else 's'}"


def _command(source: str, judgements: Sequence[Judgement], options: Sequence[str], *, sampled: bool) -> str:
    """The conversion that loses least, with what it takes to lose no more than that."""
    useful = [j for j in judgements if j.cast]
    if len(useful) < len(
        judgements
    ):  # it is in one of the types asked for: any other loses something, or gains nothing
        return f"nothing: there is nothing to cast to {next(j.to for j in judgements if not j.cast)}"
    best = max(useful, key=lambda j: (j.is_exact, j.is_safe, not j.overflowing, j.loss.snr, j.to is BF16))
    place = f"./{source}" if source.startswith("-") else source
    parts = ["precconv", shlex.quote(place), "--to", best.to.name, *map(shlex.quote, options)]
    if sampled and best.is_exact:
        parts.append("--lossless-only")  # what a sample shows, the whole has to keep
    if best.overflowing:
        held = not any(t.measure.loss(FP32).overflow for t in best.overflowing)  # FP64 may not even fit FP32
        parts += ["--on-overflow", "fp32" if held else "keep"]
    globs = dict.fromkeys(generalise(t.name) for t in best.underflowing if not t.loss.overflow)
    for glob in globs:
        parts += ["--keep", shlex.quote(glob)]
    fits_bf16 = not any(t.measure.loss(BF16).overflow for t in best.cast)
    if best.overflowing and best.to.max < BF16.max and fits_bf16:
        return f"{' '.join(parts)}, or --to bf16"
    if best.is_nearly_exact and not sampled:
        return f"{' '.join(parts)}, or --to auto, which casts only what loses nothing"
    return " ".join(parts)
