"""What an engine is: an executor that also says how far its jobs are, and can stop them.

A job is a call ``function(job, progress)``: ``progress(done, total)`` counts bytes, and raises KeyboardInterrupt in
the job when the engine was told to interrupt it.  A job that has no progress to show cannot be stopped that way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Engine", "Slots", "interrupted_by", "report_to"]

T = TypeVar("T")
Progress = Callable[[int, int], None]


class Engine(Executor, ABC):
    """An executor with ``workers`` places, whose jobs may use ``threads`` threads each."""

    workers: int
    threads: int
    remote = False  #: whether jobs may run on other machines, which need to know what memory they take

    @abstractmethod
    def start(self, function: Callable[[Any, Progress | None], T], job: object, *, memory: int) -> Future[T]:
        """Run ``function(job, progress)``; ``memory`` is what it needs at most, in bytes."""

    def progress(self) -> tuple[int, int]:
        """Bytes that are done, of those of all running jobs; (0, 0) where the engine does not know."""
        return 0, 0

    @abstractmethod
    def interrupt(self) -> None:
        """Stop what is running, and start nothing that waits; the futures say how each ended."""


class Slots(Engine):
    """As many threads as places; each takes a slot, and runs one job at a time there.

    ``board``: integers that the jobs write and the engine reads; the first says that all have to stop, and two for
    each slot are the bytes done and in total.  Each is written by one side only, so there is no lock.
    """

    def __init__(self, workers: int, threads: int, board: MutableSequence[int]) -> None:
        self.workers, self.threads, self.board = workers, threads, board
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(workers):
            self._free.put(slot)
        self._pool = ThreadPoolExecutor(workers, "precconv-slot", initializer=self.prepare_thread)

    @staticmethod
    def board_size(workers: int) -> int:
        return 1 + 2 * workers

    def prepare_thread(self) -> None:
        """Called once in each thread before its first job."""

    @abstractmethod
    def run_in(self, slot: int, call: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run a call to its end in a slot."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._pool.submit(self._take, lambda slot: self.run_in(slot, fn, args, kwargs))

    def start(self, function: Callable[[Any, Progress | None], T], job: object, *, memory: int) -> Future[T]:  # noqa: ARG002
        return self._pool.submit(self._take, lambda slot: self.run_job(slot, function, job))

    @abstractmethod
    def run_job(self, slot: int, function: Callable[[Any, Progress | None], T], job: object) -> T:
        """Run a job to its end in a slot, its progress on the board."""

    def _take(self, body: Callable[[int], T]) -> T:
        slot = self._free.get()
        try:
            if self.board[0]:
                raise KeyboardInterrupt
            return body(slot)
        finally:
            self.board[1 + 2 * slot] = self.board[2 + 2 * slot] = 0
            self._free.put(slot)

    def progress(self) -> tuple[int, int]:
        return sum(self.board[1::2]), sum(self.board[2::2])

    def interrupt(self) -> None:
        self.board[0] = 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002  Executor's
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def report_to(board: MutableSequence[int], slot: int) -> Progress:
    """A job's ``progress``: writes to the board, and interrupts the job when the board says so."""

    def show(done: int, total: int) -> None:
        if board[0]:
            raise KeyboardInterrupt
        board[1 + 2 * slot], board[2 + 2 * slot] = done, total

    return show


def interrupted_by(error: BaseException) -> bool:
    """Whether this is how a job ends that was told to stop, or that had not begun."""
    names = {kind.__name__ for kind in type(error).__mro__}  # Ray's is known by name: it need not be installed
    return bool(names & {"KeyboardInterrupt", "CancelledError", "TaskCancelledError"})
