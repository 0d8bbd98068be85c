"""Legacy checkpoints, torch 0.1.10 to 1.5: five pickles in a row, then the storages.

    magic number, protocol version, system information, the object, list of storage keys
    for each key: number of elements (8 bytes), elements

Everything after the pickles is little-endian whatever machine wrote it (``THPStorage_writeFileRaw``), so the
system information's flag does not matter.
"""

from __future__ import annotations

import struct

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

from .pickled import text
from .torch_file import Extent, TorchFile, stream_of
from .torch_storages import Storages
from .unpickle import unpickle
from .zip_index import read_bytes

__all__ = ["is_legacy", "open_legacy"]

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001


def is_legacy(head: bytes) -> bool:
    """Whether a file's first bytes are the pickle of the magic number, in any protocol."""
    return MAGIC.to_bytes(10, "little") in head[:32] or str(MAGIC).encode() in head[:32]


def open_legacy(source: SourceFile) -> TorchFile:
    """Index a legacy checkpoint; raises CorruptCheckpointError."""
    stream = stream_of(source)
    for wanted, what in ((MAGIC, "magic number"), (VERSION, "protocol version")):
        found = unpickle(stream).root
        if found != wanted:
            raise CorruptCheckpointError(f"the {what} of a legacy checkpoint is wrong", path=source.path)
    unpickle(stream)  # system information
    storages = Storages(str(source.path))
    pickle = unpickle(stream, persistent=storages.persistent)
    keys = unpickle(stream).root
    if not isinstance(keys, list):
        raise CorruptCheckpointError("the storages are not listed", path=source.path)
    extents = _extents(source, storages, keys, stream.tell())
    file = TorchFile(source, "legacy", pickle, extents)
    for ref in storages.refs.values():
        file.extent(ref)
    return file


def _extents(source: SourceFile, storages: Storages, keys: list[object], at: int) -> dict[str, Extent]:
    sizes: dict[str, int] = {}
    for ref in storages.refs.values():
        sizes.setdefault(ref.key, ref.itemsize)  # the first reference says what the numbers count
    extents: dict[str, Extent] = {}
    for raw in keys:
        key = text(raw)
        if key is None or key not in sizes or key in extents:
            raise CorruptCheckpointError("the list of storages does not fit the tensors", path=source.path)
        numel = _numel(source, at, left=len(keys) - len(extents))
        nbytes = numel * sizes[key]
        at += 8
        if at + nbytes > source.size:
            raise _truncated(source, at + nbytes, left=len(keys) - len(extents) - 1)
        extents[key] = Extent(at, nbytes, nbytes)
        at += nbytes
    return extents


def _numel(source: SourceFile, at: int, *, left: int) -> int:
    if at + 8 > source.size:
        raise _truncated(source, at + 8, left=left)
    numel = int(struct.unpack("<q", read_bytes(source, at, 8))[0])
    if numel < 0:
        raise CorruptCheckpointError(f"a storage of {numel} elements", path=source.path)
    return numel


def _truncated(source: SourceFile, need: int, *, left: int) -> CorruptCheckpointError:
    more = f" and {left} more storages follow" if left else ""
    message = f"truncated: at least {need} bytes are promised{more}, the file has {source.size}"
    return CorruptCheckpointError(message, path=source.path, hint="download or copy the file again")
