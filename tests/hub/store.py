"""Repos, commits, branches and pull requests as plain data in memory; the bytes of large files are in ``objects``.

A commit holds its whole tree, so history is a chain of mappings and nothing is ever merged.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from . import refusals

Kind = Literal["models", "datasets", "spaces"]
Status = Literal["draft", "open", "closed", "merged"]

#: Of every repo, commit and discussion: the tests ask for none.
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a commit: with its bytes when git keeps them, else with the SHA-256 of the object."""

    oid: str
    size: int
    data: bytes | None = None
    sha256: str | None = None
    pointer_size: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    oid: str
    parent: str | None
    tree: Mapping[str, Entry]
    title: str
    description: str
    author: str


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit does to its parent's tree; a name in ``deleted`` that ends in a slash is a folder."""

    title: str
    description: str = ""
    author: str = "tester"
    added: Mapping[str, Entry] = field(default_factory=dict)
    deleted: tuple[str, ...] = ()


@dataclass(slots=True)
class Discussion:
    """A discussion, or a pull request, whose commits are at ``refs/pr/NUM``."""

    num: int
    title: str
    description: str
    author: str
    status: Status
    is_pull_request: bool
    comments: list[str] = field(default_factory=list)
    merged_as: str | None = None

    @property
    def ref(self) -> str:
        return f"refs/pr/{self.num}"


@dataclass(slots=True)
class Repo:
    """``heads`` has the branches by their short names and the pull requests as ``refs/pr/N``."""

    kind: Kind
    id: str
    private: bool = False
    gated: bool = False
    disabled: bool = False
    allowed: set[str] = field(default_factory=set)
    commits: dict[str, Commit] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    discussions: dict[int, Discussion] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        return self.id.split("/")[0]

    @property
    def page(self) -> str:
        """The repo's page, without the host."""
        return self.id if self.kind == "models" else f"{self.kind}/{self.id}"


@dataclass(slots=True)
class Store:
    """Every repo by kind and id, and the ids that renamed ones had before.  Whoever changes it holds the lock."""

    repos: dict[tuple[Kind, str], Repo] = field(default_factory=dict)
    moved: dict[tuple[Kind, str], str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def regular(data: bytes) -> Entry:
    return Entry(git_oid(data), len(data), data=data)


def large(sha256: str, size: int) -> Entry:
    """A file whose bytes are elsewhere; git has a pointer to it (git-lfs, docs/spec.md)."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (sha256.encode(), size)
    return Entry(git_oid(pointer), size, sha256=sha256, pointer_size=len(pointer))


def create(store: Store, kind: Kind, repo_id: str, *, private: bool = False) -> Repo:
    """A new repo with the Hub's first commit, which has only ``.gitattributes``."""
    repo = Repo(kind, repo_id, private=private)
    attributes = regular(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    commit(repo, "main", Change("initial commit", added={".gitattributes": attributes}), parent=None)
    store.repos[kind, repo_id] = repo
    store.moved.pop((kind, repo_id), None)
    return repo


def rename(store: Store, kind: Kind, old: str, new: str) -> None:
    repo = store.repos.pop((kind, old))
    repo.id = new
    store.repos[kind, new] = repo
    store.moved[kind, old] = new


def new_id(store: Store, kind: Kind, repo_id: str) -> str | None:
    """Where a renamed repo is now, through any number of renames."""
    found = None
    while (kind, repo_id) not in store.repos and (kind, repo_id) in store.moved:
        found = repo_id = store.moved[kind, repo_id]
    return found


def resolve(repo: Repo, revision: str) -> str:
    """The commit that a branch, tag, pull request or (shortened) commit id means."""
    short = revision.removeprefix("refs/heads/")
    if (known := repo.heads.get(short) or repo.tags.get(revision)) is not None:
        return known
    if re.fullmatch("[0-9a-f]{7,40}", revision):
        for oid in repo.commits:
            if oid.startswith(revision):
                return oid
    raise refusals.revision_not_found(revision)


def tree(repo: Repo, revision: str) -> Mapping[str, Entry]:
    return repo.commits[resolve(repo, revision)].tree


def history(repo: Repo, revision: str) -> Iterator[Commit]:
    """Newest first."""
    oid: str | None = resolve(repo, revision)
    while oid is not None:
        found = repo.commits[oid]
        yield found
        oid = found.parent


def without(entries: Mapping[str, Entry], deleted: Iterable[str]) -> dict[str, Entry]:
    """The tree without these files and folders; a missing one is refused."""
    left = dict(entries)
    for name in deleted:
        gone = [p for p in left if p == name or (name.endswith("/") and p.startswith(name))]
        if not gone:
            raise refusals.entry_not_found(name)
        for path in gone:
            del left[path]
    return left


def commit(repo: Repo, ref: str, change: Change, *, parent: str | None) -> Commit:
    """Put a commit on top of ``parent`` and let ``ref`` point to it."""
    before = repo.commits[parent].tree if parent else {}
    after = {**without(before, change.deleted), **change.added}
    named = [repo.id, len(repo.commits), parent, ref, change.title, sorted((p, e.oid) for p, e in after.items())]
    oid = hashlib.sha1(json.dumps(named).encode()).hexdigest()
    made = Commit(oid, parent, after, change.title, change.description, change.author)
    repo.commits[oid] = made
    repo.heads[ref] = oid
    return made


def open_discussion(
    repo: Repo, title: str, description: str, *, author: str, status: Status, pull_request: bool
) -> Discussion:
    """The next number; a pull request starts at main."""
    made = Discussion(len(repo.discussions) + 1, title, description, author, status, pull_request)
    repo.discussions[made.num] = made
    if pull_request:
        repo.heads[made.ref] = repo.heads["main"]
    return made


def merge(repo: Repo, found: Discussion) -> None:
    repo.heads["main"] = repo.heads[found.ref]
    found.status, found.merged_as = "merged", repo.heads["main"]
