"""Which files a local model directory holds, symlinks followed.

The Hub's cache keeps a snapshot as symlinks into its blobs, so a link to a file is that file here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from precconv.errors import InputError
from precconv.paths import reason

from .roles import is_ignored

__all__ = ["list_directory"]

MAX_FILES = 1_000_000


def list_directory(root: Path, *, skip: Collection[Path] = ()) -> list[str]:
    """Every file below ``root``, relative to it with ``/``, sorted; not what is in ``skip`` or no part of a model.

    A directory that a link leads back to is not entered again.  Raises InputError for what is neither a file nor a
    directory, for what cannot be read, and for links that multiply into more than ``MAX_FILES`` paths.
    """
    skipped = {os.path.realpath(path) for path in skip}  # which no link can make fail
    found: list[str] = []
    seen = 0
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        where, above = waiting.pop()
        names, identity = _entries(root / where)
        if identity in above:
            continue
        seen += 1 + len(names)
        if seen > MAX_FILES:
            raise InputError(f"holds more than {MAX_FILES:,} files", path=root, hint="give the model's own directory")
        for name in names:
            path = f"{where}/{name}" if where else name
            is_directory = _is_directory(root / path)
            if skipped and os.path.realpath(root / path) in skipped:
                continue
            if is_directory:
                waiting.append((path, above | {identity}))
            else:
                found.append(path)
    return sorted(found)


def _entries(folder: Path) -> tuple[list[str], tuple[int, int]]:
    """The names in a directory that are part of a model, and what tells it from every other directory."""
    try:
        at = folder.stat()
        return [path.name for path in folder.iterdir() if not is_ignored(path.name)], (at.st_dev, at.st_ino)
    except OSError as e:
        raise InputError(reason(e), path=folder) from e


def _is_directory(path: Path) -> bool:
    """False for a regular file.  Raises InputError for anything else."""
    try:
        mode = path.stat().st_mode
    except OSError as e:
        if isinstance(e, FileNotFoundError) and path.is_symlink():
            hint = "remove the link, or download the file again"  # of a cache whose blobs were removed, say
            raise InputError(f"is a link to {str(path.readlink())!r}, which is not there", path=path, hint=hint) from e
        raise InputError(reason(e), path=path) from e
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise InputError("is neither a file nor a directory", path=path, hint="remove it, or copy the model elsewhere")
    return stat.S_ISDIR(mode)
