"""Files that are taken for checkpoints and are none, or none that holds the weights: recognised by content.

Each gives one sentence that says what the file is, and a hint that says what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from precconv.errors import UnknownFormatError
from precconv.fileio import SourceFile

from .zip_index import read_bytes

__all__ = ["HEAD", "Impostor", "directory_impostor", "file_impostor", "zip_impostor"]

HEAD = 1024  #: bytes of a file's start that are looked at


@dataclass(frozen=True, slots=True)
class Impostor:
    """What a file is, completing "this is ...", and what to do about it."""

    what: str
    hint: str = ""

    def error(self, path: str | os.PathLike[str]) -> UnknownFormatError:
        return UnknownFormatError(f"this is {self.what}", path=path, hint=self.hint or None)


_UNPACK = "unpack it and convert the checkpoint inside"
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF file (llama.cpp)", "convert the original checkpoint; GGUF is an output of other tools"),
    (b"lmgg", "a GGML file (llama.cpp)", "convert the original checkpoint"),
    (b"tjgg", "a GGML file (llama.cpp)", "convert the original checkpoint"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras .h5)", "export the weights to safetensors with Keras"),
    (b"\x93NUMPY", "a numpy array (.npy)", "save it as safetensors with safetensors.numpy"),
    (b"\x1f\x8b", "a gzip file", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd file", _UNPACK),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", _UNPACK),
    (b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (b"BZh", "a bzip2 file", _UNPACK),
    (b"\xfd7zXZ\0", "an xz file", _UNPACK),
    (b"\x04\x22\x4d\x18", "an lz4 file", _UNPACK),
    (b"%PDF", "a PDF document", ""),
    (b"\x7fELF", "a program or library, no checkpoint", ""),
)
_TF_INDEX = bytes.fromhex("57fb808b247547db")  #: last bytes of a TensorFlow checkpoint's index (a LevelDB table)
_DOWNLOAD = "the download failed or needs a login; fetch the file itself"


def file_impostor(source: SourceFile) -> Impostor | None:
    """What a file that is neither safetensors nor torch's is, where its bytes tell."""
    if source.size == 0:
        return Impostor("an empty file", "download or copy it again")
    head = read_bytes(source, 0, min(HEAD, source.size))
    for magic, what, hint in _MAGIC:
        if head.startswith(magic):
            return Impostor(what, hint)
    for test in (_lfs, _page, _json, _flatbuffer, _onnx, _saved_model, _msgpack):
        found = test(head)
        if found is not None:
            return found
    if source.size >= 8 and read_bytes(source, source.size - 8, 8) == _TF_INDEX:
        return Impostor("the index of a TensorFlow checkpoint", "load it with TensorFlow and save the variables")
    return None


def _lfs(head: bytes) -> Impostor | None:
    if not head.startswith(b"version https://git-lfs"):
        return None
    size = re.search(rb"^size (\d{1,20})\s*$", head, re.MULTILINE)
    promised = f" to {int(size[1])} bytes" if size else ""
    return Impostor(f"a Git LFS pointer{promised}, not the file itself", "run git lfs pull, or download the file again")


def _page(head: bytes) -> Impostor | None:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return Impostor("an HTML page, not a checkpoint", _DOWNLOAD)
    if start.startswith(b"<?xml"):
        return Impostor("an XML document, not a checkpoint", _DOWNLOAD)
    return None


def _json(head: bytes) -> Impostor | None:
    if re.match(rb'\s*\{\s*"', head) is None:
        return None
    if b'"weight_map"' in head:
        return Impostor("the index of a sharded checkpoint", "give the directory it is in")
    return Impostor("a JSON file, not a checkpoint")


def _flatbuffer(head: bytes) -> Impostor | None:
    names = {b"TFL3": "a TensorFlow Lite model", b"ET12": "an ExecuTorch program"}
    what = names.get(head[4:8])
    return Impostor(what, "convert the checkpoint it was made from") if what else None


