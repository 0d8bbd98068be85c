"""What an unpickled file says, as data: nothing here was imported, called or looked up.

Plain values are themselves: None, bool, int, float, str, bytes, bytearray, and the containers list, tuple
and dict.  All else is a node of this module, identical where the file shares it, so that the graph can be
written again:

* Global       a name the file refers to; never resolved
* Placeholder  an object by how it was made: callable, arguments, and every edit made to it since
* StorageRef   a stretch of tensor data elsewhere in the file (the ``storage`` persistent id)
* Persistent   any other persistent id
* Elements     a set or frozenset, its elements in a list (they may not be hashable here)
* Key          a dict key that hashes by identity, so that no file chooses our hash collisions
* ByteString   a Python 2 ``str`` that is not ASCII

Graphs may be cyclic, shared a million times over and nested a million deep: walk them with ``walk``, never by
recursion, and don't print or compare them.  OrderedDict, torch.Size, numpy scalars and the like are
placeholders too; ``mapping``, ``sequence``, ``text`` and ``plain`` read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from precconv.dtypes import DType

__all__ = [
    "ByteString",
    "Edit",
    "Elements",
    "Global",
    "How",
    "Key",
    "Persistent",
    "Pickle",
    "Placeholder",
    "StorageRef",
    "children",
    "class_of",
    "is_container",
    "mapping",
    "sequence",
    "text",
    "walk",
]

How = Literal["reduce", "newobj", "newobj_ex", "inst", "obj"]
#: One change to an object after it was made, in the file's order:
#: ("items", list), ("pairs", [(key, value), ...]), ("elements", list), ("state", object), and ("call",
#: Placeholder) for a call whose result was thrown away, as ``copyreg`` state setters are.
Edit = tuple[Literal["items", "pairs", "elements", "state", "call"], object]

_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core": "numpy._core",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "torch.nn.parameter": "torch.nn",
    "torch.tensor": "torch",
    "torch._tensor": "torch",
}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function the file names, spelled as the file spells it."""

    module: str
    name: str
    canonical: str = field(init=False, compare=False)  #: ``module.name``, old homes mapped to today's

    def __post_init__(self) -> None:
        object.__setattr__(self, "canonical", f"{_MODULES.get(self.module, self.module)}.{self.name}")

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False, repr=False)
class Placeholder:
    """An object that was not made: what would have made it, and what would have been done to it."""

    how: How
    callable: object  #: nearly always a Global
    args: tuple[object, ...]
    kwargs: object = None  #: of ``newobj_ex``
    edits: list[Edit] | None = None

    @property
    def kind(self) -> str:
        """The class or function as ``module.name``; ``?`` where the file computes it."""
        return str(self.callable) if isinstance(self.callable, Global) else "?"

    @property
    def canonical(self) -> str:
        return self.callable.canonical if isinstance(self.callable, Global) else ""

    def add(self, edit: Edit) -> None:
        """Record a change, joined with the one before where both add elements of one kind."""
        if self.edits is None:
            self.edits = []
        if self.edits and edit[0] in ("items", "pairs", "elements"):
            kind, last = self.edits[-1]
            if kind == edit[0]:
                assert isinstance(last, list)
                assert isinstance(edit[1], list)
                last.extend(edit[1])
                return
        self.edits.append(edit)

    @property
    def state(self) -> object:
        """What its ``__setstate__`` or ``__dict__`` would have been given last; None where nothing was."""
        return next((value for kind, value in reversed(self.edits or ()) if kind == "state"), None)

    @property
    def items(self) -> list[object]:
        """What was appended to it, as to a list."""
        return self._all("items")

    @property
    def pairs(self) -> list[tuple[object, object]]:
        """What was set in it, as in a dict; keys may repeat."""
        return [pair for pair in self._all("pairs") if isinstance(pair, tuple)]

    def _all(self, wanted: str) -> list[object]:
        lists = [value for kind, value in self.edits or () if kind == wanted]
        return [item for value in lists if isinstance(value, list) for item in value]


