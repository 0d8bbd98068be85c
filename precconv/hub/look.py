"""What a repo on the Hub has: whether it was published there already, and which files a new publication replaces.

A publication leaves its key in the commit's description.  It counts as long as the weights are what they were then:
somebody may have published something else over it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ..repo.names import parse_index, parse_weight
from .client import history, translated

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.hf_api import RepoFile

__all__ = ["MARK", "Place", "is_unchanged", "key_line", "look", "replaced", "tree"]

MARK = "(precconv "  #: in the title of every publication
_KEY = re.compile(r"^precconv-key: (\w+)\s*$", re.MULTILINE)
_COMMITS, _PULLS = 200, 200  #: how far back is looked


@dataclass(frozen=True, slots=True)
class Place:
    """A branch or an open pull request, its last commit, and the commit that published what was looked for there."""

    ref: str
    head: str
    pull: str | None = None  #: the pull request's page
    landed: str | None = None


def key_line(key: str) -> str:
    return f"precconv-key: {key}"


def look(api: HfApi, repo: str, key: str, *, branch: str, pulls: bool) -> Place:
    """Where this publication is, or else where it goes to.

    With ``pulls`` it is looked for on the branch, where a pull request may have been merged, and then among one's own
    open pull requests.
    """
    with translated(repo):
        place = _place(api, repo, key, branch)
        if place.landed is None and pulls and (found := _pull(api, repo, key)) is not None:
            return _place(api, repo, key, f"refs/pr/{found.num}", pull=found.url)
        return place


def _place(api: HfApi, repo: str, key: str, ref: str, *, pull: str | None = None) -> Place:
    commits = list(itertools.islice(history(api, repo, ref), _COMMITS))
    head = commits[0]["id"]
    landed = next((c["id"] for c in commits if _has(key, f"{c['title']}\n{c.get('message') or ''}")), None)
    if landed is not None and landed != head and not _is_intact(api, repo, landed, head):
        landed = None
    return Place(ref, head, pull, landed)


def _has(key: str, text: str) -> bool:
    return key in _KEY.findall(text)


def _is_intact(api: HfApi, repo: str, then: str, now: str) -> bool:
    left = {path: file.blob_id for path, file in tree(api, repo, now).items()}
    return all(left.get(path) == f.blob_id for path, f in tree(api, repo, then).items() if _is_weights(path))


def _pull(api: HfApi, repo: str, key: str) -> Any:
    """One's own open pull request with this key, None without; another's may hold any weights under it."""
    found = api.get_repo_discussions(repo, discussion_type="pull_request", discussion_status="open")
    candidates = [d for d in itertools.islice(found, _PULLS) if MARK in d.title]
    own = api.whoami()["name"] if candidates else None  # only then: the Hub allows few of these
    return next((d for d in candidates if d.author == own and _has(key, _description(api, repo, d.num))), None)


def _description(api: HfApi, repo: str, number: int) -> str:
    events = api.get_discussion_details(repo, number).events
    return next((str(getattr(e, "content", "")) for e in events if e.type == "comment"), "")


def tree(api: HfApi, repo: str, revision: str) -> dict[str, RepoFile]:
    """The files of a revision by their paths."""
    from huggingface_hub.hf_api import RepoFile

    with translated(repo):
        found = api.list_repo_tree(repo, recursive=True, revision=revision)
        return {item.path: item for item in found if isinstance(item, RepoFile)}


def is_unchanged(operation: CommitOperationAdd, files: Mapping[str, RepoFile]) -> bool:
    """Whether the repo has exactly these bytes under this name."""
    there, info = files.get(operation.path_in_repo), operation.upload_info
    if there is None:
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == info.sha256.hex())
    data = operation.path_or_fileobj
    return isinstance(data, bytes) and len(data) == info.size and there.blob_id == _git_oid(data)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def replaced(names: Collection[str], there: Collection[str]) -> Iterator[str]:
    """What of the repo's weights and indexes the new ones stand for: the same model, in fewer or more shards.

    Left beside them, a loader would take them instead: a single file comes before an index, in diffusers the reverse.
    """
    new = {group for name in names if (group := _group(name)) is not None}
    yield from (path for path in there if path not in names and _group(path) in new)


def _group(path: str) -> tuple[str, str, str | None, str] | None:
    """Directory, stem, variant and suffix, None for what is no weights."""
    where = PurePosixPath(path)
    found = parse_weight(where.name) or parse_index(where.name)
    return None if found is None else (str(where.parent), found.stem, found.variant, found.suffix)


def _is_weights(path: str) -> bool:
    return _group(path) is not None
