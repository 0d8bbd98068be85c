"""What a source is called, and what tells that it is still the same.

A local path wins where there is one; everything else is a reference, which ``convert`` resolves.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..outputs import without_dtype
from ..repo import list_directory
from .pins import Pin, reference

__all__ = ["Names", "identity", "is_local", "names_of", "resolved"]


@dataclass(frozen=True, slots=True)
class Names:
    """The parts of a source's name that an output's can be made of."""

    org: str  #: of a local source, the directory that it lies in
    name: str  #: of a file, without its suffix
    stem: str  #: the same without a dtype that it says: ``model`` of ``model.fp32``
    revision: str  #: ``main`` where none is given, ``local`` where there are none


def is_local(source: str) -> bool:
    """Whether there is such a path, if only a link to nowhere."""
    return os.path.lexists(source)


def resolved(source: str) -> str:
    """A source as every process finds it: absolute where it is a path, through links."""
    return os.path.realpath(source) if is_local(source) else source


def names_of(source: str) -> Names:
    """The parts of a source's name; of one that is neither a path nor a reference, those of a path."""
    found = None if is_local(source) else reference(source)
    if found is None:
        path = Path(os.path.abspath(source))  # noqa: PTH100  its own name, not that of what a link leads to
        name = path.name if path.is_dir() else _without_suffix(path.name)
        return Names(path.parent.name, name, without_dtype(name, ".-"), "local")
    org, _, name = found.repo.partition("/")
    name = name if found.file is None else _without_suffix(found.file.rpartition("/")[2])
    return Names(org, name, without_dtype(name, ".-"), found.revision or "main")


def _without_suffix(name: str) -> str:
    stem = Path(name).stem
    return Path(stem).stem if name.endswith(".tar") else stem


def identity(source: str, pin: Pin | None = None) -> list[Any]:
    """What changes when a source does: the resolved path, and size and time of every file that is read; or the commit.

    A source that is not there, or cannot be listed, has its name alone: the conversion will say what is wrong.
    """
    if pin is not None and pin.commit is not None:
        return ["repo", pin.repo, pin.commit, pin.ref.file]
    if not is_local(source):
        return ["reference", source]
    root = Path(os.path.realpath(source))
    if not root.is_dir():
        return ["file", os.fspath(root), _status(root), _status(root.parent / "config.json")]
    files: list[str] = []
    with contextlib.suppress(InputError):
        files = list_directory(root)
    return ["directory", os.fspath(root), [[name, _status(root / name)] for name in files]]


def _status(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
