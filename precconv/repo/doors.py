"""Checks of what comes from outside: JSON, and paths in listings, indexes and pipelines."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, NoReturn

from precconv.errors import CorruptCheckpointError, InputError

__all__ = ["check_collisions", "json_object", "listed", "shown", "unsafe"]

#: What no path may hold: control characters move a terminal's cursor, lone surrogates cannot be written.
_BAD = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
#: Characters; Linux opens no longer path.
_LONGEST = 4096
_DRIVE = re.compile(r"[A-Za-z]:")


def unsafe(path: str) -> str | None:
    """Why a path from outside must not be used, None for a plain relative one with ``/`` between its parts."""
    if not path:
        return "is empty"
    if len(path) > _LONGEST:
        return "is too long"
    if _BAD.search(path):
        return "holds a control character"
    if "\\" in path:
        return "holds a backslash"
    if path.startswith("/") or _DRIVE.match(path):
        return "is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "leaves the directory"
    return "is not a plain path" if "" in parts or "." in parts else None


def json_object(raw: bytes, *, path: str, limit: int) -> dict[str, Any]:
    """A file's JSON object, read strictly: UTF-8, no key twice, no NaN, at most ``limit`` bytes.

    Raises CorruptCheckpointError.
    """
    if len(raw) > limit:
        raise CorruptCheckpointError(f"{len(raw):,} bytes are too many for this file (limit {limit:,})", path=path)
    try:
        found = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_constant, parse_float=_finite
        )
    except RecursionError:
        raise CorruptCheckpointError("its JSON nests too deeply", path=path) from None
    except _TwiceError as e:
        raise CorruptCheckpointError(f"its JSON has the key {e.key!r} twice", path=path) from None
    except ValueError as e:  # bad UTF-8, bad JSON, a number of absurd length
        raise CorruptCheckpointError("not valid JSON", path=path, hint="download it again") from e
    if not isinstance(found, dict):
        raise CorruptCheckpointError("its JSON is not an object", path=path)
    return found


class _TwiceError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key if len(key) <= 100 else f"{key[:100]}…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(k for k, _ in pairs if k in seen or seen.add(k)))  # type: ignore[func-returns-value]
    return found


def _constant(_: str) -> NoReturn:
    raise ValueError


def shown(path: str) -> str:
    """A path from outside in a message: quoted, its odd characters spelled out, no longer than a line or two."""
    return repr(path if len(path) <= 200 else f"{path[:200]}…")


def _finite(text: str) -> float:
    """A number that can be written again: JSON has no Infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def listed(names: Iterable[str], *, limit: int = 100) -> str:
    """All names in one phrase; a hostile file can name a million, so what is beyond ``limit`` is counted."""
    names = list(names)
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def check_collisions(paths: Iterable[str], *, root: str) -> None:
    """Raise InputError where two paths are one on a file system that ignores case or Unicode's forms.

    Directories are compared too: ``Unet/a`` and ``unet/b`` would end in one directory there.
    """
    files: dict[str, str] = {}
    directories: dict[str, str] = {}
    for path in paths:
        key = _folded(path)
        if key in files:
            raise _collision(files[key], path, root)
        files[key] = path
        parent = path.rpartition("/")[0]
        while parent and (key := _folded(parent)) not in directories:
            directories[key] = parent
            parent = parent.rpartition("/")[0]
        if parent and directories[key] != parent:
            raise _collision(directories[key], parent, root)
    for key in files.keys() & directories.keys():
        if files[key] == directories[key]:
            raise InputError(f"{files[key]!r} would be a file and a directory", path=root, hint="rename one of them")
        raise _collision(files[key], directories[key], root)


def _collision(a: str, b: str, root: str) -> InputError:
    if a == b:
        return InputError(
            f"{a!r} would be written twice",
            path=root,
            hint="leave out --copy-all, choose another --variant, or rename one in the source",
        )
    return InputError(
        f"{a!r} and {b!r} are one name where case or Unicode forms do not count (macOS, Windows)",
        path=root,
        hint="rename one of them",
    )


def _folded(path: str) -> str:
    """As a file system that ignores case and composes characters sees it."""
    if path.isascii():
        return path.lower()
    return unicodedata.normalize("NFC", path.casefold())
