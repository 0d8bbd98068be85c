"""Results as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .errors import PrecconvError
from .inspection import Inspection
from .plan import Item, Plan
from .presets import Preset
from .report import Report

__all__ = ["failure", "inspection", "plan", "report", "size", "warnings"]


_WIDEST = 200  #: characters of a cell


def size(nbytes: int) -> str:
    """Bytes in decimal units, as disks and the Hub count: ``90.9 MB``."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}"


def count(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def printable(text: str) -> str:
    """As a terminal may show it: what would move its cursor, colour it or reorder its line is spelled out.

    Names, metadata and paths are the file's words, and a file may come from anybody.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table(rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Rows as aligned, printable lines; ``right`` has an ``r`` for each column that is a number."""
    rows = [[_clipped(printable(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i < len(right) and right[i] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _clipped(cell: str) -> str:
    """No wider than a table can be: every row is padded to the widest."""
    return cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST // 2]}…{cell[-_WIDEST // 2 + 1 :]}"


def shape(dims: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, dims)) + "]"


def inspection(found: Inspection, *, tensors: bool) -> str:
    """A checkpoint's header: totals by dtype, metadata, then every tensor."""
    elements = sum(t.numel for t in found)
    lines = [
        (
            f"{printable(found.path)}: {found.format}, {count(len(found), 'tensor')}, "
            f"{count(elements, 'element')}, {size(found.file_bytes)}"
        )
    ]
    rows = [[f"  {t.dtype}", f"{t.tensors:,}", f"{t.elements:,}", size(t.nbytes)] for t in found.totals()]
    if rows:
        lines += table([["  dtype", "tensors", "elements", "size"], *rows], right=" rrr")
    lines += [f"note: {printable(note)}" for note in found.notes]
    lines += [f"structure {printable(line)}" for line in found.structure]
    lines += [f"metadata {printable(key)}: {_short(value)}" for key, value in found.metadata.items()]
    if tensors and len(found):
        rows = [[t.name, t.dtype.name, shape(t.shape), size(t.nbytes)] for t in found]
        lines += ["", *table([["tensor", "dtype", "shape", "size"], *rows], right="   r")]
    return "\n".join(lines)


def _short(value: str) -> str:
    return repr(value) if len(value) <= 100 else f"{value[:97]!r}… ({len(value):,} characters)"


def plan(made: Plan, *, verbose: bool) -> str:
    """A plan without its warnings: one line for each reason and pair of dtypes; with ``verbose`` every tensor."""
    lines = [
        f"plan: {count(len(made.items), 'tensor')}, {size(made.source_bytes)} -> {size(made.output_bytes)}",
        *_groups(made),
    ]
    if verbose:
        lines += ["", *_tensors(made.items)]
    return "\n".join(lines)


def _groups(made: Plan) -> list[str]:
    rows = [
        [f"  {g.tensors:,}", f"{g.source} -> {g.to}" if g.source is not g.to else f"{g.to}", size(g.nbytes), g.why]
        for g in made.groups()
    ]
    lines = table(rows, right="r r")
    if made.dropped:
        names = ", ".join(i.src.name for i in made.dropped[:5])
        more = f" and {len(made.dropped) - 5:,} more" if len(made.dropped) > 5 else ""
        lines.append(f"  {count(len(made.dropped), 'tensor')} dropped: {printable(names)}{more}")
    return lines + [f"note: {printable(note)}" for note in made.notes]


def presets(tables: Sequence[Preset]) -> str:
    """One line a table: what it is about and how many patterns it keeps."""
    rows = [[t.table, f"{sum(len(r.match) for r in t.keep)}", t.about] for t in tables]
    return "\n".join(table([["preset", "patterns", "about"], *rows], right=" r"))


def preset(found: Preset) -> str:
    """What one table keeps in FP32, with the reason and the source of each row."""
    lines = [f"{found.table}: {found.about}"]
    for label, names in (("model types", found.model_types), ("classes", found.class_names)):
        if names:
            lines.append(f"{label}: {', '.join(names)}")
    for row in found.keep:
        when = "fp16 and bf16" if row.on == "half" else "fp16 only"
        lines += ["", f"{', '.join(row.match)}", f"  {row.kind} ({when}): {row.why}", f"  source: {row.source}"]
    lines += [f"warning for {warn.to}: {warn.text}" for warn in found.warn]
    return "\n".join(lines)


def _tensors(items: Sequence[Item]) -> list[str]:
    rows = [[i.src.name, i.src.dtype.name, i.to.name, shape(i.src.shape), i.why] for i in items]
    return table([["tensor", "from", "to", "shape", "why"], *rows])


def report(done: Report, *, verbose: bool) -> str:
    """What was written, in the plan's groups."""
    checked = f"verified {size(done.verified_bytes)}" if done.verified_bytes else "not verified"
    lines = [
        (
            f"{printable(str(done.output))}: {count(len(done.plan.items), 'tensor')}, {size(done.source_bytes)} -> "
            f"{size(done.output_bytes)} in {done.seconds:.2f} s, {checked}"
        ),
        *_groups(done.plan),
    ]
    copied = sum(f.action == "copied" for f in done.files)
    written = [printable(f.path) for f in done.files if f.action == "written"]
    if copied or written:
        lines.append(
            f"  {count(copied, 'other file')} copied" + (f"; rewritten: {', '.join(written)}" if written else "")
        )
    if verbose:
        lines += ["", *_tensors(done.plan.items)]
    return "\n".join(lines)


def warnings(done: Report) -> Iterator[str]:
    """One sentence a warning, with where it holds."""
    for advice in done.plan.warnings:
        yield printable(f"{done.source}: {advice}")
    for finding in done.warnings:
        yield printable(f"{done.source}: tensor {finding.tensor!r}: {finding.text}")


def failure(error: PrecconvError) -> Iterator[str]:
    """What went wrong, a line for each tensor where it is about several; then what to do."""
    lines = f"error: {error}".split("\n")
    if error.hint:
        lines.append(f"hint: {error.hint}")
    yield from map(printable, lines)
