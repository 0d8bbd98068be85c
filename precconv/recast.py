"""The kernel of a proof: a chunk of a source, cast anew by the shortest way that is right, against one of an output.

No I/O and no policy; beside the cast and the comparison a module that computes with torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

with warnings.catch_warnings():  # numpy is not needed, and torch complains where it is not installed
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

from .cast import Pair, count_ones, reference_cast
from .draws import Stretch

__all__ = ["Found", "Spot", "recast"]


class Spot(NamedTuple):
    """The first element of a stretch that is not as it should be."""

    at: int  #: counted from the stretch's first
    got: bytes
    want: bytes


class Found(NamedTuple):
    """What there is to say of one stretch of a chunk; nothing is said of those that are right."""

    stretch: int  #: its position among those that were given
    differing: int  #: elements
    spot: Spot | None
    overflow: int  #: finite values whose cast is Inf


def recast(
    x: memoryview,
    y: memoryview,
    p: Pair | None,
    sizes: Iterable[int],
    *,
    width: int,
    clamp: bool,
    stretches: Sequence[Stretch] = (),
) -> tuple[memoryview, list[Found]]:
    """The bytes that belong into an output for ``x``, and what is wrong with ``y``, which are there.

    ``p``: the cast; None where bytes are copied.  ``sizes``: elements of each stretch of the chunk, in order.
    ``width``: bytes of an element in the output.
    """
    want, lost = torch.frombuffer(x, dtype=torch.uint8), None
    if p is not None:
        values = want.view(p.src_torch)
        cast = reference_cast(values, p, clamp=clamp, stretches=stretches)
        want = cast.view(torch.uint8)
        if p.dst.max < p.src.max and bool((infinite := torch.isinf(cast)).any()):
            lost = infinite & torch.isfinite(values)
    got = torch.frombuffer(y, dtype=torch.uint8)
    if torch.equal(want, got):
        return y, [] if lost is None else list(_looked(sizes, None, lost, None))
    right = bytearray(len(y))
    torch.frombuffer(right, dtype=torch.uint8).copy_(want)
    differs = (want != got).view(-1, width).any(1)
    return memoryview(right), list(_looked(sizes, differs, lost, lambda at: _spot(y, right, at, width)))


def _looked(
    sizes: Iterable[int],
    differs: torch.Tensor | None,
    lost: torch.Tensor | None,
    spot: Callable[[int], tuple[bytes, bytes]] | None,
) -> Iterator[Found]:
    """The stretches of which there is something to say; ``spot`` gives both forms of an element."""
    first = 0
    for number, size in enumerate(sizes):
        wrong = 0 if differs is None else count_ones(differs[first : first + size])
        overflow = 0 if lost is None else count_ones(lost[first : first + size])
        where = None
        if wrong and differs is not None and spot is not None:
            at = int(differs[first : first + size].to(torch.uint8).argmax())  # of several, the first
            where = Spot(at, *spot(first + at))
        if wrong or overflow:
            yield Found(number, wrong, where, overflow)
        first += size


def _spot(y: memoryview, right: bytearray, at: int, width: int) -> tuple[bytes, bytes]:
    part = slice(at * width, (at + 1) * width)
    return bytes(y[part]), bytes(right[part])
