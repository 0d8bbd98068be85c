"""Xet over HTTP: the Hub's tokens for its storage, and the storage.

Version 1 of its protocol only, and no deduplication across files: hf_xet 1.8 asks for more, hears 404, does without.
"""

from __future__ import annotations

import time
from typing import Any

from .refusals import Refused
from .site import Site, find
from .web import Part, Request, Response, Route, part_of, reply
from .xorbs import Cas, Segment, put_shard, put_xorb

_READ, _WRITE = "xet-read", "xet-write"
_VALID = 3600


def read_token(site: Site, request: Request) -> Response:
    find(site, request, "read")
    return _token(site, _READ)


def write_token(site: Site, request: Request) -> Response:
    find(site, request, "propose" if request.flag("create_pr") else "write")
    return _token(site, _WRITE)


def _token(site: Site, text: str) -> Response:
    """The Rust client reads the body, the Python one the headers."""
    expires = int(time.time()) + _VALID
    headers = {
        "X-Xet-Cas-Url": site.storage,
        "X-Xet-Access-Token": text,
        "X-Xet-Token-Expiration": str(expires),
    }
    return reply({"accessToken": text, "exp": expires, "casUrl": site.storage}, headers=headers)


def _expect(request: Request, *tokens: str) -> None:
    if request.headers.get("Authorization", "").removeprefix("Bearer ") not in tokens:
        raise Refused(401, "the storage wants a token of the Hub's")


def upload_xorb(site: Site, request: Request) -> Response:
    _expect(request, _WRITE)
    data = request.body.read()
    with site.store.lock:
        new = request["xorb"] not in site.cas.chunks
        put_xorb(site.cas, request["xorb"], data)
    return reply({"was_inserted": new})


def upload_shard(site: Site, request: Request) -> Response:
    _expect(request, _WRITE)
    data = request.body.read()
    with site.store.lock:
        put_shard(site.cas, data)
    return reply({"result": 1})


def reconstruction(site: Site, request: Request) -> Response:
    _expect(request, _READ, _WRITE)
    if request["file"] not in site.cas.files:
        raise Refused(404, "there is no such file")
    size = site.cas.size(request["file"])
    first, _, last = (request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
    start, stop = int(first), min(size, int(last) + 1 if last else size)
    if size and start >= size:
        raise Refused(416, "Range Not Satisfiable")
    return reply(_plan(site.cas, site.cas.files[request["file"]], start, stop, f"{site.storage}/xorbs"))


def _plan(cas: Cas, segments: tuple[Segment, ...], start: int, stop: int, base: str) -> dict[str, Any]:
    """The chunks that hold these bytes of a file, and where they lie in their xorbs."""
    terms: list[dict[str, Any]] = []
    ranges: dict[str, list[tuple[int, int]]] = {}
    skip, at = 0, 0
    for segment in segments:
        begin, end, here = _needed(cas, segment, start - at, stop - at)
        if begin < end:
            skip = skip if terms else start - at - here
            size = sum(c.size for c in cas.chunks[segment.xorb][begin:end])
            terms.append({"hash": segment.xorb, "unpacked_length": size, "range": {"start": begin, "end": end}})
            ranges.setdefault(segment.xorb, []).append((begin, end))
        at += segment.size
    fetch = {xorb: [_fetch(cas, xorb, *r, base) for r in merged(found)] for xorb, found in ranges.items()}
    return {"offset_into_first_range": skip, "terms": terms, "fetch_info": fetch}


def _needed(cas: Cas, segment: Segment, start: int, stop: int) -> tuple[int, int, int]:
    """The segment's chunks that hold its bytes ``start`` to ``stop``, and where the first of them starts."""
    sizes = [c.size for c in cas.chunks[segment.xorb][segment.start : segment.stop]]
    begin, here = 0, 0
    while begin < len(sizes) and here + sizes[begin] <= start:
        here += sizes[begin]
        begin += 1
    end, at = begin, here
    while end < len(sizes) and at < stop:
        at += sizes[end]
        end += 1
    return segment.start + begin, segment.start + end, here


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Each term must lie inside one range, or the Rust client panics: ranges that touch are one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _fetch(cas: Cas, xorb: str, begin: int, end: int, base: str) -> dict[str, Any]:
    chunks = cas.chunks[xorb]
    where = {"start": chunks[begin].start, "end": chunks[end - 1].stop - 1}
    return {"range": {"start": begin, "end": end}, "url": f"{base}/{xorb}", "url_range": where}


def get_xorb(site: Site, request: Request) -> Response:
    """Like a signed address: whoever knows it needs no token."""
    path = site.cas.path(request["xorb"])
    if not path.exists():
        raise Refused(404, "there is no such xorb")
    return part_of(Part(path, 0, path.stat().st_size), request, {})


ROUTES = (
    Route("GET", "/api/{kind}/{repo}/xet-read-token/{rev}", read_token),
    Route("GET", "/api/{kind}/{repo}/xet-write-token/{rev}", write_token),
    Route("POST", "/v1/xorbs/{prefix}/{xorb}", upload_xorb),
    Route("POST", "/v1/shards", upload_shard),
    Route("GET", "/v1/reconstructions/{file}", reconstruction),
    Route("GET", "/xorbs/{xorb}", get_xorb),
)
