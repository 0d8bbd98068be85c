"""The safetensors format: own validation of the whole header, and the header of an output as a pure function.

The rules are the format's description and its reference implementation, ``safetensors/src/tensor.rs``
(version 0.8): a little-endian u64 length, that many bytes of JSON, then the data without holes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import le
from pathlib import Path
from reprlib import Repr
from typing import Any, NoReturn

from ..bulk import collector_paused
from ..dtypes import DType, by_code
from ..errors import CorruptCheckpointError, OutputError, VerificationError
from ..fileio import SourceFile
from ..paths import library_path, reason
from ..tensors import TensorInfo
from . import Format, Layout, Place, Source

MAX_HEADER = 100_000_000  #: bytes; the reference implementation refuses more
_MAX_USIZE = (1 << 64) - 1
_MAX_DEPTH = 127  #: of arrays and objects in each other; serde_json, which the reference reads with, refuses more
_WHITESPACE = b" \t\n\r"
_REPR = Repr()
_REPR.maxstring, _REPR.maxlist = 200, 8
#: Shows what a header holds in a message, however large, deep or strange it is.
_show = _REPR.repr


class _HeaderError(ValueError):
    """A broken rule, in words; ``read_header`` says in which file."""


@dataclass(frozen=True, slots=True)
class SafetensorsReader:
    """An open ``.safetensors`` file whose header is valid."""

    file: SourceFile
    metadata: Mapping[str, str]
    infos: Sequence[TensorInfo]  #: by offset
    notes: Sequence[str]
    digest: str  #: SHA-256 of all that stands before the data: the length and the header

    @property
    def format(self) -> Format:
        return FORMAT


def sniff(head: bytes) -> bool:
    """A plausible length, then the start of an object; or the start of one that can only be a header."""
    if len(head) < 9:
        return False
    plausible = struct.unpack("<Q", head[:8])[0] <= MAX_HEADER
    return head[8:10] in (b'{"', b"{}") or (plausible and head[8:9] in b"{" + _WHITESPACE)


def open_file(file: SourceFile) -> SafetensorsReader:
    """Read and validate the header; raises CorruptCheckpointError naming the broken rule."""
    head = file.read(0, 8)
    (length,) = struct.unpack("<Q", head)
    if length > MAX_HEADER:
        why = f"its header claims {length} bytes, the format allows {MAX_HEADER}"
        raise CorruptCheckpointError(why, path=file.path)
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
    digest = hashlib.sha256(head + raw).hexdigest()
    return SafetensorsReader(file, metadata, infos, notes, f"sha256:{digest}")


def _truncated(file: SourceFile, why: str) -> NoReturn:
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
        header = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_int if "-0" in text else None,
        )
        if "\\ud" in text.lower():  # JSON can spell halves of characters that UTF-8 cannot
            _no_surrogates(header)
    except RecursionError:
        raise _HeaderError("the header nests too deeply") from None
    except _HeaderError:
        raise
    except json.JSONDecodeError as e:
        raise _HeaderError(f"the header is not valid JSON ({e})") from None
    except ValueError:  # more digits than Python turns into an integer
        raise _HeaderError("the header holds a number that is out of range") from None
    assert isinstance(header, dict)
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        name = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise _HeaderError(f"the name {_show(name)} stands twice in the header")
    return found


def _int(text: str) -> int | float:
    """JSON's ``-0`` is a float to the reference implementation, and so no size and no offset."""
    return -0.0 if text == "-0" else int(text)


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
            unknown = entry.keys() - {"dtype", "shape", "data_offsets"}
            for key in unknown:
                _only_readable(entry[key], depth=2)
            extra |= unknown
    infos.sort(key=lambda t: (t.offset, t.nbytes))
    at = base
    for t in infos:
        if t.offset != at:
            what = (
                "overlaps the tensor before it" if t.offset < at else f"leaves {t.offset - at} bytes unused before it"
            )
            raise _HeaderError(f"tensor {_show(t.name)} {what}")
        at += t.nbytes
    keys = ", ".join(map(_show, sorted(extra)[:5])) + (" …" if len(extra) > 5 else "")
    notes = [f"unknown keys in its header are not carried over: {keys}"] if extra else []
    return metadata, infos, notes


def _only_readable(value: object, *, depth: int) -> None:
    """Refuse in an unknown key what makes the reference implementation refuse the file: depth and huge numbers."""
    if isinstance(value, list | dict):
        if depth == _MAX_DEPTH:
            raise _HeaderError("the header nests too deeply")
        for v in value.values() if isinstance(value, dict) else value:
            _only_readable(v, depth=depth + 1)
    elif isinstance(value, int | float):
        try:
            fits = math.isfinite(value)  # an integer's value as a float
        except OverflowError:
            fits = False
        if not fits:
            raise _HeaderError("the header holds a number that is out of range")


