"""The Hub's API for writing: what to upload how, commits, and the pull requests that hold them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from . import refusals, store
from .accounts import Account
from .refusals import Refused
from .site import Site, find
from .store import DATE, Change, Discussion, Entry, Repo, Status
from .web import Request, Response, Route, reply

_LARGE = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|gguf|onnx|h5|msgpack|npz|parquet|tar|gz|zip)$")
_LARGE_BYTES = 10_000_000


def is_large(path: str, size: int) -> bool:
    """Whether the Hub wants it as an object: by its suffix or its size.  The client never sends an empty one."""
    return size > _LARGE_BYTES or (size > 0 and _LARGE.search(path) is not None)


def preupload(site: Site, request: Request) -> Response:
    """How to send each file, and what the repo has under its name: an equal one is not sent at all."""
    repo, _ = find(site, request, "propose" if request.flag("create_pr") else "write")
    files = store.tree(repo, request["rev"])
    asked = [(f["path"], f["size"], files.get(f["path"])) for f in request.body.json()["files"]]
    return reply({
        "files": [
            {
                "path": path,
                "uploadMode": "lfs" if is_large(path, size) else "regular",
                "shouldIgnore": _is_ignored(files, path),
                "oid": (known.sha256 or known.oid) if known else None,
            }
            for path, size, known in asked
        ]
    })  # fmt: skip


def _is_ignored(files: Mapping[str, Entry], path: str) -> bool:
    """Whether the repo's .gitignore names it; only plain patterns."""
    ignore = files.get(".gitignore")
    lines = ignore.data.decode().split() if ignore is not None and ignore.data is not None else []
    return any(fnmatchcase(path, line) for line in lines)


@dataclass(slots=True)
class Draft:
    """A commit as its lines are read."""

    title: str = ""
    description: str = ""
    parent: str | None = None
    added: dict[str, Entry] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)


def _header(_site: Site, draft: Draft, value: dict[str, Any]) -> None:
    draft.title, draft.description = value["summary"], value.get("description", "")
    draft.parent = value.get("parentCommit")


def _file(_site: Site, draft: Draft, value: dict[str, Any]) -> None:
    draft.added[value["path"]] = store.regular(base64.b64decode(value["content"]))


