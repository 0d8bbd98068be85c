"""The safetensors format: own validation of the whole header, and the header of an output as a pure function.

The rules are the format's description and its reference implementation, ``safetensors/src/tensor.rs``
(version 0.8): a little-endian u64 length, that many bytes of JSON, then the data without holes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import le, mul
from pathlib import Path
from typing import Any, NoReturn

from ..bulk import collector_paused
from ..dtypes import DType, by_code
from ..errors import CorruptCheckpointError, VerificationError
from ..fileio import InputFile
from ..tensors import TensorInfo
from . import Format, Layout

MAX_HEADER = 100_000_000  #: bytes; the reference implementation refuses more
_MAX_USIZE = (1 << 64) - 1


class _HeaderError(ValueError):
    """A broken rule, in words; ``read_header`` says in which file."""


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """An open ``.safetensors`` file whose header is valid."""

    file: InputFile
    metadata: Mapping[str, str]
    infos: Sequence[TensorInfo]  #: by offset
    notes: Sequence[str]

    @property
    def format(self) -> Format:
        return FORMAT


def sniff(head: bytes) -> bool:
    return len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= MAX_HEADER


def open_file(file: InputFile) -> SafetensorsReader:
    """Read and validate the header; raises CorruptCheckpointError naming the broken rule."""
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if 8 + length > file.size:
        _truncated(file, f"its header alone is {length} bytes, the file has {file.size}")
    raw = file.read(8, length)
    try:
        with collector_paused():
            metadata, infos, notes = validate(parse(raw), base=8 + length)
    except _HeaderError as e:
        raise CorruptCheckpointError(str(e), path=file.path) from None
    end = infos[-1].offset + infos[-1].nbytes if infos else 8 + length
    if end > file.size:
        _truncated(file, f"its header promises {end} bytes, the file has {file.size}")
    if end < file.size:
        raise CorruptCheckpointError(f"{file.size - end} bytes follow the last tensor", path=file.path)
    return SafetensorsReader(file, metadata, infos, notes)


def _truncated(file: InputFile, why: str) -> NoReturn:
    raise CorruptCheckpointError(f"truncated: {why}", path=file.path, hint="fetch or copy the file again")


def parse(raw: bytes) -> dict[str, Any]:
    """The header's JSON object, duplicate names and what is not JSON refused."""
    if raw[:1] != b"{":
        raise _HeaderError("the header does not start with '{'")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise _HeaderError(f"the header is not UTF-8 (byte {8 + e.start})") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise _HeaderError("the header nests too deeply") from None
    except _HeaderError:
        raise
    except ValueError as e:
        raise _HeaderError(f"the header is not valid JSON ({e})") from None
    assert isinstance(header, dict)
    if "\\ud" in text.lower():  # JSON can spell halves of characters that UTF-8 cannot
        _no_surrogates(header)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _HeaderError(f"the name {name!r} stands twice in the header")
    return found


def _no_constant(text: str) -> NoReturn:
    raise _HeaderError(f"the header is not valid JSON ({text})")


def _no_surrogates(header: dict[str, Any]) -> None:
    try:
        _json(header).encode("utf-8")
    except UnicodeEncodeError:
        raise _HeaderError("the header has text that is not Unicode (half of a surrogate pair)") from None


def validate(header: dict[str, Any], *, base: int) -> tuple[dict[str, str], list[TensorInfo], list[str]]:
    """Every rule of the format but the file's length.  ``base`` is where the data starts.

    Returns the metadata, the tensors by offset and what is worth saying about the header.
    """
    metadata = _metadata(header.pop("__metadata__", None))
    infos, extra = [], set()
    for name, entry in header.items():
        infos.append(_entry(name, entry, base))
        if len(entry) != 3:
            extra.update(entry.keys() - {"dtype", "shape", "data_offsets"})
    infos.sort(key=lambda t: (t.offset, t.nbytes))
    at = base
    for t in infos:
        if t.offset != at:
            what = (
                "overlaps the tensor before it" if t.offset < at else f"leaves {t.offset - at} bytes unused before it"
            )
            raise _HeaderError(f"tensor {t.name!r} {what}")
        at += t.nbytes
    notes = [f"unknown keys in its header are not carried over: {', '.join(sorted(extra))}"] if extra else []
    return metadata, infos, notes


