"""Proving an output before it gets its name: the format's own library reads it, and it holds the planned cast."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from .draws import Draws, Stretch
from .dtypes import DType
from .errors import OutputError, VerificationError
from .fileio import PartFile, SourceFile
from .formats import Format, Layout
from .plan import Item
from .runs import CHUNK_BYTES, Chunk, Progress, Run, RunReader, for_each, page_aligned
from .tensors import TensorInfo

if TYPE_CHECKING:
    from .cast import Pair

__all__ = [
    "Both",
    "Sides",
    "VerifyMode",
    "first_difference",
    "sample_chunks",
    "verify_header",
    "verify_literals",
    "verify_names",
    "verify_values",
]

VerifyMode = Literal["sample", "full", "none"]
#: Source bytes looked at in each of three places of every tensor: its start, its end, and one between.
WINDOW = 64 << 10


def sample_chunks(runs: Iterable[Run], names: Callable[[int], str]) -> Iterator[Chunk]:
    """Three windows of every tensor, small tensors whole; neighbours joined."""
    for run in runs:
        start = end = 0
        for first, last in _windows(run, names):
            if first > end:
                yield from run.chunks(start, end)
                start = first
            end = max(end, last)
        yield from run.chunks(start, end)


def _windows(run: Run, names: Callable[[int], str]) -> Iterator[tuple[int, int]]:
    width = WINDOW // run.src_size
    for key, first, end in zip(run.keys, run.starts, run.starts[1:], strict=False):
        if end - first <= 3 * width:
            yield first, end
        else:
            middle = first + zlib.crc32(names(key).encode()) % (end - first - width)
            yield first, first + width
            yield middle, middle + width
            yield end - width, end


def verify_header(
    part: PartFile, fmt: Format, layout: Layout, tensors: Sequence[TensorInfo], dtypes: Sequence[DType]
) -> None:
    """The format's own library reads the output, and finds what was planned; raises VerificationError otherwise."""
    try:
        fmt.check(part.path, layout, tensors, dtypes)
    except VerificationError as e:  # the temporary name means nothing to anyone
        raise VerificationError(e.message, path=part.final, tensor=e.tensor) from e
    except OutputError as e:
        raise OutputError(e.message, path=part.final) from e


def verify_literals(part: PartFile, literals: Iterable[tuple[int, bytes]]) -> None:
    """All that is not tensor data stands in the output as it was written; raises VerificationError."""
    for offset, data in literals:
        found = bytearray(len(data))
        part.read_into(memoryview(found), offset)
        at = first_difference(found, data)
        if at is not None:
            raise VerificationError(
                f"byte {offset + at}, outside the tensor data, is not what was written", path=part.final
            )


def first_difference(a: bytes | bytearray, b: bytes | bytearray) -> int | None:
    """Where two stretches of bytes first differ, if only in that one ends; None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def verify_names(
    part: PartFile, found: Sequence[TensorInfo], tensors: Sequence[TensorInfo], dtypes: Sequence[DType]
) -> None:
    """The output, opened as any checkpoint, has the planned weights and no others."""
    have = {t.name: (t.dtype, t.shape) for t in found}
    for t, d in zip(tensors, dtypes, strict=True):
        got = have.pop(t.name, None)
        if got != (d, t.shape):
            seen = "nothing" if got is None else f"{got[0]} {list(got[1])}"
            message = f"planned as {d} {list(t.shape)}, the output holds {seen}"
            raise VerificationError(message, path=part.final, tensor=t.name)
    if have:
        raise VerificationError("not planned, but in the output", path=part.final, tensor=next(iter(have)))


class Both(NamedTuple):
    """The bytes of a chunk in the source and in the output, and what makes the one of the other."""

    source: memoryview
    output: memoryview
    pair: Pair | None  #: None where bytes are copied
    drawn: Sequence[Stretch]  #: for stochastic rounding


class Sides:
    """Reads chunks of a source and of what was made of it; for one thread, which is done with one before the next."""

    def __init__(self, source: SourceFile, read_output: Callable[[memoryview, int], None], draws: Draws | None) -> None:
        """``read_output``: fills a buffer with the output's bytes from an offset on."""
        self._reader, self._read_output, self._draws = RunReader(source), read_output, draws
        self._source, self._output = page_aligned(CHUNK_BYTES), page_aligned(CHUNK_BYTES)

    def read(self, chunk: Chunk) -> Both:
        """Elements that no tensor shows are zero in the source, as they are in the output."""
        from . import cast

        run = chunk.run
        x, y = self._source[: chunk.src_bytes], self._output[: chunk.dst_bytes]
        self._reader.read(chunk, x)
        self._read_output(y, chunk.dst_offset)
        if run.shown is not None:
            cast.blank(x, run.src_size, run.shown(chunk.start, chunk.elements))
        p = cast.pair(run.src, run.dst) if run.is_cast and run.src is not run.dst else None
        drawn = self._draws.of(run.parts(chunk.start, chunk.elements)) if self._draws and p and p.narrows else ()
        return Both(x, y, p, drawn)


def verify_values(
    source: SourceFile,
    part: PartFile,
    chunks: Iterable[Chunk],
    items: Sequence[Item],
    *,
    clamp: bool,
    draws: Draws | None = None,
    workers: int,
    progress: Progress,
) -> int:
    """Read ``chunks`` of both files and compare the output with a fresh cast of the source.

    Returns how many bytes of the output were compared.  Raises VerificationError naming tensor and element.
    """
    from . import cast

    compared = 0

    def counted() -> Iterator[Chunk]:
        nonlocal compared
        for chunk in chunks:
            compared += chunk.dst_bytes
            yield chunk

    def start() -> Callable[[Chunk], None]:
        sides = Sides(source, part.read_into, draws)

        def compare(chunk: Chunk) -> None:
            both = sides.read(chunk)
            differs = cast.first_difference(both.source, both.output, both.pair, clamp=clamp, stretches=both.drawn)
            if differs is not None:
                raise _mismatch(chunk, differs // chunk.run.dst_size, items, part)
            progress.add(chunk.src_bytes)

        return compare

    with cast.one_thread():
        for_each(counted(), start, workers=workers, tick=progress.show)
    return compared


def _mismatch(chunk: Chunk, element: int, items: Sequence[Item], part: PartFile) -> VerificationError:
    run = chunk.run
    key, first, _ = next(g for g in run.segments(0, run.starts[-1]) if g[1] <= chunk.start + element < g[2])
    unit = "element" if run.is_cast else "byte"
    return VerificationError(
        f"{unit} {chunk.start + element - first} on disk is not the cast of the source",
        path=part.final,
        tensor=items[key].src.name if key >= 0 else None,
        hint="the output was not published; check this machine's disk and memory, then run again",
    )
