"""The public ``convert_many``, and what the command line needs of a batch besides."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from ..engines import Engine, open_engine
from ..request import StrPath
from .ledger import open_ledger, read_ledger
from .lists import entries_of
from .log import LogEvent
from .options import Options
from .prepare import Batch, prepare
from .run import Listener, Standing, run_batch, select
from .summary import BatchReport, PlannedBatch, plan_batch

__all__ = ["LEDGER_NAME", "How", "convert_many", "do", "look"]

LEDGER_NAME = "precconv-batch.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a batch is done, as ``convert_many`` documents it."""

    ledger: Path
    retry_failed: bool = False
    stop_after: int | None = None
    workers: int | None = None
    engine: str | Engine = "local"
    address: str | None = None


def convert_many(
    sources: Sequence[StrPath | Mapping[str, Any]],
    *,
    output_dir: StrPath = ".",
    output: str | None = None,
    workers: int = 1,
    ledger: StrPath | None = None,
    retry_failed: bool = False,
    stop_after: int | None = None,
    engine: str | Engine | None = None,
    address: str | None = None,
    event: Callable[[LogEvent], None] | None = None,
    progress: Callable[[Standing], None] | None = None,
    **options: Unpack[Options],
) -> BatchReport:
    """Convert many checkpoints and models; a failure is that one's, and a second call does what is left.

    ``sources``: what ``convert`` takes, patterns of local files, or mappings with ``source`` and options of its own,
    among them ``output``.
    ``output_dir``: made when it is not there.  ``output``: a template of names in it, with ``{org}``, ``{name}``,
    ``{stem}``, ``{to}``, ``{revision}``; by default the name that ``convert`` gives.
    ``workers``: sources at a time; the cores are shared between them.
    ``ledger``: the file that remembers what is done, by default ``precconv-batch.jsonl`` in ``output_dir``.
    ``retry_failed``: do only what failed last time.  Without it everything that is not done is done.
    ``stop_after``: failures after which nothing more is begun.
    ``engine``: ``local`` (processes), ``inline`` (this process, one after the other; the default for one worker),
    ``ray``, or an engine that is open; ``address``: of the Ray cluster.
    ``event``, ``progress``: called in this thread for everything that happens, and a few times a second.
    ``options``: those of ``convert``; outputs are always durable.

    Raises UsageError, before any work, for a request that cannot be carried out as it is; OutputError for a ledger
    that another run has or that cannot be written; KeyboardInterrupt when the running conversions have stopped.
    """
    root = Path(output_dir)
    batch = prepare(entries_of(sources), options=options, output=output, output_dir=root)
    how = How(
        ledger=root / LEDGER_NAME if ledger is None else Path(ledger), retry_failed=retry_failed,
        stop_after=stop_after, workers=workers, engine=engine or ("inline" if workers == 1 else "local"),
        address=address,
    )  # fmt: skip
    nothing = Listener()
    return do(batch, how, Listener(event or nothing.event, progress or nothing.progress))


def do(batch: Batch, how: How, listener: Listener) -> BatchReport:
    """Carry a batch out."""
    started = time.perf_counter()
    with _engine(how) as engine, open_ledger(how.ledger) as ledger:
        results = run_batch(
            batch.jobs, engine, ledger, retry_failed=how.retry_failed, stop_after=how.stop_after, listener=listener
        )
    return BatchReport(tuple(results), Path(os.path.abspath(how.ledger)), time.perf_counter() - started)  # noqa: PTH100


def _engine(how: How) -> Any:
    """An engine that was given stays open."""
    if isinstance(how.engine, Engine):
        return nullcontext(how.engine)
    return open_engine(how.engine, workers=how.workers, address=how.address)


def look(batch: Batch, how: How) -> PlannedBatch:
    """What ``do`` would do, from headers and the ledger alone."""
    return plan_batch(list(select(batch.jobs, read_ledger(how.ledger), retry_failed=how.retry_failed)))
