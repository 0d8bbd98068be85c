"""The tests' own Hub, on loopback: enough of the real one for ``huggingface_hub`` to work with it unchanged.

It runs in the test's process and is looked at directly: ``hub.read(repo, path)`` asks no client.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from . import api, commits, lfs, listing, store, xet, xorbs
from .accounts import TOKENS
from .faults import Effect, Rule, Rules
from .listener import Cut, Exchange, Listener
from .objects import Objects, chunks
from .site import Site, content
from .store import Change, Commit, Discussion, Entry, Kind, Repo
from .web import Request, Response, Table, refusal

_TABLE = Table([*api.ROUTES, *listing.ROUTES, *commits.ROUTES, *xet.ROUTES, *lfs.ROUTES])
_HUB = "127.0.0.1"
#: Another host, or 1.x takes it for the Hub itself and follows where it should look at the redirect.
#: macOS has no second address; elsewhere localhost may first be tried as ::1, which takes seconds on Windows.
_STORAGE = "localhost" if sys.platform == "darwin" else "127.0.0.2"
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "FTP_PROXY")


class HubServer:
    """Listens while it is entered.  ``site`` has its settings (``xet``, ``page``, ``part``) and all it knows."""

    def __init__(self, root: Path, *, xet: bool = True) -> None:
        self.tokens = TOKENS
        self.site = Site(Objects(root / "objects"), xorbs.Cas(root / "xorbs"), xet=xet)
        self.requests: list[Exchange] = []
        self._rules = Rules()
        self._listeners: list[Listener] = []
        self._outages: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []

    def __enter__(self) -> Self:
        self._listeners = [Listener(host, 0, self._answer) for host in (_HUB, _STORAGE)]
        self.site.endpoint, self.site.storage = (listener.origin for listener in self._listeners)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raises what went wrong in the server itself, unless something else is being raised."""
        self._stopping.set()
        for outage in self._outages:
            outage.join()
        for listener in self._listeners:
            listener.close()
            self._errors += listener.errors
        if self._errors and kind is None:
            raise self._errors[0]

    @property
    def endpoint(self) -> str:
        return self.site.endpoint

    def environment(
        self, home: Path, *, token: str | None = None, xet: bool = True, base: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The environment of a process that uses this Hub and keeps its cache in ``home``; no ``token``, none sent.

        What ``base`` (this process's environment) says of other Hubs and of proxies is left out.
        """
        kept = {name: text for name, text in (os.environ if base is None else base).items() if not is_about_hubs(name)}
        set_here = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": os.fspath(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_XET_TELEMETRY_ENABLED": "0",
            "NO_PROXY": f"{_HUB},{_STORAGE}",
        }
        return kept | set_here | ({"HF_TOKEN": token} if token else {}) | ({} if xet else {"HF_HUB_DISABLE_XET": "1"})

    # Filling it

    def create(
        self,
        repo_id: str,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        private: bool = False,
        gated: bool = False,
        kind: Kind = "models",
    ) -> str:
        """A repo with these files in one commit, whose id is returned."""
        with self.site.store.lock:
            repo = store.create(self.site.store, kind, repo_id, private=private)
            repo.gated = gated
            return self.commit(repo_id, files, kind=kind) if files else repo.heads["main"]

    def commit(
        self,
        repo_id: str,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        deleted: Iterable[str] = (),
        revision: str = "main",
        kind: Kind = "models",
        author: str = "somebody-else",
    ) -> str:
        """A commit on top of a branch, which need not exist, as if somebody else had made it; returns its id."""
        repo = self.repo(repo_id, kind)
        added = {path: self._entry(path, data) for path, data in (files or {}).items()}
        change = Change(f"change {len(repo.commits)}", author=author, added=added, deleted=tuple(deleted))
        with self.site.store.lock:
            return store.commit(repo, revision, change, parent=repo.heads.get(revision, repo.heads["main"])).oid

    def _entry(self, path: str, data: bytes | Path) -> Entry:
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        if not commits.is_large(path, size):
            return store.regular(data if isinstance(data, bytes) else data.read_bytes())
        return store.large(self.site.objects.put([data] if isinstance(data, bytes) else chunks(data)), size)

    def repo(self, repo_id: str, kind: Kind = "models") -> Repo:
        """The repo itself, to change: ``hub.repo(name).disabled = True``."""
        return self.site.store.repos[kind, repo_id]

    def rename(self, old: str, new: str, *, kind: Kind = "models") -> None:
        with self.site.store.lock:
            store.rename(self.site.store, kind, old, new)

    def delete(self, repo_id: str, *, kind: Kind = "models") -> None:
        with self.site.store.lock:
            del self.site.store.repos[kind, repo_id]

    # Looking at it

    def repos(self, kind: Kind = "models") -> list[str]:
        return sorted(repo_id for of, repo_id in self.site.store.repos if of == kind)

    def files(self, repo_id: str, revision: str = "main", *, kind: Kind = "models") -> list[str]:
        return sorted(store.tree(self.repo(repo_id, kind), revision))

    def read(self, repo_id: str, path: str, revision: str = "main", *, kind: Kind = "models") -> bytes:
        with self.site.store.lock:
            return content(self.site, store.tree(self.repo(repo_id, kind), revision)[path])

    def commits(self, repo_id: str, revision: str = "main", *, kind: Kind = "models") -> list[Commit]:
        """Newest first; the last is the one that every repo begins with."""
        return list(store.history(self.repo(repo_id, kind), revision))

    def pull_requests(self, repo_id: str, *, kind: Kind = "models") -> list[Discussion]:
        return [d for d in self.repo(repo_id, kind).discussions.values() if d.is_pull_request]

    def seen(self, method: str = "", path: str = "") -> list[Exchange]:
        """The requests so far with this method and a path in which this expression is found."""
        return [e for e in list(self.requests) if method in ("", e.method) and re.search(path, e.path)]

    def bytes_of_weights(self) -> int:
        """How many bytes of large files, through LFS or Xet, were sent to clients."""
        return sum(e.sent for e in self.seen("GET", r"^/(objects|xorbs)/"))

    # Breaking it

    def fail(self, effect: Effect, *, method: str = "", path: str = "", times: int = 1) -> Rule:
        """Let this happen to the next requests that fit; ``left`` of what is returned says how often it still will."""
        rule = Rule(effect, method, re.compile(path), times)
        with self._rules.lock:
            self._rules.rules.append(rule)
        return rule

    def _answer(self, request: Request, exchange: Exchange) -> Response | Cut:
        self.requests.append(exchange)
        effect = self._rules.take(request.method, request.target)
        if effect is None:
            return _TABLE.answer(self.site, request)
        if effect.first is not None:
            effect.first()
        if effect.wait:
            self._stopping.wait(effect.wait)
        if effect.outage:
            self.go_away(effect.outage)
            return Cut()
        return self._faulty(effect, request)

    def _faulty(self, effect: Effect, request: Request) -> Response | Cut:
        response = _TABLE.answer(self.site, request) if effect.applied else None
        if effect.then is not None:
            effect.then()
        if effect.silent:
            return Cut()
        if effect.answer is not None:
            response = refusal(effect.answer)
        assert response is not None
        return response if effect.cut is None else Cut(response, effect.cut)

    def go_away(self, seconds: float) -> None:
        """Cut every connection and listen again, on the same ports, after this time.

        Returns when connecting is refused.  The rest is another thread's: the connection that asked for it is cut too.
        """
        deaf = threading.Event()
        outage = threading.Thread(target=self._outage, args=(seconds, deaf), name="test Hub's outage")
        self._outages.append(outage)
        outage.start()
        deaf.wait()

    def _outage(self, seconds: float, deaf: threading.Event) -> None:
        before = self._listeners
        for listener in before:
            listener.deafen()
        deaf.set()
        for listener in before:
            listener.close()
            self._errors += listener.errors
        self._stopping.wait(seconds)
        self._listeners = [Listener(listener.host, listener.port, self._answer) for listener in before]


def is_about_hubs(name: str) -> bool:
    upper = name.upper()
    return upper.startswith(("HF_", "HUGGING", "TRANSFORMERS_OFFLINE")) or upper in _PROXIES or upper == "NO_PROXY"
