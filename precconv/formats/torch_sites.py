"""The places of a pickled object where tensors are made from storages, and the same places with other storages.

A site is a call of one of torch's rebuilders, alone or within the wrappers torch puts around it; its form, flags, hooks
and metadata stay as they are.  Storages that stand elsewhere (storage objects, quantized tensors) are whole.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from ..dtypes import BF16, FP16, FP32, FP64, DType
from .pickled import Edit, Elements, Global, Pickle, Placeholder, StorageRef, children
from .torch_tensors import TensorRef, tensor_of

__all__ = ["Site", "Sites", "find_sites", "moved", "paths", "storage_type", "with_dtype"]

_PLACE, _PLACE_AND_DTYPE = Global("torch._utils", "_rebuild_tensor"), Global("torch._utils", "_rebuild_tensor_v3")
#: Rebuilders; what says where a tensor's elements are, and how many of the arguments that takes.
_REBUILDERS = {
    "torch._utils._rebuild_tensor": (_PLACE, 4),
    "torch._utils._rebuild_tensor_v2": (_PLACE, 4),
    "torch._utils._rebuild_tensor_v3": (_PLACE_AND_DTYPE, 7),
}
_DTYPE_ARGUMENT = 6  #: of ``_rebuild_tensor_v3``
_FROM_CPU = "torch._utils._rebuild_device_tensor_from_cpu_tensor"  #: its second argument is the dtype
_SUBCLASS = ("torch._rebuild_from_type", "torch._rebuild_from_type_v2")  #: function, class, arguments, state
_MAX_WRAPPERS = 8
_MAX_PATH = 50
_PREFIXES = {FP64: "Double", FP32: "Float", FP16: "Half", BF16: "BFloat16"}
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, Global})


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One tensor that is made from a storage."""

    node: Placeholder
    depth: int  #: of ``_rebuild_from_type`` calls around the rebuilder
    ref: TensorRef  #: what it shows; ``ref.node`` may be a stand-in


@dataclass(slots=True, eq=False)
class Sites:
    """What a pickle has of tensors and storages."""

    sites: dict[int, Site] = field(default_factory=dict)  #: by ``id`` of the node
    storages: dict[int, StorageRef] = field(default_factory=dict)  #: those that are whole, likewise
    devices: list[Placeholder] = field(default_factory=list)  #: tensors put on a device as another dtype, perhaps

    def base(self, node: object) -> Site | None:
        """The site within a tensor's wrappers; None where its elements are in no storage."""
        for _ in range(_MAX_WRAPPERS):
            found = self.sites.get(id(node))
            if found is not None or not isinstance(node, Placeholder):
                return found
            _, args, _ = _call(node)
            node = args[0] if args else None
        return None


def find_sites(pickle: Pickle) -> Sites:
    """Every site of a pickle; raises CorruptCheckpointError for malformed ones."""
    found = Sites()
    seen: set[int] = set()
    stack: list[object] = [pickle.root, *pickle.discarded]
    while stack:
        node = stack.pop()
        if type(node) in _PLAIN:
            continue
        if isinstance(node, StorageRef):
            found.storages[id(node)] = node
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Placeholder):
            site = _site(node)
            if site is not None:
                found.sites[id(node)] = site
                stack.extend(_beside_storage(site))
                continue
            if node.args and _call(node)[0] == _FROM_CPU:
                found.devices.append(node)
        stack.extend(children(node))
    return found


def _call(node: Placeholder) -> tuple[str, tuple[object, ...], int]:
    """The function a node calls in the end, its arguments, and how many ``_rebuild_from_type`` are around it."""
    function, args, depth = node.callable, node.args, 0
    while isinstance(function, Global) and function.canonical in _SUBCLASS and len(args) > 2:
        inner = args[2]
        if not isinstance(inner, tuple) or depth == _MAX_WRAPPERS:
            break
        function, args, depth = args[0], inner, depth + 1
    return (function.canonical if isinstance(function, Global) else ""), args, depth


def _site(node: Placeholder) -> Site | None:
    function, args, depth = _call(node)
    known = _REBUILDERS.get(function)
    if known is not None:
        inner = Placeholder("reduce", known[0], args[: known[1]])
    elif depth == 0 and function.endswith("Tensor") and not args and node.state is not None:
        inner = node
    else:
        return None
    ref = tensor_of(inner)
    return Site(node, depth, ref) if isinstance(ref, TensorRef) and ref.storage.inline is None else None


