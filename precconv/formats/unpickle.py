"""An inert unpickler: reads every pickle protocol into the nodes of ``pickled``, and does nothing else.

No name is imported or resolved and nothing is called: a call of ``os.system`` becomes a Placeholder of that
name.  What a file can cost is bounded by ``Budget``: each opcode and each byte it carries is charged for
before it is acted on, and no opcode makes more than it is charged for.  Nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .machine import Machine
from .opcodes import COST, STOP, TABLE
from .opstream import OpStream
from .pickled import Persistent, Pickle

__all__ = ["Budget", "unpickle"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What one pickle may take: ``memory`` in bytes, estimated from above; a tensor takes some 4 kB."""

    memory: int = 2 << 30


_DEFAULT = Budget()


def unpickle(
    stream: OpStream | bytes,
    *,
    persistent: Callable[[object], object] = Persistent,
    budget: Budget = _DEFAULT,
) -> Pickle:
    """The pickle that starts where ``stream`` stands, as data; the stream is left just after it.

    ``persistent`` turns a persistent id into a node.  Raises CorruptCheckpointError.
    """
    source = OpStream.of(stream) if isinstance(stream, bytes) else stream
    m = Machine(source, persistent, budget.memory)
    _run(m)
    if m.metastack or len(m.stack) != 1:
        raise source.error("it does not end with one value")
    return Pickle(m.stack[0], m.protocol, list(m.names.values()), m.discarded)


def _run(m: Machine) -> None:
    """The loop; it reads as ``OpStream.byte`` and charges as ``Machine.spend`` do, without the calls."""
    stream, table, cost = m.stream, TABLE, COST
    while True:
        pos = stream.pos
        if pos >= len(stream.window):
            stream.need(1)
            pos = stream.pos
        stream.pos = pos + 1
        op = stream.window[pos]
        if op == STOP:
            return
        m.left -= cost[op]
        if m.left < 0:
            m.spend(0)
        table[op](m)
