"""Which tensors of a checkpoint are its weights: decided from key names and structure, before a byte is read.

A state dict is a mapping that holds tensors.  Training checkpoints keep one or several under well-known keys
beside optimizers and the like, which are never weights.  Where the file leaves a choice, it is the user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from .errors import CorruptCheckpointError, PrecconvError, UnknownFormatError, UsageError
from .formats.pickled import Placeholder, class_of, is_container, mapping
from .formats.torch_tensors import TensorRef
from .outline import Entry
from .tree import Tally, Tensor, Tree, describe
from .twins import ema_only, without_twins

__all__ = ["Selection", "Weights", "select"]

Weights = Literal["auto", "model", "ema", "all"]

_MODEL = {
    *(
        "state_dict",
        "model_state_dict",
        "model_state",
        "model",
        "module",
        "net",
        "network",
        "params",
        "weights",
    ),
    *("model_dict", "model_weights", "net_state_dict", "network_state_dict", "state_dicts", "modelstate"),
}
#: A copy of the model that training averaged.
_EMA = re.compile(r"(^|[_.])(ema|swa|averaged?_model|avg_model)($|[_.])", re.IGNORECASE)
#: What training keeps beside the model.
_TRAINING = re.compile(
    r"(^|[_.])(optim\w*|opt|opts|adam\w*|lr|(lr_?)?sched\w*|(grad_?|loss_?)?scalers?|amp|rng\w*|random\w*|seed|"
    r"callbacks|loops|hyper_parameters|train(er|ing)_(state|args)|param_groups|exp_avg\w*|momentum_buffer|"
    r"(global_?)?steps?|epochs?|iter(ation)?s?|metrics?|history|early_stop\w*)($|[_.])",
    re.IGNORECASE,
)
_MAX_DEPTH = 16
_MAX_NAME = 1000  #: characters; names grow with nesting
_MAX_NAMES = 1 << 25  #: characters that nesting may add to all of them
_MAX_SHOWN = 200  #: characters of a key path in a list


@dataclass(frozen=True, slots=True)
class Selection:
    """The weights of one checkpoint and what was not taken."""

    chosen: tuple[str, ...]  #: key paths of the state dicts; "" is the whole file
    tensors: dict[str, Tensor]  #: by name, in the file's order
    left: tuple[Entry, ...]  #: printable, a line each
    renamed: dict[str, str] = field(default_factory=dict)  #: new name to the name in the file (EMA twins)


@dataclass(frozen=True, slots=True, eq=False)
class _Set:
    """A state dict that could be the weights."""

    path: tuple[str, ...]
    node: object
    kind: Literal["model", "ema"]

    @property
    def shown(self) -> str:
        return ".".join(self.path)


def select(root: object, weights: Weights = "auto", path: str | None = None, *, where: str | None = None) -> Selection:
    """Choose the weights under ``root``, or those at the key path ``path``; errors name the file ``where``.

    Raises UsageError where there is a choice to make (it lists the candidates) or where what was asked for is
    not there, UnknownFormatError where there are no weights at all, and CorruptCheckpointError for a tensor
    whose description makes no sense.
    """
    try:
        return _select(root, weights, path)
    except PrecconvError as error:
        raise type(error)(error.message, path=where, hint=error.hint) from error


def _select(root: object, weights: Weights, path: str | None) -> Selection:
    tree = Tree(root)
    sets = (
        [_at(tree, path)] if path is not None else _wanted(tree, list(_sets(tree, root, (), "model", set())), weights)
    )
    names: dict[str, Tensor] = {}
    inside: list[Entry] = []
    for one in sets:
        prefix = f"{one.shown}." if len(sets) > 1 and one.path else ""
        for name, tensor in _flat(tree, one, inside):
            if prefix + name in names:
                raise UsageError(f"two tensors would be called {name!r}", hint="use --select KEY.PATH")
            names[prefix + name] = tensor
    if not names:
        raise UsageError(f"there are no tensors at {sets[0].shown!r}")
    _check_present(root, names)
    left = (*_beside(tree, {one.path for one in sets}), *inside)
    chosen = Selection(tuple(one.shown for one in sets), names, left)
    named = path is not None or any(one.kind == "ema" for one in sets)
    return _with_twins(chosen, weights, needed=not named)


def _with_twins(chosen: Selection, weights: Weights, *, needed: bool) -> Selection:
    """Drop the ``model_ema.`` twins of a single-file LDM checkpoint, or put them in the model's place."""
    if weights not in ("model", "ema"):
        return chosen
    split = (without_twins if weights == "model" else ema_only)(chosen.tensors)
    if split is None:
        if weights == "ema" and needed:
            raise UsageError("there are no EMA weights in this file", hint="use --weights model or auto")
        return chosen
    left = [Entry(name, describe(ref.node), Tally(1, _nbytes(ref))) for name, ref in split.left.items()]
    return replace(chosen, tensors=split.tensors, left=(*chosen.left, *left), renamed=split.renamed)


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if isinstance(tensor, TensorRef) else 0


