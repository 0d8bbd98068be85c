"""Two checkpoints, of any formats, compared tensor by tensor in one pass that reads both side by side.

A side is one or more checkpoints under labels, so that what has several (a model's components, say) is compared like
a file: a tensor is matched by its label and its name.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from .bulk import collector_paused
from .checkpoint import Checkpoint, renamed
from .deviation import Comparison, Deviation, Tolerance
from .differences import Diff, TensorDiff
from .dtypes import DType
from .errors import UsageError
from .formats import Elements
from .request import StrPath, worker_count
from .runs import CHUNK_BYTES, Progress, ProgressCallback, for_each
from .sources import opened
from .tensors import TensorInfo
from .weights import Weights

__all__ = ["Side", "compare_sides", "diff"]

#: Checkpoints under labels; the label of a single file is empty.
Side = Mapping[str, Checkpoint]
#: What tensors are matched by: label and name.
_Key = tuple[str, str]


def diff(
    a: StrPath,
    b: StrPath,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    strip_wrappers: bool = False,
    weights_a: Weights = "auto",
    weights_b: Weights = "auto",
    select_a: str | None = None,
    select_b: str | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Diff:
    """Compare two checkpoints, in files, directories or on the Hub; ``a`` is the reference.

    ``atol``, ``rtol``: finite elements are equal where |a - b| <= atol + rtol * |a|; the one not given is 0.  Without
    either they are equal bit for bit where the dtypes are the same, by value where they differ.
    ``strip_wrappers``: match names without the wrapper modules (``module.``, ``_orig_mod.``) in them, and where no name
    is on both sides without what all names of one begin with, as the module of a Lightning checkpoint.
    ``weights_a``, ``select_a``, ``weights_b``, ``select_b``: which weights of a training checkpoint, as in ``convert``.
    ``workers``: threads; by default one for each usable core.  The numbers do not depend on it.
    ``progress``: called in this thread with (done, total) bytes of both files.

    Raises InputError for a file that cannot be used, UsageError where the choice is the user's.
    """
    tolerance, threads = _tolerance(atol, rtol), worker_count(workers)
    with ExitStack() as stack, collector_paused():
        one, other = (
            stack.enter_context(opened(source, weights=weights, select=select, strip_wrappers=strip_wrappers))
            for source, weights, select in ((a, weights_a, select_a), (b, weights_b, select_b))
        )
        names = (os.fspath(a), os.fspath(b))
        notes: tuple[str, ...] = ()
        if strip_wrappers:
            one, other, notes = _aligned(one, other, names)
        found = compare_sides(one, other, names=names, tolerance=tolerance, workers=threads, progress=progress)
        return replace(found, notes=(*notes, *found.notes), unwrapped=strip_wrappers)


def _aligned(a: Side, b: Side, names: tuple[str, str]) -> tuple[Side, Side, tuple[str, ...]]:
    """Both sides, where they have no name in common one of them without a module that holds all of it."""
    if a.keys() != {""} or b.keys() != {""}:
        return a, b, ()
    left, right = ({t.name for t in side[""].infos} for side in (a, b))
    for side, own, there, name in ((a, left, right, names[0]), (b, right, left, names[1])):
        prefix = next(iter(own), "").partition(".")[0] + "."
        if own & there or not all(n.startswith(prefix) for n in own):
            continue
        short = {n: n.removeprefix(prefix) for n in own}
        if there.isdisjoint(short.values()):
            continue
        note = f"{name}: names are matched without {prefix!r}, which all of them begin with"
        stripped = {"": renamed(side[""], short)}
        return (stripped, b, (note,)) if side is a else (a, stripped, (note,))
    return a, b, ()


def _tolerance(atol: float | None, rtol: float | None) -> Tolerance | None:
    for name, value in (("atol", atol), ("rtol", rtol)):
        if value is not None and not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{name} {value} is not a finite number of at least 0")
    return None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)


class _Tensor(NamedTuple):
    """A tensor of one side, and where its bytes come from."""

    info: TensorInfo
    home: Checkpoint


class _Pair(NamedTuple):
    """A tensor of both sides whose elements can be compared."""

    at: int  #: position among the tensors that both sides have
    how: Comparison
    a: _Tensor
    b: _Tensor


class _Step(NamedTuple):
    """A chunk of both."""

    pair: _Pair
    start: int  #: element
    elements: int


def compare_sides(
    a: Side,
    b: Side,
    *,
    names: tuple[str, str],
    tolerance: Tolerance | None,
    workers: int,
    progress: ProgressCallback | None = None,
) -> Diff:
    """Compare two sides, which stay open; ``names`` are what the result calls them."""
    started = time.perf_counter()
    left, right = _tensors(a), _tensors(b)
    matched = [key for key in left if key in right]
    both = [TensorDiff(_full(*key), left[key].info, right[key].info, tolerance=tolerance) for key in matched]
    pairs = [
        _Pair(at, how, left[key], right[key])
        for at, (key, t) in enumerate(zip(matched, both, strict=True))
        if (how := t.comparison) is not None and t.a.nbytes
    ]
    found = _compared(pairs, tolerance, workers, progress)
    for checkpoint in (*a.values(), *b.values()):
        checkpoint.file.require_unchanged()
    return Diff(
        *names,
        tensors=tuple(replace(t, found=found[at]) if at in found else t for at, t in enumerate(both)),
        only_a=_missing(left, right),
        only_b=_missing(right, left),
        opaque=tuple(dict.fromkeys((*_opaque(a), *_opaque(b)))),
        notes=(*_notes(a, names[0]), *_notes(b, names[1])),
        tolerance=tolerance,
        seconds=time.perf_counter() - started,
    )


def _full(label: str, name: str) -> str:
    return f"{label}/{name}" if label else name


def _tensors(side: Side) -> dict[_Key, _Tensor]:
    return {(label, t.name): _Tensor(t, found) for label, found in side.items() for t in found.infos}


def _missing(here: Mapping[_Key, _Tensor], there: Mapping[_Key, _Tensor]) -> tuple[TensorInfo, ...]:
    return tuple(t.info._replace(name=_full(*key)) for key, t in here.items() if key not in there)


def _opaque(side: Side) -> Iterator[tuple[str, str]]:
    for label, found in side.items():
        for name, tensor in found.opaque.items():
            yield _full(label, name), tensor.kind


def _notes(side: Side, name: str) -> Iterator[str]:
    return (f"{name}: {note}" for found in side.values() for note in found.notes)


# --- the pass -----------------------------------------------------------------------------------------------


def _compared(
    pairs: Sequence[_Pair], tolerance: Tolerance | None, workers: int, callback: ProgressCallback | None
) -> dict[int, Deviation]:
    """How far each pair lies apart, by its position."""
    if not pairs:
        return {}
    from . import cast, compare

    found: dict[int, Deviation] = {}
    lock = Lock()
    progress = Progress(sum(p.a.info.nbytes + p.b.info.nbytes for p in pairs), callback)

    def start() -> Callable[[_Step], None]:
        lanes, readers = compare.Lanes(CHUNK_BYTES), (_Reader(), _Reader())

        def step(task: _Step) -> None:
            pair, first, count = task
            sizes = [count * t.info.dtype.bits // 8 for t in (pair.a, pair.b)]
            for reader, tensor, out in zip(readers, (pair.a, pair.b), lanes.buffers(*sizes), strict=True):
                reader.read(tensor, first, out)
            part = lanes.compare(pair.how, first, count, tolerance)
            with lock:
                before = found.get(pair.at)
                found[pair.at] = part if before is None else before + part
            progress.add(sum(sizes))

        return step

    homes = {id(p.a.home): n for n, p in enumerate(pairs)}
    in_order = sorted(pairs, key=lambda p: (homes[id(p.a.home)], p.a.info.offset))
    for file in {id(t.home.file): t.home.file for p in pairs for t in (p.a, p.b)}.values():
        file.advise_sequential()
    with cast.one_thread():
        for_each(_steps(in_order, compare.BLOCK), start, workers=workers, tick=progress.show)
    return found


def _steps(pairs: Iterable[_Pair], block: int) -> Iterator[_Step]:
    for pair in pairs:
        total = _elements(pair.a.info)
        step = max(1, CHUNK_BYTES * 8 // max(pair.how.a.bits, pair.how.b.bits) // block) * block
        for first in range(0, total, step):
            yield _Step(pair, first, min(step, total - first))


def _elements(t: TensorInfo) -> int:
    """Elements by the bytes, of which some packed types have their own count."""
    return t.nbytes * 8 // t.dtype.bits


class _Reader:
    """Reads one side's tensors; for one thread."""

    def __init__(self) -> None:
        self._tensor: _Tensor | None = None
        self._elements: Elements | None = None

    def read(self, tensor: _Tensor, first: int, out: memoryview) -> None:
        """Fill ``out`` from element ``first`` on."""
        info, home = tensor
        if info.offset >= 0:
            home.file.read_into(out, info.offset + first * info.dtype.bits // 8)
            return
        if self._tensor is not tensor or self._elements is None:
            opener = home.source.elements(info)
            assert opener is not None
            self._tensor, self._elements = tensor, opener()
        self._elements.read(out, first * info.dtype.bits // 8 // _unit(info.dtype))


def _unit(dtype: DType) -> int:
    """Bytes of what a torch checkpoint's reader counts as an element."""
    return max(1, dtype.bits // 8)
