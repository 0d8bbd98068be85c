"""What each file of a model directory or Hub repository is: weights to convert, carried over, or left out.

Decided from the listing and a few small JSON files alone, so it is the same for a directory and for the Hub, and
everything that is missing or ambiguous is said before any work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from precconv.errors import CorruptCheckpointError, InputError, UsageError

from .choose import Candidate, candidates, choose, why_not
from .doors import check_collisions, listed, shown, unsafe
from .index import MAX_INDEX, check_shards, read_index
from .listing import list_directory
from .names import SUFFIXES, family, is_canonical, is_guess, parse_index, parse_weight
from .pipelines import MODEL_INDEX, read_pipeline, require_components
from .roles import DCP, ORIGINAL, Kind, Role, directory_of, is_ignored, roles, saved_while_training
from .sets import LeftOut, Survey, WeightSet

__all__ = ["MAX_INDEX", "LeftOut", "Survey", "WeightSet", "list_directory", "survey"]

Read = Callable[[str], bytes]
Roles = Mapping[str, Role]


@dataclass(frozen=True, slots=True)
class _Directory:
    """The weight files and the indexes right in one directory, as paths from the root."""

    weights: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Source:
    """What is surveyed, once every file has its role; the files of ``directories`` have none."""

    root: str
    read: Read
    files: frozenset[str]
    known: Roles
    directories: Mapping[str, _Directory]


def survey(
    files: Sequence[str], read: Read, *, root: str, variant: str | None = None, copy_all: bool = False
) -> Survey:
    """What each of ``files`` is: paths relative to the root, with ``/``.

    ``read`` gives the bytes of a small JSON file; more than ``MAX_INDEX`` of them are refused.  ``root`` stands in
    messages.  With ``copy_all``, what would be left out is carried over.

    Raises InputError for a listing without weights or with missing, contradicting or unsafe parts,
    CorruptCheckpointError for an index or pipeline that breaks its rules, UsageError where ``variant`` must say more.
    """
    listing = _listing(files, root)
    pipeline = None
    if MODEL_INDEX in listing:
        pipeline = read_pipeline(read(MODEL_INDEX), path=f"{root}/{MODEL_INDEX}")
        require_components(pipeline, listing, path=f"{root}/{MODEL_INDEX}")
    known = _roles(listing, is_pipeline=pipeline is not None)
    source = _Source(root, read, frozenset(listing), known, _directories(listing, known))
    if not source.directories:
        raise _no_weights(listing, known, root)
    _require_variant(variant, source)
    chosen = _choose(source, variant)
    sets = _named([s for found in chosen.values() for _, s in found])
    return _sorted_out(listing, source, chosen, sets, pipeline=pipeline, variant=variant, copy_all=copy_all)


def _listing(files: Iterable[str], root: str) -> list[str]:
    """Each path once, in order, without what is no part of a model."""
    listing = []
    for path in sorted(set(files)):
        why = unsafe(path)
        if why is not None:
            raise InputError(f"the path {shown(path)} {why}", path=root, hint="rename the file")
        if not any(map(is_ignored, path.split("/"))):
            listing.append(path)
    return listing


# Roles that depend on what else is there


def _roles(listing: Sequence[str], *, is_pipeline: bool) -> dict[str, Role]:
    """The tables' roles, less those that do not hold here, and those that hold only here."""
    known = roles(listing)
    sure = _with_weights(listing, known)
    known |= saved_while_training([p for p in listing if p not in known], sure | ({""} if is_pipeline else set()))
    seconds = {p: role for p, role in known.items() if role.kind is Kind.SECOND}
    for path, role in seconds.items():
        if role is not ORIGINAL and directory_of(path) not in sure:
            del known[path]
    if not _with_weights(listing, known):
        known = {p: role for p, role in known.items() if role is not ORIGINAL}
    if is_pipeline:
        known |= _single_files(listing, known)
    return known


def _with_weights(listing: Iterable[str], known: Roles) -> set[str]:
    """The directories with files whose names alone say that they are weights."""
    found = set()
    for path in listing:
        if path in known:
            continue
        where, _, name = path.rpartition("/")
        weight = parse_weight(name)
        if weight is None:
            if parse_index(name) is not None:
                found.add(where)
        elif not is_guess(weight.stem, weight.suffix):
            found.add(where)
    return found


