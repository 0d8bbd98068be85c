"""A torch checkpoint with other dtypes, planned to the last byte before any tensor is read.

``torch_output`` gives the file's size, the stretches of tensor data to fill in, and all that is not tensor data; this
module reads nothing and writes nothing.  Whatever the source's form, the output is a zip archive as ``torch.save``
writes it today: stored, aligned, little-endian.

    out = torch_output(file, [Choice("model.w", ref, BF16), ...])
    write each of out.start; for each of out.pieces, in any order and by any thread: read, cast, write, note the CRC-32
    write each of out.finish(out.crcs(the chunks' offsets, sizes and CRC-32s))
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ..dtypes import DType, dtype
from ..errors import InputError, UsageError
from .pickle_out import pickle_bytes
from .pickled import Placeholder, StorageRef
from .torch_file import TorchFile, file_offset
from .torch_parts import Block, Part, View, parts_of
from .torch_pieces import Piece, Shown
from .torch_sites import Sites, find_sites, moved, paths, storage_type, with_dtype
from .torch_tensors import TensorRef
from .zip_out import ZipLayout, crc32_combine, zip_layout

__all__ = ["Amended", "Choice", "TorchOutput", "top_folder", "torch_output"]


@dataclass(frozen=True, slots=True)
class Choice:
    """A tensor of the file under its name, and its dtype in the output: the source's keeps it bit for bit."""

    name: str
    ref: TensorRef
    to: DType


