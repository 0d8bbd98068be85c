"""The patterns of the preset tables: dotted paths whose components match whole components of a name.

``gate.weight`` matches ``model.layers.0.mlp.gate.weight`` and not ``shared_gate.weight``.  ``*`` stands for
any characters within one component, ``#`` is a component that is a number, ``^`` ties the first component
to the start of the name and ``$`` the last one to its end.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["compiled", "literals", "template"]

_COMPONENT = r"(?:#|[A-Za-z0-9_\-*]*[A-Za-z_\-*][A-Za-z0-9_\-*]*)"
_PATTERN = re.compile(rf"\^?{_COMPONENT}(?:\.{_COMPONENT})*\$?")


def template(name: str) -> str:
    """The name with every component that is a number written ``#``; layers share one template."""
    return ".".join(["#" if part.isdecimal() else part for part in name.split(".")])


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """What finds one pattern in a template; raises ValueError where the pattern is malformed."""
    return re.compile(_expression(pattern))


def literals(pattern: str) -> frozenset[str]:
    """The components that a name must have, letter by letter, for the pattern to match it."""
    return frozenset(part for part in pattern.strip("^$").split(".") if "*" not in part)


def _expression(pattern: str) -> str:
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(f"malformed pattern {pattern!r}")
    tied, body, last = pattern.startswith("^"), pattern.strip("^$"), pattern.endswith("$")
    if body.startswith("*") and not tied:  # may begin anywhere in a component: searched for as a plain text
        start, body = "", body.lstrip("*")
    else:
        start = "^" if tied else r"(?<![^.])"
    body = re.escape(body).replace(r"\*", "[^.]*").replace(r"\#", "#")
    return start + body + ("$" if last else r"(?![^.])")
