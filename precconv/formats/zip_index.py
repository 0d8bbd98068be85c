"""Where the records of a zip archive lie, from its central directory, believing nothing that it says twice.

Only what checkpoints need is accepted: one disk, stored and deflated records, no encryption, each name once,
nothing overlapping, local headers that agree with the directory.  Sizes come from the directory: torch writes
zeros into local headers and repeats the sizes after the data.
Layout: PKWARE APPNOTE 6.3, sections 4.3.7 (local header), 4.3.12 (directory), 4.3.14 to 4.3.16 (its end).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

__all__ = ["Record", "read_bytes", "read_records"]

_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_MAX_DIRECTORY = 1 << 27  #: a million records
_MAX32 = 0xFFFFFFFF
_WINDOW = 1 << 14  #: bytes read for a local header and those that may follow it


@dataclass(frozen=True, slots=True)
class Record:
    """One record: its data starts at ``offset`` and takes ``packed`` bytes of the file."""

    name: str
    offset: int
    packed: int
    size: int  #: bytes when unpacked
    method: Literal["stored", "deflated"]
    crc: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    header: int  #: offset of the local header
    packed: int
    size: int
    method: int
    flags: int
    crc: int


def read_bytes(source: SourceFile, offset: int, size: int) -> bytes:
    """``size`` bytes of a file."""
    buffer = bytearray(size)
    source.read_into(memoryview(buffer), offset)
    return bytes(buffer)


def _corrupt(source: SourceFile, message: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"damaged zip archive: {message}", path=source.path)


def read_records(source: SourceFile) -> dict[str, Record]:
    """The records by name, in the order of the directory; directories are left out.

    Raises CorruptCheckpointError.
    """
    start, size, count = _directory(source)
    entries = list(_entries(source, read_bytes(source, start, size)))
    if len(entries) != count:
        raise _corrupt(source, f"its end promises {count} records, its directory has {len(entries)}")
    found: dict[bytes, Record] = {}
    end_of_last = 0
    headers = _Headers(source)
    for entry in sorted(entries, key=lambda e: e.header):
        if entry.header < end_of_last:
            raise _corrupt(source, f"record {_shown(entry.name)} overlaps the one before it")
        record = _locate(headers, entry, start)
        end_of_last = record.offset + record.packed
        if entry.name in found:
            raise _corrupt(source, f"record {record.name!r} is there twice")
        found[entry.name] = record
    ordered = (found[entry.name] for entry in entries)
    return {record.name: record for record in ordered if not record.name.endswith("/")}


class _Headers:
    """Reads local headers in ascending order, small records' several at a time."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self._start = 0
        self._data = b""

    def read(self, offset: int, size: int) -> bytes:
        at = offset - self._start
        if at < 0 or at + size > len(self._data):
            self._start, at = offset, 0
            self._data = read_bytes(self.source, offset, min(max(size, _WINDOW), self.source.size - offset))
        return self._data[at : at + size]


