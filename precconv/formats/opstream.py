"""The bytes of a pickle stream, in a window that moves along the file.

Pickles of old checkpoints are followed by gigabytes that must not be read, and the lengths they claim must
not be believed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from precconv.errors import CorruptCheckpointError

__all__ = ["OpStream"]

_WINDOW = 1 << 18
_MAX_LINE = 1 << 24  #: protocol 0 writes strings and numbers as lines
_U16, _U32, _U64 = struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


class OpStream:
    """Opcodes and operands from ``fetch(offset, size) -> bytes``, up to ``size`` bytes in all."""

    __slots__ = ("base", "fetch", "pos", "size", "where", "window")

    def __init__(
        self, fetch: Callable[[int, int], bytes], size: int, *, start: int = 0, where: str | None = None
    ) -> None:
        self.fetch = fetch
        self.size = size
        self.where = where  #: the file, for messages
        self.base = start  #: stream offset of the window's first byte
        self.window = b""
        self.pos = 0

    @classmethod
    def of(cls, data: bytes, *, where: str | None = None) -> OpStream:
        """Over bytes in memory."""
        return cls(lambda offset, size: data[offset : offset + size], len(data), where=where)

    def tell(self) -> int:
        """Offset of the next byte."""
        return self.base + self.pos

    def seek(self, offset: int) -> None:
        self.base, self.pos, self.window = offset, 0, b""

    def error(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"damaged pickle at byte {self.tell()}: {message}", path=self.where)

    def need(self, count: int) -> None:
        """Make the next ``count`` bytes available in the window; the file must have them."""
        have = len(self.window) - self.pos
        if have >= count:
            return
        left = self.size - self.tell()
        if count > left:
            raise self.error(f"truncated, {count} bytes are due and {max(left, 0)} are left")
        at = self.tell()
        fresh = self.fetch(at + have, min(left, max(count, _WINDOW)) - have)
        self.window = self.window[self.pos :] + fresh
        self.base, self.pos = at, 0
        if len(self.window) < count:
            raise self.error("the file ended while it was read")

    def byte(self) -> int:
        pos = self.pos
        if pos >= len(self.window):
            self.need(1)
            pos = 0
        self.pos = pos + 1
        return self.window[pos]

    def take(self, count: int) -> bytes:
        if len(self.window) - self.pos < count:
            self.need(count)
        start = self.pos
        self.pos = start + count
        return self.window[start : self.pos]

    def _unpack(self, form: struct.Struct) -> Any:
        if len(self.window) - self.pos < form.size:
            self.need(form.size)
        start = self.pos
        self.pos = start + form.size
        return form.unpack_from(self.window, start)[0]

    def u16(self) -> int:
        return int(self._unpack(_U16))

    def u32(self) -> int:
        start = self.pos  # as ``_unpack``: half of what a large pickle reads
        if len(self.window) - start < 4:
            self.need(4)
            start = self.pos
        self.pos = start + 4
        value: int = _U32.unpack_from(self.window, start)[0]
        return value

    def u64(self) -> int:
        return int(self._unpack(_U64))

    def i32(self) -> int:
        return int(self._unpack(_I32))

    def f64(self) -> float:
        return float(self._unpack(_F64))

    def line(self) -> bytes:
        """Up to the next newline, which is consumed and not returned."""
        want = 1 << 10
        while (end := self.window.find(b"\n", self.pos)) < 0:
            left = self.size - self.tell()
            if len(self.window) - self.pos >= min(left, _MAX_LINE):
                cut = "truncated, " if left < _MAX_LINE else ""
                raise self.error(cut + "a line of text has no end")
            self.need(min(left, want))
            want *= 4
        line = self.window[self.pos : end]
        self.pos = end + 1
        return line
