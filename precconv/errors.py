"""Everything precconv raises on purpose, and the exit code of each.

* PrecconvError                  1   catches them all
  x InputError                   1   the source cannot be used as it is
    - UnknownFormatError         1   not a checkpoint this version reads
    - CorruptCheckpointError     1   claims a format and breaks its rules
    - SourceChangedError         1   shrank or changed while it was read
  x OutputError                  1   the output cannot be written there
  x UsageError                   2   the request contradicts itself
    - RuleError                  2   a rule that cannot be read, or that matches nothing
  x NumericError                 3   a numeric check refused
  x VerificationError            4   the written file is not what was planned; it was not published
  x HubError                     5   the Hub refused or could not be reached
  x WorkerError                  1   a process that worked on one of many jobs ended before the job did

Each carries what it is about: ``path``, ``tensor``, ``hint`` (what to do, one line) and, where a
conversion had got that far, ``report``.  What the Hub said also has a ``kind`` and, where it said how long, a ``wait``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from .report import Report

__all__ = [
    "CorruptCheckpointError",
    "HubError",
    "InputError",
    "NumericError",
    "OutputError",
    "PrecconvError",
    "RuleError",
    "SourceChangedError",
    "UnknownFormatError",
    "UsageError",
    "VerificationError",
    "WorkerError",
]


class PrecconvError(Exception):
    """Base of every deliberate failure; ``str()`` is ``path: tensor 'name': message``."""

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        hint: str | None = None,
        report: Report | None = None,
    ) -> None:
        where = [] if path is None else [os.fspath(path)]
        if tensor is not None:
            where.append(f"tensor {tensor!r}")
        super().__init__(": ".join([*where, message]))
        self.message = message
        self.path = path
        self.tensor = tensor
        self.hint = hint
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by state: ``__init__`` takes keywords, and workers in other processes raise these."""
        return (Exception.__new__, (type(self), *self.args), self.__dict__)


class InputError(PrecconvError): ...


class UnknownFormatError(InputError): ...


class CorruptCheckpointError(InputError): ...


class SourceChangedError(InputError): ...


class OutputError(PrecconvError): ...


class UsageError(PrecconvError):
    exit_code = 2


class RuleError(UsageError): ...


class NumericError(PrecconvError):
    exit_code = 3


class VerificationError(PrecconvError):
    exit_code = 4


class WorkerError(PrecconvError): ...


HubKind = Literal[
    "conflict", "connection", "disabled", "file", "gated", "not found", "offline", "permission", "quota", "rate limit",
    "refused", "revision", "server", "token",
]  # fmt: skip


class HubError(PrecconvError):
    """``path`` is the repo; ``wait`` is in seconds."""

    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        kind: HubKind,
        path: str | None = None,
        hint: str | None = None,
        wait: float | None = None,
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.kind = kind
        self.wait = wait

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.kind in ("conflict", "connection", "rate limit", "server")