def _single_files(listing: Sequence[str], known: Roles) -> dict[str, Role]:
    """Files beside ``model_index.json`` with the whole pipeline in them, where its components have weights."""
    if not _with_weights(listing, known) - {""}:
        return {}
    root = _directories(listing, known).get("", _Directory())
    role = Role(Kind.SECOND, "beside a pipeline, whose components are converted")
    indexed = {i.stem for path in root.indexes if (i := parse_index(path))}
    return {
        path: role
        for path in root.weights
        if (w := parse_weight(path)) and not is_canonical(w.stem, w.suffix) and w.stem not in indexed
    }


def _directories(listing: Iterable[str], known: Roles) -> dict[str, _Directory]:
    """Every directory with weights or indexes in it, the upper ones first."""
    found: dict[str, _Directory] = {}
    for path in listing:
        if path in known:
            continue
        where, _, name = path.rpartition("/")
        if parse_weight(name) is not None:
            found.setdefault(where, _Directory()).weights.append(path)
        elif parse_index(name) is not None:
            found.setdefault(where, _Directory()).indexes.append(path)
    return {where: found[where] for where in sorted(found, key=lambda w: (w.count("/") + bool(w), w))}


def _no_weights(listing: Sequence[str], known: Roles, root: str) -> InputError:
    """What was found instead."""
    formats = _foreign_formats(known)
    state = [path for path, role in known.items() if role.kind is Kind.STATE]
    if not listing:
        return InputError("there are no files", path=root)
    if formats:
        what = f"the weights are there as {formats} only, which cannot be read"
        return InputError(what, path=root, hint="convert the safetensors or torch checkpoint they were made from")
    if any(known[path] is DCP for path in state):
        hint = "join it with python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR OUT.pt"
        return InputError(f"this is {DCP.format}: its tensors are spread over .distcp files", path=root, hint=hint)
    if state:
        hint = "convert what the training run saved as the model; a DeepSpeed run's own zero_to_fp32.py makes it"
        return InputError(
            f"there is only training state and no weights: {listed(state, limit=3)}", path=root, hint=hint
        )
    what = f"there are no weights: none of the {len(listing):,} files ends in {', '.join(SUFFIXES)}"
    return InputError(what, path=root, hint="give the directory that the model was saved to")


def _foreign_formats(known: Roles) -> str:
    return " and ".join(sorted({role.format for role in known.values() if role.kind is Kind.FOREIGN}))


# One form of each model


def _require_variant(variant: str | None, source: _Source) -> None:
    """Raise UsageError where no directory has the variant asked for."""
    if variant is None:
        return
    paths = [p for d in source.directories.values() for p in (*d.weights, *d.indexes)]
    names = [p.rpartition("/")[2] for p in paths]
    there = {w.variant for name in names if (w := parse_index(name) or parse_weight(name)) and w.variant is not None}
    if variant in there:
        return
    hint = " or ".join(f"--from-variant {name}" for name in sorted(there)) or "leave out --from-variant"
    what = f"there is {listed(sorted(there))}" if there else "the weights have no variants"
    raise UsageError(f"there is no variant {variant!r}; {what}", path=source.root, hint=hint)


def _choose(source: _Source, variant: str | None) -> dict[str, list[tuple[Candidate, WeightSet]]]:
    """What is converted of each directory.  A shard belongs to one set, whichever directory it lies in."""
    owner: dict[str, str] = {}
    chosen: dict[str, list[tuple[Candidate, WeightSet]]] = {}
    for where, directory in source.directories.items():
        found = candidates([p for p in directory.weights if p not in owner], directory.indexes)
        if not found:
            continue
        picked = choose(found, variant=variant, root=source.root, where=where)
        chosen[where] = [(c, _weight_set(c, where, source)) for c in picked]
        for c, made in chosen[where]:
            for path in made.files:
                if owner.setdefault(path, c.path) != c.path:
                    what = f"{path!r} belongs to two checkpoints: {listed(sorted({owner[path], c.path}))}"
                    raise InputError(what, path=source.root, hint="remove the index that is not in use")
    return chosen


