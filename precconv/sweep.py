"""One pass over a checkpoint's values that writes nothing: read, look, add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from threading import Lock

from .bulk import collector_paused
from .formats import Place, Source
from .measures import Measure
from .runs import CHUNK_BYTES, Chunk, Progress, Run, RunReader, for_each, make_runs
from .tensors import TensorInfo

__all__ = ["castable_bytes", "sweep"]


def castable_bytes(infos: Iterable[TensorInfo]) -> int:
    """Bytes that ``sweep`` reads at most."""
    return sum(t.nbytes for t in infos if t.dtype.is_castable)


def sweep(source: Source, *, workers: int, progress: Progress) -> dict[int, Measure]:
    """The measure of every castable tensor, by position in ``source.infos``; it does not depend on ``workers``.

    Raises SourceChangedError when the file is not what it was.
    """
    from . import cast, spectrum

    places = _places(source)
    found = {key: Measure() for place in places for key in place.keys}
    lock = Lock()

    def start() -> Callable[[Chunk], None]:
        scanner, reader = spectrum.Scanner(), RunReader(source.file)
        buffer = memoryview(bytearray(max(CHUNK_BYTES, spectrum.BLOCK * 8)))

        def step(chunk: Chunk) -> None:
            run, data = chunk.run, buffer[: chunk.src_bytes]
            reader.read(chunk, data)
            for key, first, end in _blocks(run.segments(chunk.start, chunk.elements), spectrum.BLOCK):
                seen = scanner.measure(data[first * run.src_size : end * run.src_size], run.src)
                with lock:
                    found[key] += seen
            progress.add(chunk.src_bytes)

        return step

    source.file.advise_sequential()
    with collector_paused():
        runs = make_runs(places)
    with cast.one_thread():
        chunks = (chunk for run in runs for chunk in _chunks(run, spectrum.BLOCK))
        for_each(chunks, start, workers=workers, tick=progress.show)
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


def _blocks(segments: Iterable[Sequence[int]], block: int) -> Iterator[tuple[int, int, int]]:
    for key, first, end in segments:
        for at in range(first, end, block):
            yield key, at, min(at + block, end)
