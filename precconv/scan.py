"""The scan of a source: every tensor's values seen once, and what a cast would make of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ._version import __version__
from .bulk import collector_paused
from .checkpoint import Checkpoint
from .dtypes import BF16, FP16, FP32, FP64, DType
from .measures import Loss, Measure, holders, total
from .plan import Item, Plan
from .runs import Progress, ProgressCallback
from .sweep import castable_bytes, sweep
from .tensors import TensorInfo, prefixed
from .verdict import Judged, Judgement, Verdict, judge, verdict

__all__ = ["SCHEMA", "Part", "Scan", "TensorScan", "scan_checkpoints"]

#: Version of the JSON below: raised when a key changes its meaning or goes; new keys may come.
SCHEMA = 1


class Part(NamedTuple):
    """A checkpoint of what is scanned."""

    name: str  #: the component's, where there are several; its tensors are called ``name/tensor``
    file: str  #: what it is called
    found: Checkpoint


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor: what it holds, and what a conversion to each target would do with it."""

    file: str  #: which checkpoint of the source it is in
    info: TensorInfo
    measure: Measure | None  #: None where values are never cast, and were not read
    items: Mapping[DType, Item]  #: its place in the plan for each target; none where a rule drops it

    @property
    def name(self) -> str:
        """With its component's before it, where there are several."""
        return self.info.name

    @property
    def is_sampled(self) -> bool:
        """Whether some of its values were not read."""
        return self.measure is not None and self.measure.n < self.info.numel

    @property
    def holders(self) -> frozenset[DType]:
        """The targets that hold every value exactly."""
        return frozenset() if self.measure is None else holders(self.measure)

    def judged(self, to: DType) -> Judged | None:
        """What a conversion to ``to`` would do with it; None where it would not be cast."""
        item = self.items.get(to)
        if self.measure is None or item is None or item.to is self.info.dtype:
            return None
        return Judged(item, self.measure)

    @property
    def risk(self) -> tuple[int, int, float, float]:
        """Overflow, NaN and Inf, share of underflow and relative error, of the target that is worst for it."""
        found = [judged.risk for to in self.items if (judged := self.judged(to)) is not None]
        overflow, underflow, error = max(found, default=(0 if self.nonfinite else -1, 0.0, 0.0))
        return overflow, self.nonfinite, underflow, error

    @property
    def nonfinite(self) -> int:
        """NaN and Inf in it, whatever becomes of it."""
        return 0 if self.measure is None else self.measure.nan + self.measure.inf

    def to_dict(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.name,
            "file": self.file,
            "dtype": self.info.dtype.name,
            "shape": list(self.info.shape),
            "bytes": self.info.nbytes,
        }
        if self.measure is None:
            return row
        plan = {to.name: {"to": item.to.name, "why": item.why} for to, item in self.items.items()}
        return {
            **row,
            "sampled": self.is_sampled,
            **_measure_dict(self.measure),
            "casts": _casts(self.measure, self.info.dtype),
            "plan": plan,
        }


