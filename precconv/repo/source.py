"""A model's files, wherever they lie: what they are called, and how each is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from ..fileio import InputFile, SourceFile
from .listing import list_directory

__all__ = ["Files", "local_files"]

#: Bytes of a small file; who reads it refuses as many.
_LARGEST = (100 << 20) + 1


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a directory or of a repo on the Hub."""

    root: Path  #: the directory; of a repo, what its files' names begin with in messages
    paths: Sequence[str]  #: relative, with ``/``
    open: Callable[[str], SourceFile]
    shown: str  #: what the source is called
    repo: str | None = None  #: ``org/name``, where it comes from the Hub
    commit: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)  #: bytes, where the files are not here
    near: Callable[[str], AbstractContextManager[Path]] | None = None
    """Brings a file here for as long as it is needed, where there is no room for all of them."""

    def read(self, path: str) -> bytes:
        """A small file whole, or enough of a large one for its reader to refuse it."""
        file = self.open(path)
        try:
            return file.read(0, min(file.size, _LARGEST))
        finally:
            file.close()


def local_files(root: Path, *, skip: Sequence[Path] = ()) -> Files:
    """The files below a directory; ``skip`` and what is below it are no part of the model."""
    repo, commit = _cached(root)
    return Files(root, list_directory(root, skip=skip), lambda path: InputFile(root / path), str(root), repo, commit)


def _cached(root: Path) -> tuple[str | None, str | None]:
    """Repo and commit of a snapshot in the Hub's cache: ``models--org--name/snapshots/COMMIT``."""
    parts = root.resolve().parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return "/".join(parts[-3].split("--")[1:]), parts[-1]
    return None, None
