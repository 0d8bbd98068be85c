"""Names of files and directories, and what the system says about them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import OutputError

__all__ = ["exists", "free_bytes", "is_directory", "is_taken", "library_path", "reason", "require_space", "same_file"]


def reason(error: OSError) -> str:
    """What the system says, in lower case: ``no such file or directory``."""
    return (error.strerror or str(error)).lower()


@contextmanager
def library_path(path: Path) -> Iterator[str]:
    """A name for a file that libraries which want UTF-8 can open."""
    try:
        name = os.fspath(path)
        name.encode()
    except UnicodeEncodeError:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)
    else:
        yield name


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write in ``directory``'s file system."""
    return shutil.disk_usage(directory).free


def require_space(final: Path, needed: int) -> None:
    """Raises OutputError when the disk has no room for ``needed`` bytes more."""
    free = free_bytes(final.parent)
    if needed > free:
        message = f"needs {needed} bytes, the disk has {free} free"
        raise OutputError(message, path=final, hint="make room, or give a place on another disk with -o")


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Like ``Path.is_dir``, which raises before Python 3.14 where a name is too long or may not be looked up."""
    return os.path.isdir(path)  # noqa: PTH112


def exists(path: str | os.PathLike[str]) -> bool:
    """Like ``Path.exists``, which raises before Python 3.14 where a name is too long or may not be looked up."""
    return os.path.exists(path)  # noqa: PTH110


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
