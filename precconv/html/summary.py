"""What the page shows, as plain data: the result's own JSON, its tensors as columns, and what is drawn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..report import Report
from .columns import columns
from .layers import heat_map

if TYPE_CHECKING:
    from ..scan import Scan

__all__ = ["conversion_data", "scan_data"]


def scan_data(found: Scan) -> dict[str, Any]:
    """Tensors at risk first; the rows of the map in the source's order."""
    whole = found.to_dict()
    heat = heat_map(found.tensors)
    place = {id(t): n for n, t in enumerate(found.tensors)}
    heat["of"] = [heat["of"][place[id(t)]] for t in found.ranked()]
    tensors = columns(whole.pop("tensors"))
    return {"kind": "scan", "result": whole, "lines": [*found.verdict.lines], "tensors": tensors, "heat": heat}


def conversion_data(done: Report) -> dict[str, Any]:
    """Tensors with findings first, then those that lost most."""
    whole = done.to_dict()
    rows = whole.pop("tensors")
    named = {f.tensor for f in done.findings}
    order = sorted(range(len(rows)), key=lambda n: _risk(rows[n], named), reverse=True)
    tensors = columns([rows[n] for n in order])
    lines = [_outcome(done), _changes(done), _checks(done)]
    return {"kind": "conversion", "result": whole, "lines": lines, "tensors": tensors, "order": order}


def _risk(row: dict[str, Any], named: set[str]) -> tuple[Any, ...]:
    return row["name"] in named, row["overflow"], row["underflow"], row.get("relative_rms_error") or 0.0


def _outcome(done: Report) -> str:
    if done.output is None:
        return "not written: a check refused it, the output path is as it was"
    return f"written: {done.output}"


def _changes(done: Report) -> str:
    cast = [i for i in done.plan.items if i.to is not i.src.dtype]
    kept = len(done.plan.items) - len(cast)
    dropped = f", {len(done.plan.dropped):,} dropped" if done.plan.dropped else ""
    return (
        f"changed: {len(cast):,} of {len(done.plan.items):,} tensors to another dtype, {kept:,} as they were{dropped}"
    )


def _checks(done: Report) -> str:
    errors = sum(f.level == "error" for f in done.findings)
    warnings = len(done.plan.warnings) + len(done.warnings)
    return f"found: {errors:,} errors, {warnings:,} warnings; {done.verified_bytes:,} bytes read back and compared"