@dataclass(slots=True, eq=False, repr=False)
class StorageRef:
    """Tensor data by reference; where its bytes lie is the file's business (``TorchFile.extents``)."""

    key: str  #: of the record that holds the data
    type: Global  #: the file's name for it, ``torch.FloatStorage`` or ``torch.storage.UntypedStorage``
    dtype: DType | None  #: None where only the tensor knows (untyped storages)
    numel: int  #: elements; bytes where untyped
    location: str = "cpu"  #: device it was saved from; never acted on
    start: int = 0  #: first element within the record: storages of old files can be views of others
    pid: object = None  #: the persistent id as the file has it
    inline: object = None  #: bytes in any spelling, where the pickle itself holds the data

    @property
    def itemsize(self) -> int:
        """Bytes an element of its own type."""
        return 1 if self.dtype is None else max(1, self.dtype.bits // 8)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(slots=True, eq=False, repr=False)
class Persistent:
    """A persistent id that is not a storage: ``("module", class, file, source)`` in old pickled models."""

    pid: object


@dataclass(slots=True, eq=False, repr=False)
class Elements:
    """A set or frozenset of the file."""

    frozen: bool
    items: list[object]


@dataclass(slots=True, eq=False, repr=False)
class Key:
    """A dict key other than a plain scalar or a node."""

    value: object


class ByteString(bytes):
    """Bytes that Python 2 called ``str``."""

    __slots__ = ()


@dataclass(slots=True, eq=False, repr=False)
class Pickle:
    """One whole pickle."""

    root: object
    protocol: int
    globals: list[Global]  #: every name it refers to, once, in order of appearance
    discarded: list[Placeholder]  #: calls made only for their effect, on nothing that is a placeholder


def children(node: object) -> Sequence[object]:
    """What a node holds directly, in the file's order; keys before their values."""
    if isinstance(node, dict):
        return [part for pair in node.items() for part in pair]
    if isinstance(node, list | tuple):
        return node
    if isinstance(node, Placeholder):
        edits = [value for _, value in node.edits or ()]
        return [node.callable, node.args, node.kwargs, *edits]
    if isinstance(node, Elements):
        return node.items
    if isinstance(node, Key):
        return (node.value,)
    if isinstance(node, Persistent | StorageRef):
        return (node.pid,)
    return ()


def walk(root: object) -> Iterator[object]:
    """Every node and value under ``root``, containers once each, in the file's order."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        inner = children(node)
        if inner:
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack.extend(reversed(inner))
        yield node


_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict", "collections.Counter", "builtins.dict")

_SEQUENCES = ("torch.Size", "builtins.list", "builtins.tuple")


def is_container(node: object) -> bool:
    """Whether ``mapping`` or ``sequence`` would read it, without the cost of doing so."""
    if isinstance(node, dict | list | tuple):
        return True
    if not isinstance(node, Placeholder):
        return False
    return node.canonical in (*_MAPPINGS, *_SEQUENCES) or any(
        kind in ("items", "pairs") for kind, _ in node.edits or ()
    )


def mapping(node: object) -> dict[object, object] | None:
    """A dict, OrderedDict, defaultdict, Counter or any object with items set in it as a dict; else None."""
    if isinstance(node, dict):
        return node
    if not isinstance(node, Placeholder):
        return None
    pairs = node.pairs
    if not pairs and node.canonical not in _MAPPINGS:
        return None
    first = _initial_pairs(node.args[0]) if node.args else []
    return {_hashable(key): value for key, value in (*first, *pairs)}


def _initial_pairs(initial: object) -> list[tuple[object, object]]:
    """Pairs of a constructor's argument: Counter pickles a dict, Python 2's OrderedDict a list of lists."""
    if isinstance(initial, dict):
        return list(initial.items())
    if isinstance(initial, list):
        return [(pair[0], pair[1]) for pair in initial if isinstance(pair, list | tuple) and len(pair) == 2]
    return []


def _hashable(key: object) -> object:
    return Key(key) if isinstance(key, list | tuple | dict | bytearray) else key


def sequence(node: object) -> Sequence[object] | None:
    """A list, tuple, torch.Size or any object with items appended to it; else None."""
    if isinstance(node, list | tuple):
        return node
    if not isinstance(node, Placeholder):
        return None
    if node.canonical in _SEQUENCES and node.args:
        inner = node.args[0]
        return inner if isinstance(inner, list | tuple) else None
    return node.items or None


def class_of(node: Placeholder) -> str:
    """The class of an object, ``module.name``, also where copyreg made it."""
    made = node.callable
    if node.canonical in ("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__") and node.args:
        made = node.args[0]
    return str(made) if isinstance(made, Global) else "?"


def text(node: object) -> str | None:
    """A string, also one that Python 2 wrote as bytes; else None."""
    if isinstance(node, str):
        return node
    return node.decode("utf-8", "replace") if isinstance(node, bytes) else None
