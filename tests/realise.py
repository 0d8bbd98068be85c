"""Makes the objects that inert nodes describe: for tests, on pickles the tests wrote themselves."""

from __future__ import annotations

import importlib
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from precconv.formats.pickled import Elements, Global, Key, Placeholder

__all__ = ["realise"]


def realise(node: object, memo: dict[int, Any] | None = None) -> Any:
    """The object a trusted node stands for, aliases and cycles included."""
    memo = {} if memo is None else memo
    if id(node) in memo:
        return memo[id(node)]
    if isinstance(node, Global):
        module = IMPORT_MAPPING.get(node.module, node.module)
        module, name = NAME_MAPPING.get((node.module, node.name), (module, node.name))
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    if isinstance(node, list):
        made: Any = memo.setdefault(id(node), [])
        made.extend(realise(item, memo) for item in node)
        return made
    if isinstance(node, dict):
        made = memo.setdefault(id(node), {})
        made.update((realise(k, memo), realise(v, memo)) for k, v in node.items())
        return made
    if isinstance(node, Placeholder):
        return _placeholder(node, memo)
    if isinstance(node, Elements):
        made = (frozenset if node.frozen else set)(realise(item, memo) for item in node.items)
    elif isinstance(node, Key):
        made = realise(node.value, memo)
    elif isinstance(node, tuple):
        made = tuple(realise(item, memo) for item in node)
    else:
        return node
    return memo.setdefault(id(node), made)


def _placeholder(node: Placeholder, memo: dict[int, Any]) -> Any:
    function, args = realise(node.callable, memo), realise(node.args, memo)
    if node.how in ("newobj", "newobj_ex"):
        made = function.__new__(function, *args, **(realise(node.kwargs, memo) or {}))
    else:
        made = function(*args)
    memo[id(node)] = made
    for kind, value in node.edits or ():
        if kind == "items":
            made.extend(realise(value, memo))
        elif kind == "pairs":
            for key, item in value:  # type: ignore[attr-defined]
                made[realise(key, memo)] = realise(item, memo)
        elif kind == "elements":
            made.update(realise(value, memo))
        elif kind == "call":
            realise(value, memo)
        elif hasattr(made, "__setstate__"):
            made.__setstate__(realise(value, memo))
        else:
            made.__dict__.update({sys.intern(k): v for k, v in realise(value, memo).items()})
    return made