def _metadata(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _HeaderError("__metadata__ is not an object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise _HeaderError(f"__metadata__ {key!r} is not a string")
    return found


def _entry(name: str, entry: object, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _HeaderError(f"the entry of tensor {name!r} is not an object")
    try:
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as e:
        raise _HeaderError(f"tensor {name!r} has no {e.args[0]}") from None
    dtype = by_code(code) if isinstance(code, str) else None
    if dtype is None:
        raise _HeaderError(f"tensor {name!r} has the unknown dtype {code!r:.40}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_usize, offsets)):
        raise _HeaderError(f"tensor {name!r} has bad data_offsets {offsets!r:.60}")
    if not isinstance(shape, list) or not all(map(_is_usize, shape)):
        raise _HeaderError(f"tensor {name!r} has a bad shape {shape!r:.60}")
    bits = prod(shape) * dtype.bits
    if bits > _MAX_USIZE or (bits == 0 and max(accumulate(shape, mul), default=1) > _MAX_USIZE):
        raise _HeaderError(f"tensor {name!r} has a shape whose size overflows ({shape!r:.60})")
    start, end = offsets
    if (end - start) * 8 != bits:
        size = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits"
        raise _HeaderError(f"tensor {name!r}: {dtype.code} {shape!r:.60} takes {size}, its offsets span {end - start}")
    return TensorInfo(name, dtype, tuple(shape), base + start, end - start)


def _is_usize(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_USIZE


def layout(sources: Sequence[TensorInfo], dtypes: Sequence[DType], metadata: Mapping[str, str]) -> Layout:
    """The header of an output and the place of every tensor in it, given the sources and their new dtypes.

    The order of ``sources`` is kept, unless it is the order in which the safetensors library lays out (wider
    types first, then by name) or would put a tensor across a boundary of its own element size: then the output
    has the library's order for the new dtypes, and is byte for byte what the library would have written.
    """
    sizes = [prod(t.shape) * d.bits // 8 for t, d in zip(sources, dtypes, strict=True)]
    order: Sequence[int] = range(len(sources))
    if is_library_order(sources) or not _is_aligned(sizes, dtypes):
        order = sorted(order, key=lambda i: (-dtypes[i].rank, sources[i].name))
    start = [0] * len(sources)
    entries = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else []
    at = 0
    for i in order:
        t, code, start[i] = sources[i], dtypes[i].code, at
        at += sizes[i]
        shape = ",".join(map(str, t.shape))
        entries.append(f'{_json(t.name)}:{{"dtype":"{code}","shape":[{shape}],"data_offsets":[{start[i]},{at}]}}')
    body = ("{" + ",".join(entries) + "}").encode()
    body += b" " * (-len(body) % 8)
    header = struct.pack("<Q", len(body)) + body
    return Layout(header, tuple(s + len(header) for s in start), at + len(header))


#: As the reference implementation's serde_json writes: no spaces, UTF-8 as it is.
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def is_library_order(tensors: Sequence[TensorInfo]) -> bool:
    """Whether the tensors stand as the safetensors library would have written them (``prepare`` in tensor.rs)."""
    keys = [(-t.dtype.rank, t.name) for t in tensors]
    return all(map(le, keys, keys[1:]))


def _is_aligned(sizes: Sequence[int], dtypes: Sequence[DType]) -> bool:
    starts = accumulate(sizes, initial=0)
    return all(start * 8 % d.bits == 0 for start, d in zip(starts, dtypes, strict=False))


def library_view(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the safetensors library finds in the file, in the order of its bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as f:
            view = {}
            for name in f.offset_keys():
                part = f.get_slice(name)
                view[name] = (part.get_dtype(), tuple(part.get_shape()))
            return view
    except SafetensorError as e:
        raise VerificationError(f"the safetensors library refuses the output: {e}", path=path) from e


FORMAT = Format("safetensors", (".safetensors", ".sft"), sniff, open_file, layout, library_view)
