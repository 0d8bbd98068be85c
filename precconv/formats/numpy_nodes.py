"""numpy arrays and scalars, and bytes, as pickles spell them: read from their nodes, without numpy.

``numpy.core.multiarray`` and ``numpy._core.multiarray`` are one place (``Global.canonical``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

from precconv.dtypes import DType, dtype

from .pickled import Placeholder, text

__all__ = ["Array", "array_of", "bytes_of", "scalar_of"]

_DTYPES = {"f2": "fp16", "f4": "fp32", "f8": "fp64", "b1": "bool", "c8": "complex64", "c16": "complex128"} | {
    f"{kind}{size}": f"{name}{8 * size}" for kind, name in (("i", "int"), ("u", "uint")) for size in (1, 2, 4, 8)
}
_STRUCT = {"fp16": "e", "fp32": "f", "fp64": "d", "bool": "?"} | {
    f"{sign}int{8 << i}": code.upper() if sign else code for sign in ("", "u") for i, code in enumerate("bhiq")
}


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """A numpy array's type, layout (strides in elements) and little-endian data."""

    kind: str  #: as numpy writes it, ``f4``
    dtype: DType | None  #: None for objects, strings, records and big-endian data
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    data: object  #: the node that ``bytes_of`` reads

    @property
    def numel(self) -> int:
        return prod(self.shape)


def bytes_of(node: object) -> bytes | None:
    """Bytes in any of the ways pickles write them; None for other nodes."""
    if isinstance(node, bytes | bytearray):
        return bytes(node)
    if isinstance(node, str):  # Python 2 wrote its bytes as text
        return node.encode("ascii") if node.isascii() else None
    if not isinstance(node, Placeholder):
        return None
    if node.canonical in ("builtins.bytes", "builtins.bytearray"):
        return bytes_of(node.args[0]) if node.args and not isinstance(node.args[0], Placeholder) else b""
    if node.canonical == "_codecs.encode" and node.args and isinstance(node.args[0], str):
        try:
            return node.args[0].encode("latin-1")
        except UnicodeEncodeError:
            return None
    return None


def _size_of(node: object) -> int:
    """Bytes that ``bytes_of`` would give, without making them; -1 where it gives none."""
    if isinstance(node, bytes | bytearray | str):
        return len(node)
    if not isinstance(node, Placeholder) or not node.args:
        return 0 if isinstance(node, Placeholder) and node.canonical.startswith("builtins.byte") else -1
    inner = node.args[0]
    return len(inner) if isinstance(inner, bytes | bytearray | str) else -1


def _dtype_of(node: object) -> tuple[str, DType | None] | None:
    """A ``numpy.dtype`` node's name, and our type for it where it is a little-endian number."""
    if not isinstance(node, Placeholder) or node.canonical != "numpy.dtype" or not node.args:
        return None
    name = text(node.args[0]) or "?"
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "|"
    found = _DTYPES.get(name)
    big = text(order) == ">"
    return name, None if found is None or big else dtype(found)


def scalar_of(node: object) -> bool | int | float | None:
    """The value of a numpy scalar; None for other nodes and for types that are not real numbers."""
    if not isinstance(node, Placeholder) or node.canonical != "numpy._core.multiarray.scalar":
        return None
    kind = _dtype_of(node.args[0]) if len(node.args) == 2 else None
    if kind is None or kind[1] is None or _size_of(node.args[1]) != kind[1].itemsize:
        return None
    code, data = _STRUCT.get(kind[1].name), bytes_of(node.args[1])
    if code is None or data is None or len(data) != kind[1].itemsize:
        return None
    value: bool | int | float = struct.unpack("<" + code, data)[0]
    return value


def array_of(node: object) -> Array | None:
    """The array a node stands for; None for other nodes and where its parts do not fit each other."""
    if not isinstance(node, Placeholder):
        return None
    state = node.state
    if node.canonical == "numpy._core.multiarray._reconstruct" and isinstance(state, tuple):
        if len(state) == 5:
            _, shape, kind, fortran, data = state
            return _array(kind, shape, data, fortran=fortran is True)
    elif node.canonical == "numpy._core.numeric._frombuffer" and len(node.args) == 4:
        data, kind, shape, order = node.args
        return _array(kind, shape, data, fortran=order == "F")
    return None


def _array(kind_node: object, shape: object, data: object, *, fortran: bool) -> Array | None:
    kind = _dtype_of(kind_node)
    if kind is None or not isinstance(shape, tuple) or len(shape) > 64:
        return None
    sizes = tuple(n for n in shape if type(n) is int and n >= 0)
    if len(sizes) != len(shape):
        return None
    name, element = kind
    if element is not None and _size_of(data) != prod(sizes) * element.itemsize:
        return None
    return Array(name, element, sizes, _strides(sizes, fortran=fortran), data)


def _strides(shape: tuple[int, ...], *, fortran: bool) -> tuple[int, ...]:
    steps, step = [], 1
    for size in shape if fortran else reversed(shape):
        steps.append(step)
        step *= size
    return tuple(steps if fortran else reversed(steps))
