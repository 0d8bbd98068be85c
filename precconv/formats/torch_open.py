"""Torch checkpoints by content: the form that a file has, or the sentence that says what it is instead."""

from __future__ import annotations

import struct
from pathlib import Path

from precconv.errors import CorruptCheckpointError, InputError, PrecconvError, UnknownFormatError
from precconv.fileio import SourceFile

from .impostors import DCP, HEAD, Impostor, file_impostor, zip_impostor
from .pickled import Global, Pickle, Placeholder, class_of
from .torch_file import TorchFile, stream_of
from .torch_legacy import is_legacy, open_legacy
from .torch_storages import Storages
from .torch_tar import is_tar, open_tar, tar_members
from .torch_zip import open_zip
from .unpickle import unpickle
from .zip_index import read_bytes, read_records

__all__ = ["is_torch", "open_torch"]

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")


def is_torch(head: bytes) -> bool:
    """Whether a file that starts like this is for ``open_torch``, to read or to refuse."""
    return head.startswith(_ZIP) or is_legacy(head) or is_tar(head) or head.startswith(b"\x80")


def open_torch(source: SourceFile) -> TorchFile:
    """Index a torch checkpoint of any form.

    Raises UnknownFormatError for what is none, or none with its weights in it, and CorruptCheckpointError for
    a damaged one.
    """
    head = read_bytes(source, 0, min(HEAD, source.size))
    if Path(source.path).suffix == ".distcp":
        raise DCP.error(source.path)
    file = _open(source, head)
    sharded = [g for g in file.pickle.globals if g.name in ("DTensor", "ShardedTensor")]
    if sharded:
        raise _sharded(sharded[0]).error(source.path)
    return file


def _open(source: SourceFile, head: bytes) -> TorchFile:
    if head.startswith(_ZIP):
        return _open_zip(source)
    if is_legacy(head):
        return open_legacy(source)
    if is_tar(head):
        members = tar_members(source)
        if "pickle" not in members and "storages" not in members:
            first = next(iter(members), "nothing")
            what = f"a tar archive ({first!r} is first in it), no checkpoint itself"
            raise Impostor(what, "unpack it and convert the checkpoint inside").error(source.path)
        return open_tar(source, members)
    found = file_impostor(source)
    if found is None:
        found = _plain_pickle(source) if head.startswith(b"\x80") else None
    if found is None:
        shown = head[:8].hex(" ")
        raise UnknownFormatError(f"no checkpoint that is known: it starts with {shown}", path=source.path)
    raise found.error(source.path)


def _open_zip(source: SourceFile) -> TorchFile:
    try:
        records = read_records(source)
    except CorruptCheckpointError as error:
        tail_start = max(0, source.size - (1 << 16) - 22)
        if b"PK\x05\x06" in read_bytes(source, tail_start, source.size - tail_start):
            raise
        raise _truncated(source) from error
    found = zip_impostor(records)
    if found is not None:
        raise found.error(source.path)
    return open_zip(source, records)


def _truncated(source: SourceFile) -> InputError:
    """A zip archive whose end is missing: how much is, its pickle can tell, which comes first."""
    need = _promised(source)
    promise = f" of at least {need}" if need > source.size else ""
    return CorruptCheckpointError(
        f"truncated zip archive: {source.size} bytes{promise} are present, its end is missing",
        path=source.path,
        hint="download or copy the file again",
    )


def _promised(source: SourceFile) -> int:
    """Bytes the file must have at least by what its first record, ``data.pkl``, refers to; 0 if unknown."""
    if source.size < 30:
        return 0
    header = read_bytes(source, 0, 30)
    method, (name_size, extra_size) = (
        struct.unpack_from("<H", header, 8)[0],
        struct.unpack("<2H", header[26:]),
    )
    start = 30 + name_size + extra_size
    if start > source.size or method != 0 or not read_bytes(source, 30, name_size).endswith(b"data.pkl"):
        return 0
    storages, stream = Storages(str(source.path)), stream_of(source, start)
    try:
        unpickle(stream, persistent=storages.persistent)
    except PrecconvError:
        return 0
    sizes = {ref.key: ref.nbytes for ref in storages.refs.values()}
    return stream.tell() + sum(sizes.values())


def _plain_pickle(source: SourceFile) -> Impostor:
    """A pickle that torch.save did not write."""
    pickle: Pickle = unpickle(stream_of(source))
    root = pickle.root
    if isinstance(root, Placeholder):
        kind = class_of(root)
        if kind.startswith("torch.distributed.checkpoint."):
            return DCP
        return Impostor(f"a pickled object of class {kind}, not a torch.save file", _SAVE)
    return Impostor(f"a pickled {type(root).__name__}, not a torch.save file", _SAVE)


_SAVE = "load it where its code is installed and save its tensors with torch.save or safetensors"


def _sharded(kind: Global) -> Impostor:
    return Impostor(
        f"one rank's file of a sharded (FSDP) checkpoint: its tensors are {kind.name} shards",
        "gather the full state dict while saving, or join the files with torch.distributed.checkpoint",
    )
