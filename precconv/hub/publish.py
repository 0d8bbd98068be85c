"""Publishing on the Hub: files are sent as they are finished, and appear all at once, in one commit.

>>> with publisher(Target("org/name"), key) as p:  # doctest: +SKIP
...     if p.already is None:
...         sent = [p.upload(path, name) for name, path in shards]
...         p.commit([*sent, p.attach(card, "README.md")], title=publication_title("org/name", "bf16"))

A run that is killed before the commit has published nothing, and what it sent is not sent again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import __version__
from ..errors import HubError, InputError, UsageError
from ..paths import reason
from .client import client, scrubbed, translated
from .look import MARK, Place, is_unchanged, key_line, look, replaced, tree
from .retries import persistently

if TYPE_CHECKING:
    import os

    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoFile

    Sleep = Callable[[float], object]

__all__ = ["Published", "Publisher", "Target", "publication_key", "publication_title", "publisher", "upload"]

_REPO_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class Target:
    """Where to publish: ``org/name``, or ``name`` of one's own; on main, a branch, or as a pull request to main."""

    repo: str
    branch: str | None = None
    private: bool = False  #: for a repo that does not exist yet
    pr: bool = False

    def __post_init__(self) -> None:
        if self.pr and self.branch is not None:
            raise UsageError("a pull request goes to main, not to a branch", hint="give --branch or --pr")


@dataclass(frozen=True, slots=True)
class Published:
    """Where something was published; ``already`` when an earlier run had done it or the repo has the same files."""

    repo: str
    commit: str
    url: str
    pr_url: str | None = None
    already: bool = False


