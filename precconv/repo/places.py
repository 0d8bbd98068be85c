"""Where a converted model goes, and what may be in the way there."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from ..errors import OutputError
from ..formats import format_for_suffix
from ..outputs import without_dtype
from ..paths import is_directory, is_taken, reason, same_file
from .names import family, parse_index, parse_weight

__all__ = ["directory_output", "require_replaceable", "single_output"]


def single_output(output: str | os.PathLike[str] | None) -> Path | None:
    """The output as a file, when its name is that of a checkpoint file; None when it is a directory."""
    if output is None or os.fspath(output).endswith(("/", os.sep)) or is_directory(output):
        return None
    path = Path(output)
    return path if format_for_suffix(path) is not None else None


def directory_output(root: Path, to: str, output: str | os.PathLike[str] | None) -> Path:
    """The output directory, which need not exist; ``to`` is what its name says of the dtype.

    Raises OutputError for a place it must not go to.
    """
    final = _beside(root, to) if output is None else Path(output)
    if final.name in ("", "..") or os.path.islink(final):  # noqa: PTH114  Path's raises for a name that cannot be
        final = Path(os.path.realpath(final))  # and this raises for links in a circle
    if not is_directory(final.parent):
        raise OutputError("there is no such directory", path=final.parent, hint="make it first")
    if same_file(root, final):
        raise OutputError("is the input itself", path=final, hint="give another name with -o")
    if any(same_file(final, above) for above in root.resolve().parents):
        raise OutputError("the input lies in it", path=final, hint="give another name with -o")
    if os.path.ismount(
        final
    ):  # a volume of a container, say; seen hours later otherwise, when the output gets its name
        hint = f"name a directory in it, e.g. -o {final / root.resolve().name}"
        raise OutputError("is a mount point, which cannot be replaced", path=final, hint=hint)
    if is_taken(final) and not is_directory(final):
        raise OutputError("is a file, the output is a directory", path=final, hint="give another name with -o")
    return final


def _beside(root: Path, to: str) -> Path:
    """``DIR-bf16``; a dtype that the directory's name already says gives way."""
    base = root if root.name not in ("", "..") else root.resolve()
    if not base.name:
        raise OutputError("has no name to make the output's from", path=root, hint="give one with -o")
    return base.with_name(f"{without_dtype(base.name, '-')}-{to}")


def require_replaceable(final: Path, names: Collection[str], *, force: bool, at: Path | None = None) -> None:
    """Raises OutputError when something is in the way: with ``force``, anything but an older form of this output.

    ``names``: the files of the output, relative.  ``at``: where what has the name ``final`` lies meanwhile.  Other
    forms of its weights go too, as they must: what an older run left of them would be loaded with the new ones.
    """
    at = at or final
    if not is_taken(at):
        return
    try:
        is_empty = not any(at.iterdir())
        there = [p for p in at.rglob("*") if p.is_symlink() or not p.is_dir()]
    except OSError as e:
        raise OutputError(f"cannot be read: {reason(e)}", path=final) from e
    if is_empty:
        return
    if not force:
        raise OutputError("exists", path=final, hint="replace it with --force, or give another name with -o")
    models = {_model(name) for name in names} - {None}
    for path in there:
        name = path.relative_to(at).as_posix()
        if name not in names and _model(name) not in models:
            hint = "move it away, or give another name with -o"
            raise OutputError(f"holds {name!r}, which is not part of the output", path=final, hint=hint)


def _model(name: str) -> tuple[str, str] | None:
    """Whose weights a file is by its name: the same for all shards, formats and variants of one model, and its index.

    A directory full of checkpoints is no older form of another one.
    """
    where, _, file = name.rpartition("/")
    parsed = parse_weight(file) or parse_index(file)
    return None if parsed is None else (where, family(parsed.stem, parsed.suffix))
