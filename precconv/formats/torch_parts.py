"""Which stretches of the source's storages go to which storages of the output, and as what.

Views that overlap are one block and stay together.  The blocks of a storage that get one dtype share one storage of
the output, close to each other: what no tensor shows is left out.  Blocks with different fates, say a kept norm and a
cast matrix in one flat buffer, get a storage each, as no tensor can tell.

Overlapping views that are to get different dtypes keep their source dtype when any of them is to be kept (its bits
are promised), else they get the narrowest dtype that holds all of theirs: nothing is ever narrower than asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..dtypes import BF16, FP16, FP32, FP64, DType, dtype
from ..errors import InputError
from .pickled import StorageRef
from .torch_tensors import TensorRef

__all__ = ["Block", "Part", "View", "parts_of"]


@dataclass(slots=True, eq=False)
class View:
    """One tensor, or a whole storage object, over a record of the source."""

    ident: int  #: ``id`` of the node
    storage: StorageRef
    ref: TensorRef | None  #: None for a storage object
    start: int  #: first byte in the record
    end: int
    wants: list[tuple[str, DType]] = field(default_factory=list)  #: by the names it was chosen under; none keeps it

    @property
    def dtype(self) -> DType | None:
        return self.storage.dtype if self.ref is None else self.ref.dtype

    @property
    def fates(self) -> set[DType | None]:
        """The dtypes it is to get; None where its bits are to stay."""
        mine = self.dtype
        found: set[DType | None] = {None if to is mine else to for _, to in self.wants}
        return found or {None}


@dataclass(slots=True, eq=False)
class Block:
    """Overlapping views: bytes ``start`` to ``end`` of a record, elements ``src`` that become ``to``."""

    views: list[View]
    start: int
    end: int
    src: DType
    to: DType
    place: int = 0  #: first byte in the output's storage

    @property
    def is_cast(self) -> bool:
        return self.src is not self.to

    @property
    def numel(self) -> int:
        return (self.end - self.start) // _size(self.src)

    @property
    def nbytes(self) -> int:
        """In the output."""
        return self.numel * _size(self.to)

    @property
    def has_conflict(self) -> bool:
        """Whether a view gets something else than it was to get."""
        got = self.to if self.is_cast else None
        return any(fate is not got for view in self.views for fate in view.fates)


@dataclass(slots=True, eq=False)
class Part:
    """One storage of the output."""

    storage: StorageRef  #: whose type and location it has
    dtype: DType | None  #: None where untyped
    blocks: list[Block] = field(default_factory=list)
    nbytes: int = 0

    def add(self, block: Block) -> None:
        block.place = self.nbytes if block.nbytes else 0
        self.nbytes += block.nbytes
        self.blocks.append(block)

    @property
    def numel(self) -> int:
        """As its reference counts: bytes where untyped."""
        return self.nbytes if self.dtype is None else self.nbytes // _size(self.dtype)


def _size(kind: DType) -> int:
    return max(1, kind.bits // 8)


def parts_of(views: Iterable[View]) -> list[Part]:
    """The output's storages for every view of the source; raises InputError for what they cannot share."""
    records: dict[str, list[View]] = defaultdict(list)
    for view in views:
        records[view.storage.key].append(view)
    return [part for key, group in records.items() for part in _parts_of_record(key, group)]


def _parts_of_record(key: str, views: list[View]) -> Iterator[Part]:
    typed = {view.storage.dtype for view in views}
    if len(typed) > 1:
        shown = " and ".join(sorted(str(kind or "untyped") for kind in typed))
        raise InputError(f"storage {key!r} is seen as {shown}; no torch checkpoint can hold that")
    parts: dict[DType | None, Part] = {}
    for block in _blocks(views):
        if any(view.ref is None for view in block.views):
            yield _whole(block)
            continue
        fate = block.to if block.is_cast else None
        part = parts.get(fate)
        if part is None:
            part = parts[fate] = _part(block.views[0].storage, fate)
        part.add(block)
    yield from parts.values()


def _part(storage: StorageRef, fate: DType | None) -> Part:
    return Part(storage, None if storage.dtype is None else fate or storage.dtype)


def _whole(block: Block) -> Part:
    """The storage of an object that is one: nothing may be left out or added."""
    for view in block.views:
        if view.ref is None and (view.start, view.end) != (block.start, block.end):
            raise InputError(f"storage {view.storage.key!r} is a part of another; no zip checkpoint can hold that")
    part = _part(block.views[0].storage, None)
    part.add(block)
    return part


def _blocks(views: list[View]) -> list[Block]:
    """The views that overlap, together; those without elements last."""
    groups: list[tuple[list[View], int]] = []
    for view in sorted((v for v in views if v.start < v.end), key=lambda v: (v.start, -v.end)):
        if groups and view.start < groups[-1][1]:
            groups[-1][0].append(view)
            groups[-1] = (groups[-1][0], max(groups[-1][1], view.end))
        else:
            groups.append(([view], view.end))
    if len({_size(v.dtype or _BYTE) for v in views}) > 1:  # of different widths: their distances stay
        groups = [([v for group, _ in groups for v in group], max(end for _, end in groups))]
    empty = [view for view in views if view.start == view.end]
    return [
        *(_block(group, group[0].start, end) for group, end in groups),
        *(_block([view], view.start, view.end) for view in empty),
    ]


_BYTE = dtype("uint8")


def _block(views: list[View], start: int, end: int) -> Block:
    kinds = {view.dtype for view in views}
    src = next(iter(kinds)) if len(kinds) == 1 else None
    to = _joined({fate for view in views for fate in view.fates})
    if src is None:  # a mixture is bytes
        return Block(views, start, end, _BYTE, _BYTE)
    return Block(views, start, end, src, to or src)


def _joined(fates: set[DType | None]) -> DType | None:
    """One fate for several."""
    if None in fates:
        return None
    for kind in (FP16, BF16, FP32, FP64):
        if all(kind is fate or fate in _HELD[kind] for fate in fates):
            return kind
    return None


#: What each dtype holds exactly, besides itself.
_HELD: dict[DType, tuple[DType, ...]] = {FP16: (), BF16: (), FP32: (FP16, BF16), FP64: (FP16, BF16, FP32)}
