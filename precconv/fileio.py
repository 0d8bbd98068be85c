"""Files by position: the one seam between precconv and what an operating system offers.

Each call picks the best the platform has when it is made (``os.preadv``, then ``os.pread``, then a lock with
seek and read, which is all that Windows has), so the tests run the fallbacks by taking the calls away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import InputError, OutputError, SourceChangedError

fcntl: Any
try:
    fcntl = import_module("fcntl")
except ImportError:  # Windows: an open file cannot be removed there, which is the lock we need
    fcntl = None

__all__ = ["InputFile", "PartFile", "free_bytes", "part_file"]

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


def reason(error: OSError) -> str:
    """What the system says, in lower case: ``no such file or directory``."""
    return (error.strerror or str(error)).lower()


class InputFile:
    """A source, open for positional reads; close it, or use it as a context manager.

    Raises InputError when it is no regular file or cannot be opened or read, SourceChangedError when it turns out
    shorter than it was when opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            fd = os.open(self.path, os.O_RDONLY | _BINARY | _NONBLOCK)
        except OSError as e:
            raise InputError(reason(e), path=path) from e
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise InputError("is not a regular file", path=path, hint="copy what it holds to a file first")
        self._file = _Positional(fd)
        self._stat = os.fstat(fd)
        self.size: int = self._stat.st_size  #: bytes, when opened

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset``."""
        try:
            got = self._file.read_full(buffer, offset)
        except OSError as e:
            raise InputError(f"cannot be read: {reason(e)}", path=self.path) from e
        if got < len(buffer):
            now = os.fstat(self._file.fd).st_size
            raise SourceChangedError(
                f"shrank while it was read: {self.size} bytes when opened, {now} now", path=self.path
            )

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def advise_sequential(self) -> None:
        """Ask for read-ahead, where there is such a thing."""
        with contextlib.suppress(OSError):
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            elif fcntl is not None and hasattr(fcntl, "F_RDAHEAD"):
                fcntl.fcntl(self._file.fd, fcntl.F_RDAHEAD, 1)

    def require_unchanged(self) -> None:
        """Raises SourceChangedError when somebody wrote to the file since it was opened."""
        now = os.fstat(self._file.fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise SourceChangedError("changed while it was read", path=self.path)

    def close(self) -> None:
        os.close(self._file.fd)

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
        if not _is_file_at(self._file.fd, self.path):
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
                _sync_directory(self.final.parent)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._file.fd >= 0:
            os.close(self._file.fd)
            self._file.fd = -1


@contextmanager
def part_file(final: Path) -> Iterator[PartFile]:
    """A new file beside ``final``, removed on the way out unless it was published.

    Files of this kind that a killed process left in the directory are removed first.
    """
    with _writing(final):
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
            if _lock(fd) and _is_file_at(fd, path):
                return PartFile(path, final, fd)
        except BaseException:  # a signal may come at any time
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)  # another run took it for stale between the two calls above


def _lock(fd: int) -> bool:
    """Whether this process now holds the file's lock; a killed process holds none."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return e.errno not in (errno.EWOULDBLOCK, errno.EACCES)  # a file system without locks
    return True


def _is_file_at(fd: int, path: Path) -> bool:
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


def _sync_directory(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no such call; its rename is journaled
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def library_path(path: Path) -> Iterator[str]:
    """A name for a file that libraries which want UTF-8 can open."""
    try:
        name = os.fspath(path)
        name.encode()
    except UnicodeEncodeError:
        fd = os.open(path, os.O_RDONLY | _BINARY)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        yield name


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in ``directory``'s file system."""
    return shutil.disk_usage(directory).free


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Like ``Path.is_dir``, which raises before Python 3.14 where a name is too long or may not be looked up."""
    return os.path.isdir(path)  # noqa: PTH112


def is_taken(path: Path) -> bool:
    """Whether a name is in use, if only by a dangling link; raises OutputError for one that cannot be used."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    except OSError as e:
        raise OutputError(f"cannot be written: {reason(e)}", path=path) from e
    return True


def same_file(a: Path, b: Path) -> bool:
    """Whether both names lead to one file, through any links; False when either does not exist."""
    try:
        return a.samefile(b)
    except OSError:
        return False
