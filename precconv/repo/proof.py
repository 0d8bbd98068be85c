"""A whole model held against what a conversion makes of its source: its weights, configs, indexes and other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..bulk import collector_paused
from ..convert import Outcome, make_task
from ..errors import InputError
from ..fileio import InputFile, SourceFile
from ..outputs import output_format
from ..plan import Plan
from ..proof import Mismatch
from ..proving import Proven, named_as, prove_file
from ..readback import first_difference
from ..request import Request
from ..runs import Progress
from .convert import as_one
from .files import INDEX, Small, model_card, small_files
from .listing import list_directory
from .models import Models, open_models
from .plans import ModelPlan, Output, plan_models
from .reports import plan_of_all
from .source import Files

__all__ = ["Held", "prove_as_one", "prove_files"]

#: Bytes compared at a time of a file that is carried over.
_STEP = 1 << 21


@dataclass(frozen=True, slots=True)
class Held:
    """A model, or a file made of one, held against its source."""

    plan: Plan  #: as it should have been carried out
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    files: int
    nbytes: int  #: of the output that were compared
    ignored: tuple[str, ...] = ()  #: files that were not looked at
    uncompared: int = 0  #: tensors, as in ``Proven``


def prove_files(
    files: Files, root: Path, request: Request, progress: Progress, *, ignored: Callable[[str], bool]
) -> Held:
    """Hold the directory ``root`` against what the request makes of a model's files.

    ``ignored``: whether a file of it, by its relative name, does not matter; weights and their indexes do.
    """
    with open_models(files, request) as models:
        plans = plan_models(models, request, progress)
        found: list[Mismatch] = []
        outcomes: dict[str, Outcome] = {}
        names, nbytes, uncompared = set[str](), 0, 0
        for made in plans:
            for output in made.outputs:
                names.add(output.name)
                proven = _weights(made, output, root, progress)
                task = proven.task
                outcomes[output.name] = Outcome(task.plan, task.layout.size, task.layout, (), {}, ())
                found += [replace(m, file=output.name) for m in proven.mismatches]
                nbytes, uncompared = nbytes + proven.nbytes, uncompared + proven.uncompared
        plan = plan_of_all(models, plans, request, outcomes)
        skipped = []
        for small in small_files(models, plans, outcomes, model_card(models, plan, request)):
            names.add(small.path)
            if small.why != INDEX and ignored(small.path):
                skipped.append(small.path)
                continue
            mismatch, size = _small(models, root, small)
            found += [] if mismatch is None else [mismatch]
            nbytes += size
        try:
            others = [name for name in list_directory(root) if name not in names]
        except InputError as e:  # a pipe, or a link that leads nowhere
            others, there = [], Path(e.path or root)
            inside = there.relative_to(root).as_posix() if there.is_relative_to(root) else ""
            found.append(Mismatch("unreadable", e.message, inside))
        skipped += filter(ignored, others)
        found += _unexpected([name for name in others if not ignored(name)])
        looked_at = len(names.difference(skipped))
        return Held(plan, tuple(found), models.notes, looked_at, nbytes, tuple(skipped), uncompared)


def _weights(made: ModelPlan, output: Output, root: Path, progress: Progress) -> Proven:
    path = root / output.name
    with collector_paused():
        task = make_task(output.found, output.plan, named_as(path, made.fmt), made.fmt, made.request)
    if not path.is_file():
        return Proven(task, (Mismatch("missing", "is missing"),), 0, len(task.plan.items))
    return prove_file(task, path, progress)


def _small(models: Models, root: Path, small: Small) -> tuple[Mismatch | None, int]:
    """What is wrong with a file that is no weights, and its bytes."""
    path, data = root / small.path, small.data
    if not path.is_file():
        return Mismatch("missing", "is missing", small.path), 0
    with InputFile(path) as there:
        if data is not None:
            made = "is not as the conversion writes it"
            at = _first_difference(lambda at, n: data[at : at + n], len(data), there)
        else:
            made = "is not the source's"
            source = models.files.open(small.path)
            try:
                at = _first_difference(source.read, source.size, there)
            finally:
                source.close()
        size = there.size
    return None if at is None else Mismatch("file", f"{made}: byte {at} is the first that differs", small.path), size


def _first_difference(read: Callable[[int, int], bytes], size: int, there: SourceFile) -> int | None:
    """Where a file first differs from the ``size`` bytes that ``read``, given an offset and a count, has of another."""
    at, end = 0, min(size, there.size)
    while at < end:
        n = min(_STEP, end - at)
        differs = first_difference(read(at, n), there.read(at, n))
        if differs is not None:
            return at + differs
        at += n
    return None if size == there.size else end


def _unexpected(names: Sequence[str]) -> Iterator[Mismatch]:
    return (Mismatch("unexpected", "does not belong into it", name) for name in names)


def prove_as_one(files: Files, path: Path, request: Request, progress: Progress) -> Held:
    """Hold the file ``path`` against what the request makes of a model's one checkpoint."""
    request = request.with_shared()
    with open_models(files, request) as models:
        made, plan = as_one(models, request, path, progress)
        fmt = output_format(plan.model.whole.format, path, choice=request.format)
        with collector_paused():
            task = make_task(plan.model.whole, made, named_as(path, fmt), fmt, plan.request)
        proven = prove_file(task, path, progress)
        return Held(proven.task.plan, proven.mismatches, models.notes, 1, proven.nbytes, (), proven.uncompared)
