"""Large files over plain HTTP: where to send them (Git LFS batch), in one piece or in parts, and where to get them.

Objects are on another origin than the Hub, as on the real one: the client sends no token there.
"""

from __future__ import annotations

from typing import Any

from . import refusals, store, xorbs
from .objects import chunks
from .refusals import Refused
from .site import Site, find, kind_of, xet_hash
from .web import Part, Request, Response, Route, part_of, reply


def resolve(site: Site, request: Request) -> Response:
    """A file's bytes when git has them, else the way to the object, with what the client caches it under."""
    repo, _ = find(site, request, "read")
    commit, path = store.resolve(repo, request["rev"]), request["path"]
    entry = repo.commits[commit].tree.get(path)
    if entry is None:
        raise refusals.entry_not_found(path, commit=commit)
    name = path.rpartition("/")[2]
    known = {"X-Repo-Commit": commit, "Content-Disposition": f'inline; filename="{name}"'}
    if entry.data is not None:
        return part_of(entry.data, request, {**known, "ETag": f'"{entry.oid}"'})
    known |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size), "ETag": f'"{entry.sha256}"'}
    if (file := xet_hash(site, entry)) is not None:
        route = f"{site.endpoint}/api/{kind_of(request)}/{repo.id}/xet-read-token/{commit}"
        known |= {"X-Xet-Hash": file, "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
    return Response(302, b"", {**known, "Location": f"{site.storage}/objects/{entry.sha256}"})


def get_object(site: Site, request: Request) -> Response:
    sha256 = request["sha256"]
    with site.store.lock:
        xorbs.materialise(site.cas, site.objects, sha256)
    if not site.objects.has(sha256):
        raise Refused(404, "there is no such object")
    whole = Part(site.objects.path(sha256), 0, site.objects.size(sha256))
    return part_of(whole, request, {"ETag": f'"{sha256}"'})


def batch(site: Site, request: Request) -> Response:
    """What to do for each object; nothing for one that is there.  It does not say whether it is for a pull request."""
    find(site, request, "propose")
    asked = request.body.json()
    with site.store.lock:
        found = [_actions(site, o["oid"], o["size"]) for o in asked["objects"]]
    able = [t for t in ("xet",) if site.xet and t in asked.get("transfers", [])]
    transfer = able[0] if able else "multipart" if site.part else "basic"
    return reply({"transfer": transfer, "objects": found}, headers={"Content-Type": "application/vnd.git-lfs+json"})


def _actions(site: Site, oid: str, size: int) -> dict[str, Any]:
    xorbs.materialise(site.cas, site.objects, oid)
    if site.objects.has(oid):
        return {"oid": oid, "size": size}
    verify = {"href": f"{site.storage}/objects/{oid}/verify", "header": {}}
    return {"oid": oid, "size": size, "actions": {"upload": _upload(site, oid, size), "verify": verify}}


def _upload(site: Site, oid: str, size: int) -> dict[str, Any]:
    """To one address, or to one for each part and then to the one that puts them together."""
    if site.part is None or size <= site.part:
        return {"href": f"{site.storage}/objects/{oid}", "header": {}}
    count = -(-size // site.part)
    parts = {f"{n:05d}": f"{site.storage}/objects/{oid}/parts/{n}" for n in range(1, count + 1)}
    return {"href": f"{site.storage}/objects/{oid}/complete", "header": {"chunk_size": str(site.part), **parts}}


def put_object(site: Site, request: Request) -> Response:
    site.objects.put(request.body.pieces(), expected=request["sha256"])
    return Response()


def put_part(site: Site, request: Request) -> Response:
    """A part is an object of its own until all are there."""
    made = site.objects.put(request.body.pieces())
    site.parts[request["sha256"], int(request["number"])] = made
    return Response(headers={"ETag": f'"{made}"'})


def complete(site: Site, request: Request) -> Response:
    sha256 = request["sha256"]
    numbers = [part["partNumber"] for part in request.body.json()["parts"]]
    made = [site.objects.path(site.parts[sha256, n]) for n in numbers]
    site.objects.put((piece for path in made for piece in chunks(path)), expected=sha256)
    return reply({"success": True})


def verify(site: Site, request: Request) -> Response:
    sha256 = request["sha256"]
    if not site.objects.has(sha256) or site.objects.size(sha256) != request.body.json()["size"]:
        raise Refused(404, "there is no object of this size")
    return reply()


ROUTES = (
    Route("GET", "/{web}{repo}/resolve/{rev}/{path}", resolve),
    Route("POST", "/{web}{repo}.git/info/lfs/objects/batch", batch),
    Route("GET", "/objects/{sha256}", get_object),
    Route("PUT", "/objects/{sha256}", put_object),
    Route("PUT", "/objects/{sha256}/parts/{number}", put_part),
    Route("POST", "/objects/{sha256}/complete", complete),
    Route("POST", "/objects/{sha256}/verify", verify),
)