def _beside_storage(site: Site) -> list[object]:
    """All that a site's node holds but its storage."""
    node = site.node
    rest: list[object] = [node.callable, node.kwargs]
    args = node.args
    for _ in range(site.depth):
        inner = args[2]
        assert isinstance(inner, tuple)
        rest += (*args[:2], *args[3:])
        args = inner
    edits = [value for _, value in node.edits or ()]
    if args:
        return [*rest, *args[1:], *edits]
    storage = site.ref.storage  # in the state, with numbers
    return [*rest, *(part for part in edits if not (isinstance(part, tuple) and part and part[0] is storage))]


# The same with other storages ------------------------------------------------------------------------------


def storage_type(old: Global, dtype: DType) -> Global:
    """A storage's type for another dtype; untyped storages stay what they are."""
    return Global(old.module, _PREFIXES[dtype] + "Storage")


def moved(site: Site, storage: StorageRef, offset: int, dtype: DType) -> Placeholder:
    """A site's node over another storage; ``offset`` in elements of ``dtype``."""
    node = site.node
    function, args, depth = _call(node)
    if function not in _REBUILDERS:
        return _old_moved(site, storage, offset, dtype)
    inner = [storage, offset, *args[2:]]
    if dtype is not site.ref.dtype and _REBUILDERS[function][0] is _PLACE_AND_DTYPE:
        inner[_DTYPE_ARGUMENT] = Global("torch", dtype.torch)
    return _with_args(node, depth, tuple(inner))


def _old_moved(site: Site, storage: StorageRef, offset: int, dtype: DType) -> Placeholder:
    """torch 0.1: the class says the dtype, the state (storage, offset, size, stride) the rest."""
    node, kind = site.node, site.node.callable
    assert isinstance(kind, Global)
    if dtype is not site.ref.dtype:
        kind = Global(kind.module, _PREFIXES[dtype] + "Tensor")
    assert isinstance(node.state, tuple)
    state = (storage, offset, *node.state[2:])
    edits: list[Edit] = [(how, state if how == "state" else value) for how, value in node.edits or ()]
    return Placeholder(node.how, kind, node.args, node.kwargs, edits)


def with_dtype(node: Placeholder, dtype: DType) -> Placeholder:
    """A tensor put on a device, with another dtype there."""
    _, args, depth = _call(node)
    return _with_args(node, depth, (args[0], Global("torch", dtype.torch), *args[2:]))


def _with_args(node: Placeholder, depth: int, inner: tuple[object, ...]) -> Placeholder:
    levels = [node.args]
    for _ in range(depth - 1):
        below = levels[-1][2]
        assert isinstance(below, tuple)
        levels.append(below)
    for args in reversed(levels[:depth]):
        inner = (*args[:2], inner, *args[3:])
    return Placeholder(node.how, node.callable, inner, node.kwargs, node.edits)


# For messages ----------------------------------------------------------------------------------------------


def paths(root: object, wanted: Container[int]) -> dict[int, str]:
    """How to get to some nodes from the root, by ``id``: ``optimizer.state.0.exp_avg``."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    queue: list[tuple[object, int, str]] = [(root, -1, "")]  # node, entry that holds it, name there
    for i, (node, _, _) in enumerate(queue):  # grows; breadth first, for the shortest path
        if id(node) in seen or type(node) in _PLAIN:
            continue
        seen.add(id(node))
        if id(node) in wanted:
            found[id(node)] = _path(queue, i)
        queue.extend((part, i, name) for name, part in _named(node))
    return found


def _path(queue: list[tuple[object, int, str]], i: int) -> str:
    names: list[str] = []
    while i > 0 and len(names) < _MAX_PATH:
        _, above, name = queue[i]
        names.append(name)
        i = above
    return ".".join([*(["..."] if i > 0 else []), *reversed(names)]) or "the object itself"


def _named(node: object) -> Sequence[tuple[str, object]]:
    pairs = node.items() if isinstance(node, dict) else node.pairs if isinstance(node, Placeholder) else ()
    named = [(str(k) if isinstance(k, str | int) else "?", v) for k, v in pairs]
    if isinstance(node, dict):
        return named
    if isinstance(node, list | tuple | Elements):
        return [(str(i), part) for i, part in enumerate(node.items if isinstance(node, Elements) else node)]
    if isinstance(node, Placeholder):
        state = node.state if isinstance(node.state, dict) else {}
        named += [(str(k), v) for k, v in state.items()]
        return [*named, *(("?", part) for part in children(node))]
    return [("?", part) for part in children(node)]
