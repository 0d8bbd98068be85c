"""The table of pickle opcodes, protocols 0 to 5: what each does to the inert unpickler's machine.

The opcodes and their meaning are those of CPython's ``pickletools``.
"""

from __future__ import annotations

from collections.abc import Callable

from . import machine as do
from .machine import Machine
from .pickled import Elements, Placeholder

__all__ = ["COST", "STOP", "TABLE"]

Handler = Callable[[Machine], None]

STOP = ord(".")


def _unknown(m: Machine) -> None:
    raise m.stream.error("this is no pickle opcode; the data is damaged, or is not a pickle")


TABLE: list[Handler] = [_unknown] * 256
#: Bytes charged for each opcode: what it leaves in memory at most, operands apart, and never little, so that
#: it bounds time as well.
COST = [48] * 256


def _op(code: str, cost: int = 48) -> Callable[[Handler], Handler]:
    """Register the handler of an opcode."""

    def register(handler: Handler) -> Handler:
        TABLE[ord(code)] = handler
        COST[ord(code)] = cost
        return handler

    return register


# The stack and the memo ------------------------------------------------------------------------------------


@_op("(", 120)
def _mark(m: Machine) -> None:
    m.metastack.append(m.stack)
    m.stack = []


@_op("0")
def _pop(m: Machine) -> None:
    if m.stack:
        do.discard(m, m.stack.pop())
    else:
        m.pop_mark()


@_op("1")
def _pop_mark(m: Machine) -> None:
    for value in m.pop_mark():
        do.discard(m, value)


@_op("2")
def _dup(m: Machine) -> None:
    m.stack.append(m.top())


@_op("p", 150)
def _put(m: Machine) -> None:
    m.put(do.integer(m, m.stream.line()))


@_op("q", 100)
def _binput(m: Machine) -> None:
    m.put(m.stream.byte())


@_op("r", 150)
def _long_binput(m: Machine) -> None:
    m.put(m.stream.u32())


@_op("\x94", 150)
def _memoize(m: Machine) -> None:
    m.put(len(m.memo))


@_op("g")
def _get(m: Machine) -> None:
    m.get(do.integer(m, m.stream.line()))


@_op("h")
def _binget(m: Machine) -> None:
    m.get(m.stream.byte())


@_op("j")
def _long_binget(m: Machine) -> None:
    m.get(m.stream.u32())


@_op("\x80")
def _proto(m: Machine) -> None:
    m.protocol = m.stream.byte()
    if m.protocol > 5:
        raise m.stream.error(f"pickle protocol {m.protocol} is unknown")


@_op("\x95")
def _frame(m: Machine) -> None:
    m.stream.u64()  # a hint for buffering; the opcodes speak for themselves


# Plain values ----------------------------------------------------------------------------------------------


# fmt: off
#: Opcodes that push one value: what reads it, and the charge.
_VALUES: dict[str, tuple[Callable[[Machine], object], int]] = {
    "N": (lambda _: None, 48),  # NONE
    "\x88": (lambda _: True, 48),  # NEWTRUE
    "\x89": (lambda _: False, 48),  # NEWFALSE
    "L": (lambda m: do.integer(m, m.stream.line()), 48),  # LONG
    "J": (lambda m: m.stream.i32(), 48),  # BININT
    "M": (lambda m: m.stream.u16(), 48),  # BININT2
    "G": (lambda m: m.stream.f64(), 48),  # BINFLOAT
    "S": (lambda m: do.quoted(m, m.stream.line()), 48),  # STRING
    "U": (lambda m: do.byte_string(m, m.stream.take(m.stream.byte())), 48),  # SHORT_BINSTRING
    "\x8c": (lambda m: do.utf8(m, m.stream.byte()), 64),  # SHORT_BINUNICODE
    "\x8d": (lambda m: do.utf8(m, m.stream.u64()), 64),  # BINUNICODE8
    "B": (lambda m: do.raw(m, m.stream.u32()), 48),  # BINBYTES
    "C": (lambda m: do.raw(m, m.stream.byte()), 48),  # SHORT_BINBYTES
    "\x8e": (lambda m: do.raw(m, m.stream.u64()), 48),  # BINBYTES8
    "\x96": (lambda m: bytearray(do.raw(m, m.stream.u64())), 48),  # BYTEARRAY8
    ")": (lambda _: (), 48),  # EMPTY_TUPLE
    "]": (lambda _: [], 80),  # EMPTY_LIST
    "}": (lambda _: {}, 80),  # EMPTY_DICT
    "\x8f": (lambda _: Elements(frozen=False, items=[]), 144),  # EMPTY_SET
    "l": (lambda m: m.pop_mark(), 48),  # LIST
    "\x91": (lambda m: Elements(frozen=True, items=m.pop_mark()), 144),  # FROZENSET
}
# fmt: on


def _push(code: str, read: Callable[[Machine], object], cost: int) -> None:
    @_op(code, cost)
    def pushing(m: Machine) -> None:
        value = read(m)
        m.stack.append(value)


for _code, (_read, _charge) in _VALUES.items():
    _push(_code, _read, _charge)


