"""What a conversion did, tensor by tensor, as data and as versioned JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ._version import __version__
from .checks import Finding
from .errors import OutputError, UsageError
from .fileio import part_file
from .paths import is_directory, is_taken, same_file
from .plan import Item, Plan
from .stats import Stats

__all__ = ["SCHEMA", "FileReport", "Report", "TensorReport", "check_report_path", "plan_dict"]

#: Version of the JSON below: raised when a key changes its meaning or goes; new keys may come.
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor's fate and the numbers behind it."""

    item: Item
    stats: Stats

    @property
    def name(self) -> str:
        return self.item.src.name

    def to_dict(self) -> dict[str, Any]:
        item, stats = self.item, self.stats
        row: dict[str, Any] = {
            **_item_dict(item),
            "nan": stats.nan,
            "inf": stats.inf,
            "zero": stats.zero,
            "overflow": stats.overflow,
            "underflow": stats.underflow,
            "subnormal": stats.subnormal,
        }
        if stats.norms is not None:
            row |= {k: _number(v) for k, v in asdict(stats.norms).items()}
            row["relative_rms_error"] = _number(stats.norms.relative_rms_error)
        return row


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of one file of a model directory."""

    path: str  #: relative, with ``/``; in the output, but for those left out
    action: Literal["converted", "written", "copied", "left out"]
    nbytes: int | None = None  #: in the output
    why: str = ""


@dataclass(frozen=True)
class Report:
    """The result of a conversion; ``output`` is None when it was refused and nothing was written."""

    source: str
    output: str | None
    plan: Plan
    seen: Mapping[int, Stats] = field(repr=False)  #: by position in the plan, where there was anything to say
    findings: tuple[Finding, ...]
    options: Mapping[str, Any]
    source_bytes: int  #: of the file
    output_bytes: int  #: of the file, as planned where it was not written
    verified_bytes: int  #: of the output, read back and compared with a fresh cast
    seconds: float  #: until the output was ready to get its name
    files: tuple[FileReport, ...] = ()  #: of a model directory
    published: Mapping[str, Any] | None = None
    """On the Hub: ``repo``, ``commit``, ``url``, ``pr_url``, and whether it was there ``already``."""

    @cached_property
    def tensors(self) -> tuple[TensorReport, ...]:
        """Every tensor of the output with its statistics, in the source's order."""
        rows = []
        for key, item in enumerate(self.plan.items):
            stats = self.seen.get(key, Stats())
            rows.append(TensorReport(item, Stats(n=item.src.numel - stats.n) + stats))
        return tuple(rows)

    @property
    def ok(self) -> bool:
        """Whether the output was written."""
        return self.output is not None

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "warning")

    @property
    def stats(self) -> Stats:
        """All tensors together."""
        return sum((t.stats for t in self.tensors), Stats())

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: sizes in bytes, counts in elements."""
        total = self.stats
        return {
            "schema": SCHEMA,
            "tool": f"precconv {__version__}",
            "source": self.source,
            "output": self.output,
            "ok": self.ok,
            "options": dict(self.options),
            "source_bytes": self.source_bytes,
            "output_bytes": self.output_bytes,
            "verified_bytes": self.verified_bytes,
            "seconds": round(self.seconds, 3),
            "totals": {k: getattr(total, k) for k in ("n", "nan", "inf", "zero", "overflow", "underflow", "subnormal")},
            **plan_dict(self.plan, items=False),
            "findings": [asdict(f) for f in self.findings],
            "files": [asdict(f) for f in self.files],
            "published": None if self.published is None else dict(self.published),
            "tensors": [t.to_dict() for t in self.tensors],
        }

    def to_json(self) -> str:
        """ASCII, so that it survives any terminal, and names of files that are not Unicode."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON to a file, whole or not at all; raises OutputError."""
        with self.staged(path):
            pass

    @contextmanager
    def staged(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write the JSON before the body, give it its name after it; when the body raises it is gone.

        So a report that cannot be written is known before the output is published.
        """
        data = (self.to_json() + "\n").encode()
        with part_file(Path(path)) as part:
            part.write(memoryview(data), 0)
            yield
            part.publish(replace=True, durable=False)


def check_report_path(path: Path, others: Sequence[Path], *, option: str = "--report", begins: bytes = b"{") -> None:
    """Refuse a report that could not be written after a long run, or would replace a checkpoint.

    ``begins``: how a file begins that it may replace.
    """
    what = "report" if option == "--report" else "page"
    if os.fspath(path) == "-":
        instead = "; --json prints it" if option == "--report" else ""
        raise UsageError(f"the {what} is written to a file, not to stdout", hint=f"give {option} a name{instead}")
    if not is_directory(path.parent):
        raise OutputError("there is no such directory", path=path.parent, hint="make it first")
    if any(_same_place(path, o) for o in others) or (is_taken(path) and not _is_report(path, begins)):
        raise OutputError(f"the {what} cannot go there", path=path, hint=f"give {option} another name")


def _is_report(path: Path, begins: bytes) -> bool:
    """Whether a report may replace what has its name: a file that could be one; no device, link or checkpoint."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with open(path, "rb") as f:
            return f.read(len(begins)) in (b"", begins)
    except OSError:
        return False


def _same_place(a: Path, b: Path) -> bool:
    """Whether both names lead to one file, or would once there is one."""
    return same_file(a, b) or (same_file(a.parent, b.parent) and os.path.normcase(a.name) == os.path.normcase(b.name))


def plan_dict(plan: Plan, *, items: bool = True) -> dict[str, Any]:
    """A plan as plain data."""
    keys = ("why", "from", "to", "tensors", "elements", "bytes")
    data: dict[str, Any] = {
        "to": plan.to,
        "metadata": dict(plan.metadata),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
        "groups": [
            dict(zip(keys, (str(v) if i < 3 else v for i, v in enumerate(g)), strict=True)) for g in plan.groups()
        ],
        "dropped": [_item_dict(i) for i in plan.dropped],
    }
    if items:
        data["tensors"] = [_item_dict(i) for i in plan.items]
    return data


def _item_dict(item: Item) -> dict[str, Any]:
    src, to, why = item
    return {"name": src.name, "from": src.dtype.name, "to": to.name, "why": why, "shape": list(src.shape)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
