"""Zip checkpoints, torch 1.6 and later: ``NAME/data.pkl`` and a record a storage, ``NAME/data/KEY``.

Beside them ``version``, ``byteorder``, ``.format_version``, ``.storage_alignment`` and
``.data/serialization_id``; of these only ``byteorder`` changes how the file is read.  Records are stored by
torch; deflated ones come from people who zipped the file again.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Literal

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

from .opstream import OpStream
from .torch_file import Extent, TorchFile, stream_of
from .torch_storages import Storages
from .unpickle import unpickle
from .zip_index import Record, read_bytes, read_records

__all__ = ["find_root", "open_zip"]

_MAX_PICKLE = 1 << 30  #: bytes of a deflated ``data.pkl``; stored ones are read as they are needed
_MAX_NOTE = 64  #: bytes of the records that hold one word


def open_zip(source: SourceFile, records: Mapping[str, Record] | None = None) -> TorchFile:
    """Index a zip checkpoint; raises CorruptCheckpointError, also for a zip archive of something else."""
    found = read_records(source) if records is None else records
    root = find_root(found)
    if root is None:
        raise CorruptCheckpointError("a zip archive without data.pkl is no torch checkpoint", path=source.path)
    storages = Storages(str(source.path))
    pickle = unpickle(_pickle_stream(source, found[root + "data.pkl"]), persistent=storages.persistent)
    prefix = root + "data/"
    extents = {
        name.removeprefix(prefix): Extent(r.offset, r.packed, r.size, r.method == "deflated", r.crc)
        for name, r in found.items()
        if name.startswith(prefix)
    }
    order = _byte_order(source, found.get(root + "byteorder"))
    file = TorchFile(source, "zip", pickle, extents, order == "big", found)
    for ref in storages.refs.values():
        file.extent(ref)
    return file


def find_root(names: Mapping[str, Record]) -> str | None:
    """The directory of ``data.pkl`` with its slash; the outermost where several are."""
    found = [name.removesuffix("data.pkl") for name in names if name == "data.pkl" or name.endswith("/data.pkl")]
    found = [root for root in found if not root.startswith("__MACOSX/")]
    return min(found, key=lambda root: root.count("/"), default=None)


def _pickle_stream(source: SourceFile, record: Record) -> OpStream:
    if record.method == "stored":
        return stream_of(source, record.offset, record.size)
    return OpStream.of(_inflated(source, record, _MAX_PICKLE), where=str(source.path))


def _inflated(source: SourceFile, record: Record, limit: int) -> bytes:
    """A small record's bytes."""
    if record.size > limit or record.packed > limit:
        message = f"record {record.name!r} would take {record.size} bytes, at most {limit} are right"
        raise CorruptCheckpointError(message, path=source.path)
    raw = read_bytes(source, record.offset, record.packed)
    if record.method == "stored":
        return raw
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = inflater.decompress(raw, record.size + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(f"record {record.name!r}: {error}", path=source.path) from error
    if len(data) != record.size or not inflater.eof or zlib.crc32(data) != record.crc:
        message = f"record {record.name!r} does not unpack to the {record.size} bytes it promises"
        raise CorruptCheckpointError(message, path=source.path)
    return data


def _byte_order(source: SourceFile, record: Record | None) -> Literal["little", "big"]:
    """Of the machine that wrote the file; torch takes files that don't say for little-endian."""
    said = b"little" if record is None else _inflated(source, record, _MAX_NOTE)
    if said == b"little":
        return "little"
    if said == b"big":
        return "big"
    raise CorruptCheckpointError(f"byte order {said!r} is neither little nor big", path=source.path)
