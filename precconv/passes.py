"""One pass over tensor data: read, cast, look, write."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from .bulk import collector_paused
from .draws import Draws
from .fileio import SourceFile
from .formats import Layout, Place
from .runs import CHUNK_BYTES, Chunk, Progress, RunReader, all_chunks, for_each, make_runs
from .stats import Stats

if TYPE_CHECKING:
    from .spectrum import Scanner

__all__ = ["Seen", "Writable", "write_pass"]

#: (offset in the output, bytes, CRC-32) of a chunk.
Sum = tuple[int, int, int]


class Writable(Protocol):
    """What a conversion writes to."""

    def require_space(self, more: int) -> None: ...
    def preallocate(self, size: int) -> None: ...
    def write(self, buffer: memoryview, offset: int) -> None: ...


@dataclass(slots=True)
class Seen:
    """What a pass saw."""

    stats: dict[int, Stats] = field(default_factory=dict)  #: by tensor, of the chunks where there was anything to say
    sums: list[Sum] = field(default_factory=list)  #: of every chunk, where the format wants checksums


def write_pass(
    source: SourceFile,
    part: Writable,
    layout: Layout,
    places: Sequence[Place],
    *,
    clamp: bool,
    draws: Draws | None = None,
    norms: bool,
    exponents: bool = False,
    stop_at_overflow: bool,
    workers: int,
    progress: Progress,
) -> Seen:
    """Fill ``places`` of the output, and write what the layout starts with.

    ``clamp``: finite values that do not fit become the largest that does.  ``draws``: for stochastic rounding.
    ``norms``: measure sizes and errors.  ``exponents``: besides, count the source's binary exponents.
    ``stop_at_overflow``: once a value does not fit, write no more, but read on to find all that do not.
    """
    from . import cast, spectrum

    seen, lock = Seen(), Lock()
    writes = True

    def start() -> Callable[[Chunk], None]:
        lane, reader = cast.Lane(CHUNK_BYTES), RunReader(source)
        scanner = spectrum.Scanner() if exponents else None

        def look(chunk: Chunk) -> memoryview:
            nonlocal writes
            run, n = chunk.run, chunk.elements
            p = cast.pair(run.src, run.dst)
            data = lane.cast(p, n, draws.of(run.parts(chunk.start, n)) if draws is not None and p.narrows else ())
            found = lane.survey(p, n, run.segments(chunk.start, n), clamp=clamp, norms=norms)
            if scanner is not None:
                found += _exponents(scanner, chunk, lane.source(chunk.src_bytes))
            if found:
                with lock:
                    for key, stats in found:
                        seen.stats[key] = seen.stats.get(key, Stats()) + stats
                        writes = writes and not (stop_at_overflow and stats.overflow)
            return data

        def step(chunk: Chunk) -> None:
            data = lane.source(chunk.src_bytes)
            _read(reader, chunk, data)
            if chunk.run.is_cast:
                data = look(chunk)
            if writes:
                part.write(data, chunk.dst_offset)
                if layout.finish is not None:
                    seen.sums.append((chunk.dst_offset, len(data), zlib.crc32(data)))
            progress.add(chunk.src_bytes)

        return step

    _begin(part, layout)
    source.advise_sequential()
    with collector_paused():
        runs = make_runs(places)
    with cast.one_thread():
        for_each(all_chunks(runs), start, workers=workers, tick=progress.show)
    _share(seen.stats, places)
    return seen


def _begin(part: Writable, layout: Layout) -> None:
    part.preallocate(layout.size)
    for offset, data in layout.start:
        part.write(memoryview(data), offset)


def _read(reader: RunReader, chunk: Chunk, data: memoryview) -> None:
    from . import cast

    reader.read(chunk, data)
    if chunk.run.shown is not None:
        cast.blank(data, chunk.run.src_size, chunk.run.shown(chunk.start, chunk.elements))


def _exponents(scanner: Scanner, chunk: Chunk, data: memoryview) -> Iterator[tuple[int, Stats]]:
    """The histograms of the tensors in a chunk of the source."""
    run = chunk.run
    for key, first, end in run.segments(chunk.start, chunk.elements):
        yield key, Stats(exponents=scanner.exponents(data[first * run.src_size : end * run.src_size], run.src))


def _share(stats: dict[int, Stats], places: Sequence[Place]) -> None:
    """Tensors over the same memory saw the same values."""
    for place in places:
        for key in place.keys[1:]:
            if place.keys[0] in stats:
                stats[key] = stats[place.keys[0]]
