"""Runs: neighbours that can be cast as if they were one tensor, and the chunks they are worked on in.

Tensors that lie side by side in the source and in the output, with the same two dtypes, are one run of bytes on
both sides.  A file of 100,000 small tensors is then as few steps as a file with one large tensor.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event, Lock, get_ident
from typing import NamedTuple, TypeVar

from .dtypes import DType
from .fileio import SourceFile
from .formats import Elements, Place
from .tensors import TensorInfo

__all__ = [
    "CHUNK_BYTES",
    "Chunk",
    "Phases",
    "Progress",
    "ProgressCallback",
    "Run",
    "RunReader",
    "Stopped",
    "all_chunks",
    "for_each",
    "make_runs",
    "page_aligned",
]

T = TypeVar("T")
ProgressCallback = Callable[[int, int], None]

#: Bytes of the wider side of a chunk.  Measured with two threads on 4 GB, checks on: 0.25 MB 1.02 s, 0.5 MB 0.86 s,
#: 1 MB 0.66 s, 2 MB 0.56 s, 4 MB 0.61 s: the calls for a chunk cost time too, and the cache ends somewhere.
CHUNK_BYTES = 1 << 21


@dataclass(slots=True)
class Run:
    """Adjacent stretches of tensor data with one source and one target dtype."""

    src: DType
    dst: DType
    src_offset: int  #: first byte in the source file; -1 where ``elements`` reads it
    dst_offset: int  #: first byte in the output file
    is_cast: bool  #: whether the elements are numbers this tool looks at; otherwise they are counted in bytes
    src_size: int  #: bytes of one element in the source
    dst_size: int
    elements: Callable[[], Elements] | None = None
    shown: Callable[[int, int], bytearray] | None = None  #: as in ``Place``
    keys: list[int] = field(default_factory=list)  #: of the tensors: positions in the plan, -1 where none is meant
    starts: list[int] = field(default_factory=lambda: [0])  #: first element of each tensor, and the end

    def chunks(self, start: int, end: int) -> Iterator[Chunk]:
        """The elements from ``start`` to ``end``, in steps of ``CHUNK_BYTES``."""
        step = CHUNK_BYTES // max(self.src_size, self.dst_size)
        for at in range(start, end, step):
            yield Chunk(self, at, min(step, end - at))

    def segments(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The tensors under ``count`` elements from ``start``: (key, first, end), relative to ``start``."""
        i = bisect_right(self.starts, start) - 1
        while i < len(self.keys) and self.starts[i] < start + count:
            first, end = max(self.starts[i], start), min(self.starts[i + 1], start + count)
            if first < end:
                yield self.keys[i], first - start, end - start
            i += 1

    def parts(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """The same, counted in the tensors: (key, first element, count); a piece of memory counts as its first one."""
        i = bisect_right(self.starts, start) - 1
        for key, first, end in self.segments(start, count):
            while self.starts[i + 1] <= start + first:
                i += 1
            yield key, start + first - self.starts[i], end - first


class Chunk(NamedTuple):
    """A step of work: ``elements`` of a run from ``start``."""

    run: Run
    start: int
    elements: int

    @property
    def src_offset(self) -> int:
        return self.run.src_offset + self.start * self.run.src_size

    @property
    def dst_offset(self) -> int:
        return self.run.dst_offset + self.start * self.run.dst_size

    @property
    def src_bytes(self) -> int:
        return self.elements * self.run.src_size

    @property
    def dst_bytes(self) -> int:
        return self.elements * self.run.dst_size


def make_runs(places: Iterable[Place]) -> list[Run]:
    """Group stretches of tensor data into runs, in the source's order."""
    runs: list[Run] = []
    src_end = dst_end = -1  # where the next one must lie, on both sides, to go on with the run
    for src, to, offset, keys, elements, shown in sorted(places, key=lambda place: place.src.offset):
        if src.nbytes == 0:
            continue
        cast = bool(keys) and src.dtype.is_castable
        alone = elements is not None or shown is not None
        run = runs[-1] if runs else None
        follows = src.offset == src_end and offset == dst_end
        if run is None or alone or not follows or not _continues(run, src, to, cast=cast):
            wide = cast or (alone and src.dtype.bits >= 8)
            sizes = (src.dtype.itemsize, to.itemsize) if wide else (1, 1)
            run = Run(src.dtype, to, src.offset, offset, cast, *sizes, elements, shown)
            runs.append(run)
        count = src.nbytes // run.src_size
        run.keys.append(keys[0] if keys else -1)
        run.starts.append(run.starts[-1] + count)
        src_end, dst_end = (-1, -1) if alone else (src.offset + src.nbytes, offset + count * run.dst_size)
    return runs


def _continues(run: Run, src: TensorInfo, dst: DType, *, cast: bool) -> bool:
    if run.is_cast or cast:
        return run.is_cast and cast and run.src is src.dtype and run.dst is dst
    return True  # bytes are bytes


def page_aligned(size: int) -> memoryview:
    """A buffer of ``size`` bytes to read into: what begins elsewhere in a page can take three times as long to fill."""
    return memoryview(mmap.mmap(-1, size))


class RunReader:
    """Reads chunks of the source; for one thread."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._run: Run | None = None
        self._elements: Elements | None = None

    def read(self, chunk: Chunk, out: memoryview) -> None:
        """Fill ``out`` with the chunk's bytes."""
        run = chunk.run
        if run.elements is None:
            self._file.read_into(out, run.src_offset + chunk.start * run.src_size)
            return
        if self._run is not run or self._elements is None:
            self._run, self._elements = run, run.elements()
        self._elements.read(out, chunk.start)


def all_chunks(runs: Iterable[Run]) -> Iterator[Chunk]:
    """Every element of every run, in order."""
    for run in runs:
        yield from run.chunks(0, run.starts[-1])


class Stopped(Exception):  # noqa: N818  not a failure
    """Raised where work goes on after it was called off."""


class Progress:
    """Counts bytes from any thread, and shows them in the one that made it."""

    def __init__(self, total: int, callback: ProgressCallback | None = None) -> None:
        self.total, self.done, self.stopped = total, 0, False
        self._callback, self._lock, self._owner = callback, Lock(), get_ident()

    def expect(self, nbytes: int) -> None:
        """There is more to do than was known."""
        with self._lock:
            self.total += nbytes

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes

    def show(self) -> None:
        """Call now and then; raises Stopped once ``stopped`` is set."""
        if self.stopped:
            raise Stopped
        if self._callback is not None and get_ident() == self._owner:
            self._callback(self.done, self.total)


class Phases:
    """One progress over two steps: the second is ``then`` bytes long, or as the first, until it says otherwise."""

    def __init__(self, callback: ProgressCallback | None, then: int | None = None) -> None:
        self._callback, self._before, self._then = callback, 0, then

    def first(self, done: int, total: int) -> None:
        self._before = total
        if self._callback is not None:
            self._callback(done, total + (total if self._then is None else self._then))

    def second(self, done: int, total: int) -> None:
        if self._callback is not None:
            self._callback(self._before + done, self._before + total)


def for_each(
    tasks: Iterable[T], start: Callable[[], Callable[[T], None]], *, workers: int, tick: Callable[[], None]
) -> None:
    """Work through ``tasks``, in order, with ``workers`` threads; with one it is a plain loop.

    ``start`` is called once in each thread and gives the function that does a task there.  ``tick`` is called
    now and then in the calling thread.  The first exception stops everything, and is raised here.
    """
    if workers == 1:
        work = start()
        for task in tasks:
            work(task)
            tick()
        return
    source, lock, stop = iter(tasks), Lock(), Event()

    def loop() -> None:
        work = start()
        while not stop.is_set():
            with lock:
                task = next(source, None)
            if task is None:
                return
            work(task)

    with ThreadPoolExecutor(workers) as pool:
        pending = {pool.submit(loop) for _ in range(workers)}
        try:
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                tick()
        finally:
            stop.set()
