"""The rows of a heat map: tensors by the module they are in, as deep as a map can have rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..dtypes import BF16, FP16, DType
from ..exponents import Exponents

__all__ = ["MOST_ROWS", "counts", "grouped", "heat_map", "span"]

MOST_ROWS = 100
#: Components of a name that are looked at: no model is deeper, and a hostile name has a million.
_DEEPEST = 12
_COLUMNS = 96


def grouped(names: Sequence[str]) -> tuple[list[str], list[int]]:
    """Labels, numbers in them in the order of numbers, and for each name which of them is its.

    One depth for all, the deepest that gives no more than ``MOST_ROWS``; names without structure are cut into even
    runs.
    """
    paths = [name.split(".", _DEEPEST) for name in names]
    best: list[tuple[str, ...]] | None = None
    for depth in range(1, _DEEPEST + 1):
        keys = [tuple(path[:depth]) for path in paths]
        if len(set(keys)) > MOST_ROWS or keys == best:
            break
        best = keys
    if best is None:
        return _runs(names)
    place = {key: n for n, key in enumerate(sorted(set(best), key=_natural))}
    return [".".join(key) for key in place], [place[key] for key in best]


def _natural(key: Sequence[str]) -> list[list[tuple[int, str]]]:
    """Sorts ``layers.2`` before ``layers.10``; digits by length first, since a hostile name has a million of them."""
    return [
        [(len(d), d) if (d := run.lstrip("0")).isdecimal() else (0, run) for run in re.split(r"([0-9]+)", part)]
        for part in key
    ]


def _runs(names: Sequence[str]) -> tuple[list[str], list[int]]:
    size = -(-len(names) // MOST_ROWS)
    firsts = range(0, len(names), size)
    labels = [f"{names[n]} … {names[min(n + size, len(names)) - 1]}" for n in firsts]
    return labels, [n // size for n in range(len(names))]


def span(dtype: DType) -> dict[str, int]:
    """Binary exponents of the smallest subnormal, the smallest normal and the largest value."""
    values = {"subnormal": dtype.smallest_subnormal, "normal": dtype.smallest_normal, "largest": dtype.max}
    return {key: _exponent(value) for key, value in values.items()}


def _exponent(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator.bit_length() - denominator.bit_length()


def heat_map(names: Sequence[str], seen: Sequence[Exponents | None]) -> dict[str, Any]:
    """The map as plain data: an axis of exponents, which spans FP16 at least, and rows of counts over it.

    ``seen``: of each tensor; None where it was not looked at.
    ``of``: by position in ``names``, which row each is in.
    """
    labels, of = grouped(names)
    sums = [_Sum() for _ in labels]
    for exponents, row in zip(seen, of, strict=True):
        sums[row].add(exponents)
    rows = [
        {"label": label, "tensors": s.tensors, "read": s.read, **counts(s.exponents())}
        for label, s in zip(labels, sums, strict=True)
    ]
    ranges = {d.name: span(d) for d in (FP16, BF16)}
    used = [r for r in rows if r["counts"]]
    first = min([ranges["fp16"]["subnormal"] - 1, *(r["first"] for r in used)])
    last = max([ranges["fp16"]["largest"] + 1, *(r["first"] + len(r["counts"]) - 1 for r in used)])
    step = -(-(last - first + 1) // _COLUMNS)
    axis = {"first": first, "columns": -(-(last - first + 1) // step), "step": step}
    return {"axis": axis, "ranges": ranges, "rows": rows, "of": of}


def counts(exponents: Exponents) -> dict[str, Any]:
    """A histogram as plain data."""
    return {"first": exponents.first, "counts": [*exponents.counts]}


class _Sum:
    """A row while it is added up: in place, since a row may have 100,000 tensors."""

    def __init__(self) -> None:
        self.tensors = self.read = 0
        self._counts: dict[int, int] = {}

    def add(self, seen: Exponents | None) -> None:
        self.tensors += 1
        if seen is not None:
            self.read += 1
            for exponent, n in seen:
                self._counts[exponent] = self._counts.get(exponent, 0) + n

    def exponents(self) -> Exponents:
        return Exponents.of(self._counts)
