"""A zip archive as torch writes it, laid out before any of its data is known.

Records are stored, their data starts at multiples of 64 bytes, and sizes and checksums follow it; this is, byte for
byte, what torch's ``PyTorchFileWriter`` (miniz) makes, because ``torch.load`` computes places in the file from that.
The checksums come last: chunks of a record may be written in any order and theirs combined.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

__all__ = ["ALIGNMENT", "ZipLayout", "crc32_combine", "zip_layout"]

ALIGNMENT = 64
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF
_UTF8, _SIZES_FOLLOW = 0x800, 8  #: general purpose flags
_ZIP64, _PADDING = 1, int.from_bytes(b"FB", "little")  #: extra fields

Piece = tuple[int, bytes]  #: an offset in the file, and what stands there


@dataclass(frozen=True, slots=True)
class _Record:
    name: bytes
    header: int  #: offset of the local header
    offset: int  #: of the data
    size: int

    @property
    def is_wide(self) -> bool:
        """Whether 32 bits are too few for its size or its place."""
        return self.size >= _MAX32 or self.header >= _MAX32

    @property
    def flags(self) -> int:
        return _UTF8 | (_SIZES_FOLLOW if self.size else 0)

    def local(self) -> bytes:
        """The local header, padded up to the data."""
        wide = self._wide((self.size, 0), self.header)  # miniz leaves the second size to the descriptor
        padding = self.offset - self.header - _LOCAL.size - len(self.name) - len(wide) - 4
        extra = wide + struct.pack("<2H", _PADDING, padding) + b"Z" * padding
        head = _LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return head + self.name + extra

    def descriptor(self, crc: int) -> bytes:
        """What follows the data; nothing follows none."""
        if not self.size:
            return b""
        form = "<4sI2Q" if self.is_wide else "<4s3I"
        return struct.pack(form, b"PK\7\10", crc, self.size, self.size)

    def entry(self, crc: int) -> bytes:
        """Its entry of the central directory."""
        extra = self._wide((self.size, self.size), self.header)
        size, header = min(self.size, _MAX32), min(self.header, _MAX32)
        lengths = (len(self.name), len(extra), 0, 0, 0, 0)
        fixed = _ENTRY.pack(b"PK\1\2", 0, 0, self.flags, 0, 0, 0, crc, size, size, *lengths, header)
        return fixed + self.name + extra

    def _wide(self, sizes: tuple[int, int], header: int) -> bytes:
        values = [*(sizes if self.size >= _MAX32 else ()), *((header,) if header >= _MAX32 else ())]
        return struct.pack(f"<2H{len(values)}Q", _ZIP64, 8 * len(values), *values) if values else b""

    @property
    def end(self) -> int:
        return self.offset + self.size + len(self.descriptor(0))


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """Where everything goes; ``offsets`` of the records' data are in the order in which they were given."""

    records: tuple[_Record, ...]
    directory: int  #: offset
    size: int  #: of the whole file

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(record.offset for record in self.records)

    def headers(self) -> list[Piece]:
        """What stands before each record's data."""
        return [(record.header, record.local()) for record in self.records]

    def finish(self, crcs: Mapping[int, int]) -> list[Piece]:
        """What stands after it, and the directory; by number of the record, the CRC-32 of its data."""
        sums = [crcs[i] if record.size else 0 for i, record in enumerate(self.records)]
        pairs = list(zip(self.records, sums, strict=True))
        after = [(r.offset + r.size, r.descriptor(crc)) for r, crc in pairs if r.size]
        directory = b"".join(r.entry(crc) for r, crc in pairs)
        return [*after, (self.directory, directory + self._end(len(directory)))]

    def _end(self, size: int) -> bytes:
        count, start = len(self.records), self.directory
        end64 = _END64.pack(b"PK\6\6", _END64.size - 12, 0x31E, 0x2D, 0, 0, count, count, size, start)
        locator = _LOCATOR.pack(b"PK\6\7", 0, start + size, 1)
        short = min(count, _MAX16)
        return end64 + locator + _END.pack(b"PK\5\6", 0, 0, short, short, min(size, _MAX32), min(start, _MAX32), 0)


def zip_layout(sizes: Iterable[tuple[str, int]]) -> ZipLayout:
    """The archive of records with these names and sizes in bytes, in this order."""
    records: list[_Record] = []
    at = 0
    for name, size in sizes:
        records.append(_place(name.encode(), at, size))
        at = records[-1].end
    directory = sum(len(record.entry(0)) for record in records)
    return ZipLayout(tuple(records), at, at + directory + _END64.size + _LOCATOR.size + _END.size)


def _place(name: bytes, header: int, size: int) -> _Record:
    """The next record: its data starts at the first multiple of ALIGNMENT that leaves room for the header."""
    wide = 16 * (size >= _MAX32) + 8 * (header >= _MAX32)
    start = header + _LOCAL.size + len(name) + 4 + (wide + 4 if wide else 0)
    return _Record(name, header, -(-start // ALIGNMENT) * ALIGNMENT, size)


# Checksums -------------------------------------------------------------------------------------------------
# A CRC-32 is a polynomial over GF(2) modulo _POLYNOMIAL, its highest power in bit 0: appending n bytes multiplies it
# by x**(8n).  As ``crc32_combine`` in zlib's crc32.c, which Python does not expose.

_POLYNOMIAL = 0xEDB88320


def crc32_combine(first: int, second: int, size: int) -> int:
    """The CRC-32 of two stretches of data, given theirs and the second's size in bytes."""
    return _times(_shift(size), first) ^ second


def _times(a: int, b: int) -> int:
    """The product of two polynomials."""
    product = 0
    while a:
        if a & 0x80000000:
            product ^= b
        a = a << 1 & _MAX32
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=1024)
def _shift(size: int) -> int:
    """x**(8 * size): nearly all chunks have one size."""
    power, square = 0x80000000, 0x00800000  # 1 and x**8
    while size:
        if size & 1:
            power = _times(power, square)
        square = _times(square, square)
        size >>= 1
    return power
