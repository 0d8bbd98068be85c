"""Proving an output before it gets its name: the format's own library reads it, and it holds the planned cast."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from .errors import VerificationError
from .fileio import InputFile, PartFile
from .formats import Format, Layout
from .plan import Item
from .runs import CHUNK_BYTES, Chunk, Progress, Run, for_each

__all__ = ["VerifyMode", "sample_chunks", "verify_header", "verify_values"]

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


def verify_header(part: PartFile, fmt: Format, items: Sequence[Item], layout: Layout) -> None:
    """The format's library finds the planned names, dtypes, shapes and order, and the header is the planned one.

    Raises VerificationError otherwise.  The header's own bytes are compared for what the library does not show.
    Tensors without elements have no place in the order: they share theirs with whatever follows.
    """
    try:
        found = fmt.library_view(part.path)
    except VerificationError as e:
        raise VerificationError(e.message, path=part.final) from e  # the temporary name means nothing to anyone
    for src, to, _ in items:
        got = found.get(src.name)
        if got != (to.code, src.shape):
            seen = "nothing" if got is None else f"{got[0]} {list(got[1])}"
            raise VerificationError(
                f"planned as {to.code} {list(src.shape)}, the {fmt.name} library finds {seen}",
                path=part.final,
                tensor=src.name,
            )
    order = sorted((offset, i.src.name) for offset, i in zip(layout.offsets, items, strict=True) if i.nbytes)
    names = [name for _, name in order]
    if len(found) != len(items) or [n for n, (_, shape) in found.items() if 0 not in shape] != names:
        raise VerificationError("its tensors are not those planned, in the planned order", path=part.final)
    header = bytearray(len(layout.header))
    part.read_into(memoryview(header), 0)
    if header != layout.header:
        raise VerificationError("its header on disk is not the planned one", path=part.final)


def verify_values(
    source: InputFile,
    part: PartFile,
    chunks: Iterable[Chunk],
    items: Sequence[Item],
    *,
    clamp: bool,
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
        read, written = bytearray(CHUNK_BYTES), bytearray(CHUNK_BYTES)

        def compare(chunk: Chunk) -> None:
            run = chunk.run
            x, y = memoryview(read)[: chunk.src_bytes], memoryview(written)[: chunk.dst_bytes]
            source.read_into(x, chunk.src_offset)
            part.read_into(y, chunk.dst_offset)
            p = cast.pair(run.src, run.dst) if run.is_cast and run.src is not run.dst else None
            differs = cast.first_difference(x, y, p, clamp=clamp)
            if differs is not None:
                raise _mismatch(chunk, differs // run.dst_size, items, part)
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
        tensor=items[key].src.name,
        hint="the output was not published; check this machine's disk and memory, then run again",
    )
