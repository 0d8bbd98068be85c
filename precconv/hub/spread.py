"""One large model converted by many machines: each takes a shard, converts and sends it, and one commit publishes all.

Tensors never travel between the machines: every worker fetches its shard from the Hub and sends what it made there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..checkpoint import open_checkpoint
from ..convert import Outcome, Task, make_task, verify, write
from ..engines import Engine
from ..errors import PrecconvError, WorkerError
from ..fileio import part_file
from ..formats import format_named
from ..plan import Plan
from ..repo.convert import Made
from ..repo.outcomes import outcome_dict, outcome_of
from ..request import Request
from ..runs import Progress, ProgressCallback
from .client import quiet
from .publish import Target, upload
from .push import HubSink
from .source import HubRepo, fetched

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

__all__ = ["ShardJob", "convert_shard", "runner"]

#: Seconds between two looks at how far the shards are.
_LOOK = 0.1
#: Bytes that a worker needs at most: torch, and the bar of the benchmarks above it.
_MEMORY = 1 << 30


class ShardJob(NamedTuple):
    """One output of a model, as a worker anywhere can make it."""

    repo: HubRepo
    source: str  #: the file it is made from
    name: str  #: of the output, relative
    plan: Plan
    format: str
    request: Request
    target: Target


def convert_shard(
    job: ShardJob, progress: ProgressCallback | None = None
) -> tuple[dict[str, Any], CommitOperationAdd | None]:
    """Fetch, convert, verify and send one shard; what became of it, and what to commit unless a check refused.

    Nothing stays on the machine.  Raises what a conversion raises.
    """
    with quiet(), tempfile.TemporaryDirectory(prefix="precconv-") as place:
        request = job.request
        path = fetched(job.repo, job.source, to=Path(place, "source"))
        final = Path(place, Path(job.name).name)
        with open_checkpoint(
            path, weights=request.weights, select=request.select, strip_wrappers=request.strip_wrappers
        ) as found:
            task = make_task(found, job.plan, final, format_named(job.format), request)
            shown = Progress(sum(p.src.nbytes for p in task.layout.places), progress)
            with part_file(final) as part:
                outcome = write(task, part, shown)
                if outcome.errors:
                    return outcome_dict(task, outcome), None
                outcome = verify(task, outcome, part, shown)
                part.publish(replace=True, durable=False)
        return outcome_dict(task, outcome), upload(job.target, final, job.name)


def runner(
    repo: HubRepo, sink: HubSink, engine: Engine
) -> Callable[[Sequence[Made], ProgressCallback | None], dict[str, Outcome]]:
    """What makes a model's outputs on an engine, and hands the sink what they sent."""

    def run(todo: Sequence[Made], progress: ProgressCallback | None) -> dict[str, Outcome]:
        try:
            return _run(repo, sink, engine, todo, progress)
        except BaseException:
            engine.interrupt()
            raise

    return run


def _run(
    repo: HubRepo, sink: HubSink, engine: Engine, todo: Sequence[Made], progress: ProgressCallback | None
) -> dict[str, Outcome]:
    total = sum(task.layout.size for *_, task in todo)
    waiting = iter(todo)
    running: dict[Future[Any], tuple[str, Task]] = {}
    outcomes: dict[str, Outcome] = {}
    while len(outcomes) < len(todo):
        while len(running) < engine.workers and (made := next(waiting, None)) is not None:
            planned, output, task = made
            request = replace(planned.request, workers=engine.threads)
            (source,) = output.sources
            job = ShardJob(repo, source, output.name, output.plan, planned.fmt.name, request, sink.target)
            running[engine.start(convert_shard, job, memory=_MEMORY)] = (output.name, task)
        for future in wait(running, _LOOK, FIRST_COMPLETED).done:
            name, task = running.pop(future)
            data, operation = _result(future)
            outcomes[name] = outcome_of(task, data)
            if operation is not None:
                sink.sent(operation)
        if progress is not None:
            progress(sum(o.size for o in outcomes.values()), total)
    return outcomes


def _result(future: Future[Any]) -> Any:
    """What a worker returned; raises what it raised, as it was there."""
    error = future.exception()
    if error is None:
        return future.result()
    cause = getattr(error, "cause", None)  # Ray's, of what a task raised
    if isinstance(cause, PrecconvError):
        raise cause
    if isinstance(error, PrecconvError):
        raise error
    said = str(error).strip() or type(error).__name__
    raise WorkerError(f"a worker failed: {said.splitlines()[0]}") from error
