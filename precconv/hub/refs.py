"""References to models on the Hub: ``org/name``, ``org/name@revision``, ``hf://org/name[@revision][/file]``.

A local path that exists always wins; where ``org`` is here, ``org/name`` is a path in it, and so is ``./org/name``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..formats import format_for_suffix
from ..paths import exists

__all__ = ["Ref", "looks_like_repo", "parse_ref"]

_SCHEME = "hf://"
_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
#: The Hub's rules for names, as huggingface_hub's ``validate_repo_id`` has them.
_REPO = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[^\s@]+))?", re.ASCII)
_URI = re.compile(rf"(?:models/)?(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[^\s@/]+))?(?:/(?P<file>.+))?", re.ASCII)
_LONGEST = 96  #: characters of a repo's name (huggingface_hub)
#: Pull requests and other refs have slashes in their names; in a URI they are written with %2F.
_SLASH = re.compile("%2F", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ref:
    """A model on the Hub, or one file of it."""

    repo: str  #: ``org/name``
    revision: str | None = None  #: branch, tag or commit; None for the default branch
    file: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision if self.file is None else f"{_SCHEME}{self.repo}{revision}/{self.file}"


def parse_ref(source: str | os.PathLike[str]) -> Ref | None:
    """The reference that a source is, None for a local path; raises InputError for one that is neither."""
    text = os.fspath(source)
    if text.startswith(_SCHEME):
        return _uri(text)
    if exists(text.partition("/")[0] or text) or exists(text) or not looks_like_repo(text):
        return None
    found = _REPO.fullmatch(text)
    assert found is not None
    return Ref(found["repo"], found["revision"])


def looks_like_repo(text: str) -> bool:
    """Whether a path that is not there could be a repo's name: two words, and not that of a checkpoint file."""
    found = _REPO.fullmatch(text)
    return (
        found is not None
        and len(found["repo"]) <= _LONGEST
        and (found["revision"] is not None or not _is_file_name(found["repo"]))
    )


def _is_file_name(repo: str) -> bool:
    suffix = Path(repo).suffix.lower()
    return suffix in (".json", ".gguf", ".onnx", ".zip", ".tar") or format_for_suffix(Path(repo)) is not None


def _uri(text: str) -> Ref:
    rest = text[len(_SCHEME) :].rstrip("/")
    found = _URI.fullmatch(rest)
    if found is None or rest.startswith(("datasets/", "spaces/")) or ".." in rest.split("/"):
        hint = "write hf://org/name, hf://org/name@revision or hf://org/name/file"
        raise InputError("is not a reference to a model on the Hub", path=text, hint=hint)
    revision = found["revision"]
    return Ref(found["repo"], revision and _SLASH.sub("/", revision), found["file"])
