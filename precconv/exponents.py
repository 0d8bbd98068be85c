"""How large some values are, as counts by binary exponent, with one ``+``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest

__all__ = ["Exponents"]


@dataclass(frozen=True, slots=True)
class Exponents:
    """How many values have which binary exponent: 1.0 has 0, and so has what is below 2.  No zeros at either end."""

    first: int = 0
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Exponents:
        """From counts by exponent."""
        used = [e for e, n in counts.items() if n]
        if not used:
            return _NONE
        return cls(min(used), tuple(counts.get(e, 0) for e in range(min(used), max(used) + 1)))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(exponent, values), the smallest first."""
        return enumerate(self.counts, self.first)

    def __add__(self, other: Exponents) -> Exponents:
        if not other.counts:
            return self
        if not self.counts:
            return other
        first = min(self.first, other.first)
        rows = [(0,) * (e.first - first) + e.counts for e in (self, other)]
        return Exponents(first, tuple(map(sum, zip_longest(*rows, fillvalue=0))))

    def below(self, exponent: int) -> int:
        """How many values are smaller than ``2 ** exponent``."""
        return sum(self.counts[: max(exponent - self.first, 0)])


_NONE = Exponents()
