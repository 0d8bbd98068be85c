"""What a batch is about: names on the command line, lists in files or on stdin, globs, tables of TOML.

Nothing here looks into a source; a name that is none is its own job's failure, not the batch's.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, UsageError
from ..paths import reason
from .options import check_options

__all__ = ["Entry", "entries_of", "read_arguments"]

#: Existing files with these names' ends are lists, anything else is a source.
LIST_SUFFIXES = (".txt", ".list", ".toml")
_ENTRY_KEYS = ("source", "output")


@dataclass(frozen=True, slots=True)
class Entry:
    """One source and what was said about it alone."""

    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None  #: template
    defaults: Mapping[str, Any] = field(default_factory=dict)  #: of its list; ``output`` may be among them
    globbed: bool = False  #: whether it was found, not named


def read_arguments(arguments: Sequence[str], stdin: Callable[[], bytes]) -> list[Entry]:
    """The entries of LIST arguments in their order.

    ``stdin``: gives what there is for ``-``, which may stand once.  Raises InputError for a list that cannot be read,
    UsageError for one that says what it cannot.
    """
    entries: list[Entry] = []
    if arguments.count("-") > 1:
        raise UsageError("'-' is given twice, there is one stdin")
    for argument in arguments:
        if argument == "-":
            entries += _from_lines(stdin(), "stdin")
        elif argument.lower().endswith(LIST_SUFFIXES) and Path(argument).is_file():
            entries += _from_file(Path(argument))
        else:
            entries += _expanded(Entry(argument))
    return entries


def entries_of(sources: Sequence[str | os.PathLike[str] | Mapping[str, Any]]) -> list[Entry]:
    """Entries from Python: sources, or tables as a TOML list has them."""
    if isinstance(sources, (str, os.PathLike)):
        sources = [sources]
    found: list[Entry] = []
    for number, source in enumerate(sources, 1):
        if isinstance(source, Mapping):
            found += _from_table(source, f"source {number}")
        else:
            found += _expanded(Entry(os.fspath(source)))
    return found


def _from_file(path: Path) -> list[Entry]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise InputError(f"cannot be read: {reason(e)}", path=path) from e
    if path.suffix.lower() == ".toml":
        return _from_toml(data, path)
    return _from_lines(data, os.fspath(path))


def _from_lines(data: bytes, where: str) -> list[Entry]:
    """One source a line; ``#`` at the start of a line or after a space begins a comment."""
    found: list[Entry] = []
    for number, line in enumerate(data.decode("utf-8-sig", "surrogateescape").split("\n"), 1):
        said = "" if line.lstrip().startswith("#") else line.split(" #")[0].strip()
        if "\0" in said:
            raise InputError(f"line {number} is no text: this is not a list", path=where)
        if said:
            found += _expanded(Entry(said))
    return found


def _from_toml(data: bytes, path: Path) -> list[Entry]:
    try:
        found = tomllib.loads(data.decode())
    except RecursionError:
        raise InputError("nests too deeply", path=path) from None
    except ValueError as e:  # bad TOML, bad UTF-8
        raise InputError(f"is not valid TOML: {e}", path=path) from None
    for key in found:
        if key not in ("defaults", "repo"):
            hint = "a list has [defaults] and [[repo]] tables"
            raise UsageError(f"unknown key {key!r}", path=path, hint=hint)
    said, tables = found.get("defaults", {}), found.get("repo", [])
    if not isinstance(said, dict) or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError("'repo' is not a list of tables, or 'defaults' no table", path=path, hint="write [[repo]]")
    defaults = check_options(said, f"{path}: [defaults]", more=("output",))
    entries = [e for n, table in enumerate(tables, 1) for e in _from_table(table, f"{path}: [[repo]] {n}")]
    return [replace(entry, defaults=defaults) for entry in entries]


def _from_table(table: Mapping[str, Any], where: str) -> list[Entry]:
    if "source" not in table:
        raise UsageError(f"{where} has no 'source'")
    source, rest = table["source"], {k: v for k, v in table.items() if k != "source"}
    if not isinstance(source, (str, os.PathLike)) or not os.fspath(source):
        raise UsageError(f"{where}: source = {source!r} is not text")
    options = check_options(rest, where, more=_ENTRY_KEYS)
    return list(_expanded(Entry(os.fspath(source), options, options.pop("output", None))))


def _expanded(entry: Entry) -> Iterator[Entry]:
    """A pattern as the files and directories that it matches; raises UsageError where there are none."""
    source = entry.source
    if not glob.has_magic(source) or os.path.lexists(source):
        yield entry
        return
    names = sorted(glob.glob(source, recursive=True))  # noqa: PTH207  a relative pattern stays relative
    if not names:
        raise UsageError(f"{source!r} matches no file", hint="patterns are of local files")
    yield from (replace(entry, source=name, globbed=True) for name in names)
