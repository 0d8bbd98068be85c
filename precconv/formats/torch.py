"""The format of ``torch.save``: ``.pt``, ``.pth``, ``.bin`` and ``.ckpt``, zip, legacy or tar; written as zip.

Reading is indexing: what the pickle says is data, and nothing it names is imported.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..dtypes import DType
from ..errors import OutputError, VerificationError
from ..fileio import InputFile, SourceFile
from ..paths import library_path
from ..tensors import TensorInfo
from . import Format, Layout, Place, Source
from .elements import ElementReader
from .pickled import Global, Pickle, Placeholder, StorageRef
from .torch_file import Extent, TorchFile
from .torch_open import is_torch, open_torch
from .torch_out import Choice, top_folder, torch_output
from .torch_pieces import Piece
from .torch_tensors import TensorRef, tensor_of

__all__ = ["FORMAT", "TorchReader"]

_ENDS = 1 << 20  #: bytes


@dataclass(frozen=True, slots=True)
class TorchReader:
    """An open torch checkpoint, indexed."""

    file: SourceFile
    index: TorchFile

    @property
    def format(self) -> Format:
        return FORMAT

    @property
    def metadata(self) -> Mapping[str, str]:
        return {}

    @property
    def notes(self) -> Sequence[str]:
        return ()

    @property
    def digest(self) -> str:
        """Of a zip archive's records, whose checksums are of all data; of other forms' first and last megabyte."""
        if self.index.form == "zip":
            lines = (f"{r.crc:08x} {r.size} {name}\n" for name, r in self.index.records.items())
            data = "".join(lines).encode("utf-8", "surrogatepass")
        else:
            size = self.file.size
            data = self.file.read(0, min(_ENDS, size)) + self.file.read(max(0, size - _ENDS), min(_ENDS, size))
        return f"sha256:{hashlib.sha256(data).hexdigest()}"


def open_file(file: SourceFile) -> TorchReader:
    """Index a checkpoint of any of torch's forms, or say what the file is instead."""
    return TorchReader(file, open_torch(file))


def layout(
    source: Source, tensors: Sequence[TensorInfo], dtypes: Sequence[DType], _metadata: Mapping[str, str], name: str
) -> Layout:
    """The whole archive but its tensor data.

    A torch source keeps its structure, with the given tensors in other dtypes.  Where only a part of it was asked
    for, or the source is not a torch checkpoint, the output is a plain dict of the given tensors.
    """
    if isinstance(source.reader, TorchReader) and not source.is_part:
        index, refs = source.reader.index, source.refs
    else:
        index, refs = _flat(source, tensors)
    choices = [Choice(t.name, refs[t.name], d) for t, d in zip(tensors, dtypes, strict=True)]
    out = torch_output(index, choices, folder=top_folder(name))
    keys = {t.name: i for i, t in enumerate(tensors)}
    if isinstance(source.reader, TorchReader):
        places = [_place(index, piece, keys) for piece in out.pieces]
    else:
        places = [_flat_place(source, piece, tensors[keys[piece.tensors[0].name]], keys) for piece in out.pieces]
    changes = {keys[a.name]: (a.got, a.why) for a in out.amended}

    def finish(chunks: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, bytes]]:
        return out.finish(out.crcs(chunks))

    return Layout(out.start, places, out.size, changes, finish)


def _place(index: TorchFile, piece: Piece, keys: Mapping[str, int]) -> Place:
    src = piece.src
    offset = -1 if piece.src_offset is None else piece.src_offset
    info = TensorInfo(piece.tensors[0].name if piece.tensors else "", src.dtype, src.shape, offset, src.nbytes)
    elements = None if offset >= 0 else (lambda: ElementReader(index, src))
    shown = piece.shown if piece.has_gaps else None
    return Place(info, piece.to, piece.offset, tuple(keys[t.name] for t in piece.tensors), elements, shown)


def _flat_place(source: Source, piece: Piece, src: TensorInfo, keys: Mapping[str, int]) -> Place:
    """A tensor by itself or with those tied to it, wherever in the source its elements lie."""
    return Place(src, piece.to, piece.offset, tuple(keys[t.name] for t in piece.tensors), source.elements(src))


_STORAGES = {
    "fp64": "Double", "fp32": "Float", "fp16": "Half", "bf16": "BFloat16", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}  # fmt: skip
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")