# Finding the state dicts -----------------------------------------------------------------------------------


def _is_training(key: str, node: object) -> bool:
    """Whether an entry is training state: by its key, or because it is made like an optimizer's state."""
    if _TRAINING.search(key) and key.lower() not in _MODEL and not _EMA.search(key):
        return True
    return isinstance(node, dict) and "param_groups" in node and "state" in node


def _holds_state_dict(tree: Tree, node: object) -> bool:
    keys = [key for key, value in tree.entries(node) if is_container(value)]
    return any(key.lower() in _MODEL or _EMA.search(key) for key in keys)


def _parts(tree: Tree, node: object) -> tuple[Tally, dict[str, object]]:
    """Tensors directly in a container, and the entries below which there are more, training state apart."""
    inner = tree.entries(node)
    below = {
        key: value
        for key, value in inner
        if tree.tensor(value) is None
        and tree.tally(value).count
        and is_container(value)
        and not _is_training(key, value)
    }
    direct = [found for _, value in inner if (found := tree.tensor(value)) is not None]
    if below:  # beside state dicts, a tensor may be training state itself
        direct = [found for key, value in inner if (found := tree.tensor(value)) and not _is_training(key, value)]
    return Tally(len(direct), sum(_nbytes(found) for found in direct)), below


def _sets(
    tree: Tree, node: object, path: tuple[str, ...], kind: Literal["model", "ema"], seen: set[int]
) -> Iterator[_Set]:
    """The state dicts under a node that is no state dict's inside; one that is under two keys once."""
    if tree.tensor(node) is not None:
        yield _Set(path, node, kind)
        return
    if id(node) in seen:
        return
    seen.add(id(node))
    if len(path) > _MAX_DEPTH or not is_container(node) or _is_training("", node):
        return
    direct, below = _parts(tree, node)
    model = {key: value for key, value in below.items() if key.lower() in _MODEL}
    ema = {key: value for key, value in below.items() if key not in model and _EMA.search(key)}
    largest = max((tree.tally(value).nbytes for value in (model or ema).values()), default=0)
    if direct.count and 2 * direct.nbytes >= largest:
        yield _Set(path, node, kind)
        model = {}
    elif path and below and not any(_holds_state_dict(tree, value) for value in (node, *below.values())):
        yield _Set(path, node, kind)  # a tree of dicts: one set, its names joined
        return
    elif not model and not ema:
        model = below
    for key, value in model.items():
        yield from _sets(tree, value, (*path, key), kind, seen)
    for key, value in ema.items():
        yield from _sets(tree, value, (*path, key), "ema", seen)


def _wanted(tree: Tree, found: list[_Set], weights: Weights) -> list[_Set]:
    """Those of the candidates that ``weights`` asks for; several only for ``all``."""
    if not found:
        raise _nothing(tree)
    if weights == "all":
        return found
    model = [one for one in found if one.kind == "model"]
    ema = [one for one in found if one.kind == "ema"]
    if weights == "model" and not model:
        raise UsageError(f"only EMA weights are in this file, at {ema[0].shown!r}", hint="use --weights ema")
    pool = ema or model if weights == "ema" else model or ema  # EMA twins may be inside the model
    if len(pool) > 1:
        shown = "; ".join(str(Entry(one.shown, tree.describe(one.node), tree.tally(one.node))) for one in pool)
        hint = f"choose one, as in --select {pool[0].shown or 'KEY.PATH'}, or take all with --weights all"
        raise UsageError(f"several sets of weights: {shown}", hint=hint)
    return pool


def _at(tree: Tree, path: str) -> _Set:
    """What is at a key path; keys may have dots themselves, the longest that fits is taken."""
    node = tree.root
    taken: list[str] = []
    rest = path.split(".") if path else []
    while rest:
        inner = dict(tree.entries(node))
        fits = [n for n in range(len(rest), 0, -1) if ".".join(rest[:n]) in inner]
        if not fits:
            where = repr(".".join(taken)) if taken else "the top level"
            shown = ", ".join(sorted(inner)[:20]) or "nothing"
            raise UsageError(f"no {'.'.join(rest)!r} at {where}", hint=f"it has {shown}")
        key = ".".join(rest[: fits[0]])
        node, rest = inner[key], rest[fits[0] :]
        taken.append(key)
    return _Set(tuple(taken), node, "model")


