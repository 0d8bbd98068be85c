"""LZ4 frames, read only: hf_xet compresses its chunks with them, and the standard library has no LZ4.

Some MB/s: enough for the files of tests.  The formats are doc/lz4_Frame_format.md and doc/lz4_Block_format.md of
github.com/lz4/lz4.
"""

from __future__ import annotations

_MAGIC = b"\x04\x22\x4d\x18"
_UNCOMPRESSED = 1 << 31


def frame(data: bytes) -> bytes:
    """The content of one frame; its checksums are not looked at."""
    assert data[:4] == _MAGIC, "not an LZ4 frame"
    flags = data[4]
    at = 7 + (8 if flags & 0x08 else 0) + (4 if flags & 0x01 else 0)
    out = bytearray()
    while word := int.from_bytes(data[at : at + 4], "little"):
        size = word & ~_UNCOMPRESSED
        content = data[at + 4 : at + 4 + size]
        if word & _UNCOMPRESSED:
            out += content
        else:
            block(content, out)
        at += 4 + size + (4 if flags & 0x10 else 0)
    return bytes(out)


def block(data: bytes, out: bytearray) -> None:
    """Append the content of one block to what came before, to which it may refer."""
    at, end = 0, len(data)
    while at < end:
        token = data[at]
        literals, at = _length(data, at + 1, token >> 4)
        out += data[at : at + literals]
        at += literals
        if at == end:  # the last sequence has no match
            return
        distance = data[at] | data[at + 1] << 8
        matched, at = _length(data, at + 2, token & 15)
        _repeat(out, distance, matched + 4)


def _length(data: bytes, at: int, nibble: int) -> tuple[int, int]:
    """A length that goes on in further bytes when its four bits are all set, and where the rest starts."""
    total = nibble
    more = nibble == 15
    while more:
        total += data[at]
        more = data[at] == 255
        at += 1
    return total, at


def _repeat(out: bytearray, distance: int, count: int) -> None:
    """Append ``count`` bytes from ``distance`` before the end; a match longer than its distance repeats itself."""
    start = len(out) - distance
    piece = out[start : start + count]
    out += (piece * (count // len(piece) + 1))[:count] if len(piece) < count else piece
