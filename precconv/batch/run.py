"""Doing the jobs: which are still to do, as many at a time as the engine has places, each in the ledger at every step.

One job's failure is that job's; only a ledger that cannot be written stops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from ..engines import Engine, interrupted_by
from ..errors import OutputError
from ..paths import is_taken
from .jobs import Job, error_dict, is_output, memory_of, run_job
from .ledger import Ledger, now
from .log import LogEvent
from .prepare import Planned

__all__ = ["Listener", "Outcome", "Result", "Standing", "run_batch", "select"]

Outcome = Literal["done", "skipped", "failed", "interrupted", "not run"]
#: Seconds between two looks at how far the jobs are.
_LOOK = 0.1


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one job in this run; ``data`` as the ledger has it."""

    planned: Planned
    outcome: Outcome
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a batch is."""

    ended: int
    jobs: int
    running: int
    done_bytes: int  #: of the running jobs
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Listener:
    """Who wants to know; called in the thread that runs the batch."""

    event: Callable[[LogEvent], None] = lambda _: None
    progress: Callable[[Standing], None] = lambda _: None


def select(jobs: Sequence[Planned], ledger: Ledger, *, retry_failed: bool) -> Iterator[tuple[Planned, Result | None]]:
    """Every job, and its result where there is nothing to do for it.

    Done is what the ledger says is, and whose output is still there.  ``retry_failed``: only what failed last.
    """
    for planned in jobs:
        last = ledger.last(planned.key, planned.place) or {}
        if last.get("event") == "done" and (planned.output is None or is_taken(planned.output)):
            yield planned, Result(planned, "skipped", last)
        elif retry_failed and (ledger.latest(planned.source, planned.place) or {}).get("event") != "failed":
            yield planned, Result(planned, "not run", {})
        else:
            yield planned, None


def run_batch(
    jobs: Sequence[Planned],
    engine: Engine,
    ledger: Ledger,
    *,
    retry_failed: bool = False,
    stop_after: int | None = None,
    listener: Listener,
) -> list[Result]:
    """Do what is to do; results in the order of the jobs.

    ``stop_after``: failures after which nothing more is begun.  Raises OutputError when the ledger cannot be written,
    KeyboardInterrupt, with a sentence on how far it is, when it was interrupted and the running jobs have stopped.
    """
    run = _Run(jobs, engine, ledger, listener)
    todo = []
    for planned, result in select(jobs, ledger, retry_failed=retry_failed):
        if result is None:
            todo.append(planned)
        else:
            run.results[planned.key, planned.place] = result
            run.tell("info", planned, result.outcome)
    try:
        run.loop(todo, stop_after)
    except KeyboardInterrupt:
        run.wind_down()
        raise KeyboardInterrupt(run.sentence()) from None
    except BaseException:
        engine.interrupt()
        raise
    return [run.result_of(planned) for planned in jobs]


class _Run:
    """One run's state."""

    def __init__(self, jobs: Sequence[Planned], engine: Engine, ledger: Ledger, listener: Listener) -> None:
        self.jobs, self.engine, self.ledger, self.listener = jobs, engine, ledger, listener
        self.results: dict[tuple[str, str], Result] = {}
        self.running: dict[Future[dict[str, Any]], Planned] = {}
        self.failures = 0

    def loop(self, todo: Sequence[Planned], stop_after: int | None) -> None:
        waiting = iter(todo)
        more = True
        while more or self.running:
            while more and len(self.running) < self.engine.workers:
                enough = stop_after is not None and self.failures >= stop_after
                planned = None if enough else next(waiting, None)
                more = planned is not None
                if planned is not None:
                    self.begin(planned)
            done, _ = wait(self.running, _LOOK, FIRST_COMPLETED)
            for future in done:
                self.end(self.running.pop(future), future)
            self.show()

    def begin(self, planned: Planned) -> None:
        """Hand a job to the engine; one whose output is somebody else's fails here."""
        output = planned.place
        last = self.ledger.last(planned.key, output) or {}
        begun = last.get("event") in ("started", "interrupted") and not planned.force
        try:
            if not begun and not planned.force and planned.output is not None and is_output(planned.output):
                raise _exists(planned, ours=self.ledger.knows(output))
            _make_parents(planned)
        except OutputError as e:
            self.failed(planned, {"error": error_dict(e), "seconds": 0.0})
            return
        options = {**planned.job.options, "workers": self.engine.threads}
        tried_again = self.engine.remote and not planned.force  # a task whose worker died, by the engine itself
        job = Job(planned.job.source, options, begun or tried_again)
        memory = memory_of(job) if self.engine.remote else 0
        self.add("started", planned)
        self.tell("info", planned, "started", output=output)
        self.running[self.engine.start(run_job, job, memory=memory)] = planned

    def end(self, planned: Planned, future: Future[dict[str, Any]]) -> None:
        """Record what became of a job."""
        error = _error(future)
        data = future.result() if error is None else {"error": error_dict(error)}
        if error is not None and interrupted_by(error):
            self.interrupted(planned)
        elif "error" in data:
            self.failed(planned, data)
        else:
            self.add("done", planned, **data)
            self.results[planned.key, planned.place] = Result(planned, "done", data)
            self.tell("info", planned, "done", **_said(data))

    def failed(self, planned: Planned, data: dict[str, Any]) -> None:
        self.failures += 1
        self.add("failed", planned, **data)
        self.results[planned.key, planned.place] = Result(planned, "failed", data)
        self.tell("error", planned, "failed", **data["error"], seconds=data.get("seconds"))

    def interrupted(self, planned: Planned) -> None:
        self.add("interrupted", planned)
        self.results[planned.key, planned.place] = Result(planned, "interrupted")
        self.tell("warning", planned, "interrupted")

    def wind_down(self) -> None:
        """Stop what runs, and record how each job ended; a second interruption is not waited for."""
        self.engine.interrupt()
        while self.running:
            done, _ = wait(self.running, return_when=FIRST_COMPLETED)
            for future in done:
                planned = self.running.pop(future)
                error = _error(future)
                if error is not None:
                    self.interrupted(planned)
                else:
                    self.end(planned, future)
        for planned in self.jobs:  # the signal may have come between two steps
            if (planned.key, planned.place) in self.ledger.under_way:
                self.interrupted(planned)

    def add(self, event: Literal["started", "done", "failed", "interrupted"], planned: Planned, **data: Any) -> None:
        self.ledger.add(event, key=planned.key, source=planned.source, output=planned.place, **data)

    def tell(self, level: Literal["info", "warning", "error"], planned: Planned, event: str, **fields: Any) -> None:
        self.listener.event(LogEvent(now(), level, planned.source, event, fields))

    def show(self) -> None:
        done, total = self.engine.progress()
        self.listener.progress(Standing(len(self.results), len(self.jobs), len(self.running), done, total))

    def result_of(self, planned: Planned) -> Result:
        return self.results.get((planned.key, planned.place)) or Result(planned, "not run")

    def sentence(self) -> str:
        counts = {o: sum(r.outcome == o for r in self.results.values()) for o in ("done", "skipped", "interrupted")}
        done = f"{counts['done'] + counts['skipped']} of {len(self.jobs)} are done"
        return f"interrupted; {done}, {counts['interrupted']} were under way, and the same command goes on from there"


def _error(future: Future[Any]) -> BaseException | None:
    """How a future that has ended failed; one that never ran, too."""
    return CancelledError() if future.cancelled() else future.exception()


def _said(data: Mapping[str, Any]) -> dict[str, Any]:
    """What became of a job in words for a line: of what was published, where it is."""
    published = data.get("published")
    return {**data, **({"published": published["pr_url"] or published["url"]} if published else {})}


def _exists(planned: Planned, *, ours: bool) -> OutputError:
    what = "exists, of other options, another version or what the source was before" if ours else "exists"
    hint = "replace it with --force, or give this output another name"
    return OutputError(what, path=planned.place, hint=hint)


def _make_parents(planned: Planned) -> None:
    if planned.output is None:
        return
    try:
        planned.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(f"cannot be made: {e.strerror}", path=planned.output.parent) from e