def _flat(source: Source, tensors: Sequence[TensorInfo]) -> tuple[TorchFile, Mapping[str, TensorRef]]:
    """A torch checkpoint that is a plain dict of the given tensors, its data where the source has it."""
    if isinstance(source.reader, TorchReader):
        index = source.reader.index
        root: dict[object, object] = {t.name: source.refs[t.name].node for t in tensors}
        pickle = Pickle(root, 2, index.pickle.globals, [])
        return TorchFile(index.source, index.form, pickle, index.extents, index.big_endian), source.refs
    nodes: dict[object, object] = {}
    extents: dict[str, Extent] = {}
    views: dict[object, str] = {}  # shards of a torch checkpoint: tied tensors share their data here too
    for i, t in enumerate(tensors):
        key = views.setdefault(source.refs[t.name].view, str(i)) if t.name in source.refs else str(i)
        extents.setdefault(key, Extent(t.offset, t.nbytes, t.nbytes))
        nodes[t.name] = _tensor_node(t, key)
    made = TorchFile(source.file, "zip", Pickle(nodes, 2, [], []), extents)
    refs = {str(name): ref for name, node in nodes.items() if isinstance(ref := tensor_of(node), TensorRef)}
    return made, refs


def _tensor_node(t: TensorInfo, key: str) -> Placeholder:
    """What ``torch.save`` would have pickled for a tensor of a safetensors file."""
    shape = (*t.shape[:-1], t.shape[-1] // 2) if t.dtype == "fp4" and t.shape else t.shape
    stride = tuple(_strides(shape))
    hooks = Placeholder("reduce", Global("collections", "OrderedDict"), ())
    if t.dtype.name in _STORAGES:
        kind = Global("torch", f"{_STORAGES[t.dtype.name]}Storage")
        storage = StorageRef(key, kind, t.dtype, t.nbytes // t.dtype.itemsize)
        return Placeholder("reduce", _REBUILD, (storage, 0, shape, stride, False, hooks))
    if t.dtype.bits < 8 and t.dtype != "fp4":
        raise OutputError(
            f"torch has no {t.dtype} type", tensor=t.name, hint="write safetensors, or drop it with --rule"
        )
    storage = StorageRef(key, Global("torch.storage", "UntypedStorage"), None, t.nbytes)
    kind = Global("torch", t.dtype.torch)
    return Placeholder("reduce", _REBUILD_UNTYPED, (storage, 0, shape, stride, False, hooks, kind, None))


def _strides(shape: Sequence[int]) -> Iterator[int]:
    """Row-major strides in elements, as torch gives them."""
    for i in range(len(shape)):
        step = 1
        for size in shape[i + 1 :]:
            step *= max(size, 1)
        yield step


#: What torch may call to load a file without running anything of the file's choosing: tensors and their containers.
_HARMLESS = re.compile(
    r"collections\.OrderedDict|torch\._utils\._rebuild_(?:tensor(?:_v[23])?|parameter(?:_with_state)?)"
    r"|torch\.\w+Storage|torch\.storage\.\w+Storage|torch\.nn\.Parameter|torch\.Size"
    r"|torch\.(?:float|bfloat|complex|u?int|bool)\w*"
)


def check(path: Path, _planned: Layout, _tensors: Sequence[TensorInfo], _dtypes: Sequence[DType]) -> None:
    """torch loads the archive, without reading its data, where nothing but tensors and plain values is in it.

    Else torch would have to import what the file names, or call what it allows itself with whatever the file says.
    """
    with InputFile(path) as file:
        named = open_torch(file).pickle.globals
    if not all(_HARMLESS.fullmatch(g.canonical) for g in named):
        return
    from pickle import UnpicklingError

    import torch

    with library_path(path) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about how torch checks what it loads: of no use to anyone here
        try:
            torch.load(name, map_location="cpu", mmap=True, weights_only=True)
        except UnpicklingError:  # plain values that torch cannot read without trusting the file: sets, large integers
            return
        except (RuntimeError, ValueError, OSError, ArithmeticError, LookupError, TypeError) as e:
            raise VerificationError(f"torch refuses the output: {e}", path=path) from e


FORMAT = Format("pt", (".pt", ".pth", ".bin", ".ckpt", ".pth.tar", ".pt.tar"), is_torch, open_file, layout, check)
