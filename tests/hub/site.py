"""What every route works on: the repos, the objects, Xet's storage and how the server is set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, cast

from . import accounts, refusals, store, xorbs
from .accounts import Account
from .objects import Objects
from .store import Entry, Kind, Repo, Store
from .web import Request

#: See: that the repo exists.  Read: its files.  Propose: a pull request.  Write: anything else.
Need = Literal["see", "read", "propose", "write"]


@dataclass(slots=True)
class Site:
    """``endpoint`` is the Hub's origin; ``storage``, another origin as on the real Hub, has objects and Xet.

    ``page`` is the number of items in a page of a listing; ``part`` the size in bytes above which an
    LFS upload goes in several parts, of that size; without ``xet`` nothing has a Xet hash.
    """

    objects: Objects
    cas: xorbs.Cas
    store: Store = field(default_factory=Store)
    endpoint: str = ""
    storage: str = ""
    xet: bool = True
    page: int = 1000
    part: int | None = None
    parts: dict[tuple[str, int], str] = field(default_factory=dict)


def kind_of(request: Request) -> Kind:
    return cast(Kind, request.args.get("kind") or request.args.get("web") or "models")


def find(site: Site, request: Request, need: Need) -> tuple[Repo, Account | None]:
    """The repo that the request names and who asks, who may do what they ask for."""
    kind, name, who = kind_of(request), request["repo"], accounts.account(request.headers)
    repo = site.store.repos.get((kind, name))
    if repo is None and (new := store.new_id(site.store, kind, name)) is not None:
        raise refusals.moved(request.target.replace(f"/{name}", f"/{new}", 1))
    if repo is None or not accounts.may_see(who, repo):
        raise refusals.repo_not_found(signed_in=who is not None)
    for allowed, refused in _conditions(repo, who, need):
        if not allowed:
            raise refused()
    return repo, who


def _conditions(repo: Repo, who: Account | None, need: Need) -> list[tuple[bool, Callable[[], refusals.Refused]]]:
    """What must be so, and what is said when it is not."""
    known = who is not None
    readable = [
        (not repo.disabled, refusals.disabled),
        (need == "see" or accounts.may_read(who, repo), lambda: refusals.gated(repo.id, signed_in=known)),
    ]
    if need in ("see", "read"):
        return readable
    namespace = repo.namespace if need == "write" or who is None else who.name  # anybody may propose
    writable = accounts.may_write(who, namespace)
    return [*readable, (known, refusals.not_signed_in), (writable, refusals.no_write_permission)]


def content(site: Site, entry: Entry) -> bytes:
    """A file's bytes, wherever they are."""
    if entry.data is not None:
        return entry.data
    assert entry.sha256 is not None
    xorbs.materialise(site.cas, site.objects, entry.sha256)
    return site.objects.read(entry.sha256)


def xet_hash(site: Site, entry: Entry) -> str | None:
    """Every large file has one when Xet is on, as on the Hub, however it came."""
    if not site.xet or entry.sha256 is None:
        return None
    with site.store.lock:
        known = site.cas.hashes.get(entry.sha256)
        return known or xorbs.adopt(site.cas, entry.sha256, site.objects.path(entry.sha256))