def _large_file(site: Site, draft: Draft, value: dict[str, Any]) -> None:
    sha256 = value["oid"]
    if sha256 in site.cas.hashes:
        size = site.cas.size(site.cas.hashes[sha256])
    elif site.objects.has(sha256):
        size = site.objects.size(sha256)
    else:
        raise Refused(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
    draft.added[value["path"]] = store.large(sha256, size)


def _deleted_file(_site: Site, draft: Draft, value: dict[str, Any]) -> None:
    draft.deleted.append(value["path"])


def _deleted_folder(_site: Site, draft: Draft, value: dict[str, Any]) -> None:
    draft.deleted.append(value["path"].rstrip("/") + "/")


_LINES: dict[str, Callable[[Site, Draft, dict[str, Any]], None]] = {
    "header": _header,
    "file": _file,
    "lfsFile": _large_file,
    "deletedFile": _deleted_file,
    "deletedFolder": _deleted_folder,
}


def commit(site: Site, request: Request) -> Response:
    """Lines of JSON, as one commit; with ``create_pr`` on a new pull request."""
    as_pull = request.flag("create_pr")
    repo, who = find(site, request, "propose" if as_pull else "write")
    assert who is not None
    draft = Draft()
    for line in request.body.read().splitlines():
        item = json.loads(line)
        if item["key"] not in _LINES:
            raise Refused(400, f"unknown key {item['key']}")
        _LINES[item["key"]](site, draft, item["value"])
    with site.store.lock:
        return reply(_made(site, repo, request["rev"], draft, who, as_pull=as_pull))


def _made(site: Site, repo: Repo, revision: str, draft: Draft, who: Account, *, as_pull: bool) -> dict[str, Any]:
    change = Change(draft.title, draft.description, who.name, draft.added, tuple(draft.deleted))
    parent = store.resolve(repo, revision)
    if draft.parent and not parent.startswith(draft.parent):
        raise refusals.conflict()
    if not as_pull and revision not in repo.heads:
        raise refusals.revision_not_found(revision)
    store.without(repo.commits[parent].tree, change.deleted)  # refused before a pull request is opened for it
    ref, found = revision, {}
    if as_pull:
        pull = _opened(repo, draft.title, draft.description, who, "open", pull_request=True)
        ref, found = pull.ref, {"pullRequestUrl": f"{site.endpoint}/{repo.page}/discussions/{pull.num}"}
    made = store.commit(repo, ref, change, parent=parent)
    url = f"{site.endpoint}/{repo.page}/commit/{made.oid}"
    return {"success": True, "commitUrl": url, "commitOid": made.oid, **found}


def _opened(
    repo: Repo, title: str, description: str, who: Account, status: Status, *, pull_request: bool
) -> Discussion:
    return store.open_discussion(
        repo, title, description, author=who.name, status=status, pull_request=pull_request
    )  # fmt: skip


# Discussions and pull requests


def open_discussion(site: Site, request: Request) -> Response:
    """A pull request that is opened empty is a draft."""
    repo, who = find(site, request, "propose")
    assert who is not None
    wanted = request.body.json()
    pull = bool(wanted.get("pullRequest"))
    with site.store.lock:
        description = wanted.get("description", "")
        made = _opened(repo, wanted["title"], description, who, "draft" if pull else "open", pull_request=pull)
    url = f"{site.endpoint}/{repo.page}/discussions/{made.num}"
    return reply({"num": made.num, "url": url, "pullRequest": pull})


def list_discussions(site: Site, request: Request) -> Response:
    """A page of the discussions, the newest first."""
    repo, _ = find(site, request, "read")
    query = request.query
    found = [d for d in reversed(repo.discussions.values()) if _listed(d, query)]
    start = int(query.get("p", 0)) * site.page
    shown = [_described(repo, d) for d in found[start : start + site.page]]
    return reply({"discussions": shown, "count": len(found), "start": start})


def _listed(found: Discussion, query: dict[str, str]) -> bool:
    kind = "pull_request" if found.is_pull_request else "discussion"
    state = "open" if found.status in ("open", "draft") else "closed"
    return (
        query.get("type", "all") in ("all", kind)
        and query.get("status", "all") in ("all", state)
        and query.get("author", found.author) == found.author
    )


def _described(repo: Repo, found: Discussion) -> dict[str, Any]:
    return {
        "num": found.num, "title": found.title, "author": {"name": found.author}, "createdAt": DATE,
        "status": found.status, "isPullRequest": found.is_pull_request,
        "repo": {"name": repo.id, "type": repo.kind.removesuffix("s")},
    }  # fmt: skip


def show_discussion(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "read")
    found = _discussion(repo, request)
    changes = {"base": "refs/heads/main", "mergeCommitId": found.merged_as} if found.is_pull_request else {}
    texts = [found.description, *found.comments]
    events = [_event(found, "comment", **_comment(found, text)) for text in texts if text]
    more = {"events": events, "filesWithConflicts": [], "changes": changes, "diff": ""}
    return reply({**_described(repo, found), **more})


def _discussion(repo: Repo, request: Request) -> Discussion:
    found = repo.discussions.get(int(request["num"]))
    if found is None:
        raise Refused(404, f"there is no discussion {request['num']}")
    return found


def _event(found: Discussion, kind: str, **data: Any) -> dict[str, Any]:
    return {"id": "0", "type": kind, "createdAt": DATE, "author": {"name": found.author}, "data": data}


def _comment(found: Discussion, text: str) -> dict[str, Any]:
    latest = {"raw": text, "html": "", "updatedAt": DATE, "author": {"name": found.author}}
    return {"edited": False, "hidden": False, "latest": latest, "history": [], "numEdits": 0}


def add_comment(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "propose")
    found, text = _discussion(repo, request), request.body.json()["comment"]
    found.comments.append(text)
    return reply({"newMessage": _event(found, "comment", **_comment(found, text))})


def change_status(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "propose")
    found = _discussion(repo, request)
    found.status = cast(Status, request.body.json()["status"])
    return reply({"newStatus": _event(found, "status-change", status=found.status)})


def merge(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    with site.store.lock:
        store.merge(repo, _discussion(repo, request))
    return reply()


ROUTES = (
    Route("POST", "/api/{kind}/{repo}/preupload/{rev}", preupload),
    Route("POST", "/api/{kind}/{repo}/commit/{rev}", commit),
    Route("POST", "/api/{kind}/{repo}/discussions", open_discussion),
    Route("GET", "/api/{kind}/{repo}/discussions", list_discussions),
    Route("GET", "/api/{kind}/{repo}/discussions/{num}", show_discussion),
    Route("POST", "/api/{kind}/{repo}/discussions/{num}/comment", add_comment),
    Route("POST", "/api/{kind}/{repo}/discussions/{num}/status", change_status),
    Route("POST", "/api/{kind}/{repo}/discussions/{num}/merge", merge),
)
