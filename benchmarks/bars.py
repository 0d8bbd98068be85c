"""The bars: one row each, with how to compute its values, round by round, from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import jobs
from .record import Run, Series

Unit = Literal["x", "MB", "us", "s", "modules"]
#: Values of a row, one a round; raises MissingError.
Values = Callable[[Run], list[float]]

MB = 1 << 20


class MissingError(Exception):
    """A row has no values; the text says why."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: its name in ``reasons.toml``, what is compared, and the limit of the median."""

    key: str
    what: str
    limit: float
    unit: Unit
    values: Values
    strict: bool = False  #: below the limit, not at it

    def met(self, median: float) -> bool:
        return median < self.limit if self.strict else median <= self.limit


def series(run: Run, group: str, job: str) -> Series:
    """Raises MissingError where the job did not run or failed."""
    if group not in run.groups:
        raise MissingError("not in this run")
    if job not in run.groups[group]:
        raise MissingError(f"{job} does not fit this machine")
    found = run.groups[group][job]
    if found.failed:
        raise MissingError(f"{job}: {found.failed}")
    return found


def best_floor(run: Run, group: str) -> Series:
    """Of the ways to allocate the output, the one with the smaller median."""
    return min((series(run, group, name) for name in jobs.FLOORS), key=lambda s: statistics.median(s.seconds))


def over(group: str, job: str, base: str) -> Values:
    """Ratio of a job's time to another's, within each round; ``base`` may be the floor."""

    def values(run: Run) -> list[float]:
        mine = series(run, group, job).seconds
        other = best_floor(run, group) if base == "floor" else series(run, group, base)
        return [a / b for a, b in zip(mine, other.seconds, strict=False)]

    return values


def above_torch(group: str) -> Values:
    """MB of peak resident memory that the command line takes above a process that only imports torch."""

    def values(run: Run) -> list[float]:
        pairs = zip(series(run, group, jobs.CLI).peak, series(run, group, jobs.TORCH).peak, strict=False)
        return [(a - b) / MB for a, b in pairs]

    return values


def per_tensor(job: str) -> Values:
    """Microseconds a tensor above one tensor of as many bytes."""

    def values(run: Run) -> list[float]:
        many = series(run, "small", job + jobs.MANY).seconds
        one = series(run, "small", job + jobs.ONE).seconds
        return [(a - b) / run.small * 1e6 for a, b in zip(many, one, strict=False)]

    return values


def seconds(job: str) -> Values:
    return lambda run: series(run, "startup", job).wall


def modules(run: Run) -> list[float]:
    return [told["torch_modules"] for told in series(run, "startup", jobs.INSPECT_MODULES).told]


def _conversion(group: str, prefix: str, what: str) -> list[Bar]:
    time = f"{what}, after `import torch`"
    whole = f"{what}, whole process"
    return [
        Bar(f"{prefix}floor", f"{time} / floor", 1.5, "x", over(group, jobs.API, "floor")),
        Bar(f"{prefix}cp", f"{time} / `cp`", 1.0, "x", over(group, jobs.API, jobs.CP), strict=True),
        Bar(f"{prefix}five-lines", f"{whole} / five lines", 0.6, "x", over(group, jobs.CLI, jobs.FIVE)),
    ]


def _memory(group: str, what: str) -> Bar:
    return Bar(f"memory-{group}", f"peak memory above `import torch`, {what}", 256, "MB", above_torch(group))


BARS: tuple[Bar, ...] = (
    *_conversion("4", "", "4 GB to bf16"),
    _memory("1", "1 GB"),
    _memory("4", "4 GB"),
    _memory("16", "16 GB"),
    _memory("tensor", "one 8 GB tensor"),
    _memory("sharded", "a directory of 16 GB"),
    Bar(
        "sharded-cp",
        "16 GB directory to bf16, after `import torch` / `cp -r`",
        1.0,
        "x",
        over("sharded", jobs.API, jobs.CP),
        strict=True,
    ),
    *_conversion("ckpt", "ckpt-", "4 GB `.ckpt` to safetensors"),
    _memory("ckpt", "4 GB `.ckpt`"),
    Bar(
        "checks",
        "4 GB to bf16, checks and verification on / off",
        1.15,
        "x",
        over("4", jobs.API, jobs.UNCHECKED),
    ),
    Bar("stochastic", "4 GB to bf16, stochastic / nearest", 3.0, "x", over("4", jobs.STOCHASTIC, jobs.API)),
    Bar(
        "stochastic-fp16",
        "4 GB to fp16, stochastic / nearest",
        3.0,
        "x",
        over("4", jobs.STOCHASTIC_FP16, jobs.API_FP16),
    ),
    Bar("scan", "`precconv scan` of 4 GB / conversion to bf16", 3.0, "x", over("4", jobs.SCAN, jobs.API)),
    Bar("small", "100,000 tensors of 1 KB, a tensor", 20, "us", per_tensor(jobs.API), strict=True),
    Bar("help", "`precconv --help`", 0.2, "s", seconds(jobs.HELP), strict=True),
    Bar("inspect", "`precconv inspect`", 0.5, "s", seconds(jobs.INSPECT), strict=True),
    Bar("inspect-torch", "modules of torch loaded by `inspect`", 0, "modules", modules),
)
