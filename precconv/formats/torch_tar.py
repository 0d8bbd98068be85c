"""The oldest checkpoints, torch before 0.1.10: a tar archive of ``storages``, ``tensors`` and ``pickle``.

    storages   number of storages; for each a pickle (key, location, storage type), then the number of
               elements (8 bytes) and the elements; then the list of views (key, root key, offset, numel)
    tensors    number of tensors; for each a pickle (key, storage key, tensor type), then dimensions, sizes,
               strides and offset as 8-byte integers
    pickle     the object; tensors and storages are persistent ids, their keys

All little-endian.  The tensors come out as ``torch._utils._rebuild_tensor`` placeholders, which is what torch
wrote from 0.1.10 on.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from precconv.errors import CorruptCheckpointError
from precconv.fileio import SourceFile

from .opstream import OpStream
from .pickled import Global, Persistent, Placeholder, StorageRef, text
from .torch_file import Extent, TorchFile, stream_of
from .torch_storages import Storages
from .unpickle import unpickle
from .zip_index import read_bytes

__all__ = ["is_tar", "open_tar", "tar_members"]

_BLOCK = 512
_MAX_MEMBERS = 10_000
_REBUILD = Global("torch._utils", "_rebuild_tensor")


def is_tar(head: bytes) -> bool:
    """Whether a file starts with a tar header."""
    return head[257:262] == b"ustar"


def tar_members(source: SourceFile) -> dict[str, tuple[int, int]]:
    """Offset and size of each regular file in a tar archive; raises CorruptCheckpointError."""
    members: dict[str, tuple[int, int]] = {}
    at = 0
    while at + _BLOCK <= source.size and len(members) < _MAX_MEMBERS:
        header = read_bytes(source, at, _BLOCK)
        if not header.strip(b"\0"):
            break
        try:
            size = int(header[124:136].strip(b"\0 ") or b"0", 8)
        except ValueError:
            raise _corrupt(source, f"a member's size at byte {at} cannot be read") from None
        at += _BLOCK
        if size < 0 or at + size > source.size:
            raise _corrupt(source, f"truncated: a member ends at byte {at + size}, the file at {source.size}")
        if header[156:157] in (b"0", b"\0"):
            name = header[:100].rstrip(b"\0").decode("utf-8", "replace").removeprefix("./")
            members[name] = (at, size)
        at += -(-size // _BLOCK) * _BLOCK
    return members


def open_tar(source: SourceFile, members: Mapping[str, tuple[int, int]] | None = None) -> TorchFile:
    """Index a tar checkpoint; raises CorruptCheckpointError, also for a tar archive of something else."""
    found = tar_members(source) if members is None else members
    missing = [name for name in ("storages", "tensors", "pickle") if name not in found]
    if missing:
        raise _corrupt(source, f"it has no {missing[0]!r}, so it is no torch checkpoint")
    storages, extents = _storages(source, stream_of(source, *found["storages"]))
    tensors = _tensors(source, stream_of(source, *found["tensors"]), storages)

    def persistent(pid: object) -> object:
        key = text(pid)
        number = int(key) if key is not None and key.isdecimal() and len(key) < 30 else pid
        if isinstance(number, int):
            return tensors.get(number) or storages.get(number) or Persistent(pid)
        return Persistent(pid)

    pickle = unpickle(stream_of(source, *found["pickle"]), persistent=persistent)
    return TorchFile(source, "tar", pickle, extents)


def _corrupt(source: SourceFile, message: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"damaged tar archive: {message}", path=source.path)


def _count(source: SourceFile, stream: OpStream) -> int:
    count = unpickle(stream).root
    if type(count) is not int or count < 0:
        raise _corrupt(source, "a number of entries is missing")
    return count


def _triple(source: SourceFile, stream: OpStream) -> tuple[int, object, object]:
    entry = unpickle(stream).root
    if not isinstance(entry, tuple) or len(entry) != 3 or type(entry[0]) is not int:
        raise _corrupt(source, "an entry is not (key, ..., type)")
    return entry


def _storages(source: SourceFile, stream: OpStream) -> tuple[dict[int, StorageRef], dict[str, Extent]]:
    types = Storages(str(source.path))
    refs: dict[int, StorageRef] = {}
    extents: dict[str, Extent] = {}
    for _ in range(_count(source, stream)):
        key, location, kind = _triple(source, stream)
        if not isinstance(kind, Global):
            raise _corrupt(source, "a storage has no type")
        numel = stream.u64()
        ref = StorageRef(str(key), kind, types.element(kind), numel, text(location) or "")
        if ref.nbytes > stream.size - stream.tell():
            left = stream.size - stream.tell()
            raise _corrupt(source, f"a storage of {ref.nbytes} bytes where {left} are left")
        refs[key] = ref
        extents[ref.key] = Extent(stream.tell(), ref.nbytes, ref.nbytes)
        stream.seek(stream.tell() + ref.nbytes)
    views = unpickle(stream).root
    for view in views if isinstance(views, list) else ():
        _add_view(source, refs, view)
    return refs, extents


def _add_view(source: SourceFile, refs: dict[int, StorageRef], view: object) -> None:
    if not isinstance(view, tuple) or len(view) != 4 or not all(type(v) is int for v in view):
        raise _corrupt(source, "a storage view is not four numbers")
    key, root_key, offset, numel = view
    root = refs.get(root_key)
    if root is None or offset < 0 or numel < 0 or offset + numel > root.numel:
        raise _corrupt(source, "a storage view lies outside its storage")
    refs[key] = StorageRef(root.key, root.type, root.dtype, numel, root.location, root.start + offset)


def _tensors(source: SourceFile, stream: OpStream, storages: Mapping[int, StorageRef]) -> dict[int, Placeholder]:
    tensors: dict[int, Placeholder] = {}
    for _ in range(_count(source, stream)):
        key, storage_key, _ = _triple(source, stream)
        dims = stream.u64() & 0xFFFFFFFF
        if dims > 64:
            raise _corrupt(source, f"a tensor with {dims} dimensions")
        numbers = struct.unpack(f"<{2 * dims + 1}q", stream.take(16 * dims + 8))
        storage = storages.get(storage_key) if isinstance(storage_key, int) else None
        args = (storage, numbers[-1], numbers[:dims], numbers[dims:-1])
        tensors[key] = Placeholder("reduce", _REBUILD, args)
    return tensors
