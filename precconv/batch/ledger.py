"""What became of every job, a JSON object a line, added to and never rewritten.

A record is one write and on the disk before the next step is taken, so a killed run leaves all of it but for the end
of the last line; the next run closes that line and does not count it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from .._version import __version__
from ..errors import InputError, OutputError
from ..fileio import sync_directory, try_lock
from ..paths import reason

__all__ = ["SCHEMA", "Event", "Ledger", "now", "open_ledger", "read_ledger"]

#: Version of the records: raised when a key changes its meaning or goes; new keys and events may come.
SCHEMA = 1
Event = Literal["started", "done", "failed", "interrupted"]

msvcrt: Any
try:
    msvcrt = import_module("msvcrt")
except ImportError:
    msvcrt = None

#: How every line begins, and so a torn one too.
_BEGINNING = b'{"schema": '
#: Where Windows locks a byte: nothing is ever written there, and what is locked cannot be read by others.
_LOCKED_BYTE = 0x7FFFFFFE


class Ledger:
    """An open ledger: what it said, and where to add to it; ``fd`` is -1 for one that is only read."""

    def __init__(self, path: Path, records: Iterable[Mapping[str, Any]], fd: int = -1) -> None:
        self.path, self.fd = path, fd
        self.under_way: dict[tuple[str, str], dict[str, Any]] = {}  #: started by this run, not ended
        self._last: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._latest: dict[tuple[object, str], Mapping[str, Any]] = {}
        for record in records:
            self._keep(record)

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._last[_place(record["key"], record["output"])] = record
        self._latest[record.get("source"), os.path.normcase(record["output"])] = record

    def last(self, key: str, output: str) -> Mapping[str, Any] | None:
        """The last that was said of a job with this output."""
        return self._last.get(_place(key, output))

    def latest(self, source: str, output: str) -> Mapping[str, Any] | None:
        """The same, whatever the source was then: one that could not be found had no commit yet."""
        return self._latest.get((source, os.path.normcase(output)))

    def knows(self, output: str) -> bool:
        """Whether any job made, or began to make, this output."""
        return any(place == os.path.normcase(output) for _, place in self._last)

    def add(self, event: Event, *, key: str, source: str, output: str, **data: Any) -> dict[str, Any]:
        """Add a record, and return when it is on the disk; raises OutputError when it cannot be."""
        record = {
            "schema": SCHEMA, "time": now(), "version": __version__, "event": event, "key": key, "source": source,
            "output": output, **data,
        }  # fmt: skip
        line = json.dumps(record).encode() + b"\n"  # ASCII, so that names which are no Unicode survive
        self._write(line)
        if event == "started":
            self.under_way[_place(key, output)] = {"key": key, "source": source, "output": output}
        else:
            self.under_way.pop(_place(key, output), None)
        self._keep(record)
        return record

    def _write(self, line: bytes) -> None:
        try:
            written = os.write(self.fd, line)
            os.fsync(self.fd)
        except OSError as e:
            raise OutputError(f"cannot be written: {reason(e)}", path=self.path) from e
        if written < len(line):
            raise OutputError("cannot be written: no room for a whole record", path=self.path)


def _place(key: str, output: str) -> tuple[str, str]:
    return key, os.path.normcase(output)


def now() -> str:
    """UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@contextmanager
def open_ledger(path: Path) -> Iterator[Ledger]:
    """A ledger to add to, locked until the end; made, with its directory, when there is none.

    Raises OutputError where another run has it, or where it is another file, or that of a newer version.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        fd = os.open(path, flags, 0o666)
    except OSError as e:
        raise OutputError(f"cannot be written: {reason(e)}", path=path) from e
    try:
        if not _lock(fd):
            hint = "wait for it, or give this one another --ledger and other outputs"
            raise OutputError("another run is at work on this batch", path=path, hint=hint)
        if new:
            sync_directory(path.parent)
        data = _read(path)
        ledger = Ledger(path, _records(data, path), fd)
        if data and not data.endswith(b"\n"):
            ledger._write(b"\n")
        yield ledger
    finally:
        os.close(fd)


def read_ledger(path: Path) -> Ledger:
    """What a ledger says, without a lock and without changing it; nothing where there is none."""
    return Ledger(path, _records(_read(path) if path.exists() else b"", path))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InputError(f"cannot be read: {reason(e)}", path=path) from e


def _records(data: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """The records of a ledger; lines that are none, as a crash leaves them, are passed over."""
    first = data[: data.find(b"\n")] if b"\n" in data else data
    if not first.startswith(_BEGINNING) and not _BEGINNING.startswith(first):
        hint = "give another name with --ledger; nothing was changed"
        raise OutputError("is not the ledger of a batch", path=path, hint=hint)
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict) or not all(isinstance(record.get(k), str) for k in ("event", "key", "output")):
            continue
        schema = record.get("schema")
        if not isinstance(schema, int) or schema > SCHEMA:
            hint = "use that version, or begin a new ledger with --ledger"
            raise OutputError("was written by a newer version of precconv", path=path, hint=hint)
        yield record


def _lock(fd: int) -> bool:
    """Whether this process now holds the ledger; the system takes the lock back when it ends, however it does."""
    if msvcrt is None:
        return try_lock(fd)
    os.lseek(fd, _LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    except OSError as e:
        return e.errno not in (errno.EACCES, errno.EDEADLK)
    return True