_MERGE = "merge the partitions first: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR"


def _check_present(root: object, names: dict[str, Tensor]) -> None:
    """Refuse files whose tensors are empty because their values are in other files."""
    empty = [name for name, ref in names.items() if isinstance(ref, TensorRef) and ref.numel == 0]
    pairs = mapping(root)
    if empty and pairs is not None and "param_shapes" in pairs:
        message = f"this is a DeepSpeed ZeRO-3 partition: {len(empty)} tensors are empty placeholders"
        raise UnknownFormatError(f"{message}, {empty[0]!r} is the first", hint=_MERGE)
    if len(empty) == len(names):
        raise UnknownFormatError(f"all {len(names)} tensors are empty: their values are in other files", hint=_MERGE)


def _nothing(tree: Tree) -> UnknownFormatError:
    """No weights: because a model object was pickled, or because there are none."""
    for key, value in [("", tree.root), *tree.entries(tree.root)]:
        if is_module(value):
            assert isinstance(value, Placeholder)
            where = f" at {key!r}" if key else ""
            return UnknownFormatError(
                f"this is a pickled model object of class {class_of(value)}{where}, not a state dict",
                hint="load it where its code is installed and save model.state_dict()",
            )
    optimizer = mapping((mapping(tree.root) or {}).get("optimizer_state_dict"))
    if optimizer is not None and "zero_stage" in optimizer:
        return UnknownFormatError("this is a DeepSpeed ZeRO optimizer partition, without weights", hint=_MERGE)
    count = tree.tally(tree.root).count
    if count:
        return UnknownFormatError(
            f"no weights: the {count} tensors in it are training state or inside objects",
            hint="if some are weights after all, name them with --select KEY.PATH",
        )
    return UnknownFormatError(f"no tensors in it, it holds {tree.describe(tree.root)}")


def is_module(node: object) -> bool:
    """Whether a node is a pickled ``torch.nn.Module``, of whatever class."""
    state = node.state if isinstance(node, Placeholder) else None
    return isinstance(state, dict) and "_parameters" in state and "_modules" in state


# Names, and what is left -----------------------------------------------------------------------------------


def _flat(tree: Tree, one: _Set, left: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a state dict by name, nested keys joined; what it holds besides goes to ``left``."""
    found = tree.tensor(one.node)
    if found is not None:
        yield (one.path[-1] if one.path else "tensor"), found
        return
    start = f"{one.shown}." if one.path else ""
    entered, spent = {id(one.node)}, 0
    stack = [(key, key, value) for key, value in reversed(tree.entries(one.node))]
    while stack:
        name, key, value = stack.pop()
        found = tree.tensor(value)
        if found is not None:
            yield name, found
        elif _is_inside(tree, name, key, value) and id(value) not in entered:
            entered.add(id(value))
            stack.extend((f"{name}.{inner}", inner, item) for inner, item in reversed(tree.entries(value)))
            spent += len(tree.entries(value)) * len(name)
            if spent > _MAX_NAMES:
                raise CorruptCheckpointError("the names of its tensors would take more memory than is right")
        else:
            left.append(Entry(_clipped(start + name), tree.describe(value), tree.tally(value)))


def _clipped(path: str) -> str:
    return path if len(path) <= _MAX_SHOWN else path[:_MAX_SHOWN] + "…"


def _is_inside(tree: Tree, name: str, key: str, value: object) -> bool:
    """Whether a container in a state dict is a part of it, and no second one or training state."""
    if not tree.tally(value).count or not is_container(value) or len(name) > _MAX_NAME:
        return False
    another = key.lower() in _MODEL and "state" in key.lower()
    return not (another or _EMA.search(key) or _is_training(key, value))


def _beside(tree: Tree, paths: set[tuple[str, ...]]) -> Iterator[Entry]:
    """Everything on the way to the chosen state dicts that does not lead to one."""
    on_the_way = {path[:n] for path in paths for n in range(len(path) + 1)}
    level: list[tuple[tuple[str, ...], object]] = [((), tree.root)]
    while level:
        below: list[tuple[tuple[str, ...], object]] = []
        for path, node in level:
            for key, value in tree.entries(node) if path not in paths else ():
                here = (*path, key)
                if here in on_the_way:
                    below.append((here, value))
                else:
                    yield Entry(_clipped(".".join(here)), tree.describe(value), tree.tally(value))
        level = below
