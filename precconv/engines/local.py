"""Jobs in processes of this machine, a pool of one process for each place.

A process that dies breaks its own pool and no other: it fails the one job that it had, and the next gets a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, MutableSequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing.connection import wait
from typing import Any, TypeVar

from ..errors import WorkerError
from ..request import worker_count
from .base import Progress, Slots, report_to

__all__ = ["open_engine"]

T = TypeVar("T")

#: Not fork: a process with threads, as torch's, must not be copied.
_CONTEXT = multiprocessing.get_context("spawn")
#: What a terminal or a service manager sends to a whole group: the parent alone answers, and stops its jobs.
_PARENTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Local(Slots):
    """Spawned processes, started when there is a job for them and kept for the next."""

    def __init__(self, workers: int, threads: int) -> None:
        super().__init__(workers, threads, _CONTEXT.RawArray("q", Slots.board_size(workers)))
        self._pools: dict[int, ProcessPoolExecutor] = {}

    def prepare_thread(self) -> None:
        """Processes inherit which signals the thread that starts them does not hear."""
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)

    def run_in(self, slot: int, call: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        pool = self._pool_of(slot)
        try:
            return pool.submit(call, *args, **kwargs).result()
        except BrokenProcessPool as e:
            self._pools.pop(slot).shutdown()
            hint = "this is what running out of memory looks like: fewer --workers need less of it"
            raise WorkerError("the process that worked on it died", hint=hint) from e

    def run_job(self, slot: int, function: Callable[[Any, Progress | None], T], job: object) -> T:
        return self.run_in(slot, partial(_work, slot, function, job), (), {})

    def _pool_of(self, slot: int) -> ProcessPoolExecutor:
        if slot not in self._pools:
            pool = ProcessPoolExecutor(1, _CONTEXT, initializer=_prepare, initargs=(self.board,))
            try:
                pool.submit(_answer).result()
            except BrokenProcessPool as e:
                pool.shutdown()
                hint = "a script that starts it needs 'if __name__ == \"__main__\":' around what it does"
                raise WorkerError("a process to work in could not be started", hint=hint) from e
            self._pools[slot] = pool
        return self._pools[slot]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  Executor's
        super().shutdown(wait, cancel_futures=cancel_futures)
        for pool in self._pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)


def open_engine(*, workers: int | None, address: str | None) -> Local:  # noqa: ARG001  all engines take the same
    places = workers or 1
    return Local(places, max(1, worker_count(None) // places))


# In the processes


_board: MutableSequence[int] = []


def _prepare(board: MutableSequence[int]) -> None:
    """Before the first job: the shared memory for what jobs report, and an end when the parent ends."""
    global _board
    _board = board
    if not hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed cannot say so: without it a job would go on beside the next run's.

    Killed too: what a conversion leaves then is what the next run goes on from.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        with contextlib.suppress(OSError):
            wait([parent.sentinel])
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _answer() -> None:
    """Shows that the process is there."""


def _work(slot: int, function: Callable[[Any, Progress | None], T], job: object) -> T:
    show = report_to(_board, slot)
    show(0, 0)
    return function(job, show)
