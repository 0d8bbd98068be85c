"""The run as a markdown page: every bar, the reasons for those missed, every job, the machine."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path

from . import jobs
from .bars import BARS, MB, Bar, MissingError, best_floor
from .record import Run, Series

REASONS = Path(__file__).with_name("reasons.toml")

INTRO = """\
# Benchmarks

Written by `benchmarks/run.py`, which measures everybody side by side in one run. In every round all jobs of a
group run one after the other, each as a process of its own; before each, the last output is removed, the disk
catches up and the source is read into the page cache. Ratios are computed within a round, and the median over
the rounds is what counts. GB and MB are powers of two.

- *floor*: two threads read the source and write as many bytes as the output has, in 1 MB chunks, and nothing
  else; the output gets its blocks while it is written (`ftruncate`) or before (`fallocate`), and ratios are
  taken over whichever has the smaller median.
- *five lines*: `load_file`, `.to()`, `save_file`, the script that a conversion usually is; also with an
  `isfinite` check of the result.
- *precconv*: the time after `import torch`, with the default checks and verification; *whole process*: the
  command line from start to exit.
- *verification off*: `verify="none"`. *Checks and verification off*: besides, the look at the results is
  taken out of the kernel, which no option does.
- *stochastic*: `--rounding stochastic`; *scan*: `precconv.scan`, histograms and verdict included; both after
  `import torch`, beside the conversion to nearest in the same rounds. *verify*: of the conversion's own output,
  which it makes first, untimed.
- *peak memory* is the largest resident size of the process, mapped files included.
"""


def page(run: Run) -> str:
    """The whole page."""
    parts = [INTRO]
    if run.scale != 1:
        parts.append(f"**Inputs are scaled by {run.scale:g}: a trial of the harness, not a measurement.**\n")
    parts += ["## Bars\n", bars_table(run), *reasons(run), "## Times and memory\n", jobs_tables(run)]
    if run.notes:
        parts.append("\n".join(["Left out:\n", *(f"- {note}" for note in run.notes)]) + "\n")
    parts += ["## Machine\n", table(["", ""], [[k, v] for k, v in run.machine.items()])]
    return "\n".join(parts)


def bars_table(run: Run) -> str:
    head = ["what", "median", "min to max", "bar", "verdict"]
    return table(head, [_row(run, bar) for bar in BARS])


def _row(run: Run, bar: Bar) -> list[str]:
    limit = f"{'below' if bar.strict else 'at most'} {_number(bar.limit, bar.unit)}"
    try:
        values = bar.values(run)
        median = statistics.median(values)
    except MissingError as e:
        return [bar.what, "", "", limit, f"not measured: {e}"]
    spread = f"{_number(min(values), bar.unit)} to {_number(max(values), bar.unit)}"
    return [bar.what, _number(median, bar.unit), spread, limit, verdict(bar, median)]


def verdict(bar: Bar, median: float) -> str:
    """``met``, or by how much not."""
    if bar.met(median):
        return "met"
    by = f" by {(median / bar.limit - 1) * 100:.0f} %" if bar.limit else ""
    return f"**missed{by}**"


def reasons(run: Run) -> list[str]:
    """A list of the explanations for rows that missed their bar; missed rows without one say so."""
    known = load_reasons(REASONS)
    lines = []
    for bar in BARS:
        try:
            if not bar.met(statistics.median(bar.values(run))):
                lines.append(f"- {bar.what}: {known.get(bar.key, 'not explained yet')}")
        except MissingError:
            continue
    return ["Why bars are missed:\n", "\n".join(lines) + "\n"] if lines else []


def load_reasons(path: Path) -> dict[str, str]:
    """Row key -> reason; raises ValueError for a key that no row has."""
    found: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))
    unknown = found.keys() - {bar.key for bar in BARS}
    if unknown:
        known = ", ".join(bar.key for bar in BARS)
        raise ValueError(f"{path.name}: no such rows: {', '.join(sorted(unknown))}; rows: {known}")
    return found


def jobs_tables(run: Run) -> str:
    return "\n".join(
        f"{run.titles[key]}\n\n{table(_JOBS_HEAD, [_job_row(run, key, n, s) for n, s in group.items()])}"
        for key, group in run.groups.items()
    )


_JOBS_HEAD = ["job", "rounds", "median s", "min to max", "over the floor", "peak MB", "above `import torch`"]


def _job_row(run: Run, key: str, name: str, series: Series) -> list[str]:
    if not series.wall:
        return [name, "0", series.failed, "", "", "", ""]
    seconds = series.seconds
    row = [
        name,
        str(len(seconds)),
        f"{statistics.median(seconds):.3f}",
        f"{min(seconds):.3f} to {max(seconds):.3f}",
    ]
    return [*row, _over_floor(run, key, seconds), *_peaks(run, key, name, series)]


def _over_floor(run: Run, key: str, seconds: Sequence[float]) -> str:
    try:
        floor = best_floor(run, key).seconds
    except MissingError:
        return ""
    return f"{statistics.median(a / b for a, b in zip(seconds, floor, strict=False)):.2f}"


def _peaks(run: Run, key: str, name: str, series: Series) -> list[str]:
    """Peak memory, absolute and relative; of Python processes alone, others are too small to be told."""
    if name in (jobs.CP, *jobs.FLOORS):
        return ["", ""]
    torch = run.groups[key].get(jobs.TORCH)
    above = f"{(max(series.peak) - statistics.median(torch.peak)) / MB:.0f}" if torch and torch.peak else ""
    return [f"{max(series.peak) / MB:.0f}", above]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _number(value: float, unit: str) -> str:
    digits = {"x": 2, "s": 2, "MB": 0, "us": 1, "modules": 0}[unit]
    return f"{value:.{digits}f}" + ("" if unit == "modules" else f" {unit}")