def publication_key(source: str, commit: str | None, options: Mapping[str, Any], *, version: str = __version__) -> str:
    """What a publication depends on, as 16 hexadecimal digits; ``options`` as JSON has them."""
    said = json.dumps([source, commit, options, version], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def publication_title(source: str | None, to: str) -> str:
    """A commit's title; ``source`` is a repo's id, anything else is not said: a path is nobody else's business."""
    named = f" {source}" if source is not None and _REPO_ID.fullmatch(source) else ""
    return f"Convert{named} to {to} {MARK}{__version__})"


@contextmanager
def publisher(target: Target, key: str, *, token: str | None = None, sleep: Sleep | None = None) -> Iterator[Publisher]:
    """A repo that can be written to, made if need be; on the way out, waits in other threads end with an error.

    Raises HubError when it cannot be written to, UsageError when ``private`` contradicts what is there.
    """
    stopped = threading.Event()

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise HubError("publishing was given up", kind="refused", path=target.repo)

    wait, api = sleep or pause, client(token=token)
    try:
        found = persistently(lambda: _opened(api, target), sleep=wait)
        place = persistently(lambda: _look(api, found, key), sleep=wait)
        already = None if place.landed is None else _published(api, found, place, place.landed, already=True)
        yield Publisher(api, found, key, wait, already)
    finally:
        stopped.set()


@dataclass(frozen=True, slots=True)
class Publisher:
    """Made by ``publisher``.  ``already``: an earlier run published the same, nothing is left to do."""

    api: HfApi
    target: Target
    key: str
    sleep: Sleep
    already: Published | None

    def upload(self, path: str | os.PathLike[str], name: str) -> CommitOperationAdd:
        """Send a finished file at once, from any thread; see the function ``upload``."""
        return _uploaded(self.api, self.target, path, name, self.sleep)

    def attach(self, data: bytes, name: str) -> CommitOperationAdd:
        """A small file that goes with the commit."""
        return _addition(self.target.repo, name, data)

    def commit(
        self,
        operations: Sequence[CommitOperationAdd],
        *,
        title: str,
        description: str = "",
        delete: Collection[str] = (),
    ) -> Published:
        """Publish all files in one commit, in place of older weights of the same models and of those to ``delete``.

        Raises HubError; then nothing was published, unless the Hub could not be asked any more.
        """
        texts = scrubbed(title), scrubbed("\n\n".join(filter(None, [description, key_line(self.key)])))
        sent = False

        def once() -> Published:
            nonlocal sent
            place = _look(self.api, self.target, self.key)
            if place.landed is not None:  # an earlier try's, whose answer was lost
                return _published(self.api, self.target, place, place.landed, already=not sent)
            files = tree(self.api, self.target.repo, place.head)
            changes = _changes(operations, files, delete)
            if not changes:
                return _published(self.api, self.target, place, place.head, already=True)
            sent = True
            return _sent(self.api, self.target, place, changes, texts)

        return persistently(once, sleep=self.sleep)


def upload(
    target: Target,
    path: str | os.PathLike[str],
    name: str,
    *,
    token: str | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> CommitOperationAdd:
    """Send a finished file to a repo that a ``publisher`` elsewhere has open; afterwards the file is not needed.

    What is returned can be pickled, for the publisher to commit.  A file that the Hub keeps in git comes with it whole.
    """
    return _uploaded(client(token=token), target, path, name, sleep)


# The repo


def _opened(api: HfApi, target: Target) -> Target:
    """The target under its full and present name; the repo and the branch exist and may be written to."""
    from huggingface_hub import CommitOperationAdd

    with translated(target.repo):
        wanted = target.repo if "/" in target.repo else f"{api.whoami()['name']}/{target.repo}"
        found = replace(target, repo=_ensured(api, replace(target, repo=wanted)))
        # An empty file is never an object: this asks how to send it, which only those hear who may.
        api.preupload_lfs_files(found.repo, additions=[CommitOperationAdd(".gitattributes", b"")], create_pr=target.pr)
        if target.branch is not None and target.branch not in _branches(api, found.repo):
            api.create_branch(found.repo, branch=target.branch, revision="main", exist_ok=True)
        return found


def _ensured(api: HfApi, target: Target) -> str:
    """The id of the repo, which is made where there is none; a renamed one has another."""
    there = _info(api, target.repo)
    if there is None:
        return str(api.create_repo(target.repo, private=target.private or None, exist_ok=True).repo_id)
    if target.private and not there.private:
        raise UsageError(
            "is public already, and --private makes only new repos private",
            path=target.repo,
            hint="push to another name, or change its visibility on the Hub",
        )
    return str(there.id)


def _info(api: HfApi, repo: str) -> ModelInfo | None:
    try:
        with translated(repo):
            return api.model_info(repo)
    except HubError as e:
        if e.kind != "not found":
            raise
    return None


def _branches(api: HfApi, repo: str) -> list[str]:
    return [branch.name for branch in api.list_repo_refs(repo).branches]


def _look(api: HfApi, target: Target, key: str) -> Place:
    return look(api, target.repo, key, branch=target.branch or "main", pulls=target.pr)


def _published(api: HfApi, target: Target, place: Place, commit: str, *, already: bool) -> Published:
    branch = "" if target.branch in (None, "main") else f"/tree/{target.branch}"
    return Published(target.repo, commit, f"{api.endpoint}/{target.repo}{branch}", place.pull, already)


# Files


def _uploaded(api: HfApi, target: Target, path: str | os.PathLike[str], name: str, sleep: Sleep) -> CommitOperationAdd:
    whole = Path(path).absolute()  # the client takes a name that begins with ~ for somebody's home
    with _reading(whole):
        whole.stat()
    made = _addition(target.repo, name, whole)

    def once() -> None:
        with translated(target.repo, what=name):
            api.preupload_lfs_files(target.repo, additions=[made], revision=target.branch, create_pr=target.pr)

    with _reading(whole):
        persistently(once, sleep=sleep)
    _require_taken(target.repo, [made])
    if made.path_or_fileobj != b"":  # not emptied, so not sent: it goes with the commit, perhaps on another machine
        return _addition(target.repo, name, whole.read_bytes())
    assert made.upload_info.sha256  # computed while the file is there
    return made


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:  # the Hub's are translated inside
        raise InputError(f"cannot be read: {reason(e)}", path=path) from e


def _addition(repo: str, name: str, content: bytes | Path) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    try:
        CommitOperationAdd(name, b"")
    except ValueError as e:
        raise HubError(f"{name!r}: the Hub takes no file of this name", kind="refused", path=repo) from e
    return CommitOperationAdd(name, content)


def _require_taken(repo: str, operations: Sequence[CommitOperationAdd]) -> None:
    """The client leaves out, without a word, what the repo's .gitignore names."""
    for operation in operations:
        if operation._should_ignore:
            message = f"{operation.path_in_repo}: the repo's .gitignore leaves it out"
            raise HubError(message, kind="refused", path=repo, hint="change .gitignore on the Hub")


def _changes(
    operations: Sequence[CommitOperationAdd], files: Mapping[str, RepoFile], delete: Collection[str]
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """What makes the repo's files those of the publication."""
    from huggingface_hub import CommitOperationDelete

    names = {operation.path_in_repo for operation in operations}
    gone = {*replaced(names, files), *(path for path in delete if path in files and path not in names)}
    changed = [_fresh(operation) for operation in operations if not is_unchanged(operation, files)]
    return [*changed, *(CommitOperationDelete(path) for path in sorted(gone))]


def _fresh(operation: CommitOperationAdd) -> CommitOperationAdd:
    """As if nothing was known of the repo: what the client learned at the upload may have changed since."""
    from huggingface_hub import CommitOperationAdd

    data = operation.path_or_fileobj
    if isinstance(data, bytes) and len(data) == operation.upload_info.size:
        return CommitOperationAdd(operation.path_in_repo, data)
    sent = copy.copy(operation)
    sent._remote_oid = None
    return sent


def _sent(
    api: HfApi,
    target: Target,
    place: Place,
    changes: Sequence[CommitOperationAdd | CommitOperationDelete],
    texts: tuple[str, str],
) -> Published:
    """Make the commit, on a new pull request where one is wanted and there is none yet."""
    from huggingface_hub import CommitOperationAdd

    create_pr = target.pr and place.pull is None
    additions = [change for change in changes if isinstance(change, CommitOperationAdd)]
    with translated(target.repo):
        api.preupload_lfs_files(
            target.repo, additions=additions, revision=place.ref, create_pr=create_pr, free_memory=False
        )
        _require_taken(target.repo, additions)
        made = api.create_commit(
            target.repo,
            changes,
            commit_message=texts[0],
            commit_description=texts[1],
            revision=place.ref,
            create_pr=create_pr,
            parent_commit=place.head,
        )
    return _published(api, target, replace(place, pull=made.pr_url or place.pull), made.oid, already=False)
