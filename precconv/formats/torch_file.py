"""A torch checkpoint, indexed: its inert object, and where in the file each storage's bytes are.

``elements.ElementReader`` reads tensors of it.  The three forms (zip, legacy, tar) make the same record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

from .opstream import OpStream
from .pickled import Pickle, StorageRef
from .torch_tensors import TensorRef
from .zip_index import Record, read_bytes

__all__ = ["Extent", "TorchFile", "file_offset", "stream_of"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a storage's record lies: ``packed`` bytes from ``offset``, ``nbytes`` when unpacked."""

    offset: int
    packed: int
    nbytes: int
    deflated: bool = False
    crc: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """One checkpoint file; ``source`` stays open and is the caller's to close."""

    source: SourceFile
    form: Literal["zip", "legacy", "tar"]
    pickle: Pickle
    extents: Mapping[str, Extent]  #: by storage key
    big_endian: bool = False  #: whether multi-byte values of the storages are
    records: Mapping[str, Record] = field(default_factory=dict)  #: of a zip archive, all there are

    @property
    def root(self) -> object:
        """What ``torch.load`` would return, as inert nodes."""
        return self.pickle.root

    def extent(self, storage: StorageRef) -> Extent:
        """Where a storage lies; raises CorruptCheckpointError where the file does not hold all of it."""
        found = self.extents.get(storage.key)
        need = (storage.start + storage.numel) * storage.itemsize
        if found is None:
            raise CorruptCheckpointError(f"the data of storage {storage.key!r} is missing", path=self.source.path)
        if found.nbytes < need:
            message = f"storage {storage.key!r} has {found.nbytes} bytes, its tensors need {need}"
            raise CorruptCheckpointError(message, path=self.source.path)
        return found


def file_offset(file: TorchFile, ref: TensorRef) -> int | None:
    """Where a tensor's elements lie one after the other as they are: for reading without a reader.

    None where they don't: strided, deflated, big-endian or held by the pickle itself.
    """
    if ref.storage.inline is not None or not ref.is_contiguous:
        return None
    extent = file.extent(ref.storage)
    if extent.deflated or (file.big_endian and swap_width(ref) > 1):
        return None
    return extent.offset + ref.byte_start


def swap_width(ref: TensorRef) -> int:
    """Bytes of the numbers an element is made of: complex ones have two parts."""
    return ref.itemsize // 2 if ref.dtype.kind == "complex" else ref.itemsize


def stream_of(source: SourceFile, start: int = 0, size: int | None = None) -> OpStream:
    """Pickles of a file from ``start``, without reading past ``size`` bytes."""
    end = source.size if size is None else start + size

    def fetch(offset: int, count: int) -> bytes:
        return read_bytes(source, offset, min(count, end - offset))

    return OpStream(fetch, end, start=start, where=str(source.path))
