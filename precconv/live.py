"""The same cast for a model in memory: a state dict in, a new one and its report out.

Every value goes through the streamed conversion's kernel, on the CPU in bounded chunks, wherever its tensor lies: so
the bits are those of a converted file, on any device.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from .checks import Finding, Limits, OnNonfinite, OnOverflow, fallbacks, run_checks
from .convert import refusal
from .draws import Draws
from .dtypes import DType, dtype
from .errors import UsageError
from .plan import Item, Plan, make_plan
from .report import Report
from .request import Request, Rounding, StrPath, request_of
from .rules import MixedMode, NormMode, Rule
from .runs import CHUNK_BYTES, Progress, ProgressCallback, for_each
from .stats import Stats
from .tensors import TensorInfo

if TYPE_CHECKING:
    import torch

__all__ = ["cast_state_dict"]

_NAME = "state dict"
#: Entries without a tensor that a note names one by one.
_LISTED = 8


def cast_state_dict(
    state: Mapping[str, Any],
    *,
    to: str | DType,
    config: Mapping[str, object] | None = None,
    preset: str = "auto",
    norms: NormMode = "fp32",
    mixed: MixedMode = "keep",
    keep: Sequence[str] = (),
    rule: Sequence[str | Rule] = (),
    rules: StrPath | None = None,
    on_overflow: OnOverflow = "error",
    on_nonfinite: OnNonfinite = "warn",
    max_underflow: float | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[dict[str, Any], Report]:
    """Cast a model's state dict as ``convert`` casts a file that holds the same tensors; ``state`` is not changed.

    ``state``: names to tensors, as ``module.state_dict()`` gives it.  What is no tensor is in the result as it is.
    ``config``: the model's ``config.json``, as ``model.config.to_dict()`` gives it; with it the architecture is known
    for certain, without it by the names.
    The other options are those of ``convert``.

    Returns a new dict, an ``OrderedDict`` with its ``_metadata`` if ``state`` is one, in the same order.  A tensor that
    need not change is in it itself, the same object; one that is cast is a new plain tensor that needs no gradient, on
    its own device and with the strides ``.to()`` would give it.  Names of one and the same view of memory that are cast
    alike have one new tensor; other views that overlap are not kept together.  Only the new tensors take memory.

    Raises UsageError for a tensor that would have to be cast and is not a plain one with values (on the meta device,
    sparse, nested, a subclass), RuleError, or NumericError with the report when a check refuses.
    """
    started = time.perf_counter()
    request = request_of(
        to=to, preset=preset, norms=norms, mixed=mixed, keep=keep, rule=rule, rules=rules, on_overflow=on_overflow,
        on_nonfinite=on_nonfinite, max_underflow=max_underflow, rounding=rounding, seed=seed, workers=workers,
        verify="none",
    )  # fmt: skip
    if request.lossless is not None:
        raise UsageError("to 'auto' is for files and models, not for a state dict", hint="say which dtype")
    tensors = _tensors(state)
    infos = [_info(name, x) for name, x in tensors.items()]
    made = make_plan(infos, {}, request.policy, config=config)
    rest = [name for name in state if name not in tensors]
    _require_plain(made, tensors)
    work = _Work(request, tensors, made, Progress(0, progress))
    made, findings = work.run()

    def report(*, done: bool) -> Report:
        return Report(
            source=_NAME,
            output=_NAME if done else None,
            plan=made,
            seen=work.stats,
            findings=tuple(findings),
            options=request.options(),
            source_bytes=made.source_bytes,
            output_bytes=made.output_bytes,
            verified_bytes=0,
            seconds=time.perf_counter() - started,
        )

    errors = [f for f in findings if f.level == "error"]
    if errors:
        raise refusal(errors, request, path=_NAME, report=report(done=False))
    made = Plan(made.target, made.items, made.dropped, {}, (*_kept(rest), *made.notes), made.warnings)
    return _assembled(state, made, work.made), report(done=True)


def _kept(rest: Sequence[object]) -> Iterator[str]:
    if rest:
        more = f" and {len(rest) - _LISTED} more" if len(rest) > _LISTED else ""
        yield f"no tensors, kept as they are: {', '.join(map(str, rest[:_LISTED]))}{more}"


def _assembled(state: Mapping[str, Any], made: Plan, new: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The new state dict, in the order of the old one and of its kind."""
    dropped = {i.src.name for i in made.dropped}
    out: dict[str, Any] = OrderedDict() if isinstance(state, OrderedDict) else {}
    out.update((name, new.get(name, value)) for name, value in state.items() if name not in dropped)
    metadata = getattr(state, "_metadata", None)  # of the modules' versions; load_state_dict looks at it
    if isinstance(out, OrderedDict) and metadata is not None:
        out._metadata = metadata.copy()  # type: ignore[attr-defined]
    return out


