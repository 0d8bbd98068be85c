"""The Hub's API for what is in a repo: trees, paths, branches, tags and history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode

from . import refusals, store
from .refusals import Refused
from .site import Site, find, xet_hash
from .store import DATE, Commit, Entry
from .web import Request, Response, Route, reply

Item = dict[str, Any]


def tree(site: Site, request: Request) -> Response:
    """A page of files and folders, with a link to the next."""
    repo, _ = find(site, request, "read")
    files = store.tree(repo, request["rev"])
    folder = request.args.get("path", "").strip("/")
    shown = list(_below(site, files, folder, recursive=request.flag("recursive"), expand=request.flag("expand")))
    if folder and not shown:
        raise refusals.entry_not_found(folder)
    start = int(request.query.get("cursor", 0))
    stop = start + site.page
    link = f"{site.endpoint}{request.path}?{urlencode({**request.query, 'cursor': stop})}"
    return reply(shown[start:stop], headers={"Link": f'<{link}>; rel="next"'} if stop < len(shown) else {})


def _below(site: Site, files: dict[str, Entry] | Any, folder: str, *, recursive: bool, expand: bool) -> Iterator[Item]:
    seen, prefix = set(), f"{folder}/" if folder else ""
    for path in sorted(p for p in files if p.startswith(prefix)):
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            name = prefix + "/".join(parts[:depth])
            if name not in seen:
                seen.add(name)
                yield directory(name, expand=expand)
        if recursive or len(parts) == 1:
            yield file(site, path, files[path], expand=expand)


def directory(path: str, *, expand: bool) -> Item:
    found: Item = {"type": "directory", "oid": store.git_oid(path.encode()), "size": 0, "path": path}
    return {**found, **_LAST_COMMIT} if expand else found


def file(site: Site, path: str, entry: Entry, *, expand: bool) -> Item:
    found: Item = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
    if entry.sha256 is not None:
        found["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if (known := xet_hash(site, entry)) is not None:
        found["xetHash"] = known
    return {**found, **_LAST_COMMIT} if expand else found


_LAST_COMMIT: Item = {"lastCommit": {"id": "0" * 40, "title": "not kept", "date": DATE}}


def paths_info(site: Site, request: Request) -> Response:
    """The files and folders among the paths of a form; what does not exist is left out."""
    repo, _ = find(site, request, "read")
    files, form = store.tree(repo, request["rev"]), parse_qs(request.body.read().decode())
    expand = form.get("expand", ["false"])[0].lower() in ("1", "true")
    found = []
    for path in (p.strip("/") for p in form.get("paths", [])):
        if path in files:
            found.append(file(site, path, files[path], expand=expand))
        elif any(name.startswith(f"{path}/") for name in files):
            found.append(directory(path, expand=expand))
    return reply(found)


def refs(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "read")
    pulls = {name: oid for name, oid in repo.heads.items() if name.startswith("refs/pr/")}
    branches = {name: oid for name, oid in repo.heads.items() if name not in pulls}
    found = {
        "branches": [_ref(name, f"refs/heads/{name}", oid) for name, oid in branches.items()],
        "converts": [],
        "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
    }
    asked = request.flag("include_prs")
    return reply({**found, "pullRequests": [_ref(n, n, oid) for n, oid in pulls.items()]} if asked else found)


def _ref(name: str, ref: str, oid: str) -> Item:
    return {"name": name, "ref": ref, "targetCommit": oid}


def commits(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "read")
    return reply([_commit(c) for c in store.history(repo, request["rev"])])


def _commit(made: Commit) -> Item:
    by = [{"user": made.author}]
    return {"id": made.oid, "title": made.title, "message": made.description, "date": DATE, "authors": by}


def create_branch(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    start = request.body.json().get("startingPoint") or "main"
    with site.store.lock:
        if request["name"] in repo.heads:
            raise Refused(409, f"Reference already exists: {request['name']}")
        repo.heads[request["name"]] = store.resolve(repo, start)
    return reply()


def delete_branch(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    with site.store.lock:
        if repo.heads.pop(request["name"], None) is None:
            raise refusals.revision_not_found(request["name"])
    return reply()


def create_tag(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    name = request.body.json()["tag"]
    with site.store.lock:
        if name in repo.tags:
            raise Refused(409, f"Tag already exists: {name}")
        repo.tags[name] = store.resolve(repo, request["rev"])
    return reply()


def delete_tag(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    with site.store.lock:
        if repo.tags.pop(request["rev"], None) is None:
            raise refusals.revision_not_found(request["rev"])
    return reply()


ROUTES = (
    Route("GET", "/api/{kind}/{repo}/tree/{rev}", tree),
    Route("GET", "/api/{kind}/{repo}/tree/{rev}/{path}", tree),
    Route("POST", "/api/{kind}/{repo}/paths-info/{rev}", paths_info),
    Route("GET", "/api/{kind}/{repo}/refs", refs),
    Route("GET", "/api/{kind}/{repo}/commits/{rev}", commits),
    Route("POST", "/api/{kind}/{repo}/branch/{name}", create_branch),
    Route("DELETE", "/api/{kind}/{repo}/branch/{name}", delete_branch),
    Route("POST", "/api/{kind}/{repo}/tag/{rev}", create_tag),
    Route("DELETE", "/api/{kind}/{repo}/tag/{rev}", delete_tag),
)
