"""Where each output of a batch goes: names from a template, and no two in each other's way."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ..errors import InputError, UsageError
from ..fileio import InputFile
from ..formats import Format, detect, format_for_suffix, format_named
from ..outputs import FormatChoice, default_name
from ..paths import is_directory
from .pins import reference
from .sources import names_of

__all__ = ["check_places", "check_repos", "check_template", "output_place", "repo_name"]

FIELDS = ("org", "name", "stem", "to", "revision")
#: What the Hub says of a name beyond this it says when it is asked.
_REPO = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def check_template(template: str) -> str:
    """The template; raises UsageError for a field there is not, and for a name that is always the same."""
    found = re.findall(r"\{([^{}]*)\}", template)
    known = ", ".join(f"{{{f}}}" for f in FIELDS)
    for field in found:
        if field not in FIELDS:
            raise UsageError(f"output {template!r}: there is no field {{{field}}}", hint=f"known: {known}")
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise UsageError(f"output {template!r}: a brace has no partner", hint=f"fields: {known}")
    return template


def output_place(source: str, to: str, template: str | None, root: Path, choice: FormatChoice) -> Path:
    """The output of a source, absolute; by default ``root`` and the name that a single conversion would give it.

    A template's name for a file that does not say a format gets the suffix of the one that it will have.
    """
    names = {**asdict(names_of(source)), "to": to}
    path, is_file = Path(source), not is_directory(source) and os.path.lexists(source)
    ref = None if os.path.lexists(source) else reference(source)
    if ref is not None and ref.file is not None:
        path, is_file = Path(ref.file), True
    if template is not None:
        said = template.format(**{k: v.replace(os.sep, "_") for k, v in names.items()})
        place = root / said
        if is_file and format_for_suffix(place) is None:
            place = root / (said + _suffix(path, choice))
    elif is_file:
        place = root / default_name(path, _format(path, choice), to)
    else:
        place = root / f"{names['stem']}-{to}"
    return Path(os.path.abspath(place))  # noqa: PTH100  '..' is taken as written; a link may lead elsewhere


def _format(path: Path, choice: FormatChoice) -> Format:
    """Of the output: what is asked for, or what the source is; for one that is nothing, its name decides."""
    if choice != "same":
        return format_named(choice)
    try:
        with InputFile(path) as file:
            return detect(file)
    except InputError:
        return format_for_suffix(path) or format_named("safetensors")


def _suffix(path: Path, choice: FormatChoice) -> str:
    fmt = _format(path, choice)
    return path.suffix if path.suffix.lower() in fmt.suffixes else fmt.suffixes[0]


def check_places(places: Sequence[tuple[str, Path]]) -> None:
    """Raises UsageError where two outputs are one, one lies in the other, or one is or lies in a source.

    ``places``: sources and their outputs.
    """
    hint = "give --output with {org}, {stem} or {to} in it, or name one of them in a TOML list"
    seen: dict[str, str] = {}
    for source, place in places:
        if _key(place) in seen:
            raise UsageError(f"{seen[_key(place)]} and {source} have the same output {place}", hint=hint)
        seen[_key(place)] = source
    for source, place in places:
        for above in place.parents:
            if _key(above) in seen:
                message = f"the output of {source} lies in that of {seen[_key(above)]}: {place}"
                raise UsageError(message, hint=hint)
    sources = {_key(Path(source)): source for source, _ in places if os.path.lexists(source)}
    for source, place in places:
        for above in (place, *place.parents):
            if _key(above) in sources and (above == place or is_directory(above)):
                what = "is" if above == place else "lies in"
                message = f"the output of {source} {what} the source {sources[_key(above)]}: {place}"
                raise UsageError(message, hint="give another place with --output-dir")


def repo_name(template: str, source: str, to: str) -> str:
    """The repo that a source's output is published in; raises UsageError for what can be no repo's name."""
    names = {**asdict(names_of(source)), "to": to}
    name = check_template(template).format(**{k: v.replace("/", "_") for k, v in names.items()})
    if not _REPO.fullmatch(name):
        hint = "write it as org/name, as in me/{stem}-{to}"
        raise UsageError(f"{source}: --push {name!r} is not the name of a repo", hint=hint)
    return name


def check_repos(places: Sequence[tuple[str, str]]) -> None:
    """Raises UsageError where two sources are published in one place; the Hub has no two names that differ in case."""
    seen: dict[str, str] = {}
    for source, place in places:
        repo, at, branch = place.partition("@")
        mark = repo.lower() + at + branch
        if mark in seen and not place.endswith("#pr"):
            hint = "give --push with {org}, {stem} or {to} in it, as in me/{stem}-{to}"
            raise UsageError(f"{seen[mark]} and {source} have the same output {place}", hint=hint)
        seen[mark] = source


def _key(path: Path) -> str:
    """The same for names that lead to one place, whether or not it is there."""
    return os.path.normcase(os.path.realpath(path))
