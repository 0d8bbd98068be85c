"""The bytes of one storage, wherever they are: stored in the file, deflated, or within the pickle."""

from __future__ import annotations

import zlib
from typing import Protocol

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

from .numpy_nodes import bytes_of
from .torch_file import Extent, TorchFile
from .torch_tensors import TensorRef
from .zip_index import read_bytes

__all__ = ["StorageBytes", "storage_bytes"]

_PIECE = 1 << 18  #: bytes of compressed data at a time
_SKIP = 1 << 20  #: bytes unpacked at a time to get to a later place


class StorageBytes(Protocol):
    """``read`` fills a buffer from a byte offset within the storage's record."""

    def read(self, out: memoryview, offset: int) -> None: ...


def storage_bytes(file: TorchFile, ref: TensorRef) -> StorageBytes:
    """Access to the record that holds a tensor's data."""
    if ref.storage.inline is not None:
        data = bytes_of(ref.storage.inline)
        if data is None or len(data) < ref.byte_end:
            raise CorruptCheckpointError("a numpy array's data is damaged", path=file.source.path)
        return _Inline(data)
    extent = file.extent(ref.storage)
    return (_Deflated if extent.deflated else _Stored)(file.source, extent)


class _Inline:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read(self, out: memoryview, offset: int) -> None:
        out[:] = self._data[offset : offset + len(out)]


class _Stored:
    def __init__(self, source: SourceFile, extent: Extent) -> None:
        self._source = source
        self._start = extent.offset

    def read(self, out: memoryview, offset: int) -> None:
        self._source.read_into(out, self._start + offset)


class _Deflated:
    """Unpacks forwards; going back starts again from the record's first byte.

    Whoever reads to the end has the CRC checked.
    """

    def __init__(self, source: SourceFile, extent: Extent) -> None:
        self._source = source
        self._extent = extent
        self._rewind()

    def _rewind(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._taken = 0  #: compressed bytes read
        self._pos = 0  #: unpacked bytes given out
        self._crc = 0

    def read(self, out: memoryview, offset: int) -> None:
        if offset < self._pos:
            self._rewind()
        while self._pos < offset:
            self._next(min(_SKIP, offset - self._pos))
        done = 0
        while done < len(out):
            piece = self._next(min(_SKIP, len(out) - done))
            out[done : done + len(piece)] = piece
            done += len(piece)

    def _next(self, limit: int) -> bytes:
        """Between one and ``limit`` further bytes."""
        while True:
            if self._inflater.eof:
                raise self._corrupt(f"it ends after {self._pos} of {self._extent.nbytes} bytes")
            packed = self._inflater.unconsumed_tail or self._feed()
            try:
                piece = self._inflater.decompress(packed, limit)
            except zlib.error as error:
                raise self._corrupt(str(error)) from error
            if piece:
                break
            if not packed:
                raise self._corrupt(f"it ends after {self._pos} of {self._extent.nbytes} bytes")
        self._pos += len(piece)
        self._crc = zlib.crc32(piece, self._crc)
        if self._pos == self._extent.nbytes and self._crc != self._extent.crc:
            raise self._corrupt("its checksum is wrong")
        return piece

    def _feed(self) -> bytes:
        size = min(_PIECE, self._extent.packed - self._taken)
        data = read_bytes(self._source, self._extent.offset + self._taken, size)
        self._taken += size
        return data

    def _corrupt(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"a compressed storage is damaged: {message}", path=self._source.path)
