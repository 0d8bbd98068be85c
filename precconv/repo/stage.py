"""An output directory while it is being made: beside its final name, under one that a later run finds again.

``.NAME.xxxxxxxx.precconv-part/`` holds the tree in ``files/``, a record of each finished output in ``done/``, and what
the run was about in ``state.json``.  A run with the same source, options and version goes on where one was killed; any
other starts afresh.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, OutputError
from ..fileio import PART_SUFFIX, is_file_at, part_file, remove_stale_parts, sync_directory, try_lock
from ..paths import is_taken, reason

__all__ = ["Stage", "copy_mode", "home_of", "put_back", "remove_stage", "staged"]

_STATE, _LOCK = "state.json", "lock"
_OLD = "replaced"  #: where an output that is being replaced waits


class Stage:
    """What is made so far; made by ``staged``."""

    def __init__(self, final: Path, home: Path, fingerprint: str, *, durable: bool) -> None:
        self.final, self.home, self.files = final, home, home / "files"
        self.durable = durable
        self.kept = False  #: whether a failed run leaves it for the next one
        self.discarded = False  #: whether an unfinished run of other options or another source was there
        self.done = self._resume(fingerprint)  #: records of finished outputs, by name

    def _resume(self, fingerprint: str) -> dict[str, Any]:
        state = _read(self.home / _STATE)
        done = self.home / "done"
        if state.get("fingerprint") != fingerprint:
            self.discarded = any(done.glob("*.json"))
            for part in (self.files, done):
                shutil.rmtree(part, ignore_errors=True)
        self.files.mkdir(exist_ok=True)
        done.mkdir(exist_ok=True)
        for part in (self.files, done):  # once: to look through a directory for each of its files takes ever longer
            for directory in (part, *(p for p in part.rglob("*") if p.is_dir())):
                remove_stale_parts(directory)
        remove_stale_parts(self.home)
        self._write(self.home / _STATE, {"fingerprint": fingerprint})
        records = [_read(p) for p in sorted(done.glob("*.json"))]
        return {r["name"]: r["data"] for r in records if self._is_intact(r)}

    def _is_intact(self, record: Mapping[str, Any]) -> bool:
        """Whether an output is as it was recorded: the file's bytes cannot have been lost since."""
        try:
            found = self.place(record["name"]).stat()
        except (OSError, KeyError, TypeError, ValueError):
            return False
        if [found.st_size, found.st_mtime_ns] != record.get("stat"):
            return False
        return record.get("synced") is True or record.get("boot") == boot_id() is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was there when the run began."""
        if self.discarded:
            return ("what an unfinished run with other options, another source or version had done was discarded",)
        return (f"an earlier run had finished {len(self.done)} weight files: gone on from there",) if self.done else ()

    def place(self, name: str) -> Path:
        """Where the file ``name`` (relative, with ``/``) of the output is made; its directory exists then."""
        path = self.files / name
        with _writing(self.final):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def must_sync(self) -> bool:
        """Whether a finished output must be on the disk before it is recorded: where nothing tells of a crash."""
        return self.durable or boot_id() is None

    def record(self, name: str, data: Mapping[str, Any]) -> None:
        """An output is whole and verified; ``data`` is what the report needs of it."""
        with _writing(self.final / name):
            found = self.place(name).stat()
        entry = {
            "name": name, "stat": [found.st_size, found.st_mtime_ns], "boot": boot_id(), "synced": self.must_sync,
            "data": data,
        }  # fmt: skip
        key = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).hexdigest()
        self._write(self.home / "done" / f"{key}.json", entry)
        self.done[name] = entry["data"]

    def _write(self, path: Path, data: Mapping[str, Any]) -> None:
        text = json.dumps(data).encode()
        with part_file(path, sweeps=False) as part:
            part.write(memoryview(text), 0)
            part.publish(replace=True, durable=self.durable)

    def write(self, name: str, data: bytes, *, mode_of: Path | None = None) -> None:
        """A small file of the output, with the permissions of another."""
        with part_file(self.place(name), sweeps=False) as part:
            part.write(memoryview(data), 0)
            if mode_of is not None:
                copy_mode(mode_of, part.path)
            part.publish(replace=True, durable=self.durable)

    def copy(self, source: Path, name: str) -> None:
        """A file that is carried over as it is, with its permissions; a copy, so that no edit reaches the source."""
        target = self.place(name)
        try:
            target.unlink(missing_ok=True)
            shutil.copy(source, target)
            if self.durable:
                with open(target, "rb") as file:
                    os.fsync(file.fileno())
        except OSError as e:
            if e.filename == os.fspath(source):
                raise InputError(f"cannot be read: {reason(e)}", path=source) from e
            raise OutputError(f"cannot be written: {reason(e)}", path=self.final / name) from e

    def publish(self, check: Callable[[Path], None] | None = None) -> None:
        """Give the directory its name, in one step; what it replaces is removed.

        ``check``: asked where that lies just then, and raises for what must stay.
        """
        old = self.home / _OLD
        with _writing(self.final):
            for directory in sorted((p for p in self.files.rglob("*") if p.is_dir()), reverse=True):
                if self.durable:
                    sync_directory(directory)
            if self.durable:
                sync_directory(self.files)
            try:
                if is_taken(self.final):
                    self.final.rename(old)
                if check is not None and is_taken(old):  # hours after the start, somebody may have put things there
                    check(old)
                self.files.rename(self.final)
            except BaseException:  # a signal may come at any time
                if is_taken(old) and not is_taken(self.final):
                    old.rename(self.final)
                raise
            if self.durable:
                sync_directory(self.final.parent)

    def only(self, names: Collection[str]) -> None:
        """Remove what an earlier run left in the tree that is not part of this output."""
        for path in [p for p in self.files.rglob("*") if not p.is_dir()]:
            if path.relative_to(self.files).as_posix() not in names:
                with _writing(self.final):
                    path.unlink()


def copy_mode(source: Path, part: Path) -> None:
    """Give an output its source's permissions; raises InputError where that has lost its name meanwhile."""
    try:
        shutil.copymode(source, part)
    except OSError as e:
        if e.filename == os.fspath(source):
            raise InputError(f"cannot be read: {reason(e)}", path=source) from e
        raise OutputError(f"cannot be written: {reason(e)}", path=part) from e