def _metadata(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _HeaderError("__metadata__ is not an object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise _HeaderError(f"__metadata__ {_show(key)} is not a string")
    return found


def _entry(name: str, entry: object, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _HeaderError(f"the entry of tensor {_show(name)} is not an object")
    try:
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as e:
        raise _HeaderError(f"tensor {_show(name)} has no {e.args[0]}") from None
    dtype = by_code(code) if isinstance(code, str) else None
    if dtype is None:
        raise _HeaderError(f"tensor {_show(name)} has the unknown dtype {_show(code)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_usize, offsets)):
        raise _HeaderError(f"tensor {_show(name)} has bad data_offsets {_show(offsets)}")
    if not isinstance(shape, list) or not all(map(_is_usize, shape)):
        raise _HeaderError(f"tensor {_show(name)} has a bad shape {_show(shape)}")
    bits = _bits(shape, dtype)
    if bits is None:
        raise _HeaderError(f"tensor {_show(name)} has a shape whose size overflows ({_show(shape)})")
    start, end = offsets
    if (end - start) * 8 != bits:
        size = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits} bits"
        what = f"{dtype.code} {_show(shape)} takes {size}, its offsets span {end - start}"
        raise _HeaderError(f"tensor {_show(name)}: {what}")
    return TensorInfo(name, dtype, tuple(shape), base + start, end - start)


def _bits(shape: list[int], dtype: DType) -> int | None:
    """Size of a tensor's data; None where the reference's 64-bit arithmetic overflows, before a zero or after it.

    Stops there: the exact product of a hostile shape takes hours.
    """
    bits = 1
    for factor in (*shape, dtype.bits):
        bits *= factor
        if bits > _MAX_USIZE:
            return None
    return bits


def _is_usize(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_USIZE


def layout(
    source: Source, tensors: Sequence[TensorInfo], dtypes: Sequence[DType], metadata: Mapping[str, str], _name: str
) -> Layout:
    """The header of an output and the place of every tensor in it, given the tensors and their new dtypes.

    The order of a safetensors source is kept, unless it is the order in which the safetensors library lays out
    (wider types first, then by name) or would put a tensor across a boundary of its own element size: then, and for
    sources in other formats or of several files, the output has the library's order for the new dtypes, and is byte
    for byte what the library would have written.  Raises OutputError for a dtype that the format has no code for.
    """
    for t, d in zip(tensors, dtypes, strict=True):
        if not d.code:
            hint = f"leave it out (--rule {t.name!r}=drop) or write --format pt"
            raise OutputError(f"safetensors has no {d} type", tensor=t.name, hint=hint)
    sizes = [prod(t.shape) * d.bits // 8 for t, d in zip(tensors, dtypes, strict=True)]
    order: Sequence[int] = range(len(tensors))
    if not isinstance(source.reader, SafetensorsReader) or is_library_order(tensors) or not _is_aligned(sizes, dtypes):
        order = sorted(order, key=lambda i: (-dtypes[i].rank, tensors[i].name))
    entries = [f'"__metadata__":{_json(dict(metadata))}'] if metadata else []
    starts = []
    at = 0
    for i in order:
        t, code, start = tensors[i], dtypes[i].code, at
        at += sizes[i]
        starts.append(start)
        shape = ",".join(map(str, t.shape))
        entries.append(f'{_json(t.name)}:{{"dtype":"{code}","shape":[{shape}],"data_offsets":[{start},{at}]}}')
    body = ("{" + ",".join(entries) + "}").encode()
    body += b" " * (-len(body) % 8)
    if len(body) > MAX_HEADER:
        raise OutputError(f"its header would have {len(body)} bytes, the format allows {MAX_HEADER}")
    header = struct.pack("<Q", len(body)) + body
    base = len(header)
    places = [
        Place(tensors[i], dtypes[i], base + start, (i,), source.elements(tensors[i]))
        for i, start in zip(order, starts, strict=True)
    ]
    return Layout([(0, header)], places, at + base)


#: As the reference implementation's serde_json writes: no spaces, UTF-8 as it is.
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def is_library_order(tensors: Sequence[TensorInfo]) -> bool:
    """Whether the tensors stand as the safetensors library would have written them (``prepare`` in tensor.rs)."""
    keys = [(-t.dtype.rank, t.name) for t in tensors]
    return all(map(le, keys, keys[1:]))


def _is_aligned(sizes: Sequence[int], dtypes: Sequence[DType]) -> bool:
    starts = accumulate(sizes, initial=0)
    return all(start % max(1, d.bits // 8) == 0 for start, d in zip(starts, dtypes, strict=False))


def check(path: Path, planned: Layout, tensors: Sequence[TensorInfo], dtypes: Sequence[DType]) -> None:
    """The safetensors library finds the planned names, dtypes, shapes and order.

    Tensors without elements have no place in the order: they share theirs with whatever follows.
    """
    found = _library_view(path)
    for t, d in zip(tensors, dtypes, strict=True):
        got = found.get(t.name)
        if got != (d.code, t.shape):
            seen = "nothing" if got is None else f"{got[0]} {list(got[1])}"
            message = f"planned as {d.code} {list(t.shape)}, the safetensors library finds {seen}"
            raise VerificationError(message, path=path, tensor=t.name)
    names = [place.src.name for place in planned.places if place.src.nbytes]
    if len(found) != len(tensors) or [n for n, (_, shape) in found.items() if 0 not in shape] != names:
        raise VerificationError("its tensors are not those planned, in the planned order", path=path)


def _library_view(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names to (dtype code, shape) as the safetensors library finds them, in the order of their bytes."""
    from safetensors import SafetensorError, safe_open

    try:
        with library_path(path) as name, safe_open(name, framework="pt") as f:
            view = {}
            for name in f.offset_keys():
                part = f.get_slice(name)
                view[name] = (part.get_dtype(), tuple(part.get_shape()))
            return view
    except OSError as e:
        raise OutputError(f"cannot be read back: {reason(e)}", path=path) from e
    except SafetensorError as e:
        raise VerificationError(f"the safetensors library refuses the output: {e}", path=path) from e


FORMAT = Format("safetensors", (".safetensors", ".sft"), sniff, open_file, layout, check)
