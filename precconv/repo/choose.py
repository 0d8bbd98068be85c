"""Which of a directory's weight files are converted: one form of each model in it.

A model can be there as several files, formats and variants at once.  The order is the loading libraries' own:
the wanted variant, then safetensors before the others, then the file or the index that they look for first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from precconv.errors import InputError, UsageError

from .doors import listed
from .index import shard_order
from .names import INDEX_FIRST, WeightName, family, is_canonical, parse_index, parse_weight, rank

__all__ = ["Candidate", "candidates", "choose", "why_not"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that could be converted; ``files`` of an index are not known before it is read."""

    stem: str
    variant: str | None
    suffix: str
    files: tuple[str, ...] = ()
    index: str | None = None
    total: int | None = None  #: None where the name has no number
    numbers: frozenset[int] = frozenset()

    @property
    def family(self) -> str:
        return family(self.stem, self.suffix)

    @property
    def path(self) -> str:
        """The one path that stands for it in a message."""
        return self.index or self.files[0]

    @property
    def is_whole(self) -> bool:
        """Whether every shard is there once, numbered from 1 or, as some savers do, from 0."""
        n = len(self.files)
        return self.total is None or (n == self.total and self.numbers in (set(range(1, n + 1)), set(range(n))))


def candidates(weights: Iterable[str], indexes: Iterable[str]) -> list[Candidate]:
    """Every checkpoint that one directory's files can make up."""
    found: list[Candidate] = []
    groups: dict[str, list[str]] = {}
    heads: dict[str, WeightName] = {}
    for path in weights:
        name = _parsed(path)
        if name.number is None:
            found.append(Candidate(name.stem, name.variant, name.suffix, (path,)))
        else:
            groups.setdefault(name.group, []).append(path)
            heads[name.group] = name
    for group, paths in groups.items():
        head = heads[group]
        numbers = frozenset(n for path in paths if (n := _parsed(path).number) is not None)
        found.append(Candidate(head.stem, head.variant, head.suffix, shard_order(paths), None, head.total, numbers))
    for path in indexes:
        index = parse_index(path.rpartition("/")[2])
        assert index is not None
        found.append(Candidate(index.stem, index.variant, index.suffix, index=path))
    return found


def _parsed(path: str) -> WeightName:
    name = parse_weight(path.rpartition("/")[2])
    assert name is not None
    return name


def choose(found: Sequence[Candidate], *, variant: str | None, root: str, where: str) -> list[Candidate]:
    """One candidate for each model of a directory; canonical and indexed ones only, where there are any.

    Raises UsageError where the variant is the user's choice, InputError where shards are missing or ambiguous.
    """
    main = [c for c in found if c.index is not None or is_canonical(c.stem, c.suffix)]
    # vocab.bin and vocab.pt may be two things; beside vocab.safetensors they are not
    one = {c.family for c in main or found if main or c.suffix == ".safetensors"}
    groups: dict[str, list[Candidate]] = {}
    for c in main or found:
        groups.setdefault(c.family if c.family in one else f"{c.family}{c.suffix}", []).append(c)
    place = f"{root}/{where}" if where else root
    return [_of_one_model(group, variant=variant, place=place, root=root) for group in groups.values()]


def _of_one_model(group: Sequence[Candidate], *, variant: str | None, place: str, root: str) -> Candidate:
    wanted = _variant(group, variant, place)
    same = [c for c in group if c.variant == wanted]
    suffix = min((c.suffix for c in same), key=rank)
    same = [c for c in same if c.suffix == suffix]
    single = [c for c in same if c.index is None and c.total is None]
    indexed = [c for c in same if c.index is not None]
    if single and not (indexed and single[0].stem in INDEX_FIRST):
        return single[0]
    if len(indexed) > 1:
        raise InputError(
            f"there are two indexes of one checkpoint: {listed(c.path for c in indexed)}",
            path=place,
            hint="remove the one that is not in use",
        )
    return indexed[0] if indexed else _without_index(same, root)


def _variant(group: Sequence[Candidate], asked: str | None, place: str) -> str | None:
    """Which variant of one model: the one asked for, else the plain one, else the only one."""
    there = {c.variant for c in group}
    if asked in there or None in there:
        return asked if asked in there else None
    names = sorted(v for v in there if v is not None)
    if asked is None and len(names) == 1:
        return names[0]
    lacking = "there are only variants" if asked is None else f"there is no variant {asked!r} and no plain file, only"
    raise UsageError(
        f"{lacking}: {listed(names)}",
        path=place,
        hint="choose one: " + " or ".join(f"--from-variant {name}" for name in names),
    )


def _without_index(same: Sequence[Candidate], root: str) -> Candidate:
    whole = [c for c in same if c.is_whole]
    if len(whole) == 1:
        return whole[0]
    if whole:
        raise InputError(
            f"there are {len(whole)} complete sets of shards and no index: {listed(c.path for c in whole)}",
            path=root,
            hint="remove the one that is not in use",
        )
    short = same[0]
    assert short.total is not None
    absent = (n for n in range(1, short.total + 1) if n not in short.numbers)
    some = list(islice(absent, 101))  # a name can claim 999,999,999 shards
    what = f"not found: number {listed(map(str, some[:100]))}{' and more' if len(some) > 100 else ''}"
    raise InputError(
        f"{short.total:,} shards without an index, {what if some else 'numbered twice or beyond their total'}",
        path=f"{root}/{short.path}",
        hint="download the whole checkpoint",
    )


def why_not(path: str, chosen: Mapping[str, Candidate]) -> str:
    """Why a weight file or index of a directory is not among what was chosen there, by family."""
    name = path.rpartition("/")[2]
    parsed = parse_index(name) or _parsed(path)
    used = chosen.get(family(parsed.stem, parsed.suffix))
    if used is None:
        return f"not part of {listed((_name(c) for c in chosen.values()), limit=3)}"
    if parsed.variant != used.variant:
        kind = "without variant" if parsed.variant is None else f"as variant {parsed.variant}"
        return f"the same weights {kind}; {_name(used)} is converted"
    if parsed.suffix != used.suffix:
        return f"the same weights in another format; {_name(used)} is converted"
    if isinstance(parsed, WeightName) and parsed.number is not None:
        return f"a shard of another save; {_name(used)} is converted"
    return f"the same weights once more; {_name(used)} is converted"


def _name(c: Candidate) -> str:
    return c.path.rpartition("/")[2]
