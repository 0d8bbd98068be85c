"""Files by position: the one seam between precconv and what an operating system offers.

Each call picks the best the platform has when it is made (``os.preadv``, then ``os.pread``, then a lock with
seek and read, which is all that Windows has), so the tests run the fallbacks by taking the calls away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .errors import InputError, OutputError, SourceChangedError
from .paths import reason, require_space

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows: an open file cannot be removed there, which is the lock we need
    fcntl = None

__all__ = [
    "InputFile",
    "PartFile",
    "SourceFile",
    "is_file_at",
    "part_file",
    "remove_stale_parts",
    "sync_directory",
    "try_lock",
]

_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0)
#: Opening a pipe waits for its other end without it.
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
#: Ends the name of every unfinished output: ``.NAME.xxxxxxxx.precconv-part``, a long NAME cut.
PART_SUFFIX = ".precconv-part"


class _Positional:
    """A file descriptor read and written at positions, from any number of threads."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def read(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.fd, [view], offset)
        if hasattr(os, "pread"):
            data = os.pread(self.fd, len(view), offset)
        else:
            with self._lock:
                os.lseek(self.fd, offset, os.SEEK_SET)
                data = os.read(self.fd, len(view))
        view[: len(data)] = data
        return len(data)

    def read_full(self, view: memoryview, offset: int) -> int:
        """Bytes read: less than asked for only at the end of the file."""
        done = self.read(view, offset)
        while 0 < done < len(view):
            got = self.read(view[done:], offset + done)
            if got == 0:
                break
            done += got
        return done

    def write(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self.fd, view, offset)
        with self._lock:
            os.lseek(self.fd, offset, os.SEEK_SET)
            return os.write(self.fd, view)

    def write_full(self, view: memoryview, offset: int) -> None:
        done = self.write(view, offset)
        while done < len(view):
            done += self.write(view[done:], offset + done)


class SourceFile(Protocol):
    """What a conversion reads from: one file, or several that are read as one."""

    path: Path
    size: int  #: bytes, when opened

    def read_into(self, buffer: memoryview, offset: int) -> None: ...
    def read(self, offset: int, length: int) -> bytes: ...
    def advise_sequential(self) -> None: ...
    def require_unchanged(self) -> None: ...
    def held(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


class InputFile:
    """A source, open for positional reads; close it, or use it as a context manager.

    Raises InputError when it is no regular file or cannot be opened or read, SourceChangedError when it turns out
    shorter than it was when opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock, self._closed, self._users = threading.Lock(), False, 0
        self._file: _Positional | None = _Positional(self._open())
        self._stat = os.fstat(self._file.fd)
        self.size: int = self._stat.st_size  #: bytes, when opened

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | _BINARY | _NONBLOCK)
        except OSError as e:
            raise InputError(reason(e), path=self.path) from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InputError("is not a regular file", path=self.path, hint="copy what it holds to a file first")
        return fd

    @property
    def _reading(self) -> _Positional:
        with self._lock:
            if self._closed:
                raise InputError("was closed already", path=self.path)
            if self._file is None:
                self._file = _Positional(self._open())
                if not self._is_same():
                    raise SourceChangedError("changed while it was read", path=self.path)
            return self._file

    def park(self) -> None:
        """Give the descriptor back until the next read: a model has more shards than a process may have files."""
        with self._lock:
            if not self._users:
                self._close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While it is read: the descriptor is given back when the last one leaves."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
            self.park()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset``."""
        file = self._reading
        try:
            got = file.read_full(buffer, offset)
        except OSError as e:
            raise InputError(f"cannot be read: {reason(e)}", path=self.path) from e
        if got < len(buffer):
            now = os.fstat(file.fd).st_size
            raise SourceChangedError(
                f"shrank while it was read: {self.size} bytes when opened, {now} now", path=self.path
            )

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def advise_sequential(self) -> None:
        """Ask for read-ahead, where there is such a thing."""
        fd = self._reading.fd
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            elif fcntl is not None and hasattr(fcntl, "F_RDAHEAD"):
                fcntl.fcntl(fd, fcntl.F_RDAHEAD, 1)

    def require_unchanged(self) -> None:
        """Raises SourceChangedError when somebody wrote to the file since it was opened."""
        _ = self._reading
        if not self._is_same():
            raise SourceChangedError("changed while it was read", path=self.path)

    def _is_same(self) -> bool:
        assert self._file is not None
        now, then = os.fstat(self._file.fd), self._stat
        return (now.st_ino, now.st_size, now.st_mtime_ns) == (then.st_ino, then.st_size, then.st_mtime_ns)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file.fd)
            self._file = None

    def close(self) -> None:
        with self._lock:
            self._close()
            self._closed = True

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PartFile:
    """An output under its temporary name; made by ``part_file``."""

    def __init__(self, path: Path, final: Path, fd: int) -> None:
        self.path, self.final = path, final
        self._file = _Positional(fd)

    def preallocate(self, size: int) -> None:
        """Make the file ``size`` bytes long, its blocks reserved where the system can reserve them."""
        fd = self._file.fd
        with _writing(self.final):
            os.ftruncate(fd, size)
            if size and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(fd, 0, size)
                except OSError as e:
                    if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                        raise

    def require_space(self, more: int) -> None:
        require_space(self.final, more)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of ``buffer`` (bytes) at ``offset``."""
        try:
            self._file.write_full(buffer, offset)
        except OSError as e:
            raise _unwritten(self.final, e) from e

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with what was written at ``offset``."""
        with _writing(self.final):
            got = self._file.read_full(buffer, offset)
        if got < len(buffer):
            raise OutputError("shrank while it was written", path=self.final)

    def sync(self) -> None:
        """Wait until the bytes are on the disk."""
        with _writing(self.final):
            if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the drive's cache
                with contextlib.suppress(OSError):  # network drives don't know it
                    fcntl.fcntl(self._file.fd, fcntl.F_FULLFSYNC)
                    return
            os.fsync(self._file.fd)

    def publish(self, *, replace: bool, durable: bool) -> None:
        """Give the file its final name, in one step; without ``replace`` never over an existing file."""
        if durable:
            self.sync()
        if not is_file_at(self._file.fd, self.path):
            raise OutputError("its temporary file was replaced", path=self.final)
        if fcntl is None:  # where an open file cannot be renamed; elsewhere the lock is held to the end
            self.close()
        with _writing(self.final):
            try:
                _rename(self.path, self.final, replace=replace)
            except FileExistsError as e:
                raise OutputError("exists", path=self.final, hint="replace it with --force") from e
            self.close()
            if durable:
                sync_directory(self.final.parent)

    def close(self) -> None:
        if self._file.fd >= 0:  # a second call does nothing
            os.close(self._file.fd)
            self._file.fd = -1