def _weight_set(c: Candidate, where: str, source: _Source) -> WeightSet:
    made = WeightSet(where, c.stem, c.variant, c.suffix, c.files, c.index)
    if c.index is None:
        return made
    path = f"{source.root}/{c.index}"
    index = read_index(source.read(c.index), path=path, where=where, suffix=c.suffix)
    for shard in index.shards:
        if (role := source.known.get(shard)) and role.kind is Kind.STATE:
            raise CorruptCheckpointError(f"its shard {shard!r} is {role.why}", path=path)
    check_shards(
        index,
        path=path,
        exists=source.files.__contains__,
        beside=lambda where: source.directories.get(where, _Directory()).weights,
    )
    return replace(made, files=index.shards, weight_map=index.weight_map, index_metadata=index.metadata)


def _named(sets: Sequence[WeightSet]) -> tuple[WeightSet, ...]:
    """With a name for each: its directory, with the stem where that alone does not tell it from the others."""
    in_directory = Counter(s.where for s in sets)
    short = ["/".join(filter(None, (s.where, s.stem if in_directory[s.where] > 1 else ""))) for s in sets]
    taken = Counter(short)
    return tuple(
        replace(s, name=name if taken[name] == 1 else "/".join(filter(None, (s.where, s.stem + s.suffix))))
        for s, name in zip(sets, short, strict=True)
    )


def _sorted_out(
    listing: Sequence[str],
    source: _Source,
    chosen: Mapping[str, Sequence[tuple[Candidate, WeightSet]]],
    sets: tuple[WeightSet, ...],
    *,
    pipeline: Mapping[str, object] | None,
    variant: str | None,
    copy_all: bool,
) -> Survey:
    used = {path for s in sets for path in (*s.files, s.index) if path is not None}
    whys = {path: role.why for path, role in source.known.items() if path not in used}
    for where, directory in source.directories.items():
        by_family = {c.family: c for c, _ in chosen.get(where, ())}
        whys |= {p: why_not(p, by_family) for p in (*directory.weights, *directory.indexes) if p not in used}
    strays = [path for path in whys if path not in source.known and _is_stray(path, chosen)]
    for path in strays:  # bge-m3 needs its colbert_linear.pt beside pytorch_model.bin
        del whys[path]
    others = tuple(p for p in listing if p not in used and (copy_all or p not in whys))
    check_collisions([p for p in listing if p in used or copy_all or p not in whys], root=source.root)
    left_out = () if copy_all else tuple(LeftOut(p, whys[p]) for p in listing if p in whys)
    notes = [
        *_notes(sets, variant, source.known),
        *(f"carried over as it is, not part of the weights: {p}" for p in strays),
    ]
    return Survey(sets, others, left_out, tuple(notes), pipeline)


def _is_stray(path: str, chosen: Mapping[str, Sequence[tuple[Candidate, WeightSet]]]) -> bool:
    """A file beside the weights whose name says neither that it is a checkpoint nor that it is one of them."""
    where, _, name = path.rpartition("/")
    found = parse_weight(name)
    return (
        found is not None
        and found.number is None
        and found.suffix in (".bin", ".pt", ".pth")
        and not is_canonical(found.stem, found.suffix)
        and family(found.stem, found.suffix) not in {c.family for c, _ in chosen.get(where, ())}
    )


def _notes(sets: Sequence[WeightSet], variant: str | None, known: Roles) -> Iterator[str]:
    """What a user may not expect of the choice."""
    for s in sets:
        if s.index is None and not s.is_single:
            yield f"{s.files[0]}: there is no index, and the {len(s.files)} shards are complete by their numbers"
        if s.variant is not None and variant is None:
            yield f"{s.files[0]}: the weights are there as variant {s.variant} only"
    plain = [s.files[0] for s in sets if s.variant is None] if variant is not None else []
    if (formats := _foreign_formats(known)) and all(s.is_guess for s in sets):
        yield f"weights are there as {formats}, which cannot be read, and perhaps nowhere else"
    if plain:
        yield f"there is no variant {variant} of {listed(plain, limit=10)}, so the files without one are used"
