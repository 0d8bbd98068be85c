"""One file held against what a conversion makes: everything is planned, laid out and cast again, nothing is written.

Where the file's header is the planned one, every byte has its place and is compared there.  Where it is not, what is
different in it is said, and the tensors that both have are compared wherever the file has them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from .bulk import collector_paused
from .checkpoint import Checkpoint
from .convert import Task, open_output, write
from .differences import unravelled
from .errors import PrecconvError, UnknownFormatError
from .fileio import InputFile, SourceFile
from .formats import Format, Place
from .plan import Item
from .proof import Mismatch
from .provenance import KEY
from .readback import Sides, first_difference
from .request import draws_for
from .runs import Chunk, Progress, all_chunks, for_each, make_runs
from .tensors import TensorInfo

if TYPE_CHECKING:
    from .recast import Found

__all__ = ["Proven", "named_as", "prove_file"]

#: With these, what overflows decides a tensor's dtype, and so the whole layout.
_FALLBACKS = ("keep", "fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Proven:
    """What became of one file; ``task`` as it should have been carried out."""

    task: Task
    mismatches: tuple[Mismatch, ...]
    nbytes: int  #: of the output that were compared
    uncompared: int = 0  #: tensors of which the file has no values that could be looked at


def named_as(path: Path, fmt: Format) -> Path:
    """What the file was called when it was made: a torch archive has a folder of that name in it."""
    if fmt.name != "pt":
        return path
    try:
        with InputFile(path) as file:
            head = file.read(0, min(file.size, 30 + 256))
    except PrecconvError:
        return path
    size = int.from_bytes(head[26:28], "little")
    folder = head[30 : 30 + size].decode("utf-8", "replace").partition("/")[0]
    return path.with_name(f"{folder}.pt") if head[:2] == b"PK" and folder else path


def prove_file(task: Task, path: Path, progress: Progress) -> Proven:
    """Hold a file against what the task makes of its source; neither is changed.

    Raises what reading the source raises; what is wrong with the output is in the result.
    """
    with task.file.held():
        task, refused = _settled(task, progress)
        try:
            out = _opened(task, path)
        except PrecconvError as e:
            mismatch = Mismatch("unreadable", e.message, tensor=e.tensor)
            return Proven(task, (*refused, mismatch), 0, len(task.plan.items))
        with out:
            proven = _compared(task, out, progress)
            out.file.require_unchanged()
        task.file.require_unchanged()
    return replace(proven, mismatches=(*refused, *proven.mismatches))


class _Nowhere:
    """Where a conversion writes that is done for its decisions."""

    def require_space(self, more: int) -> None: ...
    def preallocate(self, size: int) -> None: ...
    def write(self, buffer: memoryview, offset: int) -> None: ...


def _settled(task: Task, progress: Progress) -> tuple[Task, list[Mismatch]]:
    """The task with the dtypes that overflow gives, and what the checks would have refused."""
    if task.request.limits.on_overflow not in _FALLBACKS:
        return task, []
    progress.expect(_source_bytes(task.layout.places))
    outcome = write(task, _Nowhere(), progress)
    refused = [Mismatch("refused", f"{f.text}: refused by the conversion", tensor=f.tensor) for f in outcome.errors]
    return replace(task, plan=outcome.plan, layout=outcome.layout), refused


def _source_bytes(places: Sequence[Place]) -> int:
    return sum(p.src.nbytes for p in places)


def _opened(task: Task, path: Path) -> Checkpoint:
    out = open_output(task, path)
    if out.format is not task.fmt:
        out.file.close()
        raise UnknownFormatError(f"is a {out.format.name} file, should be {task.fmt.name}", path=path)
    return out


# The comparison


def _compared(task: Task, out: Checkpoint, progress: Progress) -> Proven:
    layout, items = task.layout, task.plan.items
    different = _first_difference(out.file, layout.start)
    is_laid_out = different is None and out.file.size == layout.size
    found = [] if different is None else _header_mismatches(task, out, different)
    places = layout.places if is_laid_out else _where_they_are(task, out)
    tally = _values(task, out.file, places, progress)
    found += [*_wrong_values(tally, items), *_overflowed(tally, task)]
    literals = list(layout.start)
    if is_laid_out and layout.finish is not None:
        rest = layout.finish(tally.sums)
        literals += rest
        at = _first_difference(out.file, rest)
        if at is not None:
            found.append(_outside(at))
    if different is None and out.file.size != layout.size:
        text = f"has {out.file.size} bytes, {layout.size} belong into it"
        found.append(Mismatch("bytes", text))
    seen = {key for place in places for key in place.keys}
    nbytes = tally.nbytes + sum(len(data) for _, data in literals)
    return Proven(task, tuple(found), nbytes, sum(key not in seen and bool(i.nbytes) for key, i in enumerate(items)))


def _first_difference(file: SourceFile, literals: Sequence[tuple[int, bytes]]) -> int | None:
    """The first byte of the file that is not as ``literals`` have it."""
    for offset, data in literals:
        at = first_difference(file.read(offset, max(0, min(len(data), file.size - offset))), data)
        if at is not None:
            return offset + at
    return None


def _outside(at: int) -> Mismatch:
    return Mismatch("bytes", f"byte {at}, outside the tensor data, is not what belongs there")


def _header_mismatches(task: Task, out: Checkpoint, at: int) -> list[Mismatch]:
    """What an other header says otherwise; ``at`` is the first byte that differs."""
    have = {t.name: t for t in out.infos}
    found: list[Mismatch] = []
    for item in task.plan.items:
        found += _tensor_mismatches(item, have.pop(item.src.name, None))
    for t in have.values():
        found.append(Mismatch("unexpected", f"{t.dtype} {list(t.shape)}, does not belong into it", tensor=t.name))
    if task.fmt.name == "safetensors":
        found += _metadata_mismatches(task.plan.metadata, out.metadata)
    return found or [_outside(at)]


def _tensor_mismatches(item: Item, there: TensorInfo | None) -> Iterator[Mismatch]:
    name, shape = item.src.name, item.src.shape
    if there is None:
        yield Mismatch("missing", f"is missing: {item.to} {list(shape)} ({item.why})", tensor=name)
        return
    if there.dtype is not item.to:
        yield Mismatch("dtype", f"is {there.dtype}, should be {item.to} ({item.why})", tensor=name)
    if there.shape != shape:
        yield Mismatch("shape", f"has the shape {list(there.shape)}, should have {list(shape)}", tensor=name)


def _metadata_mismatches(want: Mapping[str, str], got: Mapping[str, str]) -> Iterator[Mismatch]:
    for key in dict.fromkeys((*want, *got)):
        should, there = want.get(key), got.get(key)
        if should == there:
            continue
        if key == KEY:
            text = f"its record of how it was made is {_shown(there)}, should be {_shown(should)}"
            yield Mismatch("record", text)
        else:
            yield Mismatch("metadata", f"metadata {key!r} is {_shown(there)}, should be {_shown(should)}")


def _shown(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 400 else f"{value[:400]}… ({len(value)} characters)"


def _where_they_are(task: Task, out: Checkpoint) -> list[Place]:
    """The places of tensors that the output has as planned, but elsewhere; those it has in other ways are left out."""
    have, items = {t.name: t for t in out.infos}, task.plan.items
    found = []
    for place in task.layout.places:
        if not place.keys:
            continue
        item = items[place.keys[0]]
        there = have.get(item.src.name)
        is_whole = place.src.nbytes == item.src.nbytes  # in a torch file, memory may be more than one tensor's
        if there is None or there.offset < 0 or not is_whole:
            continue
        if there.dtype is item.to and there.shape == item.src.shape:
            found.append(place._replace(offset=there.offset))
    return found


# The values


@dataclass(slots=True)
class _Wrong:
    elements: int = 0
    at: int = 0  #: the first of them
    got: bytes = b""
    want: bytes = b""


@dataclass(slots=True)
class _Tally:
    """What a pass over both files saw, by position in the plan; -1 is what belongs to no chosen tensor."""

    wrong: dict[int, _Wrong] = field(default_factory=dict)
    overflow: dict[int, int] = field(default_factory=dict)
    sums: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, key: int, first: int, found: Found) -> None:
        """``first``: where the stretch begins in its tensor."""
        if found.overflow:
            self.overflow[key] = self.overflow.get(key, 0) + found.overflow
        if found.spot is None:
            return
        wrong = self.wrong.setdefault(key, _Wrong())
        at = first + found.spot.at
        if not wrong.elements or at < wrong.at:
            wrong.at, wrong.got, wrong.want = at, found.spot.got, found.spot.want
        wrong.elements += found.differing


def _values(task: Task, out: SourceFile, places: Sequence[Place], progress: Progress) -> _Tally:
    """Cast everything anew, and compare it with what is in the output."""
    from . import cast, recast

    tally, lock = _Tally(), Lock()
    draws, clamp = draws_for(task.request, task.found, task.plan), task.request.limits.on_overflow == "clamp"
    sums = task.layout.finish is not None

    def read_output(buffer: memoryview, offset: int) -> None:
        held = max(0, min(len(buffer), out.size - offset))
        out.read_into(buffer[:held], offset)
        buffer[held:] = bytes(len(buffer) - held)

    def start() -> Callable[[Chunk], None]:
        sides = Sides(task.file, read_output, draws)

        def step(chunk: Chunk) -> None:
            x, y, p, drawn = sides.read(chunk)
            parts = list(chunk.run.parts(chunk.start, chunk.elements))
            counts = [count for _, _, count in parts]
            data, found = recast.recast(x, y, p, counts, width=chunk.run.dst_size, clamp=clamp, stretches=drawn)
            if sums:
                tally.sums.append((chunk.dst_offset, len(data), zlib.crc32(data)))
            with lock:
                tally.nbytes += max(0, min(chunk.dst_bytes, out.size - chunk.dst_offset))
                for one in found:
                    key, first, _ = parts[one.stretch]
                    tally.add(key, first, one)
            progress.add(chunk.src_bytes)

        return step

    progress.expect(_source_bytes(places))
    task.file.advise_sequential()
    with collector_paused():
        runs = make_runs(places)
    with cast.one_thread():
        for_each(all_chunks(runs), start, workers=task.request.workers, tick=progress.show)
    return tally


def _wrong_values(tally: _Tally, items: Sequence[Item]) -> Iterator[Mismatch]:
    for key, wrong in sorted(tally.wrong.items()):
        forms = f"{_hex(wrong.got)}, should be {_hex(wrong.want)}"
        if key < 0:
            text = f"{wrong.elements} bytes of data that is no chosen tensor's differ, the first is {forms}"
            yield Mismatch("values", text, elements=wrong.elements)
            continue
        item = items[key]
        if item.src.dtype.is_castable:
            at = unravelled(wrong.at, item.src.shape)
            text = f"{_wrong(wrong.elements, item.src.numel, 'elements')}, the first at {list(at)}: {forms}"
            yield Mismatch("values", text, tensor=item.src.name, elements=wrong.elements, first=at)
        else:  # copied, whatever its elements are
            text = f"{_wrong(wrong.elements, item.src.nbytes, 'bytes')}, the first is byte {wrong.at}: {forms}"
            yield Mismatch("values", text, tensor=item.src.name, elements=wrong.elements)


def _wrong(count: int, of: int, what: str) -> str:
    return f"{count} of {of} {what} {'is' if count == 1 else 'are'} wrong"


def _hex(data: bytes) -> str:
    """A little-endian element as a number."""
    return f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"


def _overflowed(tally: _Tally, task: Task) -> Iterator[Mismatch]:
    """What the conversion would have refused."""
    if task.request.limits.on_overflow in ("clamp", "ieee"):
        return
    for key, count in sorted(tally.overflow.items()):
        item = task.plan.items[key]
        text = f"{count} finite values do not fit {item.to}: refused by the conversion"
        yield Mismatch("refused", text, tensor=item.src.name)