@contextmanager
def part_file(final: Path, *, sweeps: bool = True) -> Iterator[PartFile]:
    """A new file beside ``final``, removed on the way out unless it was published.

    Files of this kind that a killed process left in the directory are removed first, unless that was done already.
    """
    with _writing(final):
        if sweeps:
            remove_stale_parts(final.parent)
        part = _create(final)
    try:
        yield part
    finally:
        part.close()
        with contextlib.suppress(OSError):  # whatever it is, what went wrong before it matters more
            part.path.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _unwritten(path, e) from e


def _unwritten(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot be written: {reason(error)}", path=path)


def _create(final: Path) -> PartFile:
    while True:
        path = final.with_name(f".{final.name[:50]}.{secrets.token_hex(4)}{PART_SUFFIX}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
        try:
            if try_lock(fd) and is_file_at(fd, path):
                return PartFile(path, final, fd)
        except BaseException:  # a signal may come at any time
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)  # another run took it for stale between the two calls above


def try_lock(fd: int) -> bool:
    """Whether this process now holds the file's lock; a killed process holds none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # a file system without locks
    return True


def is_file_at(fd: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def remove_stale_parts(directory: Path) -> list[Path]:
    """Remove unfinished outputs that no running process holds; what was removed is returned."""
    removed = []
    for path in directory.glob(f".*.{'[0-9a-f]' * 8}{PART_SUFFIX}"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and _remove_stale(path):
                removed.append(path)
    return removed


def _remove_stale(path: Path) -> bool:
    if fcntl is None:
        path.unlink()  # Windows refuses while a process has it open
        return True
    fd = os.open(path, os.O_RDWR | _BINARY)
    try:
        stale = _lock_is_free(fd)
        if stale:  # removed under the lock, so that a run which has just made it cannot take it for its own
            path.unlink()
        return stale
    finally:
        os.close(fd)


def _lock_is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _rename(path: Path, final: Path, *, replace: bool) -> None:
    if replace:
        path.replace(final)
        return
    if hasattr(os, "link") and os.name != "nt":
        try:
            os.link(path, final)  # unlike rename, fails when the name is taken
        except OSError:
            pass  # it is taken, or there are no hard links here
        else:
            path.unlink()
            return
    if os.path.lexists(final):
        raise FileExistsError(final)
    path.rename(final)  # only Windows still refuses when the name has been taken since


def sync_directory(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no such call; its rename is journaled
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