@dataclass(frozen=True)
class Scan:
    """The result of a scan; ``tensors`` in the order of the source."""

    source: str
    targets: tuple[DType, ...]
    tensors: tuple[TensorScan, ...] = field(repr=False)
    notes: tuple[str, ...]
    warnings: tuple[str, ...]  #: what names, shapes and config say against a target
    seconds: float
    sample: int | None = None  #: bytes that were read of a tensor at most
    options: tuple[str, ...] = ()  #: of the command line, those that the plans depend on besides the target

    @cached_property
    def share(self) -> float | None:
        """Share of the castable values that was read; None where that is all of them."""
        if not any(t.is_sampled for t in self.tensors):
            return None
        return self.totals.n / sum(t.info.numel for t in self.tensors if t.measure is not None)

    @cached_property
    def totals(self) -> Measure:
        """All values that were read."""
        return total(t.measure for t in self.tensors if t.measure is not None)

    @cached_property
    def judgements(self) -> tuple[Judgement, ...]:
        """What a conversion to each target would do."""
        with collector_paused():
            return tuple(self._judge(to) for to in self.targets)

    def _judge(self, to: DType) -> Judgement:
        rows = [(t.items[to], t.measure) for t in self.tensors if t.measure is not None and to in t.items]
        return judge(to, rows)

    @cached_property
    def verdict(self) -> Verdict:
        odd = [t.name for t in self.ranked() if t.nonfinite] if self.totals.nan or self.totals.inf else []
        return verdict(self.source, self.judgements, self.totals, odd=odd, share=self.share, options=self.options)

    def ranked(self) -> list[TensorScan]:
        """Tensors at risk first: by overflow, NaN and Inf, underflow, then error, where a target would cast them."""
        return sorted(self.tensors, key=lambda t: t.risk, reverse=True)

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Plain data for JSON: the ``top`` tensors most at risk, or all of them; sizes in bytes, counts in values.

        ``snr_db`` is null where there is no error, ``min_abs`` where there is no value but zeros, ``sample`` where all
        values were read.  Of a tensor that is ``sampled``, all numbers are those of ``n`` values.
        """
        dtypes = dict.fromkeys(t.info.dtype for t in self.tensors if t.measure is not None)
        return {
            "schema": SCHEMA,
            "tool": f"precconv {__version__}",
            "source": self.source,
            "targets": [to.name for to in self.targets],
            "sample": None if self.share is None else {"bytes": self.sample, "share": self.share},
            "verdict": {
                "sampled": self.share is not None,
                "safe": self.verdict.safe,
                "unsafe": self.verdict.unsafe,
                "run": self.verdict.run,
                "judgements": [_judgement_dict(j) for j in self.judgements],
            },
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
            "totals": {
                "tensors": len(self.tensors),
                "bytes": sum(t.info.nbytes for t in self.tensors),
                "sampled": self.share is not None,
                **_measure_dict(self.totals),
                "casts": _casts(self.totals, *dtypes),
            },
            "tensors": [t.to_dict() for t in self.ranked()[:top]],
        }


def scan_checkpoints(
    parts: Sequence[Part],
    plans: Mapping[DType, Plan],
    *,
    source: str,
    workers: int,
    sample: int | None = None,
    options: Sequence[str] = (),
    notes: Sequence[str] = (),
    progress: ProgressCallback | None = None,
) -> Scan:
    """Scan one or several open checkpoints, which are together ``source``.

    ``plans``: for each target what a conversion of all of them would do, by the names that tensors have in the result.
    ``sample``: bytes that are read of a tensor at most.
    """
    started = time.perf_counter()
    shown = Progress(sum(castable_bytes(part.found.infos, sample) for part in parts), progress)
    items: dict[str, dict[DType, Item]] = {}
    for to, plan in plans.items():
        for item in plan.items:
            items.setdefault(item.src.name, {})[to] = item
    tensors: list[TensorScan] = []
    with collector_paused():
        for name, file, found in parts:
            measures = sweep(found.source, workers=workers, progress=shown, sample=sample)
            for key, t in enumerate(found.infos):
                info = t._replace(name=prefixed(name, t.name))
                tensors.append(TensorScan(file, info, measures.get(key), items.get(info.name, {})))
    return Scan(
        source,
        tuple(plans),
        tuple(tensors),
        tuple(dict.fromkeys((*notes, *(note for plan in plans.values() for note in plan.notes)))),
        tuple(dict.fromkeys(line for plan in plans.values() for line in plan.warnings)),
        time.perf_counter() - started,
        sample,
        tuple(options),
    )


def _measure_dict(m: Measure) -> dict[str, Any]:
    return {
        "n": m.n,
        "nan": m.nan,
        "inf": m.inf,
        "zero": m.zero,
        "subnormal": m.subnormal,
        "min_abs": _finite(m.min_abs),
        "max_abs": m.max_abs,
        "exponents": {"first": m.exponents.first, "counts": list(m.exponents.counts)},
        "exact": sorted(d.name for d in holders(m)),
    }


def _casts(m: Measure, *sources: DType) -> dict[str, Any]:
    """What a cast to each 16-bit type would do, and to FP32 where that is narrower."""
    targets = (FP16, BF16, FP32) if FP64 in sources else (FP16, BF16)
    return {to.name: {"underflow_share": m.underflow_share(to), **_loss_dict(m.loss(to))} for to in targets}


def _loss_dict(loss: Loss) -> dict[str, Any]:
    return {
        "overflow": loss.overflow,
        "underflow": loss.underflow,
        "subnormal": loss.subnormal,
        "exact": loss.is_exact,
        "max_abs_error": loss.max_abs_error,
        "relative_rms_error": loss.relative_rms_error,
        "snr_db": _finite(loss.snr),
    }


def _judgement_dict(j: Judgement) -> dict[str, Any]:
    return {
        "to": j.to.name,
        "tensors": len(j.cast),
        "safe": j.is_safe,
        "upcast": j.is_upcast,
        **_loss_dict(j.loss),
        "overflowing": [t.name for t in j.overflowing],
        "underflowing": [t.name for t in j.underflowing],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
