"""The options that each of many conversions may have of its own: those of ``convert`` but for a few.

Where the output goes, the threads and durability are the batch's to say.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from ..checks import OnNonfinite, OnOverflow
from ..dtypes import DType
from ..errors import UsageError
from ..outputs import FormatChoice
from ..readback import VerifyMode
from ..request import Rounding
from ..rules import MixedMode, NormMode, Rule
from ..ties import SharedMode
from ..weights import Weights

__all__ = ["PUBLISHING", "Options", "check_options"]


class Options(TypedDict, total=False):
    """As ``convert`` has them."""

    to: str | DType
    lossless_only: bool
    format: FormatChoice
    force: bool
    weights: Weights
    select: str | None
    strip_wrappers: bool
    shared: SharedMode | None
    preset: str
    norms: NormMode
    mixed: MixedMode
    keep: Sequence[str]
    rule: Sequence[str | Rule]
    rules: str | os.PathLike[str] | None
    component: Mapping[str, str | DType] | Sequence[str]
    shard_size: str | int | None
    variant: str | None
    from_variant: str | None
    copy_all: bool
    provenance: bool
    on_overflow: OnOverflow
    on_nonfinite: OnNonfinite
    max_underflow: float | None
    rounding: Rounding
    seed: int | None
    verify: VerifyMode
    push: str | None
    private: bool
    branch: str | None
    pr: bool
    low_disk: bool


#: What is about publishing; ``push`` is a template of repo names.
PUBLISHING = ("push", "private", "branch", "pr", "low_disk")

_HINTS = get_type_hints(Options)


def check_options(given: Mapping[str, Any], where: str, *, more: Sequence[str] = ()) -> dict[str, Any]:
    """Options by their names in Python; ``-`` is as good as ``_``.

    ``more``: other keys that are allowed, which are text.
    Raises UsageError for a key there is not, with the nearest that there is, and for a value of another type.
    """
    options = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        hint = str if name in more else _HINTS.get(name)
        if hint is None:
            raise UsageError(f"{where}: unknown key {key!r}", hint=_nearest(name, [*more, *_HINTS]))
        if not _fits(value, hint):
            raise UsageError(f"{where}: {key} = {value!r} is not {_said(hint)}")
        options[name] = value
    return options


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type as it stands in an annotation."""
    kind, args = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in args)
    if kind is Literal:
        return value in args if isinstance(value, str) else False
    if kind is os.PathLike:
        return isinstance(value, os.PathLike)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return isinstance(value, Mapping) and all(isinstance(k, str) and _fits(v, args[1]) for k, v in value.items())
    if isinstance(kind, type) and issubclass(kind, Sequence):
        return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(_fits(v, args[0]) for v in value))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _said(hint: Any) -> str:
    """A type in words."""
    kind, args = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_said(part) for part in args if part is not type(None)))
    if kind is Literal:
        return f"one of {', '.join(args)}"
    if isinstance(kind, type) and issubclass(kind, (Mapping, Sequence)):
        return "a table" if issubclass(kind, Mapping) else "a list"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(hint, "text")
