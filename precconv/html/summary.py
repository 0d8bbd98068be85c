"""What the page shows, as plain data: the result's own JSON, its tensors as columns, and what is drawn from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..dtypes import BF16, FP16, DType
from ..exponents import Exponents
from ..report import Report, TensorReport
from ..tensors import TensorInfo
from .columns import columns
from .layers import counts, heat_map, span

if TYPE_CHECKING:
    from ..scan import Scan

__all__ = ["conversion_data", "scan_data"]


def scan_data(found: Scan) -> dict[str, Any]:
    """Tensors at risk first; the rows of the map in the source's order."""
    whole = found.to_dict()
    heat = _heat(
        [t.info for t in found.tensors], [None if t.measure is None else t.measure.exponents for t in found.tensors]
    )
    measures = [t.measure for t in found.tensors if t.measure is not None]
    heat["edges"] = _edges((d, m.exponents) for d in (FP16, BF16) for m in measures if m.loss(d).overflow)
    place = {id(t): n for n, t in enumerate(found.tensors)}
    heat["of"] = [heat["of"][place[id(t)]] for t in found.ranked()]
    tensors = columns(whole.pop("tensors"))
    return {"kind": "scan", "result": whole, "lines": [*found.verdict.lines], "tensors": tensors, "heat": heat}


def conversion_data(done: Report) -> dict[str, Any]:
    """Tensors with findings first, then those that lost most."""
    whole = done.to_dict()
    rows = whole.pop("tensors")
    seen = [_exponents(t) for t in done.tensors]
    for row, exponents in zip(rows, seen, strict=True):
        if exponents is not None:
            row["exponents"] = counts(exponents)
    heat = _heat([i.src for i in done.plan.items], seen)
    heat["edges"] = _edges(_overflowed(done, seen))
    named: dict[str, tuple[bool, bool]] = {}
    for f in done.findings:
        named[f.tensor] = max(named.get(f.tensor, (False, False)), (f.level == "error", f.check == "overflow"))
    order = sorted(range(len(rows)), key=lambda n: _risk(rows[n], named), reverse=True)
    heat["of"] = [heat["of"][n] for n in order]
    tensors = columns([rows[n] for n in order])
    lines = [_outcome(done), _changes(done), _checks(done)]
    return {"kind": "conversion", "result": whole, "lines": lines, "tensors": tensors, "order": order, "heat": heat}


def _exponents(tensor: TensorReport) -> Exponents | None:
    """None where a tensor's values were not looked at."""
    src = tensor.item.src
    return Exponents() if src.dtype.is_castable and not src.numel else tensor.stats.exponents


def _heat(infos: Sequence[TensorInfo], seen: Sequence[Exponents | None]) -> dict[str, Any]:
    heat = heat_map([t.name for t in infos], seen)
    return {**heat, "unread": _unread(infos, seen)}


def _unread(infos: Sequence[TensorInfo], seen: Sequence[Exponents | None]) -> list[str]:
    """What the map does not show, a sentence each."""
    said, total = [], _things(len(infos), "tensor")
    floats = [e for t, e in zip(infos, seen, strict=True) if t.dtype.is_castable]
    unseen = sum(e is None for e in floats)
    others = [t.dtype.name for t in infos if not t.dtype.is_castable]
    if unseen and any(e is not None and e.counts for e in floats):
        why = "they share memory with others, and show part of it"
        said.append(f"The values of {unseen:,} of {total} were not looked at by themselves: {why}.")
    elif unseen:
        said.append(f"The values of {unseen:,} of {total} were not looked at.")
    if others:
        types = ", ".join(dict.fromkeys(others))
        hold = "holds" if len(others) == 1 else "hold"
        said.append(f"{len(others):,} of {total} {hold} what no cast changes ({types}): not looked at.")
    return said


def _overflowed(done: Report, seen: Sequence[Exponents | None]) -> Iterator[tuple[DType, Exponents]]:
    """What did not fit which type, also where the tensor became another for that."""
    named = {f.tensor for f in done.findings if f.check == "overflow"}
    for item, exponents in zip(done.plan.items, seen, strict=True):
        if item.src.name in named and exponents is not None:
            yield from ((d, exponents) for d in (FP16, BF16) if item.why == f"overflow in {d}" or item.to is d)


def _edges(overflowing: Iterable[tuple[DType, Exponents]]) -> list[str]:
    """Where the map's powers of two hide an overflow, a sentence a type: they end later than the type does."""
    inside = Counter(d for d, e in overflowing if e.first + len(e.counts) - 1 == span(d)["largest"])
    return [
        f"Values of {_things(n, 'tensor')} overflow {d} inside its range as drawn: {d} ends at {d.max:,.6g}, "
        f"its last power of two at {2.0 ** (span(d)['largest'] + 1):,.6g}."
        for d, n in inside.items()
    ]


def _things(n: int, thing: str) -> str:
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def _risk(row: dict[str, Any], named: Mapping[str, tuple[bool, bool]]) -> tuple[Any, ...]:
    """Errors first, then what overflowed: what got another dtype for that loses nothing any more."""
    found = named.get(row["name"])
    numbers = (row["overflow"], row["underflow"], row.get("relative_rms_error") or 0.0)
    return found is not None, *(found or (False, False)), *numbers


def _outcome(done: Report) -> str:
    if done.published is not None and done.published["already"]:
        return f"published already: {done.output}; nothing was read, nothing was written"
    if done.output is None:
        return "not written: a check refused it, the output path is as it was"
    return f"written: {done.output}"


def _changes(done: Report) -> str:
    total = len(done.plan.items)
    cast = sum(i.to is not i.src.dtype for i in done.plan.items)
    what, kept = (
        ("changed", "as it was" if total - cast == 1 else "as they were") if done.ok else ("would change", "kept")
    )
    dropped = f", {len(done.plan.dropped):,} dropped" if done.plan.dropped else ""
    return f"{what}: {cast:,} of {_things(total, 'tensor')} to another dtype, {total - cast:,} {kept}{dropped}"


def _checks(done: Report) -> str:
    errors = sum(f.level == "error" for f in done.findings)
    warnings = len(done.plan.warnings) + len(done.warnings)
    found = f"found: {_things(errors, 'error')}, {_things(warnings, 'warning')}"
    return f"{found}; {_things(done.verified_bytes, 'byte')} read back and compared" if done.ok else found
