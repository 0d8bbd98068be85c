"""Storages as torch's pickles refer to them: the ``("storage", ...)`` persistent id, through all its forms.

* zip files      ("storage", type, key, location, numel)
* legacy files   the same and view metadata, None or (view key, offset, numel): torch before 0.4 kept storages
                 that are views of others

Numbers count elements of the type; bytes where the storage is untyped.
"""

from __future__ import annotations

from precconv.dtypes import DTYPES, TORCH_ONLY, DType, dtype
from precconv.errors import CorruptCheckpointError

from .pickled import Global, Persistent, StorageRef, text

__all__ = ["Storages", "dtype_of"]

_STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
_UNTYPED = {"UntypedStorage", "_UntypedStorage", "TypedStorage", "_TypedStorage"}

_BY_TORCH = {name: d for d in (*DTYPES, *TORCH_ONLY) for name in (d.torch, *d.aliases)}


def dtype_of(node: object) -> DType | None:
    """The element type that a name such as ``torch.float16`` stands for; None for any other node."""
    if not isinstance(node, Global) or node.module != "torch":
        return None
    return _BY_TORCH.get(node.name)


class Storages:
    """The storages of one file by key; ``persistent`` is the unpickler's hook."""

    def __init__(self, where: str | None = None) -> None:
        self.where = where
        self.refs: dict[tuple[str, str, int, int], StorageRef] = {}
        self._elements: dict[str, DType | None] = {}

    def persistent(self, pid: object) -> object:
        """The node of a persistent id; the same id gives the same node."""
        if not isinstance(pid, tuple) or not pid or text(pid[0]) != "storage":
            if isinstance(pid, tuple) and len(pid) > 1 and text(pid[0]) == "module" and isinstance(pid[1], Global):
                return pid[1]  # the class of a pickled module: legacy files keep its source text beside it
            return Persistent(pid)
        if len(pid) not in (5, 6):
            raise self._error("a storage reference has the wrong number of parts")
        _, kind, raw_key, location, numel, *view = pid
        key = text(raw_key)
        if key is None or not isinstance(kind, Global) or type(numel) is not int or numel < 0:
            raise self._error("a storage reference has parts of the wrong type")
        ref = StorageRef(key, kind, self.element(kind), numel, text(location) or "", pid=pid)
        if view and view[0] is not None:
            self._narrow(ref, view[0])
        return self._same(ref)

    def _same(self, ref: StorageRef) -> StorageRef:
        """One node for one storage, however often it is referred to."""
        return self.refs.setdefault((ref.key, ref.type.canonical, ref.start, ref.numel), ref)

    def _narrow(self, ref: StorageRef, view: object) -> None:
        """Make ``ref`` the view of its storage that old metadata describes."""
        if not isinstance(view, tuple) or len(view) != 3:
            raise self._error("a storage view is not described by three values")
        _, offset, size = view
        if type(offset) is not int or type(size) is not int or offset < 0 or size < 0:
            raise self._error("a storage view is not described by its offset and size")
        if offset + size > ref.numel:
            raise self._error(f"a storage view ends at {offset + size}, its storage at {ref.numel}")
        ref.start, ref.numel = offset, size

    def element(self, kind: Global) -> DType | None:
        """The element type of a storage class; None for untyped ones."""
        if kind.canonical not in self._elements:
            self._elements[kind.canonical] = self._element(kind)
        return self._elements[kind.canonical]

    def _element(self, kind: Global) -> DType | None:
        if kind.name in _UNTYPED:
            return None
        found = _STORAGE_TYPES.get(kind.name)
        if found is None or kind.module.split(".")[0] != "torch":
            raise self._error(f"storage type {kind} is unknown")
        return dtype(found)

    def _error(self, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.where)
