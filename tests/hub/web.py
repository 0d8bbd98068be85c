"""Requests, answers and tables of routes: what the server's other parts see of HTTP.

Paths are matched as they were sent and unquoted afterwards, part by part: a revision may be ``refs%2Fpr%2F1``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from .refusals import Refused

if TYPE_CHECKING:
    from .site import Site

_PIECE = 1 << 20
#: What a word in braces stands for in a route's pattern; any other is one part of a path.
_WORDS = {
    "kind": "(?P<kind>models|datasets|spaces)",
    "web": "(?:(?P<web>datasets|spaces)/)?",  # the pages and files of models have no prefix
    "repo": "(?P<repo>[^/]+/[^/]+?)",
    "path": "(?P<path>.+)",
}


class Body:
    """What a request brings along, read once, in pieces or whole."""

    def __init__(self, stream: BinaryIO, headers: Mapping[str, str]) -> None:
        self._stream = stream
        self._left = int(headers.get("Content-Length") or 0)
        self._chunked = "chunked" in (headers.get("Transfer-Encoding") or "")
        self.received = 0

    def pieces(self) -> Iterator[bytes]:
        """Raises ConnectionError when the client goes away before the end."""
        while self._chunked and not self._left:
            self._left = int(self._stream.readline().split(b";")[0] or b"0", 16)
            if not self._left:
                self._stream.readline()
                self._chunked = False
                return
            yield from self._of_known_length()
            self._stream.readline()
        yield from self._of_known_length()

    def _of_known_length(self) -> Iterator[bytes]:
        while self._left:
            piece = self._stream.read(min(self._left, _PIECE))
            if not piece:
                raise ConnectionError("the client went away")
            self._left -= len(piece)
            self.received += len(piece)
            yield piece

    def read(self) -> bytes:
        return b"".join(self.pieces())

    def json(self) -> Any:
        """An empty body is an empty object."""
        return json.loads(self.read() or b"{}")

    def drain(self) -> None:
        """An answer to a request that was not read to its end would not be heard."""
        for _ in self.pieces():
            pass


@dataclass(slots=True)
class Request:
    """``path`` is still quoted; ``args`` are the words of the route's pattern, unquoted."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Body
    args: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true")

    def __getitem__(self, name: str) -> str:
        return self.args[name]


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes ``start`` to ``stop`` (exclusive) of a file."""

    path: Path
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Response:
    status: int = 200
    body: bytes | Part = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Callable[["Site", Request], Response]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    pattern: str
    answer: Answer


def reply(value: object = None, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; without a value, an empty object."""
    data = json.dumps({} if value is None else value).encode()
    return Response(status, data, {"Content-Type": "application/json", **(headers or {})})


def refusal(error: Refused) -> Response:
    return reply({"error": error.message}, status=error.status, headers=error.headers)


def compiled(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"\{(\w+)\}", pattern)
    texts = [_WORDS.get(p, f"(?P<{p}>[^/]+)") if n % 2 else re.escape(p) for n, p in enumerate(pieces)]
    return re.compile("".join(texts))


class Table:
    """Routes in order; the first that fits answers."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [(route, compiled(route.pattern)) for route in routes]

    def answer(self, site: Site, request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        for route, pattern in self._routes:
            if route.method == method and (match := pattern.fullmatch(request.path)):
                request.args = {name: unquote(text) for name, text in match.groupdict("").items()}
                try:
                    return route.answer(site, request)
                except Refused as error:
                    return refusal(error)
        return refusal(Refused(404, f"the test Hub has no route for {request.method} {request.path}"))


def part_of(data: bytes | Part, request: Request, headers: Mapping[str, str]) -> Response:
    """A body, or the range of it that was asked for (RFC 9110, section 14; one range only)."""
    size = len(data)
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range") or "")
    if not match or match[0] == "bytes=-":
        return Response(200, data, headers)
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        raise Refused(416, "Range Not Satisfiable", extra={"Content-Range": f"bytes */{size}"})
    some = data[start:stop] if isinstance(data, bytes) else Part(data.path, data.start + start, data.start + stop)
    return Response(206, some, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{size}"})