def _onnx(head: bytes) -> Impostor | None:
    """A ModelProto: ir_version, then the producer's name or a graph."""
    if re.match(rb"\x08[\x02-\x20](\x12[\x00-\x40][ -~]*|\x3a)", head) is None:
        return None
    if not re.match(rb"\x08.\x12[\x01-\x40][ -~]+[\x1a\x22\x2a\x32\x3a\x42]", head, re.DOTALL) and head[2] != 0x3A:
        return None
    return Impostor("an ONNX model", "convert the checkpoint it was exported from")


def _saved_model(head: bytes) -> Impostor | None:
    """A SavedModel: schema version 1, then a MetaGraphDef that starts with its MetaInfoDef."""
    if re.match(rb"\x08\x01\x12[\x80-\xff]{0,9}[\x00-\x7f]\x0a", head, re.DOTALL) is None:
        return None
    return Impostor("a TensorFlow SavedModel", "load it with TensorFlow and save the variables")


def _msgpack(head: bytes) -> Impostor | None:
    """A map whose first key is a short string, as flax writes."""
    if re.match(rb"(?:[\x81-\x8f]|\xde..)(?:[\xa1-\xbf]|\xd9.)[A-Za-z_][ -~]*", head, re.DOTALL) is None:
        return None
    return Impostor("a msgpack file (Flax)", "load it with Flax and save the parameters as safetensors")


def _any(names: Collection[str], pattern: str) -> bool:
    return any(re.search(pattern, name) for name in names)


def _all(names: Collection[str], pattern: str) -> bool:
    return bool(names) and all(re.search(pattern, name) for name in names)


_ZIPS: tuple[tuple[Callable[[Collection[str]], bool], str, str], ...] = (
    (
        lambda names: _any(names, r"(^|/)\.data/(extern_modules|python_version)$"),
        "a torch.package archive, a program rather than a state dict",
        "load it with torch.package.PackageImporter and save its state_dict()",
    ),
    (
        lambda names: _any(names, r"(^|/)constants\.pkl$") or _any(names, r"^[^/]+/code/.*\.py$"),
        "a TorchScript archive, a program rather than a state dict",
        "load it with torch.jit.load and save its state_dict()",
    ),
    (
        lambda names: _any(names, r"(^|/)archive_format$|serialized_exported_program\.json$"),
        "a torch.export program (.pt2), not a state dict",
        "load it with torch.export.load and save its state_dict",
    ),
    (
        lambda names: _all(names, r"\.npy$"),
        "a numpy archive (.npz)",
        "load it with numpy and save the arrays as safetensors",
    ),
    (
        lambda names: _any(names, r"(^|/)model\.weights\.h5$"),
        "a Keras model",
        "load it with Keras and export the weights",
    ),
    (
        lambda names: _any(names, r"^(\[Content_Types\]\.xml|META-INF/|AndroidManifest\.xml)"),
        "a zip archive of an office document or program, no checkpoint",
        "",
    ),
)


def zip_impostor(names: Collection[str]) -> Impostor | None:
    """What a zip archive with these records is, where it is no torch checkpoint."""
    names = [name for name in names if "/data/" not in name]  # storages, of which there may be many
    for test, what, hint in _ZIPS:
        if test(names):
            return Impostor(what, hint)
    if any(name == "data.pkl" or name.endswith("/data.pkl") for name in names):
        return None
    inside = [name for name in names if re.search(r"\.(safetensors|pt|pth|ckpt|bin)$", name)]
    if inside:
        return Impostor(f"a zip archive with {inside[0]!r} in it, no checkpoint itself", _UNPACK)
    return Impostor("a zip archive without a checkpoint in it" if names else "an empty zip archive")


def directory_impostor(path: str | os.PathLike[str]) -> Impostor | None:
    """What a directory that is no model repository is: a distributed checkpoint (DCP)."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    shards = next(folder.glob("*.distcp"), None)
    if shards is None and not (folder / ".metadata").is_file():
        return None
    return DCP


DCP = Impostor(
    "a distributed checkpoint (DCP): its tensors are spread over .distcp files",
    "join it with python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT.pt",
)
