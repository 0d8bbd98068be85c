"""A scan as text for people: a table, the histograms, the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .dtypes import FP16, DType
from .exponents import Exponents
from .scan import Scan, TensorScan
from .text import count, printable, shape, size, table

__all__ = ["ASCII", "BLOCKS", "scan"]

#: Heights of a column, then a stretch of the ruler where FP16 is subnormal, then one where it is normal.
BLOCKS = "▁▂▃▄▅▆▇█░─"
ASCII = ".:-=+*#@-="
_NUMBERS = ("least |x|", "largest |x|", "zeros", "NaN", "Inf")
_COLUMNS = 64  #: of a histogram, at most


class _Axis(NamedTuple):
    """The binary exponents under the columns of every histogram."""

    first: int
    columns: int
    step: int  #: exponents a column


def scan(found: Scan, *, top: int | None, histograms: bool = False, quiet: bool = False, blocks: str = BLOCKS) -> str:
    """The ``top`` tensors most at risk, or all; then the verdict, which is all there is when ``quiet``."""
    verdict = [printable(line) for line in found.verdict.lines]
    if quiet:
        return "\n".join(verdict)
    ranked = found.ranked()
    shown = ranked[:top]
    lines = [_head(found), *(f"note: {printable(note)}" for note in found.notes), "", *_table(shown, found)]
    if len(shown) < len(ranked):
        lines.append(f"and {count(len(ranked) - len(shown), 'tensor')} less at risk (--top 0 shows all)")
    if histograms:
        lines += _histograms(shown, found.totals.exponents, blocks)
    return "\n".join([*lines, "", *verdict])


def _head(found: Scan) -> str:
    nbytes = sum(t.measure.n * t.info.dtype.itemsize for t in found.tensors if t.measure is not None)
    head = (
        f"{printable(found.source)}: {count(len(found.tensors), 'tensor')}, "
        f"{count(found.totals.n, 'value')} ({size(nbytes)}) read in {found.seconds:.2f} s"
    )
    if found.share is None or found.sample is None:
        return head
    return f"{head}\na sample: of tensors larger than {size(found.sample)} so much, and all numbers are about that"


def _table(rows: Sequence[TensorScan], found: Scan) -> list[str]:
    """With a column more, the share of the values that was read, where that is not all of them."""
    sampled = found.share is not None
    head = ["tensor", "dtype", "shape", *(["read"] if sampled else []), *_NUMBERS]
    cells = [[*head, *(f"as {to}" for to in found.targets)]]
    for t in rows:
        m = t.measure
        if m is None:
            numbers = [size(t.info.nbytes), *[""] * 4]
        else:
            least = "" if math.isinf(m.min_abs) else f"{m.min_abs:.3g}"
            zeros = _share(m.zero / m.n) if m.zero else ""
            odd = [f"{n:,}" if n else "" for n in (m.nan, m.inf)]
            numbers = [least, f"{m.max_abs:.3g}", zeros, *odd]
        share = [_read(t)] if sampled else []
        fates = [_fate(t, to) for to in found.targets]
        cells.append([t.name, t.info.dtype.name, shape(t.info.shape), *share, *numbers, *fates])
    return table(cells, right="   rrrrrr" if sampled else "   rrrrr")


def _read(t: TensorScan) -> str:
    if t.measure is None:
        return ""
    return _share(t.measure.n / t.info.numel) if t.is_sampled else "all"


def _share(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "<0.01%"


def _fate(t: TensorScan, to: DType) -> str:
    """What a conversion would do with a tensor, in a few characters."""
    judged = t.judged(to)
    if judged is None:
        return "not cast" if to in t.items else "dropped"
    loss, other = judged.loss, "" if judged.item.to is to else f" ({judged.item.to})"
    if loss.overflow:
        return f"{loss.overflow:,} overflow{other}"
    if loss.is_exact:
        return f"exact so far{other}" if t.is_sampled else f"exact{other}"
    zeros = f", {_share(judged.underflow_share)} to 0" if loss.underflow else ""
    return f"{loss.snr:.1f} dB{zeros}{other}"


def _histograms(rows: Sequence[TensorScan], every: Exponents, blocks: str) -> list[str]:
    """A line for each tensor, over one axis."""
    if not every.counts:
        return []
    step = -(-len(every.counts) // _COLUMNS)
    axis = _Axis(every.first, -(-len(every.counts) // step), step)
    last = every.first + len(every.counts) - 1
    each = "one" if step == 1 else f"{step}"
    legend = (
        f"values by size, from 2^{every.first} to 2^{last}, {each} a column, heights logarithmic; "
        f"fp16: {blocks[9]} normal, {blocks[8]} subnormal"
    )
    drawn = [
        f"  {_bars(t.measure.exponents, axis, blocks)}  {printable(t.name)}" for t in rows if t.measure is not None
    ]
    return ["", legend, f"  {_ruler(axis, blocks)}".rstrip(), *drawn]


def _bars(exponents: Exponents, axis: _Axis, blocks: str) -> str:
    columns = [0] * axis.columns
    for exponent, n in exponents:
        columns[(exponent - axis.first) // axis.step] += n
    top = math.log2(max(columns) + 1)
    return "".join(blocks[min(7, int(8 * math.log2(n + 1) / top))] if n else " " for n in columns)


def _ruler(axis: _Axis, blocks: str) -> str:
    """Where FP16 has normal and subnormal values; a column counts when any of its exponents does."""
    low, normal, high = (math.frexp(x)[1] - 1 for x in (FP16.smallest_subnormal, FP16.smallest_normal, FP16.max))
    marks = []
    for i in range(axis.columns):
        first = axis.first + i * axis.step
        last = first + axis.step - 1
        is_normal, is_subnormal = last >= normal and first <= high, last >= low and first < normal
        marks.append(blocks[9] if is_normal else blocks[8] if is_subnormal else " ")
    return "".join(marks)
