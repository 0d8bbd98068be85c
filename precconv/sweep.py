"""One pass over a checkpoint's values that writes nothing: read, look, add up.

It can look at a sample: of every tensor that is larger, stretches spread evenly from its first element to its last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from threading import Lock

from .bulk import collector_paused
from .formats import Place, Source
from .measures import Measure
from .runs import CHUNK_BYTES, Chunk, Progress, Run, RunReader, for_each, make_runs, page_aligned
from .tensors import TensorInfo

__all__ = ["castable_bytes", "sweep"]

#: Stretches of a sample, and the bytes that each has at least: a request to the Hub costs as much as some of them.
_WINDOWS = 8
_WINDOW_BYTES = 1 << 16

Piece = tuple[int, int, int]  #: (key, first element, end) of a tensor's part of a chunk


def castable_bytes(infos: Iterable[TensorInfo], sample: int | None = None) -> int:
    """Bytes that ``sweep`` reads at most."""
    return sum(min(t.nbytes, sample or t.nbytes) for t in infos if t.dtype.is_castable)


def sweep(source: Source, *, workers: int, progress: Progress, sample: int | None = None) -> dict[int, Measure]:
    """The measure of every castable tensor, by position in ``source.infos``; it does not depend on ``workers``.

    ``sample``: bytes that are read of a tensor at most.  Raises SourceChangedError when the file is not what it was.
    """
    from . import cast, crowd, spectrum

    places = _places(source)
    found = {key: Measure() for place in places for key in place.keys}
    lock = Lock()

    def start() -> Callable[[Chunk], None]:
        scanner, reader = spectrum.Scanner(), RunReader(source.file)
        buffer = page_aligned(max(CHUNK_BYTES, spectrum.BLOCK * 8))

        def measured(data: memoryview, run: Run, pieces: Sequence[Piece]) -> Iterator[Measure]:
            """What is in pieces that follow each other: several small ones, or one."""
            size, at = run.src_size, pieces[0][1]
            seen: Sequence[Measure | None] = [None]
            if pieces[0][2] - at <= spectrum.SMALL:
                whole = data[at * size : pieces[-1][2] * size]
                seen = crowd.measure_crowd(whole, run.src, [end - first for _, first, end in pieces])
            for (_, first, end), measure in zip(pieces, seen, strict=True):
                yield measure or scanner.measure(data[first * size : end * size], run.src)

        def step(chunk: Chunk) -> None:
            run, data = chunk.run, buffer[: chunk.src_bytes]
            reader.read(chunk, data)
            for pieces in _groups(_blocks(run.segments(chunk.start, chunk.elements), spectrum.BLOCK), spectrum.SMALL):
                seen = [*measured(data, run, pieces)]
                with lock:
                    for (key, _, _), measure in zip(pieces, seen, strict=True):
                        found[key] = found[key] + measure if found[key].n else measure
            progress.add(chunk.src_bytes)

        return step

    with source.file.held(), cast.one_thread():
        if sample is None:
            source.file.advise_sequential()
        for_each(_all_chunks(places, spectrum.BLOCK, sample), start, workers=workers, tick=progress.show)
        source.file.require_unchanged()
    return {key: found[place.keys[0]] for place in places for key in place.keys}


def _places(source: Source) -> list[Place]:
    """The castable tensors where they lie; those over the same bytes are one place."""
    places: dict[tuple[int, ...] | str, Place] = {}
    for key, t in enumerate(source.infos):
        if not t.dtype.is_castable:
            continue
        where = t.name if t.offset < 0 else (t.offset, t.nbytes, t.dtype.rank)
        known = places.get(where)
        keys = (key,) if known is None else (*known.keys, key)
        places[where] = Place(t, t.dtype, t.offset, keys, source.elements(t))
    return [*places.values()]


def _all_chunks(places: Sequence[Place], block: int, sample: int | None) -> Iterator[Chunk]:
    """Everything; of what is larger than ``sample`` bytes, so much of it."""
    with collector_paused():
        whole = [p for p in places if sample is None or p.src.nbytes <= sample]
        runs = make_runs(whole)
    for run in runs:
        yield from _chunks(run, block)
    if sample is None:
        return
    for place in places:
        if place.src.nbytes > sample:
            yield from _windows(make_runs([place])[0], block, sample)


def _windows(run: Run, block: int, sample: int) -> Iterator[Chunk]:
    """Stretches of a tensor that are ``sample`` bytes together, the same ones every time."""
    count = max(1, min(_WINDOWS, sample // _WINDOW_BYTES))
    width = max(1, sample // count // run.src_size)
    free = run.starts[-1] - width
    for n in range(count):
        start = free * n // (count - 1) if count > 1 else free // 2
        for at in range(start, start + width, max(CHUNK_BYTES // run.src_size, block)):
            yield Chunk(run, at, min(max(CHUNK_BYTES // run.src_size, block), start + width - at))


def _chunks(run: Run, block: int) -> Iterator[Chunk]:
    """A run in steps of about ``CHUNK_BYTES`` that end where a block of a tensor does."""
    step = max(CHUNK_BYTES // run.src_size, block)
    start = 0
    for first, end in pairwise(run.starts):
        while end - start > step:
            cut = first + (start + step - first) // block * block
            yield Chunk(run, start, cut - start)
            start = cut
    if run.starts[-1] > start:
        yield Chunk(run, start, run.starts[-1] - start)


def _groups(pieces: Iterable[Piece], small: int) -> Iterator[list[Piece]]:
    """Neighbours of at most ``small`` elements together, every other one by itself."""
    for is_small, group in groupby(pieces, lambda piece: piece[2] - piece[1] <= small):
        if is_small:
            yield [*group]
        else:
            yield from ([piece] for piece in group)


def _blocks(segments: Iterable[Sequence[int]], block: int) -> Iterator[Piece]:
    for key, first, end in segments:
        for at in range(first, end, block):
            yield key, at, min(at + block, end)
