"""Where an output goes, under which name and in which format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .dtypes import CASTABLE
from .errors import OutputError, UsageError
from .formats import Format, format_for_suffix, format_named, formats
from .paths import is_directory, is_taken, same_file

__all__ = ["FormatChoice", "default_name", "output_format", "output_path", "without_dtype"]

FormatChoice = Literal["same", "safetensors", "pt"]


def output_path(
    source: Path,
    source_format: Format,
    to: str,
    output: str | os.PathLike[str] | None,
    *,
    choice: FormatChoice,
    force: bool,
) -> tuple[Path, Format]:
    """Where the output goes and in which format; ``to`` is what its name says of the dtype.

    Raises OutputError for a place it cannot or must not go to, UsageError for a name that contradicts the format.
    """
    wanted = source_format if choice == "same" else format_named(choice)
    name = default_name(source, wanted, to)
    final = source.with_name(name) if output is None else Path(output)
    if output is not None and is_directory(final):
        final = final / name
    elif output is not None and os.fspath(output).endswith(("/", os.sep)):
        raise OutputError("there is no such directory", path=os.fspath(output), hint="make it first")
    fmt = output_format(source_format, final, choice=choice)
    if not is_directory(final.parent):
        raise OutputError("there is no such directory", path=final.parent, hint="make it first")
    if same_file(source, final):
        raise OutputError("is the input itself", path=final, hint="give another name with -o")
    if not is_taken(final):
        return final, fmt
    if not (final.is_file() or final.is_symlink()):
        raise OutputError("is not a regular file", path=final, hint="give another name with -o")
    if not force:
        raise OutputError("exists", path=final, hint="replace it with --force, or give another name with -o")
    return final, fmt


def output_format(source_format: Format, final: Path | None, *, choice: FormatChoice) -> Format:
    """The format a name's suffix says; where it says none, the one that was asked for by name.

    Without a name, the source's.  Raises UsageError where nothing says it, or two things differ.
    """
    wanted = None if choice == "same" else format_named(choice)
    if final is None or is_directory(final):
        return wanted or source_format
    said = format_for_suffix(final)
    if said is None and wanted is None:
        known = ", ".join(s for f in formats() for s in f.suffixes)
        hint = f"end it in one of {known}, or say --format"
        raise UsageError(f"the name {final.name!r} does not say a format", path=final, hint=hint)
    if said is not None and wanted is not None and said is not wanted:
        raise UsageError(
            f"--format {wanted.name} contradicts the name's suffix", path=final, hint="leave out --format, or rename"
        )
    found = said or wanted
    assert found is not None
    return found


def default_name(source: Path, fmt: Format, to: str) -> str:
    """``NAME.bf16.SUFFIX``; a dtype that the source's name already says gives way."""
    stem, suffix = source.stem, source.suffix
    if suffix == ".tar" and Path(stem).suffix in fmt.suffixes:  # NAME.pth.tar, a custom of training scripts
        stem, suffix = Path(stem).stem, Path(stem).suffix + suffix
    elif suffix not in fmt.suffixes:
        suffix = fmt.suffixes[0]
    return f"{without_dtype(stem, '.')}.{to}{suffix}"


def without_dtype(name: str, separators: str) -> str:
    """A name without the dtype that it ends in, after one of these characters; never nothing."""
    for separator in separators:
        base, _, said = name.rpartition(separator)
        if base and any(said.lower() in (d.name, *d.aliases) for d in CASTABLE):
            return base
    return name
