"""The Hub's API for accounts and whole repos: who am I, create, delete, rename, list, describe."""

from __future__ import annotations

import json
import struct
from typing import Any, cast

from . import accounts, refusals, store
from .accounts import signed_in
from .refusals import Refused
from .site import Site, content, find, kind_of
from .store import DATE, Kind, Repo
from .web import Request, Response, Route, reply


def whoami(_site: Site, request: Request) -> Response:
    who = signed_in(request.headers)
    orgs = [{"name": name, "type": "org", "roleInOrg": role} for name, role in who.orgs.items()]
    token = {"displayName": "test", "role": who.role}
    auth = {"type": "access_token", "accessToken": token}
    return reply({"type": "user", "id": who.name, "name": who.name, "fullname": who.name, "orgs": orgs, "auth": auth})


def agent_harnesses(_site: Site, _request: Request) -> Response:
    """Asked by 2.x before its first call unless telemetry is off; a list instead of an object crashes it."""
    return reply({"standardEnvVars": [], "harnesses": {}})


def validate_yaml(_site: Site, request: Request) -> Response:
    """Of a model card, before a commit that has one."""
    request.body.drain()
    return reply({"warnings": [], "errors": []})


def create(site: Site, request: Request) -> Response:
    wanted, who = request.body.json(), signed_in(request.headers)
    kind, namespace = _named_kind(wanted), wanted.get("organization") or who.name
    repo_id = f"{namespace}/{wanted['name']}"
    if not accounts.may_write(who, namespace):
        raise refusals.no_right_to_create(namespace)
    with site.store.lock:
        found = site.store.repos.get((kind, repo_id))
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        repo = found or store.create(site.store, kind, repo_id, private=private)
    url = {"url": f"{site.endpoint}/{repo.page}", "name": repo_id}
    return reply(url | {"error": "You already created this model repo"}, status=409) if found else reply(url)


def delete(site: Site, request: Request) -> Response:
    wanted = request.body.json()
    repo = _writable(site, request, wanted, f"{wanted.get('organization') or '?'}/{wanted['name']}")
    with site.store.lock:
        del site.store.repos[repo.kind, repo.id]
    return reply()


def move(site: Site, request: Request) -> Response:
    wanted = request.body.json()
    repo = _writable(site, request, wanted, wanted["fromRepo"])
    with site.store.lock:
        store.rename(site.store, repo.kind, repo.id, wanted["toRepo"])
    return reply()


def _named_kind(wanted: dict[str, Any]) -> Kind:
    return cast(Kind, f"{wanted.get('type') or 'model'}s")


def _writable(site: Site, request: Request, wanted: dict[str, Any], repo_id: str) -> Repo:
    """A repo that is named in the body, its namespace left out when it is the user's own."""
    own = signed_in(request.headers).name
    request.args = {"kind": _named_kind(wanted), "repo": repo_id.replace("?/", f"{own}/", 1)}
    return find(site, request, "write")[0]


def list_repos(site: Site, request: Request) -> Response:
    who, kind, query = accounts.account(request.headers), kind_of(request), request.query
    return reply([
        described(repo, repo.heads["main"])
        for (of, repo_id), repo in sorted(site.store.repos.items())
        if of == kind and accounts.may_see(who, repo)
        if query.get("author", repo.namespace) == repo.namespace and query.get("search", "") in repo_id
    ])  # fmt: skip


def info(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "see")
    return reply(
        described(repo, store.resolve(repo, request.args.get("rev") or "main"), blobs="blobs" in request.query)
    )


def described(repo: Repo, commit: str, *, blobs: bool = False) -> dict[str, Any]:
    return {
        "_id": repo.id, "id": repo.id, "modelId": repo.id, "author": repo.namespace, "sha": commit,
        "lastModified": DATE, "createdAt": DATE, "private": repo.private, "gated": "manual" if repo.gated else False,
        "disabled": repo.disabled, "downloads": 0, "likes": 0, "tags": [],
        "siblings": [_sibling(path, entry, blobs) for path, entry in sorted(repo.commits[commit].tree.items())],
    }  # fmt: skip


def _sibling(path: str, entry: store.Entry, blobs: bool) -> dict[str, Any]:
    if not blobs:
        return {"rfilename": path}
    named = {"rfilename": path, "size": entry.size, "blobId": entry.oid}
    lfs = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return {**named, "lfs": lfs} if entry.sha256 else named


def auth_check(site: Site, request: Request) -> Response:
    find(site, request, "read")
    return reply()


def settings(site: Site, request: Request) -> Response:
    repo, _ = find(site, request, "write")
    wanted = request.body.json()
    repo.private = wanted.get("private", wanted.get("visibility", "private" if repo.private else "") == "private")
    repo.gated = bool(wanted.get("gated", repo.gated))
    return reply()


def safetensors_metadata(site: Site, request: Request) -> Response:
    """The headers of every shard that an index names, in one answer (2.x)."""
    repo, _ = find(site, request, "read")
    files = store.tree(repo, "main")
    if request["path"] not in files:
        raise refusals.entry_not_found(request["path"])
    index = json.loads(content(site, files[request["path"]]))
    shards = sorted(set(index["weight_map"].values()))
    if missing := [name for name in shards if name not in files]:
        raise Refused(404, f"the index names shards that are not there: {', '.join(missing)}")
    headers = {name: _header(content(site, files[name])) for name in shards}
    return reply({"index": {"metadata": index.get("metadata")}, "headers": headers})


def _header(data: bytes) -> Any:
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size])


ROUTES = (
    Route("GET", "/api/whoami-v2", whoami),
    Route("GET", "/api/agent-harnesses", agent_harnesses),
    Route("POST", "/api/validate-yaml", validate_yaml),
    Route("POST", "/api/repos/create", create),
    Route("DELETE", "/api/repos/delete", delete),
    Route("POST", "/api/repos/move", move),
    Route("GET", "/api/{kind}", list_repos),
    Route("GET", "/api/{kind}/{repo}", info),
    Route("GET", "/api/{kind}/{repo}/revision/{rev}", info),
    Route("GET", "/api/{kind}/{repo}/auth-check", auth_check),
    Route("PUT", "/api/{kind}/{repo}/settings", settings),
    Route("GET", "/api/{kind}/{repo}/safetensors-metadata/{path}", safetensors_metadata),
)
