"""Results as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from .differences import Diff, TensorDiff
from .errors import PrecconvError
from .inspection import Inspection
from .plan import Item, Plan
from .presets import Preset
from .proof import Mismatch, Proof
from .provenance import KEY, read_record
from .report import Report

__all__ = ["diff", "failure", "inspection", "plan", "proof", "report", "size", "warnings"]


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
    lines += [
        f"metadata {printable(key)}: {repr(value) if key == KEY and read_record(found.metadata) else _short(value)}"
        for key, value in found.metadata.items()
    ]
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
    if done.published is not None and done.published["already"]:
        commit = done.published["commit"][:12]
        return f"{printable(str(done.output))}: published already, commit {commit}; nothing to do"
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
    if done.published is not None:
        url = done.published["pr_url"] or done.published["url"]
        lines.append(f"  published: {printable(url)}, commit {done.published['commit'][:12]}")
    if copied or written:
        lines.append(
            f"  {count(copied, 'other file')} copied" + (f"; rewritten: {', '.join(written)}" if written else "")
        )
    if verbose:
        lines += ["", *_tensors(done.plan.items)]
    return "\n".join(lines)


def diff(found: Diff, *, top: int) -> str:
    """The verdict, what only one side has, totals, then the ``top`` tensors that differ most."""
    changed = found.different
    lines = [f"{printable(found.a)} against {printable(found.b)}: {_verdict(found, len(changed))}"]
    for side, missing in (("first", found.only_a), ("second", found.only_b)):
        if missing:
            lines.append(f"  {count(len(missing), 'tensor')} only in the {side}: {_named([t.name for t in missing])}")
    if found.opaque:
        names = [f"{name} ({kind})" for name, kind in found.opaque]
        lines.append(f"  {count(len(names), 'tensor')} that cannot be compared: {_named(names)}")
    lines += [f"  {count(n, 'tensor')} {a} against {b}" for (a, b), n in found.dtypes.items()]
    if changed:
        lines.append(f"  {_total(found)}")
        beyond = ["beyond"] if found.tolerance is not None else []
        rows = [_diff_row(t) for t in changed[:top]]
        heads = ["tensor", "dtype", "shape", "differing", *beyond, "max abs", "rel RMS", "SNR dB", "worst"]
        lines += ["", *table([heads, *rows], right="   rrrr" + "r" * len(beyond))] if rows else []
        if len(changed) > top:
            lines.append(f"and {count(len(changed) - top, 'tensor')} more (--top {len(changed)} shows all)")
    if not found.tensors and found.only_a and found.only_b:
        wrappers = "" if found.unwrapped else "--strip-wrappers sees through wrapper modules, "
        lines.append(
            f"note: no name is on both sides; {wrappers}--select-a and --select-b choose other weights of a torch "
            "checkpoint"
        )
    lines += [f"note: {printable(note)}" for note in found.notes]
    return "\n".join(lines)


def _verdict(found: Diff, changed: int) -> str:
    if not found.equal:
        if found.tolerance is None:
            return f"different, {changed:,} of {count(len(found.tensors), 'common tensor')}"
        beyond = sum(1 for t in found.tensors if not t.equal)
        return f"different, {beyond:,} of {count(len(found.tensors), 'common tensor')} by more than the tolerance"
    within = f", {changed:,} within the tolerance" if changed else ""
    return f"equal, {count(len(found.tensors), 'tensor')}{within}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return printable(", ".join(names[:5])) + more


def _total(found: Diff) -> str:
    total = found.total
    parts = [f"{total.bit_differing:,} of {count(total.n, 'element')} differ"]
    if found.tolerance is not None:
        parts.append(f"{total.beyond:,} by more than atol {found.tolerance.atol:g}, rtol {found.tolerance.rtol:g}")
    if total.nonfinite:
        parts.append(f"{total.nonfinite:,} with NaN or Inf on one side")
    if total.zeros:
        parts.append(f"{total.zeros:,} only by the sign of 0")
    if total.nans:
        parts.append(f"{total.nans:,} only by the bits of NaN")
    if total.squared_errors:
        parts.append(
            f"max abs {total.max_abs_error:.3g}, rel RMS {total.relative_rms_error:.3g}, SNR {total.snr_db:.1f} dB"
        )
    return "; ".join(parts)


def _diff_row(t: TensorDiff) -> list[str]:
    dtype, dims = (
        str(x) if x == y else f"{x} / {y}" for x, y in ((t.a.dtype, t.b.dtype), (shape(t.a.shape), shape(t.b.shape)))
    )
    within = t.tolerance is not None
    if t.problem is not None:
        return [t.name, dtype, dims, *[""] * (5 if within else 4), f"not compared: {t.problem}"]
    only_odd = t.found.nonfinite and not t.found.squared_errors  # NaN or Inf on one side: they have no error
    numbers = [
        "" if value is None or only_odd else f"{value:{spec}}"
        for value, spec in ((t.max_abs_error, ".3g"), (t.relative_rms_error, ".3g"), (t.snr_db, ".1f"))
    ]
    beyond = [f"{t.found.beyond:,}"] if within else []
    return [t.name, dtype, dims, f"{t.differing:,}", *beyond, *numbers, _worst(t)]


def _worst(t: TensorDiff) -> str:
    worst = t.found.worst
    if worst is None:
        return ""
    a, b = (f"{v:.9g}" if isinstance(v, float) else str(v) for v in (worst.a, worst.b))
    if a == b:
        a, b = f"{a} ({worst.a_bits:#x})", f"{b} ({worst.b_bits:#x})"
    return f"{list(t.worst_index or ())}: {a} / {b}"


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


def proof(found: Proof, *, top: int) -> str:
    """Whether an output is what its source and options make; if not, ``top`` of the reasons."""
    is_it = "is" if found.proven else "is not"
    told = _TOLD[found.options_from]
    bytes_of_it = ", every byte" + (" but what was to be ignored" if found.ignored else "") if found.proven else ""
    lines = [printable(f"{found.output} {is_it} {shlex.join(found.words)} of {found.source}{bytes_of_it} ({told})")]
    if found.proven:
        files = f", {count(found.files, 'file')}" if found.files > 1 else ""
        lines.append(
            f"  {count(len(found.plan.items), 'tensor')}{files}, {size(found.compared_bytes)} compared "
            f"in {found.seconds:.2f} s"
        )
    lines += [f"  {printable(_mismatch(m))}" for m in found.mismatches[:top]]
    if len(found.mismatches) > top:
        lines.append(f"  and {len(found.mismatches) - top:,} more")
    if found.ignored:
        lines.append(f"  ignored: {_named(found.ignored)}")
    hint = _proof_hint(found)
    lines += [f"hint: {printable(hint)}"] if hint else []
    return "\n".join([*lines, *(f"note: {printable(note)}" for note in found.notes)])


_TOLD = {
    "record": "options: its record",
    "report": "options: the report",
    "arguments": "options: as given",
    "dtypes": "the target: by its dtypes",
}
#: What is wrong where no tensor is.
_AROUND = {"record", "metadata", "bytes"}


def _proof_hint(found: Proof) -> str | None:
    if found.proven:
        return None
    kinds = {m.kind for m in found.mismatches}
    is_beside = all(m.file and m.kind in ("file", "unexpected") and not m.tensor for m in found.mismatches)
    untold = "it does not say how it was made: give the options of its conversion, or --report"
    if is_beside and not found.uncompared:
        way = f"what does not matter can be left out (--ignore {found.mismatches[0].file!r})"
        return f"the weights are proven; {f'{untold}; or ' if found.options_from == 'dtypes' else ''}{way}"
    if kinds <= _AROUND and not found.uncompared:
        what = "the bytes around them" if "bytes" in kinds else "the words about them"
        return f"every value is the one that belongs there; {what} differ"
    return untold if found.options_from == "dtypes" else None


def _mismatch(m: Mismatch) -> str:
    where = [m.file] if m.file else []
    if m.tensor is not None:
        where.append(f"tensor {m.tensor!r}")
    return ": ".join([*where, m.text])
