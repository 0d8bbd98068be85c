"""Names and plain values as pickle opcodes: those of protocol 2 wherever it has one."""

from __future__ import annotations

import struct

from .pickled import Global

__all__ = ["binary", "byte_string", "floating", "integer", "name_line", "text"]

_U32, _I32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<Q"), struct.Struct(">d")


def name_line(node: object) -> bytes | None:
    """A name as two lines; None where lines cannot hold it."""
    if not isinstance(node, Global) or not node.module or not node.name or "\n" in node.module + node.name:
        return None
    try:
        return f"{node.module}\n{node.name}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes((value,))
    if 0 <= value < 65536:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + _I32.pack(value)
    size = (value.bit_length() >> 3) + 1
    data = value.to_bytes(size, "little", signed=True)
    return (b"\x8a" + bytes((size,)) if size < 256 else b"\x8b" + _I32.pack(size)) + data


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return (b"X" + _U32.pack(len(data)) if len(data) < 1 << 32 else b"\x8d" + _U64.pack(len(data))) + data


def binary(value: bytes) -> bytes:
    size = len(value)
    if size < 256:
        return b"C" + bytes((size,)) + value
    return (b"B" + _U32.pack(size) if size < 1 << 32 else b"\x8e" + _U64.pack(size)) + value


def byte_string(value: bytes) -> bytes:
    """Text of Python 2: how it is understood is for whoever loads it to say."""
    return (b"U" + bytes((len(value),)) if len(value) < 256 else b"T" + _I32.pack(len(value))) + bytes(value)


def floating(value: float) -> bytes:
    return b"G" + _F64.pack(value)