def _shown(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace"))


def _name(source: SourceFile, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _corrupt(source, f"record name {_shown(raw)} is not UTF-8") from None
    if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
        raise _corrupt(source, f"record name {name!r} leaves the archive")
    return name


def _directory(source: SourceFile) -> tuple[int, int, int]:
    """Offset, size and number of records of the central directory."""
    tail_start = max(0, source.size - _END.size - 0xFFFF - _LOCATOR.size)
    tail = read_bytes(source, tail_start, source.size - tail_start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= _END.size:
            _, disk, first, here, count, size, start, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == len(tail):
                break
        at = tail.rfind(b"PK\x05\x06", 0, at)
    else:
        raise _corrupt(source, "its central directory is missing")
    end = tail_start + at
    locator = at - _LOCATOR.size
    if locator >= 0 and tail.startswith(b"PK\x06\x07", locator):
        end = _LOCATOR.unpack_from(tail, locator)[2]
        disk, first, here, count, size, start = _directory64(source, end)
    if disk or first or here != count:
        raise _corrupt(source, "it is one part of several")
    if size > _MAX_DIRECTORY:
        raise _corrupt(source, f"its directory would take {size} bytes")
    if start + size != end:
        raise _corrupt(source, f"its directory ends at byte {start + size}, not {end}; bytes are missing")
    return start, size, count


def _directory64(source: SourceFile, end: int) -> tuple[int, int, int, int, int, int]:
    if end + _END64.size > source.size:
        raise _corrupt(source, "its zip64 end lies beyond the file")
    fields = _END64.unpack(read_bytes(source, end, _END64.size))
    if fields[0] != b"PK\x06\x06":
        raise _corrupt(source, "its zip64 end is missing")
    _, _, _, _, disk, first, here, count, size, start = fields
    return disk, first, here, count, size, start


def _entries(source: SourceFile, directory: bytes) -> Iterator[_Entry]:
    at = 0
    while at < len(directory):
        if len(directory) - at < _ENTRY.size or not directory.startswith(b"PK\x01\x02", at):
            raise _corrupt(source, "its directory is cut or overwritten")
        _, _, _, flags, method, _, _, crc, packed, size, n, x, c, disk, _, _, header = _ENTRY.unpack_from(directory, at)
        at += _ENTRY.size
        name, extra = directory[at : at + n], directory[at + n : at + n + x]
        at += n + x + c
        if at > len(directory) or disk not in (0, 0xFFFF):
            raise _corrupt(source, "its directory is cut or overwritten")
        size, packed, header = _zip64(source, extra, [size, packed, header])
        yield _Entry(name, header, packed, size, method, flags, crc)


def _zip64(source: SourceFile, extra: bytes, fields: list[int]) -> list[int]:
    """Sizes and offset, those too large for 32 bits from the zip64 extra field, in its order."""
    if _MAX32 not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, at)
        if tag == 1:
            wide = extra[at + 4 : at + 4 + size]
            values = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
            found = [next(values, None) if field == _MAX32 else field for field in fields]
            if None in found:
                break
            return [value for value in found if value is not None]
        at += 4 + size
    raise _corrupt(source, "a record larger than 4 GB does not say how large")


def _locate(headers: _Headers, entry: _Entry, directory: int) -> Record:
    """Find a record's data through its local header, which must say what the directory says."""
    source = headers.source
    _check_kind(source, entry)
    fixed = _LOCAL.size + len(entry.name)
    if entry.header + fixed + entry.packed > directory:
        raise _corrupt(source, f"record {_shown(entry.name)} reaches into the directory")
    raw = headers.read(entry.header, fixed)
    mark, _, flags, method, _, _, crc, packed, size, n, x = _LOCAL.unpack_from(raw)
    if mark != b"PK\x03\x04" or raw[_LOCAL.size :] != entry.name or n != len(entry.name):
        raise _corrupt(source, f"record {_shown(entry.name)} is not where the directory says")
    # With bit 3, which torch sets, the sizes follow the data and are zeros here.
    agree = (flags & 8 and crc == 0 and packed in (0, _MAX32) and size in (0, _MAX32)) or (
        crc == entry.crc and packed in (entry.packed, _MAX32) and size in (entry.size, _MAX32)
    )
    if not agree or method != entry.method or (flags ^ entry.flags) & 1:
        raise _corrupt(source, f"record {_shown(entry.name)} says one thing in the directory and another where it lies")
    offset = entry.header + fixed + x
    if offset + entry.packed > directory:
        raise _corrupt(source, f"record {_shown(entry.name)} reaches into the directory")
    kind: Literal["stored", "deflated"] = "deflated" if entry.method else "stored"
    return Record(_name(source, entry.name), offset, entry.packed, entry.size, kind, entry.crc)


def _check_kind(source: SourceFile, entry: _Entry) -> None:
    """Refuse what checkpoints have no use for."""
    if not entry.flags & 0x2041 and (entry.method == 8 or (entry.method == 0 and entry.packed == entry.size)):
        return
    shown = _shown(entry.name)
    if entry.flags & 0x2041:
        raise _corrupt(source, f"record {shown} is encrypted")
    if entry.method not in (0, 8):
        raise _corrupt(source, f"record {shown} is compressed by method {entry.method}, not stored or deflated")
    raise _corrupt(source, f"record {shown} is stored in {entry.packed} bytes but has {entry.size}")
