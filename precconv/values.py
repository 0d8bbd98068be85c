"""Plans that depend on the values: what names and shapes decide first, then a pass over what that leaves open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .bulk import collector_paused
from .checkpoint import Checkpoint
from .dtypes import BF16, FP16
from .lossless import automatic, lossless_only, undecided
from .measures import Measure
from .plan import Plan
from .request import Request
from .runs import Progress
from .sweep import castable_bytes, sweep

__all__ = ["settled"]

_NOTE = "decided from the values: no cast changes one"


def settled(
    make: Callable[[Request], Plan], found: Checkpoint, request: Request, progress: Progress | None = None
) -> Plan:
    """The plan that ``make`` makes; of a lossless request, with what the values of ``found`` say.

    ``make`` gives the plan for a target from headers alone, and raises what there is to raise before a value is read.
    """
    if request.lossless is None:
        with collector_paused():
            return make(request)
    simple = request.from_headers()
    targets = (BF16, FP16) if request.lossless == "auto" else (simple.policy.target,)
    with collector_paused():
        plans = [make(replace(simple, policy=replace(simple.policy, target=to))) for to in targets]
    measures = _measures(found, undecided(*plans), request, progress or Progress(0))
    made = automatic(plans[0], plans[1], measures) if len(plans) > 1 else lossless_only(plans[0], measures)
    return replace(made, notes=(*made.notes, _NOTE))


def _measures(found: Checkpoint, names: set[str], request: Request, progress: Progress) -> dict[str, Measure]:
    """What the values of some tensors are like, by name."""
    infos = [t for t in found.infos if t.name in names]
    progress.expect(castable_bytes(infos))
    measures = sweep(replace(found.source, infos=infos), workers=request.workers, progress=progress)
    return {infos[key].name: measure for key, measure in measures.items()}
