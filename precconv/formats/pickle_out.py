"""Writes an inert graph as a pickle again: what loading it makes is what loading its source made.

Every object is written by the opcode that the source used for it, in the order in which CPython's pickler works, so
that callables see the arguments they saw.  Values take the opcodes of protocol 2 wherever it has one for them,
because ``torch.load(weights_only=True)`` knows no others.  An object that is referred to more than once is written
once and then fetched from the memo, by identity.

Nothing is imported or run, and nothing here recurses.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import InputError
from .pickle_values import binary, byte_string, floating, integer, name_line, text
from .pickled import ByteString, Elements, Global, Key, Persistent, Placeholder, StorageRef, children

__all__ = ["pickle_bytes"]

_BATCH = 1000  #: items that CPython's pickler gives an object at a time
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SINGLE = {"items": b"a", "pairs": b"s"}
_MANY = {"items": b"e", "pairs": b"u", "elements": b"\x90"}
_MAKE = {"reduce": b"R", "newobj": b"\x81", "newobj_ex": b"\x92"}
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
#: Passes over the graph after which a cycle is no longer one that a pickler wrote: tuples in cycles are begun again
#: for each list or dict between them and themselves.
_MAX_RETURNS = 16


def pickle_bytes(
    root: object,
    *,
    protocol: int = 2,
    discarded: Sequence[Placeholder] = (),
    replace: Mapping[int, object] | None = None,
    key: Callable[[StorageRef], str] = lambda storage: storage.key,
) -> bytes:
    """The pickle of ``root``, which is only read.

    ``protocol``: the source's; it decides how loaders understand names.  Below 2 it becomes 2.
    ``discarded``: calls made for their effect, written after the object.
    ``replace``: by ``id()`` of a node of the graph, the node that is written in its place, everywhere.
    ``key``: the record each storage is in; called whenever one is written, in the order of the pickle.

    Raises InputError for what torch could not load from a zip checkpoint, with its name.
    """
    out = _Writer(_References((root, *discarded)), replace or {}, key)
    out.write(b"\x80" + bytes((max(protocol, 2),)))
    out.run(root)
    for call in discarded:
        out.run(call)
        out.write(b"0")
    out.write(b".")
    return b"".join(out.parts)


_PLAIN = frozenset({type(None), bool, int, float, Global, StorageRef})


class _References:
    """Who is referred to how, found in one pass over the graph."""

    def __init__(self, roots: Iterable[object]) -> None:
        self.shared: set[int] = set()  #: ids of what is referred to more than once
        self.arguments: set[int] = set()  #: ids of lists and the like that calls are given
        self.count = 0
        seen: set[int] = set()
        stack = [node for node in roots if type(node) not in _PLAIN]
        while stack:
            node = stack.pop()
            ident = id(node)
            if ident in seen:
                self.shared.add(ident)
                continue
            seen.add(ident)
            inner = children(node)
            self.count += len(inner)
            stack.extend(part for part in inner if type(part) not in _PLAIN)
            if isinstance(node, Placeholder):
                self.arguments.update(id(arg) for arg in node.args if isinstance(arg, list | dict | Elements))


Steps = Iterator[object]  #: writes, and yields the nodes to be written in between


class _Writer:
    """The opcodes so far, and the memo: what is in it was written and can be fetched."""

    def __init__(
        self, references: _References, replace: Mapping[int, object], key: Callable[[StorageRef], str]
    ) -> None:
        self.parts: list[bytes] = []
        self.write = self.parts.append
        self._shared = references.shared
        self._arguments = references.arguments
        self._replace = replace
        self._key = key
        self._budget = _MAX_RETURNS * references.count + 100_000
        self._memo: dict[object, bytes] = {}  #: by id; by value for names and for text within storage ids

    def run(self, root: object) -> None:
        """Write ``root`` and all below it."""
        first = self._begin(root)
        stack = [] if first is None else [first]
        while stack:
            for node in stack[-1]:
                steps = self._begin(node)
                if steps is not None:
                    stack.append(steps)
                    break
            else:
                stack.pop()

    def _begin(self, node: object) -> Steps | None:
        """Write a node that holds no others; for one that does, its steps."""
        kind = type(node)
        atom = _ATOMS.get(kind)
        if atom is not None:
            self.write(atom(node))
            return None
        ident = id(node)
        self._budget -= 1
        if self._budget < 0:
            raise InputError("its objects refer to each other in too many circles to be written again")
        fetch = self._memo.get(ident)
        if fetch is not None:
            self.write(fetch)
            return None
        if self._replace:
            node = self._replace.get(ident, node)
            kind = type(node)
        whole = _WHOLE.get(kind)
        if whole is not None and whole(self, node, ident):
            return None
        steps = _STEPS.get(kind)
        if steps is None:
            raise InputError(f"an object of type {kind.__name__} cannot be written to a pickle")
        return steps(self, node, ident)

    def _put(self, ident: int) -> None:
        """Remember what was just written, if it is referred to again."""
        if ident in self._shared and ident not in self._memo:
            self._remember(ident)

    def _put_open(self, ident: int, content: object) -> None:
        """Remember an object that is going to get its content: what it is a part of may be begun again from there.

        Not so an argument of a call, which is written anew for the second call, as the first still waits for it.
        """
        if ident in self._memo or not (content or ident in self._shared):
            return
        if ident in self._arguments and ident not in self._shared:
            self._arguments.discard(ident)  # a third time, it is the second's
        else:
            self._remember(ident)

    def _remember(self, name: object) -> None:
        index = len(self._memo)
        if index < 256:
            operand, put, get = bytes((index,)), b"q", b"h"
        else:
            operand, put, get = _U32.pack(index), b"r", b"j"
        self.write(put + operand)
        self._memo[name] = get + operand

    def _recalled(self, ident: int, undo: bytes) -> bool:
        """Whether an object came about while its parts were written; ``undo`` drops those.

        So it is with a tuple that holds a list that holds the tuple: CPython's pickler does the same.
        """
        fetch = self._memo.get(ident)
        if fetch is None:
            return False
        self.write(undo + fetch)
        return True

    # What can be written at once: most of what tensors are made of -------------------------------------------

    def value(self, node: object, ident: int) -> bool:
        self.write(_VALUES[type(node)](node))
        self._put(ident)
        return True

    def numbers(self, node: tuple[object, ...], ident: int) -> bool:
        """A tuple of integers, if it is one."""
        parts = []
        for part in node:
            if type(part) is not int:
                return False
            parts.append(integer(part))
        size = len(parts)
        self.write(b"".join(parts) + _TUPLES[size] if size < 4 else b"(" + b"".join(parts) + b"t")
        if size:
            self._put(ident)
        return True

    def bare(self, node: Placeholder, ident: int) -> bool:
        """A call without arguments, nothing done to its result, if it is one."""
        if node.args or node.edits or node.how != "reduce" or not isinstance(node.callable, Global):
            return False
        self.name(node.callable)
        self.write(b")R")
        self._put(ident)
        return True

    def name(self, node: Global, _: int = 0) -> bool:
        fetch = self._memo.get(node)
        if fetch is not None:
            self.write(fetch)
            return True
        line = name_line(node)
        self.write(text(node.module) + text(node.name) + b"\x93" if line is None else b"c" + line)
        self._remember(node)
        return True

    def storage(self, node: StorageRef, _: int) -> bool:
        """As ``torch.save`` refers to a storage: ("storage", type, key, location, number of elements)."""
        self.write(b"(")
        self._known_text("storage")
        self.name(node.type)
        self.write(text(self._key(node)))
        self._known_text(node.location)
        self.write(integer(node.numel) + b"tQ")
        return True

    def _known_text(self, value: str) -> None:
        fetch = self._memo.get(value)
        if fetch is None:
            self.write(text(value))
            self._remember(value)
        else:
            self.write(fetch)

    # What holds other nodes ----------------------------------------------------------------------------------

    def tuple(self, node: tuple[object, ...], ident: int) -> Steps:
        size = len(node)
        if size > 3:
            self.write(b"(")
        yield from node
        if size > 3:
            if not self._recalled(ident, b"1"):
                self.write(b"t")
                self._put(ident)
        elif not self._recalled(ident, b"0" * size):
            self.write(_TUPLES[size])
            self._put(ident)

    def list(self, node: list[object], ident: int) -> Steps:
        self.write(b"]")
        self._put_open(ident, node)
        return self._fill("items", node)

    def dict(self, node: dict[object, object], ident: int) -> Steps:
        self.write(b"}")
        self._put_open(ident, node)
        return self._fill("pairs", node.items())

    def elements(self, node: Elements, ident: int) -> Steps:
        if not node.frozen:
            self.write(b"\x8f")
            self._put_open(ident, node.items)
            yield from self._fill("elements", node.items)
            return
        self.write(b"(")
        yield from node.items
        if not self._recalled(ident, b"1"):
            self.write(b"\x91")
            self._put(ident)

    def _fill(self, kind: str, content: Iterable[object]) -> Steps:
        """Give the object on the stack its items, pairs or elements."""
        pairs = kind == "pairs"
        batch: list[object] = []
        for entry in content:
            batch.append(entry)
            if len(batch) == _BATCH:
                yield from self._batch(kind, batch, pairs=pairs)
                batch = []
        yield from self._batch(kind, batch, pairs=pairs)

    def _batch(self, kind: str, batch: Sequence[object], *, pairs: bool) -> Steps:
        if not batch:
            return
        single = _SINGLE.get(kind) if len(batch) == 1 else None
        if single is None:
            self.write(b"(")
        for entry in batch:
            if pairs:
                assert isinstance(entry, tuple)
                yield from entry
            else:
                yield entry
        self.write(single or _MANY[kind])

    def placeholder(self, node: Placeholder, ident: int) -> Steps:
        how = node.how
        if how == "inst" or how == "obj":
            self.write(b"(")
            name = name_line(node.callable) if how == "inst" else None
            if name is None:
                yield node.callable
            yield from node.args
            made, undo = b"o" if name is None else b"i" + name, b"1"
        else:
            yield node.callable
            yield node.args
            if how == "newobj_ex":
                yield node.kwargs
            made, undo = _MAKE[how], b"000" if how == "newobj_ex" else b"00"
        if self._recalled(ident, undo):
            return
        self.write(made)
        self._put_open(ident, node.edits)
        for kind, value in node.edits or ():
            if kind == "state":
                yield value
                self.write(b"b")
            elif kind == "call":
                yield value
                self.write(b"0")
            else:
                assert isinstance(value, list)
                yield from self._fill(kind, value)

    def key(self, node: Key, _: int) -> Steps:
        yield node.value

    def persistent(self, node: Persistent, _: int) -> Steps:
        """Old pickled modules: ``("module", class, file, source)``, of which torch keeps the class."""
        pid = node.pid
        if isinstance(pid, tuple) and len(pid) > 1 and pid[0] in ("module", b"module"):
            yield pid[1]
            return
        shown = pid if isinstance(pid, str | int) else type(pid).__name__
        raise InputError(f"the persistent id {shown!r:.80} stands for nothing that torch could load")


_ATOMS: dict[type, Callable[..., bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: integer,
    float: floating,
}
_VALUES: dict[type, Callable[..., bytes]] = {
    str: text,
    bytes: binary,
    ByteString: byte_string,
    bytearray: lambda value: b"\x96" + _U64.pack(len(value)) + bytes(value),
}
_WHOLE: dict[type, Callable[..., bool]] = {
    **dict.fromkeys(_VALUES, _Writer.value),
    tuple: _Writer.numbers,
    Placeholder: _Writer.bare,
    Global: _Writer.name,
    StorageRef: _Writer.storage,
}
_STEPS: dict[type, Callable[..., Steps]] = {
    tuple: _Writer.tuple,
    list: _Writer.list,
    dict: _Writer.dict,
    Elements: _Writer.elements,
    Placeholder: _Writer.placeholder,
    Key: _Writer.key,
    Persistent: _Writer.persistent,
}
