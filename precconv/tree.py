"""A pickled object as a tree of named entries, with the tensors under each counted in one pass.

Files share containers, nest them and make them cyclic as they please; the pass visits each once, and a shared
one counts wherever it appears.
"""

from __future__ import annotations

from dataclasses import dataclass

from .formats.numpy_nodes import array_of, bytes_of, scalar_of
from .formats.pickled import Elements, Global, Key, Placeholder, class_of, mapping, sequence, text
from .formats.torch_tensors import OpaqueTensor, TensorRef, tensor_of

__all__ = ["Tally", "Tensor", "Tree", "describe", "key_text"]

Tensor = TensorRef | OpaqueTensor

_MAX_TEXT = 40
_MAX_KEY = 4096  #: characters; longer keys are no names
_NONE = (0, 0)
_MANY = 1 << 62  #: shared containers can make sums grow exponentially


@dataclass(frozen=True, slots=True)
class Tally:
    """Tensors under a node: how many, and their bytes in row-major order, tied ones each time."""

    count: int = 0
    nbytes: int = 0


class Tree:
    """Tensors and tallies of the nodes under ``root``, by identity."""

    def __init__(self, root: object) -> None:
        self.root = root
        self._tensors: dict[int, Tensor] = {}
        self._tallies: dict[int, tuple[int, int]] = {}
        self._entries: dict[int, list[tuple[str, object]]] = {}
        self._described: dict[int, str] = {}
        self._count(root)

    def tensor(self, node: object) -> Tensor | None:
        """The tensor a node of the tree stands for."""
        return self._tensors.get(id(node))

    def tally(self, node: object) -> Tally:
        """The tensors under a node of the tree, itself included."""
        return Tally(*self._tallies.get(id(node), _NONE))

    def entries(self, node: object) -> list[tuple[str, object]]:
        """What a node of the tree holds by key text or index, attributes for an object; read once."""
        if not isinstance(node, dict | list | tuple | Placeholder):
            return []
        found = self._entries.get(id(node))
        if found is None:
            found = self._entries[id(node)] = _entries(node)
        return found

    def describe(self, node: object) -> str:
        """``describe``, worked out once for a node that many share."""
        if not isinstance(node, Placeholder):
            return describe(node)
        found = self._described.get(id(node))
        if found is None:
            found = self._described[id(node)] = describe(node)
        return found

    def _inner(self, node: object) -> list[object]:
        values = [value for _, value in self.entries(node)]
        if not isinstance(node, Placeholder) or mapping(node) is not None:  # whose arguments are among its entries
            return values
        return [*node.args, *values]

    def _count(self, root: object) -> None:
        """Depth first, children before parents; a container met inside itself adds nothing."""
        stack: list[tuple[object, list[object] | None]] = [(root, None)]
        while stack:
            node, inner = stack.pop()
            if inner is not None:
                self._tallies[id(node)] = self._sum(inner)
                continue
            if not isinstance(node, dict | list | tuple | Placeholder) or id(node) in self._tallies:
                continue
            self._tallies[id(node)] = _NONE
            found = tensor_of(node)
            if found is not None:
                self._tensors[id(node)] = found
                self._tallies[id(node)] = (1, found.nbytes if isinstance(found, TensorRef) else 0)
                continue
            inner = self._inner(node)
            stack.append((node, inner))
            stack.extend((item, None) for item in reversed(inner))

    def _sum(self, items: list[object]) -> tuple[int, int]:
        count, nbytes = 0, 0
        for item in items:
            found = self._tallies.get(id(item), _NONE)
            count, nbytes = count + found[0], nbytes + found[1]
        return min(count, _MANY), min(nbytes, _MANY)


def _entries(node: object) -> list[tuple[str, object]]:
    pairs = mapping(node)
    if pairs is not None:
        return [(key_text(key), value) for key, value in pairs.items()]
    inner = sequence(node)
    if inner is not None:
        return [(str(i), value) for i, value in enumerate(inner)]
    return _attributes(node) if isinstance(node, Placeholder) else []


def _attributes(node: Placeholder) -> list[tuple[str, object]]:
    """State of an object; ``__slots__`` make it a pair of dicts."""
    state = node.state
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    named = [(key_text(k), v) for part in parts if isinstance(part, dict) for k, v in part.items()]
    return named or [("state", state)] * (state is not None)


def key_text(key: object) -> str:
    """A dict key as it stands in a key path: classes by name, anything else by what it is."""
    if isinstance(key, str | bytes):
        plain = text(key[:_MAX_KEY]) or ""
        return plain if len(key) <= _MAX_KEY else f"{plain[:100]}… ({len(key)} long)"
    if isinstance(key, bool | float | Global | None):
        return str(key)
    if isinstance(key, int):
        return str(key)  # larger ones are a ``Key``
    if isinstance(key, Placeholder) and key.canonical == "_codecs.encode":  # how protocol 2 spells bytes
        return key_text(bytes_of(key) or b"")
    if isinstance(key, Key) and isinstance(key.value, tuple) and all(map(_is_scalar, key.value)):
        return repr(key.value)[:_MAX_KEY]
    return f"({describe(key.value if isinstance(key, Key) else key)})"


def _is_scalar(value: object) -> bool:
    return isinstance(value, str | bool | int | float | None) and len(str(value)) <= _MAX_TEXT


def _short(value: str) -> str:
    return repr(value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…")


def describe(node: object) -> str:
    """What a node is in a few words; no nesting, whatever it holds."""
    if isinstance(node, bool | None):
        return str(node)
    if isinstance(node, int):
        return f"int {node}" if node.bit_length() < 64 else f"int of {node.bit_length()} bits"
    if isinstance(node, float):
        return f"float {node!r}"
    if isinstance(node, str):
        return f"str {_short(node)}"
    if isinstance(node, bytes | bytearray):
        return f"{len(node)} bytes"
    if isinstance(node, list | tuple | dict):
        return f"{type(node).__name__} of {len(node)}"
    if isinstance(node, Elements):
        return f"{'frozenset' if node.frozen else 'set'} of {len(node.items)}"
    if isinstance(node, Global):
        return f"class or function {node}"
    return _describe_object(node) if isinstance(node, Placeholder) else type(node).__name__.lower()


def _describe_object(node: Placeholder) -> str:
    found = tensor_of(node)
    if isinstance(found, TensorRef):
        return f"{found.dtype} {list(found.shape)}"
    if isinstance(found, OpaqueTensor):
        return found.kind
    scalar, array = scalar_of(node), array_of(node)
    if scalar is not None:
        return f"numpy scalar {scalar!r}"
    if array is not None:
        return f"numpy array {array.kind} {list(array.shape)}"
    size = sequence(node)
    if node.canonical == "torch.Size" and size is not None:
        return f"torch.Size of {len(size)}"
    if node.canonical == "torch.device" and node.args:
        return f"torch.device {_short(text(node.args[0]) or '?')}"
    pairs = mapping(node)
    if pairs is not None:
        return f"{class_of(node).rpartition('.')[2]} of {len(pairs)}"
    made = class_of(node)
    if node.how == "reduce" and made.rpartition(".")[2][:1].islower():  # functions, by custom
        return f"object made by {made}, which was not run"
    return f"object of class {made}"
