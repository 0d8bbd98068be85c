"""Torch checkpoints for the tests, and the comparison with torch.load that they stand on."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from precconv.fileio import InputFile
from precconv.formats.elements import ElementReader
from precconv.formats.pickled import mapping, text
from precconv.formats.torch_file import TorchFile, file_offset
from precconv.formats.torch_legacy import open_legacy
from precconv.formats.torch_tensors import TensorRef, tensor_of
from precconv.formats.torch_zip import open_zip

OPENERS: dict[bool, Callable[[InputFile], TorchFile]] = {True: open_zip, False: open_legacy}


@contextmanager
def opened(path: str | os.PathLike[str], opener: Callable[[InputFile], TorchFile]) -> Iterator[TorchFile]:
    """The index of a file, closed after."""
    source = InputFile(path)
    try:
        yield opener(source)
    finally:
        source.close()


def saved(value: object, path: Path, *, use_zip: bool = True, protocol: int = 2) -> Path:
    """``torch.save``, in either form."""
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=use_zip)
    return path


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row-major order."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read(file: TorchFile, ref: TensorRef, *, tile: int = 1 << 20, step: int | None = None) -> bytes:
    """A tensor's bytes through the reader, ``step`` elements at a time."""
    out = bytearray(ref.nbytes)
    reader = ElementReader(file, ref, tile=tile)
    step = step or max(1, ref.numel)
    for start in range(0, ref.numel, step):
        count = min(step, ref.numel - start)
        window = memoryview(out)[start * ref.itemsize : (start + count) * ref.itemsize]
        reader.read(window, start)
    return bytes(out)


def check_tree(file: TorchFile, node: object, value: Any) -> int:
    """Compare every tensor of a loaded object with its inert counterpart; returns how many there were."""
    found = tensor_of(node)
    if isinstance(value, torch.Tensor):
        assert isinstance(found, TensorRef)
        assert str(value.dtype) == f"torch.{found.dtype.torch}"
        assert (tuple(value.shape), value.stride()) == (found.shape, found.stride)
        assert read(file, found) == raw(value)
        offset = file_offset(file, found)
        if offset is not None:
            direct = bytearray(found.nbytes)
            file.source.read_into(memoryview(direct), offset)
            assert bytes(direct) == raw(value)
        return 1
    if isinstance(value, dict):
        inner = mapping(node)
        assert inner is not None
        named = {text(k) if isinstance(k, str | bytes) else k: v for k, v in inner.items()}
        assert list(named) == list(value)
        return sum(check_tree(file, named[key], value[key]) for key in value)
    if isinstance(value, list | tuple):
        assert isinstance(node, list | tuple)
        return sum(check_tree(file, a, b) for a, b in zip(node, value, strict=True))
    return 0


def rezipped(
    path: Path,
    change: Callable[[str, bytes], bytes | None] = lambda _, data: data,
    *,
    method: int = zipfile.ZIP_STORED,
    extra: dict[str, bytes] | None = None,
) -> Path:
    """The archive written again by Python, its records passed through ``change`` (None drops one)."""
    target = path.with_name("rezipped-" + path.name)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w", method) as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
        for name, data in (extra or {}).items():
            new.writestr(name, data)
    return target


def big_endian(path: Path, widths: dict[str, int]) -> Path:
    """A zip checkpoint as a big-endian machine writes it; ``widths`` are bytes a number, by storage key."""

    def change(name: str, data: bytes) -> bytes:
        folder, _, key = name.rpartition("/")
        if name.endswith("/byteorder"):
            return b"big"
        if folder.endswith("/data") and key in widths:
            width = widths[key]
            return b"".join(data[i : i + width][::-1] for i in range(0, len(data), width))
        return data

    return rezipped(path, change)


def legacy_pickles(*values: object, protocol: int = 2) -> bytes:
    """Pickles in a row, as legacy files start."""
    import pickle

    return b"".join(pickle.dumps(value, protocol) for value in values)


def tar_checkpoint(storages: bytes, tensors: bytes, pickled: bytes) -> bytes:
    """The oldest form, from its three members."""
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for name, data in (
            ("sys_info", b""),
            ("pickle", pickled),
            ("tensors", tensors),
            ("storages", storages),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def tar_tensor(shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bytes:
    """A tensor's metadata in the oldest form."""
    return struct.pack(f"<q{2 * len(shape) + 1}q", len(shape), *shape, *stride, offset)
