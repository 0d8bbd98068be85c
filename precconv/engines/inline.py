"""Jobs one after the other in this process: needs nothing, but a job that takes the process down takes all."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UsageError
from ..request import worker_count
from .base import Progress, Slots, report_to

__all__ = ["open_engine"]

T = TypeVar("T")


class Inline(Slots):
    """One thread."""

    def run_in(self, slot: int, call: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:  # noqa: ARG002
        return call(*args, **kwargs)

    def run_job(self, slot: int, function: Callable[[Any, Progress | None], T], job: object) -> T:
        return function(job, report_to(self.board, slot))


def open_engine(*, workers: int | None, address: str | None) -> Inline:  # noqa: ARG001  all engines take the same
    if workers not in (None, 1):
        raise UsageError(f"{workers} workers in one process", hint="say --engine local")
    return Inline(1, worker_count(None), array("q", [0] * Slots.board_size(1)))
