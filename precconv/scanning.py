"""The public ``scan``: whatever a source is, its values seen once, or a sample of them.

A model is judged as a conversion would do it: each component with its own config, rules and target.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from .bulk import collector_paused
from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import BF16, FP16, DType
from .errors import UsageError
from .plan import Plan
from .repo.models import Models, open_models
from .repo.plans import combined, plan_models
from .request import Request, StrPath, plan_of, request_of
from .rules import MixedMode, NormMode, Rule
from .runs import Phases, ProgressCallback
from .scan import Part, Scan, scan_checkpoints
from .sizes import size_bytes
from .sources import checkpoint_file, model_files
from .weights import Weights

__all__ = ["SAMPLE", "scan"]

#: What a scan judges unless it is told.
_HALVES = (FP16, BF16)
#: Bytes of a tensor that a sample has at most, unless it is told.
SAMPLE = 1 << 20
#: Requests side by side for a sample of a model on the Hub: they wait, they do not compute.
_REQUESTS = 8


def scan(
    source: StrPath,
    *,
    to: str | DType | None = None,
    sample: str | int | None = None,
    weights: Weights = "auto",
    select: str | None = None,
    strip_wrappers: bool = False,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    component: Mapping[str, str | DType] | Sequence[str] = (),
    from_variant: str | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Scan:
    """Read every value of a source once, and say what a cast would make of them; nothing is written.

    ``source``: as in ``convert``; a model on the Hub is fetched to the client's cache, but for a ``sample``.
    ``to``: the target that the verdict is about; by default both ``fp16`` and ``bf16``.  What each would lose is
    measured in any case.
    ``sample``: read so much of each tensor at most (``1MB``, or bytes), in stretches spread over it.  Of a model on the
    Hub no more than that and the headers is fetched.  All numbers are then about what was read.
    ``weights`` … ``from_variant``: as in ``convert``; they decide which tensors a conversion would cast, and only those
    are judged.
    ``workers``: threads; by default one for each usable core.  The result does not depend on it.
    ``progress``: called in this thread with (done, total) bytes.

    Raises InputError, HubError, UsageError or RuleError.
    """
    if str(to).lower() == "auto":
        raise UsageError("--to auto is for a conversion: a scan says what each dtype would lose", hint="leave out --to")
    requests = {
        request.policy.target: request
        for target in ((to,) if to is not None else _HALVES)
        for request in [
            request_of(
                to=target, weights=weights, select=select, strip_wrappers=strip_wrappers, preset=preset, norms=norms,
                mixed=mixed, keep=keep, rule=rule, rules=rules, component=component, from_variant=from_variant,
                workers=workers,
            )
        ]
    }  # fmt: skip
    nbytes = None if sample is None else _sample(sample)
    first = next(iter(requests.values()))
    phases = Phases(progress)
    files = model_files(source, first, ranged=nbytes is not None, progress=phases.first)
    with ExitStack() as stack:
        if files is None:
            path, beside = checkpoint_file(source, ranged=nbytes is not None, progress=phases.first)
            is_remote = beside is not None
            found = stack.enter_context(
                open_checkpoint(path, weights=weights, select=select, strip_wrappers=strip_wrappers)
            )
            parts, plans = [Part("", found.file.path.name, found)], _of_file(found, requests, beside)
        else:
            is_remote = bool(files.sizes) and nbytes is not None
            models = stack.enter_context(open_models(files, first))
            parts, plans = _parts(models), _of_models(models, requests)
        return scan_checkpoints(
            parts,
            plans,
            source=os.fspath(source),
            workers=max(first.workers, _REQUESTS) if is_remote else first.workers,
            sample=nbytes,
            options=first.plan_words(),
            progress=phases.second,
        )


def _sample(text: str | int) -> int:
    found = size_bytes(text, "sample")
    if found < 1:
        raise UsageError(f"a sample of {text!r} is none", hint="say how much of each tensor, e.g. 1MB")
    return found


def _of_file(found: Checkpoint, requests: Mapping[DType, Request], beside: Path | None) -> dict[DType, Plan]:
    with collector_paused():
        return {to: plan_of(found, request, beside=beside) for to, request in requests.items()}


def _of_models(models: Models, requests: Mapping[DType, Request]) -> dict[DType, Plan]:
    """The plans for all components, as one for each target."""
    made = {}
    for to, request in requests.items():
        with collector_paused():
            plans = [(p.model.name, p.decided) for p in plan_models(models, request)]
        made[to] = combined(request, plans, models.notes)
    return made


def _parts(models: Models) -> list[Part]:
    return [Part(models.label(m), m.set.index or m.set.files[0], m.whole) for m in models.models]