@dataclass(frozen=True, slots=True)
class Amended:
    """A choice that could not be followed, because a tensor's memory is shared or is not in a storage."""

    name: str
    wanted: DType
    got: DType
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class TorchOutput:
    """The plan of one output file."""

    size: int  #: bytes
    start: list[tuple[int, bytes]]  #: what is known now, and where it goes
    pieces: tuple[Piece, ...]  #: all tensor data, by offset; they fill their records without holes
    amended: tuple[Amended, ...]
    zip: ZipLayout
    notes: Mapping[int, bytes]  #: the small records but the last, by number

    def crcs(self, chunks: Iterable[tuple[int, int, int]]) -> dict[int, int]:
        """The CRC-32 of each record from those of its chunks: (offset in the output, bytes, CRC-32), in any order.

        Raises ValueError where the chunks are not all of the tensor data, each byte once.
        """
        sums: dict[int, int] = {}
        last = len(self.zip.records) - 1
        at = {i: r.offset for i, r in enumerate(self.zip.records[:last]) if i not in self.notes and r.size}
        numbers = iter(at)
        number: int | None = -1
        end = 0
        for offset, size, crc in sorted(chunks):
            while offset >= end and number is not None:
                number = next(numbers, None)
                end = 0 if number is None else self.zip.records[number].offset + self.zip.records[number].size
            if number is None or offset != at[number]:
                raise ValueError(f"a chunk at byte {offset} does not follow the one before it")
            sums[number] = crc32_combine(sums[number], crc, size) if number in sums else crc
            at[number] += size
        for number, reached in at.items():
            record = self.zip.records[number]
            if reached != record.offset + record.size:
                raise ValueError(f"{reached - record.offset} of {record.size} bytes of {record.name!r} were written")
        return sums

    def finish(self, crcs: Mapping[int, int]) -> list[tuple[int, bytes]]:
        """All that ``start`` left open, given the CRC-32 of each record of tensor data, by its number.

        Records of ``size`` 0 need none.
        """
        known = {number: zlib.crc32(data) for number, data in self.notes.items()} | dict(crcs)
        last = len(self.zip.records) - 1
        words = b"".join(known.get(i, 0).to_bytes(4, "little") for i in range(last))
        ident = b"%040d" % (int.from_bytes(hashlib.sha256(words).digest()) % 10**40)
        known[last] = zlib.crc32(ident)
        pieces = [*self.zip.headers(), *self._notes({**self.notes, last: ident}), *self.zip.finish(known)]
        return list(_joined(pieces, after=self.start[-1][0] + len(self.start[-1][1])))

    def _notes(self, notes: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        return ((self.zip.records[i].offset, data) for i, data in notes.items())


def _joined(pieces: Iterable[tuple[int, bytes]], *, after: int) -> Iterator[tuple[int, bytes]]:
    """Pieces that follow each other as one, those before ``after`` left out."""
    run: list[bytes] = []
    begin = end = 0
    for offset, data in sorted(pieces):
        if offset < after:
            continue
        if run and offset != end:
            yield begin, b"".join(run)
            run = []
        if not run:
            begin = end = offset
        run.append(data)
        end += len(data)
    if run:
        yield begin, b"".join(run)


def top_folder(name: str) -> str:
    """The folder in the archive that ``torch.save`` would use for a file of this name."""
    stem = re.split(r"[/\\]", name)[-1]
    stem = stem.rpartition(".")[0] if "." in stem else stem
    return stem if stem and stem.isascii() else "archive"


def torch_output(file: TorchFile, choices: Iterable[Choice], *, folder: str = "archive") -> TorchOutput:
    """Plan the output of a checkpoint with some of its tensors in other dtypes, all else as it is.

    ``folder``: the one in the archive, a name without slashes.

    Raises InputError for what cannot be written again, with its name.
    """
    try:
        return _planned(file, choices, folder)
    except InputError as e:
        if e.path is not None:
            raise
        raise type(e)(e.message, path=file.source.path, tensor=e.tensor, hint=e.hint) from e


def _planned(file: TorchFile, choices: Iterable[Choice], folder: str) -> TorchOutput:
    sites = find_sites(file.pickle)
    views = _views(file, sites)
    amended = list(_choose(sites, views, choices))
    parts = parts_of(views.values())
    amended += _conflicts(file, parts)
    nodes, refs = _replacements(sites, parts)
    numbers: dict[int, int] = {}
    data = pickle_bytes(
        file.root,
        protocol=file.pickle.protocol,
        discarded=file.pickle.discarded,
        replace=nodes,
        key=lambda ref: str(numbers.setdefault(id(ref), len(numbers))),
    )
    ordered = [refs[ident] for ident in numbers]
    return _output(file, data, ordered, amended, folder)


def _views(file: TorchFile, sites: Sites) -> dict[int, View]:
    found: dict[int, View] = {}
    for ident, site in sites.sites.items():
        ref = site.ref
        file.extent(ref.storage)
        found[ident] = View(ident, ref.storage, ref, ref.byte_start, max(ref.byte_start, ref.byte_end))
    for ident, storage in sites.storages.items():
        file.extent(storage)
        begin = storage.start * storage.itemsize
        found[ident] = View(ident, storage, None, begin, begin + storage.nbytes)
    return found


def _choose(sites: Sites, views: Mapping[int, View], choices: Iterable[Choice]) -> Iterator[Amended]:
    """Note at each view what is wanted of it; yields the choices that no view can follow."""
    for choice in choices:
        ref, to = choice.ref, choice.to
        if to is not ref.dtype and not (to.is_castable and ref.dtype.is_castable):
            raise UsageError(f"{ref.dtype} cannot become {to}", tensor=choice.name)
        site = sites.base(ref.node)
        if site is not None:
            views[id(site.node)].wants.append((choice.name, to))
        elif ref.storage.inline is None:
            raise InputError("is not in this file", tensor=choice.name)
        elif to is not ref.dtype:
            yield Amended(choice.name, to, ref.dtype, "its values are a numpy array")


def _conflicts(file: TorchFile, parts: Iterable[Part]) -> Iterator[Amended]:
    blocks = [block for part in parts for block in part.blocks if block.has_conflict]
    if not blocks:
        return
    where = paths(file.root, {view.ident for block in blocks for view in block.views if not view.wants})
    for block in blocks:
        names = [name for view in block.views for name in _names(view, where)]
        for view in block.views:
            got = block.to if block.is_cast else view.dtype
            for name, to in view.wants:
                if got is not None and to is not got:
                    yield Amended(name, to, got, _sharing(names, name))


def _names(view: View, where: Mapping[int, str]) -> list[str]:
    return [name for name, _ in view.wants] or [where.get(view.ident, "a tensor without a name")]


def _sharing(names: list[str], mine: str) -> str:
    others = list(islice((name for name in names if name != mine), 3))
    more = len(names) - 1 - len(others)
    return f"it shares memory with {', '.join(map(repr, others))}" + (f" and {more} more" if more > 0 else "")


def _replacements(sites: Sites, parts: Iterable[Part]) -> tuple[dict[int, object], dict[int, tuple[Part, StorageRef]]]:
    """The nodes to write for those of the source, and each new storage by its ``id``."""
    nodes: dict[int, object] = {}
    refs: dict[int, tuple[Part, StorageRef]] = {}
    to: dict[int, DType] = {}
    for part in parts:
        old = part.storage
        kind = old.type if part.dtype in (None, old.dtype) else storage_type(old.type, part.dtype or dtype("uint8"))
        ref = StorageRef("", kind, part.dtype, part.numel, old.location)
        refs[id(ref)] = (part, ref)
        for block in part.blocks:
            for view in block.views:
                nodes[view.ident] = _replacement(sites, ref, block, view)
                if block.is_cast:
                    to[view.ident] = block.to
    for node in sites.devices:
        base = sites.base(node)
        if base is not None and id(base.node) in to:
            nodes[id(node)] = with_dtype(node, to[id(base.node)])
    return nodes, refs


def _replacement(sites: Sites, ref: StorageRef, block: Block, view: View) -> Placeholder | StorageRef:
    if view.ref is None:
        return ref
    to = block.to if block.is_cast else view.ref.dtype
    width = max(1, to.bits // 8)
    skipped = view.start - block.start
    if block.is_cast:
        skipped = skipped // view.ref.itemsize * width
    return moved(sites.sites[view.ident], ref, (block.place + skipped) // width, to)


def _output(
    file: TorchFile, data: bytes, storages: list[tuple[Part, StorageRef]], amended: list[Amended], folder: str
) -> TorchOutput:
    before = [("data.pkl", data), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
    after = [("version", b"3\n"), (".data/serialization_id", bytes(40))]
    sizes = [
        *((name, len(note)) for name, note in before),
        *((f"data/{i}", part.nbytes) for i, (part, _) in enumerate(storages)),
        *((name, len(note)) for name, note in after),
    ]
    layout = zip_layout((f"{folder}/{name}", size) for name, size in sizes)
    first, offsets = len(before), layout.offsets
    notes = {i: note for i, (_, note) in enumerate(before)} | {first + len(storages): after[0][1]}
    pieces = [
        _piece(file, first + i, offsets[first + i] + block.place, block)
        for i, (part, _) in enumerate(storages)
        for block in part.blocks
        if block.nbytes
    ]
    head = layout.records[0]
    start = [(0, head.local() + data)]
    return TorchOutput(layout.size, start, tuple(pieces), tuple(amended), layout, notes)


def _piece(file: TorchFile, record: int, offset: int, block: Block) -> Piece:
    view = block.views[0]
    src, storage = _source_dtype(file, block), view.storage
    width = max(1, src.bits // 8)
    extent = file.extent(storage)
    numel = extent.nbytes // storage.itemsize
    whole = StorageRef(storage.key, storage.type, storage.dtype, numel, storage.location, inline=storage.inline)
    node = view.ref.node if view.ref is not None else Placeholder("reduce", storage.type, ())
    flat = TensorRef(node, whole, src, block.start // width, ((block.end - block.start) // width,), (1,))
    shown = [
        Shown(name, v.ref, (v.start - block.start) // width, -(-(v.end - block.start) // width))
        for v in block.views
        if v.ref is not None
        for name, _ in v.wants
    ]
    views = tuple(v.ref for v in block.views if v.ref is not None) if block.is_cast else ()
    to = block.to if block.is_cast else src
    return Piece(record, flat, to, offset, file_offset(file, flat), tuple(shown), views)


def _source_dtype(file: TorchFile, block: Block) -> DType:
    """The elements to read: for those of a mixture of types, bytes."""
    if block.src is dtype("uint8") and file.big_endian:
        kinds = {view.dtype for view in block.views if view.dtype is not None}
        if any(kind.bits > 8 for kind in kinds):
            raise InputError("a storage of a big-endian file is seen as several types")
    return block.src
