"""The state of the inert unpickler, and what its opcodes do to containers and text."""

from __future__ import annotations

import re
from collections.abc import Callable

from .opstream import OpStream
from .pickled import ByteString, Edit, Elements, Global, How, Key, Persistent, Placeholder, StorageRef

__all__ = ["Machine"]

_MAX_EDITS = 100  #: of an object; batches of items are one


class Machine:
    """The pickle virtual machine: a stack, the stacks below its marks, and a memo."""

    __slots__ = (
        "discarded",
        "left",
        "memo",
        "metastack",
        "names",
        "persistent",
        "protocol",
        "stack",
        "stream",
    )

    def __init__(self, stream: OpStream, persistent: Callable[[object], object], memory: int) -> None:
        self.stream = stream
        self.persistent = persistent
        self.left = memory
        self.stack: list[object] = []
        self.metastack: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.names: dict[tuple[str, str], Global] = {}
        self.discarded: list[Placeholder] = []
        self.protocol = 0

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise self.stream.error("it needs more memory than any checkpoint does")

    def pop(self) -> object:
        if not self.stack:
            raise self.stream.error("it takes more from the stack than is on it")
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack:
            raise self.stream.error("it refers to the top of an empty stack")
        return self.stack[-1]

    def pop_mark(self) -> list[object]:
        """Everything since the last mark."""
        if not self.metastack:
            raise self.stream.error("it closes a group that it did not open")
        group, self.stack = self.stack, self.metastack.pop()
        return group

    def put(self, index: int) -> None:
        if index < 0 or not self.stack:
            raise self.stream.error(f"nothing can be put in memo entry {index}")
        self.memo[index] = self.stack[-1]

    def get(self, index: int) -> None:
        try:
            self.stack.append(self.memo[index])
        except KeyError:
            raise self.stream.error(f"it refers to memo entry {index}, which it did not make") from None

    def name(self, module: str, name: str) -> None:
        key = (module, name)
        if key not in self.names:
            self.names[key] = Global(module, name)
        self.stack.append(self.names[key])

    def make(self, how: How, function: object, args: object, kwargs: object = None) -> None:
        if not isinstance(args, tuple):
            raise self.stream.error("the arguments of a call are not a tuple")
        if not isinstance(function, Global | Placeholder):
            raise self.stream.error(f"it calls {typed(function)}")
        self.stack.append(Placeholder(how, function, args, kwargs))


def typed(value: object) -> str:
    return f"a value of type {type(value).__name__}"


# Text ------------------------------------------------------------------------------------------------------


def ascii_text(m: Machine, line: bytes) -> str:
    try:
        return line.decode("ascii")
    except UnicodeDecodeError:
        raise m.stream.error("a number or index is not ASCII") from None


def raw(m: Machine, size: int) -> bytes:
    """The next ``size`` bytes, charged for before they are read."""
    m.spend(size + 64)
    return m.stream.take(size)


def utf8(m: Machine, size: int) -> str:
    """The next ``size`` bytes as text."""
    return decoded(m, raw(m, size))


def decoded(m: Machine, data: bytes) -> str:
    if not data.isascii():
        m.spend(4 * len(data))  # one wide character widens them all
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise m.stream.error("a string is not UTF-8") from None


def integer(m: Machine, line: bytes) -> int:
    try:
        return int(ascii_text(m, line).removesuffix("L"), 10)
    except ValueError:  # not a number, or more digits than Python converts
        raise m.stream.error("a number cannot be read") from None


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"\\": b"\\", b"'": b"'", b'"': b'"', b"a": b"\a"} | {
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}


def _unescape(found: re.Match[bytes]) -> bytes:
    hexadecimal, octal, plain = found.groups()
    if hexadecimal:
        return bytes((int(hexadecimal, 16),))
    if octal:
        return bytes((int(octal, 8) & 0xFF,))
    return _ESCAPED.get(plain, found[0])


def byte_string(m: Machine, data: bytes) -> str | ByteString:
    """A Python 2 ``str``: text where it is ASCII, which is what torch makes of it too."""
    m.spend(len(data) + 64)
    return data.decode("ascii") if data.isascii() else ByteString(data)


def quoted(m: Machine, line: bytes) -> str | ByteString:
    """The value of a protocol 0 string literal."""
    line = line.strip()
    if len(line) < 2 or line[0] != line[-1] or line[0] not in b"'\"":
        raise m.stream.error("a string has no quotes")
    return byte_string(m, _ESCAPE.sub(_unescape, line[1:-1]))


# Containers ------------------------------------------------------------------------------------------------


def as_key(value: object) -> object:
    """A value as a dict key whose hash the file does not choose: large numbers and tuples go by identity."""
    if isinstance(value, str | bytes | Global | Placeholder | Key | StorageRef | Persistent | bool | None):
        return value
    if isinstance(value, int):
        return value if -(1 << 60) < value < 1 << 60 else Key(value)
    return value if isinstance(value, float) else Key(value)


def record(m: Machine, target: Placeholder, edit: Edit) -> None:
    """Note a change to an object; real ones see a handful, and readers look through all of them."""
    target.add(edit)
    if len(target.edits or ()) > _MAX_EDITS:
        raise m.stream.error(f"an object is changed more than {_MAX_EDITS} times")


def set_items(m: Machine, target: object, flat: list[object]) -> None:
    """Set keys and values, which the file lists in turn."""
    if len(flat) % 2:
        raise m.stream.error("a dict has a key without a value")
    m.spend(50 * len(flat))
    pairs = zip(flat[::2], flat[1::2], strict=True)
    if isinstance(target, dict):
        for key, value in pairs:
            target[as_key(key)] = value
    elif isinstance(target, Placeholder):
        record(m, target, ("pairs", list(pairs)))
    else:
        raise m.stream.error(f"items are set in {typed(target)}")


def append_items(m: Machine, target: object, items: list[object]) -> None:
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Placeholder):
        record(m, target, ("items", items))
    else:
        raise m.stream.error(f"items are appended to {typed(target)}")


def add_elements(m: Machine, target: object, items: list[object]) -> None:
    if isinstance(target, Elements) and not target.frozen:
        target.items.extend(items)
    elif isinstance(target, Placeholder):
        record(m, target, ("elements", items))
    else:
        raise m.stream.error(f"elements are added to {typed(target)}")


def discard(m: Machine, value: object) -> None:
    """POP: a call whose result is thrown away was made for its effect; remember it where it belongs."""
    if not isinstance(value, Placeholder) or value.how != "reduce":
        return
    target = value.args[0] if value.args else None
    if isinstance(target, Placeholder):
        record(m, target, ("call", value))
    else:
        m.discarded.append(value)
