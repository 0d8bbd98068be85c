"""Several files of one checkpoint, read as if they were one: offsets count on from file to file.

So all that is known of one file (plans, layouts, runs) holds for shards that become one file, or other shards.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from threading import Lock

from ..fileio import SourceFile
from . import Elements, Format, Reader, Source
from .torch_tensors import TensorRef

__all__ = ["JoinedFile", "JoinedReader", "join"]


#: Files that stay open between two reads; a model can have more shards than a process may have open files.
_KEPT_OPEN = 8


class JoinedFile:
    """Files one after the other; closing it closes them."""

    def __init__(self, path: Path, files: Sequence[SourceFile]) -> None:
        self.path = path  #: what they are shards of, for messages
        self.files = tuple(files)
        self.starts = list(accumulate((f.size for f in files), initial=0))  #: first byte of each, and the end
        self.size = self.starts[-1]
        self._lock, self._kept = Lock(), dict[int, ExitStack]()  # the last few that were read, the last one last

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` (bytes) from ``offset``, across the files' ends."""
        at = bisect_right(self.starts, offset) - 1
        while buffer:
            count = min(len(buffer), self.starts[at + 1] - offset)
            if count:
                with self.reading(at) as file:
                    file.read_into(buffer[:count], offset - self.starts[at])
            buffer, offset, at = buffer[count:], offset + count, at + 1

    def read(self, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    @contextmanager
    def reading(self, at: int) -> Iterator[SourceFile]:
        """One of the files, open for as long as the body reads it."""
        file = self.files[at]
        with file.held():
            with self._lock:
                self._keep(at)
            yield file

    def _keep(self, at: int) -> None:
        hold = self._kept.pop(at, None)
        if hold is None:
            hold = ExitStack()
            hold.enter_context(self.files[at].held())
            self.files[at].advise_sequential()
        self._kept[at] = hold
        if len(self._kept) > _KEPT_OPEN:
            self._kept.pop(next(iter(self._kept))).close()

    def advise_sequential(self) -> None:
        """Each file is advised when it is opened."""

    def require_unchanged(self) -> None:
        for file in self.files:
            with file.held():
                file.require_unchanged()

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:
            while self._kept:
                self._kept.popitem()[1].close()

    def close(self) -> None:
        self._release()
        for file in self.files:
            file.close()


@dataclass(frozen=True, slots=True)
class _JoinedElements:
    """Reads a tensor of one of the files, which is open only meanwhile."""

    file: JoinedFile
    at: int
    elements: Elements

    def read(self, out: memoryview, start: int) -> None:
        with self.file.reading(self.at):
            self.elements.read(out, start)


@dataclass(frozen=True, slots=True)
class JoinedReader:
    """Shards of one format, their headers read and valid."""

    format: Format
    file: JoinedFile
    metadata: Mapping[str, str]
    notes: Sequence[str]
    parts: Sequence[Reader]

    @property
    def digest(self) -> str:
        """SHA-256 of the shards' digests, one a line."""
        lines = "".join(f"{part.digest}\n" for part in self.parts)
        return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def join(path: Path, sources: Sequence[Source]) -> Source:
    """The tensors of all ``sources``, in their order; names must differ among them.

    Metadata: what a file says first holds; files of one model say the same.
    """
    file = JoinedFile(path, [s.file for s in sources])
    metadata: dict[str, str] = {}
    for source in sources:
        metadata = {**source.reader.metadata, **metadata}
    notes = tuple(dict.fromkeys(note for s in sources for note in s.reader.notes))
    infos = [
        t._replace(offset=t.offset + start) if t.offset >= 0 else t
        for source, start in zip(sources, file.starts, strict=False)
        for t in source.infos
    ]
    refs: dict[str, TensorRef] = {}
    owners: dict[int, tuple[int, TensorRef]] = {}
    for number, source in enumerate(sources):
        for name, ref in source.refs.items():
            refs[name] = _in_file(ref, number)
            owners[id(refs[name])] = number, ref

    def open_elements(ref: TensorRef) -> Elements:
        at, own = owners[id(ref)]
        opener = sources[at].open_elements
        assert opener is not None
        return _JoinedElements(file, at, opener(own))

    readers = [s.reader for s in sources]
    reader = JoinedReader(readers[0].format, file, metadata, notes, readers)
    return Source(reader, infos, refs, open_elements, is_part=True)


def _in_file(ref: TensorRef, number: int) -> TensorRef:
    """With a storage that is not taken for another file's: every file counts its storages from 0."""
    return replace(ref, storage=replace(ref.storage, key=f"{number}/{ref.storage.key}"))
