"""What sets two checkpoints apart, tensor by tensor, as data and as versioned JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .deviation import Comparison, Deviation, Tolerance, comparison
from .tensors import TensorInfo

__all__ = ["SCHEMA", "Diff", "TensorDiff", "unravelled"]

#: Version of the JSON below: raised when a key changes its meaning or goes; new keys may come.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor that both sides have."""

    name: str
    a: TensorInfo  #: as that side has it; of its names only ``name`` is the one matched
    b: TensorInfo
    found: Deviation = field(default_factory=Deviation)  #: nothing where the elements were not compared
    tolerance: Tolerance | None = None

    @property
    def comparison(self) -> Comparison | None:
        """How the elements are compared; None where shapes or dtypes do not allow it."""
        return comparison(self.a.dtype, self.b.dtype) if self.a.shape == self.b.shape else None

    @property
    def problem(self) -> str | None:
        """Why the elements were not compared: ``shape`` or ``dtype``."""
        if self.a.shape != self.b.shape:
            return "shape"
        return None if self.comparison is not None else "dtype"

    @property
    def differing(self) -> int:
        """Elements that differ, where no tolerance is given: bit for bit in one dtype, by value between two."""
        return self.found.bit_differing

    @property
    def equal(self) -> bool:
        """Whether no element differs or, with a tolerance, none by more."""
        if self.problem is not None:
            return False
        return not (self.found.beyond if self.tolerance is not None else self.differing)

    @property
    def max_abs_error(self) -> float | int | None:
        """Largest |a - b| of the elements finite on both sides, an int among integers; None for what has no values."""
        pair = self.comparison
        if pair is None or pair.how == "bits":
            return None
        return float(self.found.max_abs_error) if pair.how == "float" else self.found.max_abs_error

    @property
    def relative_rms_error(self) -> float | None:
        """As ``Deviation`` has it; None for all but floats."""
        return self.found.relative_rms_error if self._is_float else None

    @property
    def snr_db(self) -> float | None:
        """As ``Deviation`` has it; None for all but floats."""
        return self.found.snr_db if self._is_float else None

    @property
    def worst_index(self) -> tuple[int, ...] | None:
        """Where the worst element is in the tensor's shape; None where none differs."""
        worst = self.found.worst
        return None if worst is None else unravelled(worst.index, self.a.shape)

    @property
    def _is_float(self) -> bool:
        pair = self.comparison
        return pair is not None and pair.how == "float"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that JSON does not have are the texts ``inf``, ``-inf`` and ``nan``."""
        found, worst = self.found, self.found.worst
        return {
            "name": self.name,
            "a": side_dict(self.a),
            "b": side_dict(self.b),
            "equal": self.equal,
            "problem": self.problem,
            "elements": found.n,
            "differing": self.differing,
            **_counts(found),
            "max_abs_error": _number(self.max_abs_error),
            "relative_rms_error": _number(self.relative_rms_error),
            "snr_db": _number(self.snr_db),
            "worst": None
            if worst is None
            else {
                "index": list(self.worst_index or ()),
                "a": _number(worst.a),
                "b": _number(worst.b),
                "a_bits": hex(worst.a_bits),
                "b_bits": hex(worst.b_bits),
            },
        }


@dataclass(frozen=True)
class Diff:
    """Two checkpoints, compared.  The first is the reference: errors are relative to its values."""

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]  #: those of both sides, in the first one's order
    only_a: tuple[TensorInfo, ...]
    only_b: tuple[TensorInfo, ...]
    opaque: tuple[tuple[str, str], ...]  #: name and kind of tensors that are no plain arrays: not compared
    notes: tuple[str, ...]
    tolerance: Tolerance | None
    seconds: float
    unwrapped: bool = False  #: whether names were matched without wrapper modules

    @property
    def equal(self) -> bool:
        """Whether both sides have the same tensors of the same shapes, and each is equal."""
        return not (self.only_a or self.only_b or self.opaque) and all(t.equal for t in self.tensors)

    @cached_property
    def total(self) -> Deviation:
        """All compared elements together: counts of every kind, errors of floats only; ``worst`` is left out."""
        return sum((_addend(t) for t in self.tensors), Deviation())

    @property
    def different(self) -> list[TensorDiff]:
        """The tensors in which anything differs, what matters most first.

        Other shapes and dtypes that cannot be compared; then what is beyond the tolerance; NaN and Inf where there was
        another value; integers and packed types; floats, the lowest SNR first; other bits of the same values.
        """
        return sorted((t for t in self.tensors if t.problem or t.differing), key=_order)

    @property
    def dtypes(self) -> dict[tuple[str, str], int]:
        """How many tensors have which two different dtypes, the most frequent first."""
        pairs: dict[tuple[str, str], int] = {}
        for t in self.tensors:
            if t.a.dtype is not t.b.dtype:
                pair = (t.a.dtype.name, t.b.dtype.name)
                pairs[pair] = pairs.get(pair, 0) + 1
        return dict(sorted(pairs.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, every tensor in it; schema version ``SCHEMA``."""
        total = self.total
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "atol": None if self.tolerance is None else self.tolerance.atol,
            "rtol": None if self.tolerance is None else self.tolerance.rtol,
            "only_a": [{"name": t.name, **side_dict(t)} for t in self.only_a],
            "only_b": [{"name": t.name, **side_dict(t)} for t in self.only_b],
            "opaque": [{"name": name, "kind": kind} for name, kind in self.opaque],
            "notes": list(self.notes),
            "seconds": self.seconds,
            "total": {
                "tensors": len(self.tensors),
                "different": sum(1 for t in self.tensors if t.problem or t.differing),
                "elements": total.n,
                "differing": total.bit_differing,
                **_counts(total),
                "max_abs_error": _number(float(total.max_abs_error)),
                "relative_rms_error": _number(total.relative_rms_error),
                "snr_db": _number(total.snr_db),
            },
            "tensors": [t.to_dict() for t in self.tensors],
        }


def unravelled(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """A row-major position as an index a dimension."""
    found: list[int] = []
    for size in reversed(shape):
        index, at = divmod(index, size)
        found.append(at)
    return tuple(reversed(found))


def side_dict(t: TensorInfo) -> dict[str, Any]:
    return {"dtype": t.dtype.name, "shape": list(t.shape)}


def _counts(found: Deviation) -> dict[str, int]:
    return {
        "nonfinite": found.nonfinite,
        "zeros": found.zeros,
        "nans": found.nans,
        "beyond": found.beyond,
    }


def _number(value: float | int | str | None) -> float | int | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _addend(t: TensorDiff) -> Deviation:
    pair = t.comparison
    if pair is None or pair.how == "float":
        return replace(t.found, worst=None)
    return replace(t.found, worst=None, max_abs_error=0)


def _order(t: TensorDiff) -> tuple[Any, ...]:
    if t.problem is not None:
        return (0, 0, 0)
    found, snr = t.found, t.snr_db
    outside = 1 if found.beyond else 2
    if found.nonfinite:
        return (outside, 0, -found.nonfinite / found.n)
    if snr is None:
        return (outside, 1, -found.differing / found.n)
    if math.isnan(snr):  # sums that no FP64 holds
        snr = -math.inf
    return (outside, 2, snr) if found.differing else (outside, 3, -found.bit_differing / found.n)