@_op("X", 128)
def _binunicode(m: Machine) -> None:
    m.stack.append(do.utf8(m, m.stream.u32()))


@_op("I")
def _int(m: Machine) -> None:
    line = m.stream.line()
    m.stack.append(line == b"01" if line in (b"00", b"01") else do.integer(m, line))


@_op("K")
def _binint1(m: Machine) -> None:
    m.stack.append(m.stream.byte())


def _binary_long(m: Machine, size: int) -> None:
    m.spend(2 * size)
    m.stack.append(int.from_bytes(m.stream.take(size), "little", signed=True))


@_op("\x8a")
def _long1(m: Machine) -> None:
    _binary_long(m, m.stream.byte())


@_op("\x8b")
def _long4(m: Machine) -> None:
    size = m.stream.i32()
    if size < 0:
        raise m.stream.error(f"a number of {size} bytes")
    _binary_long(m, size)


@_op("F")
def _float(m: Machine) -> None:
    try:
        m.stack.append(float(do.ascii_text(m, m.stream.line())))
    except ValueError:
        raise m.stream.error("a number cannot be read") from None


# Text and bytes --------------------------------------------------------------------------------------------


@_op("T")
def _binstring(m: Machine) -> None:
    size = m.stream.i32()
    if size < 0:
        raise m.stream.error(f"a string of {size} bytes")
    m.stack.append(do.byte_string(m, m.stream.take(size)))


@_op("V")
def _unicode(m: Machine) -> None:
    line = m.stream.line()
    m.spend(4 * len(line) + 64)
    try:
        m.stack.append(line.decode("raw-unicode-escape"))
    except UnicodeDecodeError:
        raise m.stream.error("a string has a broken escape") from None


# Containers ------------------------------------------------------------------------------------------------


@_op("t", 64)
def _tuple(m: Machine) -> None:
    group = m.pop_mark()
    m.spend(8 * len(group))
    m.stack.append(tuple(group))


@_op("\x85", 72)
def _tuple1(m: Machine) -> None:
    m.stack.append((m.pop(),))


@_op("\x86", 80)
def _tuple2(m: Machine) -> None:
    second = m.pop()
    m.stack.append((m.pop(), second))


@_op("\x87", 88)
def _tuple3(m: Machine) -> None:
    third, second = m.pop(), m.pop()
    m.stack.append((m.pop(), second, third))


@_op("d", 80)
def _dict(m: Machine) -> None:
    made: dict[object, object] = {}
    do.set_items(m, made, m.pop_mark())
    m.stack.append(made)


@_op("a")
def _append(m: Machine) -> None:
    value = m.pop()
    do.append_items(m, m.top(), [value])


@_op("e")
def _appends(m: Machine) -> None:
    items = m.pop_mark()
    do.append_items(m, m.top(), items)


@_op("s")
def _setitem(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    do.set_items(m, m.top(), [key, value])


@_op("u")
def _setitems(m: Machine) -> None:
    flat = m.pop_mark()
    do.set_items(m, m.top(), flat)


@_op("\x90")
def _additems(m: Machine) -> None:
    items = m.pop_mark()
    do.add_elements(m, m.top(), items)


# Names, calls and references -------------------------------------------------------------------------------


@_op("c", 200)
def _global(m: Machine) -> None:
    module = do.decoded(m, m.stream.line())
    m.name(module, do.decoded(m, m.stream.line()))


@_op("\x93", 200)
def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise m.stream.error("a class or function is not named by strings")
    m.name(module, name)


@_op("R", 120)
def _reduce(m: Machine) -> None:
    args = m.pop()
    m.make("reduce", m.pop(), args)


@_op("\x81", 120)
def _newobj(m: Machine) -> None:
    args = m.pop()
    m.make("newobj", m.pop(), args)


@_op("\x92", 120)
def _newobj_ex(m: Machine) -> None:
    kwargs, args = m.pop(), m.pop()
    m.make("newobj_ex", m.pop(), args, kwargs)


@_op("i", 320)
def _inst(m: Machine) -> None:
    args = m.pop_mark()
    _global(m)
    m.make("inst", m.pop(), tuple(args))


@_op("o", 120)
def _obj(m: Machine) -> None:
    group = m.pop_mark()
    if not group:
        raise m.stream.error("an object without a class")
    m.make("obj", group[0], tuple(group[1:]))


@_op("b", 160)
def _build(m: Machine) -> None:
    state = m.pop()
    target = m.top()
    if not isinstance(target, Placeholder):
        raise m.stream.error(f"state is set on {do.typed(target)}")
    do.record(m, target, ("state", state))


@_op("P", 200)
def _persid(m: Machine) -> None:
    m.stack.append(m.persistent(do.ascii_text(m, m.stream.line())))


@_op("Q", 200)
def _binpersid(m: Machine) -> None:
    m.stack.append(m.persistent(m.pop()))


@_op("\x82")
@_op("\x83")
@_op("\x84")
def _extension(m: Machine) -> None:
    raise m.stream.error("it uses the copyreg extension registry, whose codes only its writer knows")


@_op("\x97")
@_op("\x98")
def _buffer(m: Machine) -> None:
    raise m.stream.error("it refers to buffers that are not in the file")