# What is in a state dict -----------------------------------------------------------------------------------


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    import torch
    from torch.nn.parameter import is_lazy

    if not isinstance(state, Mapping):
        raise UsageError(f"a {type(state).__name__} is not a state dict", hint="pass module.state_dict()")
    found = {name: x for name, x in state.items() if isinstance(x, torch.Tensor)}
    for name in found:
        if not isinstance(name, str):
            raise UsageError(f"the key {name!r} is not a name: a state dict has strings")
        if is_lazy(found[name]):  # has no shape, dtype or values yet
            hint = "call the model once on an input, which makes the parameter"
            raise UsageError("is not initialised", path=_NAME, tensor=name, hint=hint)
    if state and not found:
        raise UsageError("holds no tensors", path=_NAME, hint="if the state dict is inside, pass it, as state['model']")
    return found


def _info(name: str, x: torch.Tensor) -> TensorInfo:
    kind = dtype(x.dtype)
    shape = (x.numel(),) if x.is_nested else tuple(x.shape)
    if kind == "fp4" and shape:  # two values in each of torch's elements
        shape = (*shape[:-1], shape[-1] * 2)
    return TensorInfo(name, kind, shape, -1, x.numel() * x.element_size())


def _require_plain(made: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Whatever is to be cast must be a tensor whose values can be read and written one by one."""
    for item in made.items:
        if item.to is item.src.dtype:
            continue
        kind = _kind(tensors[item.src.name])
        if kind is not None:
            name = item.src.name
            hint = f"keep it (keep=[{name!r}]), or pass a plain tensor with its values"
            raise UsageError(f"is {kind}, which cannot be cast to {item.to}", path=_NAME, tensor=name, hint=hint)


def _kind(x: torch.Tensor) -> str | None:
    """What is special about a tensor; None for a plain one."""
    import torch

    if x.is_nested:
        return "a nested tensor"
    if x.layout != torch.strided:
        return f"a {str(x.layout).removeprefix('torch.')} tensor"
    if x.device.type == "meta":
        return "on the meta device, without values"
    if type(x) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return f"a {type(x).__name__}"
    return None


def _ties(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Each name to the first one of the same elements seen in the same way."""
    first: dict[object, str] = {}
    return {name: first.setdefault(_view(x), name) for name, x in tensors.items()}


def _view(x: torch.Tensor) -> object:
    if _kind(x) is not None or not x.numel():
        return id(x)
    place = (x.device, x.untyped_storage().data_ptr(), x.storage_offset())
    return (*place, tuple(x.shape), x.stride(), x.dtype, x.is_neg())


# The work --------------------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """Elements of a tensor that follow each other in row-major order; at most a chunk."""

    key: int
    x: torch.Tensor
    y: torch.Tensor | None  #: where the result goes; None where there is nothing to change
    first: int  #: index of the first in the tensor
    to: DType


class _Work:
    """The casts of one state dict: every view of memory once for each dtype that it goes to."""

    def __init__(self, request: Request, tensors: Mapping[str, torch.Tensor], plan: Plan, progress: Progress) -> None:
        self.stats: dict[int, Stats] = {}  #: by position in the plan
        self.made: dict[str, torch.Tensor] = {}
        self._request, self._tensors, self._plan, self._progress = request, tensors, plan, progress
        self._lock = Lock()
        self._refused = False
        self._first = _ties(tensors)
        names = [self._first[i.src.name] for i in plan.items]
        self._draws = None if request.seed is None else Draws(request.seed, names)

    def run(self) -> tuple[Plan, list[Finding]]:
        """Cast everything, and again what gets another dtype because it overflowed."""
        plan, limits = self._plan, self._request.limits
        self._cast(plan, range(len(plan.items)))
        changes, findings = fallbacks(plan.items, self.stats, limits)
        if changes:
            plan = plan.amended(changes)
            for key in changes:
                del self.stats[key]
                self.made.pop(plan.items[key].src.name, None)
            self._cast(plan, sorted(changes))
        for key, stats in sorted(self.stats.items()):
            findings += run_checks(plan.items[key], stats, limits)
        return plan, findings

    def _cast(self, plan: Plan, keys: Sequence[int]) -> None:
        from . import cast

        groups: dict[tuple[str, DType], list[int]] = {}
        for key in keys:
            item = plan.items[key]
            if item.src.dtype.is_castable and _kind(self._tensors[item.src.name]) is None:
                groups.setdefault((self._first[item.src.name], item.to), []).append(key)
        self._progress.expect(sum(plan.items[same[0]].src.nbytes for same in groups.values()))
        with cast.one_thread():
            tasks = self._tasks(plan.items, [same[0] for same in groups.values()])
            for_each(tasks, self._start, workers=self._request.workers, tick=self._progress.show)
        for key, *others in groups.values():
            name = plan.items[key].src.name
            for other in others:
                if key in self.stats:
                    self.stats[other] = self.stats[key]
                if name in self.made:
                    self.made[plan.items[other].src.name] = self.made[name]

    def _tasks(self, items: Sequence[Item], keys: Sequence[int]) -> Iterator[_Task]:
        """The steps, in order; a tensor's result is allocated when its turn comes."""
        import torch

        for key in keys:
            info, to, _ = items[key]
            x, y = self._tensors[info.name].detach(), None
            if to is not info.dtype and not self._refused:
                y = self.made[info.name] = torch.empty_like(x, dtype=getattr(torch, to.torch))
            first = 0
            for index in _blocks(tuple(x.shape), CHUNK_BYTES // max(info.dtype.itemsize, to.itemsize)):
                part = x[index]
                yield _Task(key, part, None if y is None else y[index], first, to)
                first += part.numel()

    def _start(self) -> Callable[[_Task], None]:
        from . import cast

        lane = cast.Lane(CHUNK_BYTES)
        limits: Limits = self._request.limits

        def step(task: _Task) -> None:
            key, x, y, first, to = task
            p, n = cast.pair(dtype(x.dtype), to), x.numel()
            drawn = () if self._draws is None or not p.narrows else self._draws.of([(key, first, n)])
            lane.load(p, x)
            lane.cast(p, n, drawn)
            found = lane.survey(p, n, [(key, 0, n)], clamp=limits.on_overflow == "clamp")
            if y is not None and not self._refused:
                lane.unload(p, y)
            with self._lock:
                for _, stats in found:
                    whole = Stats(n - stats.n) + stats
                    self.stats[key] = self.stats.get(key, Stats()) + whole
                    if stats.overflow and limits.on_overflow == "error":  # only the rest of the report is wanted
                        self._refused = True
                        self.made.clear()
            self._progress.add(n * x.element_size())

        return step


def _blocks(shape: tuple[int, ...], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that take a tensor apart into pieces of at most ``most`` elements, in row-major order."""
    if prod(shape) <= most:
        if prod(shape):
            yield ()
        return
    inner = prod(shape[1:])
    if inner <= most:
        rows = most // inner
        yield from ((slice(at, at + rows),) for at in range(0, shape[0], rows))
        return
    for i in range(shape[0]):
        yield from ((i, *rest) for rest in _blocks(shape[1:], most))
