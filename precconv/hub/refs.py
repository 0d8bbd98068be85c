"""References to models on the Hub: ``org/name``, ``org/name@revision``, ``hf://org/name[@revision][/file]``.

A local path that exists always wins; where ``org`` is here, ``org/name`` is a path in it, and so is ``./org/name``.
The address of a model's page, or of a file's, is taken as what it shows.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..errors import InputError
from ..formats import format_for_suffix
from ..paths import exists

__all__ = ["Ref", "looks_like_repo", "parse_ref"]

_SCHEME = "hf://"
_OTHERS = ("datasets/", "spaces/")  #: whose names have a word more
_WORD = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
#: The Hub's rules for names, as huggingface_hub's ``validate_repo_id`` has them.
_REPO = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[^\s@]+))?", re.ASCII)
_URI = re.compile(rf"(?:models/)?(?P<repo>{_WORD}/{_WORD})(?:@(?P<revision>[^\s@/]+))?(?:/(?P<file>.+))?", re.ASCII)
_LONGEST = 96  #: characters of a repo's name (huggingface_hub)
#: Pull requests and other refs have slashes in their names; in a URI they are written with %2F.
_SLASH = re.compile("%2F", re.IGNORECASE)
_REF = r"(?:refs(?:/|%2F)\w+(?:/|%2F))?[^/\s]+"
_WEB = re.compile("https?://", re.IGNORECASE)
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
#: Of a page, the path: that of a model, of a revision of it, or of one of its files.
_PAGE = re.compile(
    rf"/(?P<repo>{_WORD}/{_WORD})"
    rf"(?:/(?:(?:tree|commit)/(?P<revision>{_REF})|(?:blob|resolve|raw)/(?P<of_file>{_REF})/(?P<file>.+)))?/?",
    re.ASCII | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A model on the Hub, or one file of it."""

    repo: str  #: ``org/name``
    revision: str | None = None  #: branch, tag or commit; None for the default branch
    file: str | None = None
    is_guess: bool = field(default=False, compare=False)  #: it could be the path of a file that is not there

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return self.repo + revision if self.file is None else f"{_SCHEME}{self.repo}{revision}/{self.file}"


def parse_ref(source: str | os.PathLike[str]) -> Ref | None:
    """The reference that a source is, None for a local path; raises InputError for one that is neither."""
    text = os.fspath(source)
    if text.startswith(_SCHEME):
        return _uri(text)
    if _WEB.match(text):
        return _page(text)
    if exists(text.partition("/")[0] or text) or not looks_like_repo(text):
        return None
    found = _REPO.fullmatch(text)
    assert found is not None
    return Ref(found["repo"], found["revision"], is_guess=True)


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
    if found is None or rest.startswith(_OTHERS) or _climbs(found["file"]):
        hint = "write hf://org/name, hf://org/name@revision or hf://org/name/file"
        raise InputError("is not a reference to a model on the Hub", path=text, hint=hint)
    revision = found["revision"]
    return Ref(found["repo"], revision and _SLASH.sub("/", revision), found["file"])


def _climbs(file: str | None) -> bool:
    """Whether a file's name leads out of the repo, or is not one name only."""
    return file is not None and any(part in ("", ".", "..") for part in re.split(r"[/\\]", file))


def _page(text: str) -> Ref:
    from huggingface_hub import constants

    parts = urlsplit(text)
    if parts.netloc.lower() not in (*_HOSTS, urlsplit(constants.ENDPOINT).netloc.lower()):
        hint = "download the file first; models on the Hub are written org/name"
        raise InputError("is not the address of a model on the Hub", path=text, hint=hint)
    found = _PAGE.fullmatch(parts.path)
    file = found and found["file"] and unquote(found["file"])
    if found is None or parts.path.startswith(tuple(f"/{kind}" for kind in _OTHERS)) or _climbs(file):
        hint = "write org/name, org/name@revision or hf://org/name@revision/file"
        raise InputError("is an address on the Hub, but not that of a model or its file", path=text, hint=hint)
    revision = found["revision"] or found["of_file"]
    return Ref(found["repo"], revision and unquote(revision), file)