@contextmanager
def staged(final: Path, fingerprint: str, *, durable: bool) -> Iterator[Stage]:
    """A directory for an output, to go on with or new; removed on the way out unless ``kept`` says otherwise.

    Raises OutputError where another run is making the same output.
    """
    home, keep = home_of(final), False
    with _writing(final):
        if not home.is_symlink():
            home.mkdir(exist_ok=True)
    with _lock(final) as is_mine:
        if not is_mine:
            raise OutputError("another run is writing it", path=final, hint="wait for it, or give another name with -o")
        try:
            with _writing(final):
                if is_taken(home / _OLD) and is_taken(final):  # a run was killed before it could remove it
                    shutil.rmtree(home / _OLD)
                stage = Stage(final, home, fingerprint, durable=durable)
            try:
                yield stage
            finally:
                keep = stage.kept
        finally:
            if not keep:  # under the lock: who comes next makes a directory of their own
                shutil.rmtree(home, ignore_errors=True)
    if not keep and os.name == "nt":  # where a file that is open cannot be removed
        shutil.rmtree(home, ignore_errors=True)


def put_back(final: Path) -> None:
    """Give an output its name back where a run was killed between taking it away and putting the new one there."""
    old = home_of(final) / _OLD
    if is_taken(old):
        with _lock(final) as is_mine, _writing(final):
            if is_mine and not is_taken(final):
                old.rename(final)


@contextmanager
def _lock(final: Path) -> Iterator[bool]:
    """Whether no other run is making the same output, nor is until the end of the body."""
    home = home_of(final)
    path = home / _LOCK
    for made in (home, home / "files", home / "done"):
        if made.is_symlink():  # in a directory that others may write, theirs: what it leads to is not ours to remove
            raise OutputError("is a link where the output is to be made", path=made, hint="remove it")
    with _writing(final):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        yield try_lock(fd) and is_file_at(fd, path)  # else whoever held it has removed it, and a third may have another
    finally:
        os.close(fd)


def home_of(final: Path) -> Path:
    """Where ``final`` is made; the same in every run."""
    key = hashlib.blake2b(os.fsencode(final.name), digest_size=4).hexdigest()
    return final.with_name(f".{final.name[:50]}.{key}{PART_SUFFIX}")


def remove_stage(final: Path) -> None:
    """Remove what a killed run left of making ``final``, unless a run is at it."""
    home = home_of(final)
    if home.is_symlink():
        return
    with contextlib.suppress(OSError):
        # made where it is not there: the run may have been killed while it removed all this
        fd = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        free = try_lock(fd)
        os.close(fd)
        if free:
            shutil.rmtree(home, ignore_errors=True)


def boot_id() -> str | None:
    """What changes when the system starts again and only then; None where the system does not say.

    Until then, bytes that a killed process wrote are not lost.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise OutputError(f"cannot be written: {reason(e)}", path=path) from e
