"""Xet's content-addressed storage as data: xorbs (chunks of files) and how files are put together from them.

A file is a list of segments, each a range of chunks of one xorb.  The layouts: huggingface.co/docs/xet, hf_xet 1.8.
Hashes of files and xorbs that the server makes itself are not Xet's (they would need BLAKE3); no client checks them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import lz4
from .objects import Objects

_CHUNK = 64 << 10
_CHUNKS_IN_XORB = 512
_SHARD_HEADER = 48
_ROW = 48
_LAST = b"\xff" * 32
_VERIFICATION, _METADATA = 0x80000000, 0x40000000


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks ``start`` to ``stop`` (exclusive) of a xorb, ``size`` bytes of the file."""

    xorb: str
    size: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where a chunk lies in its xorb, header included, and its bytes in the file."""

    start: int
    stop: int
    size: int


@dataclass(slots=True)
class Cas:
    """``files`` by their Xet hash; ``hashes`` from SHA-256 to Xet hash."""

    root: Path
    files: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    chunks: dict[str, tuple[Chunk, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, xorb: str) -> Path:
        return self.root / xorb

    def size(self, file: str) -> int:
        return sum(s.size for s in self.files[file])


def hash_text(data: bytes) -> str:
    """Xet's way to write 32 bytes: four little-endian numbers."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))


def chunks_of(xorb: bytes) -> Iterator[Chunk]:
    """A chunk's header: version 0, length there (3 bytes), scheme, length unpacked (3 bytes).  A footer may follow."""
    at = 0
    while at + 8 <= len(xorb) and xorb[at] == 0:
        stop = at + 8 + int.from_bytes(xorb[at + 1 : at + 4], "little")
        if stop > len(xorb):
            return
        yield Chunk(at, stop, int.from_bytes(xorb[at + 5 : at + 8], "little"))
        at = stop


def put_xorb(cas: Cas, name: str, data: bytes) -> None:
    cas.path(name).write_bytes(data)
    cas.chunks[name] = tuple(chunks_of(data))


def put_shard(cas: Cas, shard: bytes) -> None:
    """Learn the files that a shard describes: how they are put together, and their SHA-256."""
    at = _SHARD_HEADER
    while at + _ROW <= len(shard) and shard[at : at + 32] != _LAST:
        name = hash_text(shard[at : at + 32])
        flags, count, _ = struct.unpack("<IIQ", shard[at + 32 : at + _ROW])
        rows = [shard[at + _ROW * n : at + _ROW * (n + 1)] for n in range(1, count + 1)]
        at += _ROW * (1 + count + (count if flags & _VERIFICATION else 0))
        cas.files[name] = tuple(_segment(row) for row in rows)
        if flags & _METADATA:
            cas.hashes[hash_text(shard[at : at + 32])] = name
            at += _ROW


def _segment(row: bytes) -> Segment:
    _flags, size, start, stop = struct.unpack("<IIII", row[32:])
    return Segment(hash_text(row[:32]), size, start, stop)


def adopt(cas: Cas, sha256: str, path: Path) -> str:
    """Offer a file that did not come through Xet, in uncompressed chunks, and return its hash."""
    segments: list[Segment] = []
    with open(path, "rb") as file:
        while pieces := [p for _ in range(_CHUNKS_IN_XORB) if (p := file.read(_CHUNK))]:
            name = _made_up(f"xorb {len(segments)} of {sha256}")
            put_xorb(cas, name, b"".join(_packed(p) for p in pieces))
            segments.append(Segment(name, sum(map(len, pieces)), 0, len(pieces)))
    made = _made_up(f"file {sha256}")
    cas.files[made] = tuple(segments)
    cas.hashes[sha256] = made
    return made


def _packed(piece: bytes) -> bytes:
    size = len(piece).to_bytes(3, "little")
    return b"\0" + size + b"\0" + size + piece


def _made_up(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def content(cas: Cas, file: str) -> Iterator[bytes]:
    """A file's bytes, chunk by chunk."""
    for segment in cas.files[file]:
        xorb = cas.path(segment.xorb).read_bytes()
        for chunk in cas.chunks[segment.xorb][segment.start : segment.stop]:
            yield unpacked(xorb[chunk.start : chunk.stop])


def unpacked(chunk: bytes) -> bytes:
    """Schemes: 0 as it is, 1 LZ4, 2 LZ4 of the bytes sorted by their place in groups of four."""
    scheme, data = chunk[4], chunk[8:]
    if scheme == 0:
        return data
    data = lz4.frame(data)
    return data if scheme == 1 else _ungrouped(data)


def _ungrouped(data: bytes) -> bytes:
    out, at = bytearray(len(data)), 0
    for place in range(4):
        count = (len(data) + 3 - place) // 4
        out[place::4] = data[at : at + count]
        at += count
    return bytes(out)


def materialise(cas: Cas, objects: Objects, sha256: str) -> None:
    """Put a file that came through Xet together as an object of its own; its SHA-256 is checked."""
    if not objects.has(sha256) and sha256 in cas.hashes:
        objects.put(content(cas, cas.hashes[sha256]), expected=sha256)
