"""Which random bits an element gets in stochastic rounding: those of the seed, its tensor's name and its index.

A stretch is elements of one tensor, one after the other, with the keys of their bits; ``stochastic`` makes the bits.
The keys change with every block of a tensor, so that the bits of a block can be made from a table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

__all__ = ["BLOCK", "Draws", "Keys", "Stretch", "keys", "stretches"]

#: 32 bits each; two for the words that neighbours share, two for those of each element.
Keys = tuple[int, int, int, int]
#: Elements with the same keys: as many as a chunk of FP32 has, which are then few steps of work.
BLOCK = 1 << 19


class Stretch(NamedTuple):
    """Some elements of a tensor; ``first`` counts from the start of the block that ``keys`` are for."""

    keys: Keys
    first: int
    elements: int


@lru_cache(maxsize=4096)
def keys(seed: int, name: str, block: int) -> Keys:
    """The keys of block number ``block`` of a tensor."""
    data = struct.pack("<QQ", seed, block) + name.encode("utf-8", "surrogatepass")
    a, b, c, d = struct.unpack("<4I", blake2b(data, digest_size=16).digest())
    return a, b, c, d


def stretches(seed: int, name: str, first: int, count: int) -> Iterator[Stretch]:
    """The stretches of ``count`` elements of a tensor from element ``first``."""
    while count:
        block, at = divmod(first, BLOCK)
        n = min(count, BLOCK - at)
        yield Stretch(keys(seed, name, block), at, n)
        first, count = first + n, count - n


@dataclass(frozen=True, slots=True)
class Draws:
    """The random bits of a conversion."""

    seed: int
    names: Sequence[str]  #: by position in the plan; tied tensors have one name, and so the same bits

    def of(self, parts: Iterable[tuple[int, int, int]]) -> list[Stretch]:
        """The stretches of parts of tensors that follow each other: (position in the plan, first element, count)."""
        return [s for key, first, count in parts for s in stretches(self.seed, self.names[key], first, count)]
