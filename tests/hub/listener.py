"""The server's sockets: a thread for every connection, all of which end when it stops listening.

Answers are made by ``answer``; what a fault does to a connection is done here.
"""

from __future__ import annotations

import os
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO, cast

from .web import Body, Part, Request, Response

_POLL = 0.01  # seconds until the loop notices that it is to end
_PIECE = 1 << 20


@dataclass(slots=True)
class Exchange:
    """A request as it was logged; ``sent`` and ``received`` are bytes of bodies, ``range`` is the header's text.

    The status is 0 when the connection was cut instead of an answer.
    """

    method: str
    path: str
    range: str
    with_token: bool
    status: int = 0
    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of an answer, then the end of the connection; without an answer at once."""

    response: Response | None = None
    after: int = 0


Answerer = Callable[[Request, Exchange], Response | Cut]


class Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = os.name == "posix"  # elsewhere it would share the port with others
    daemon_threads = False  # closing waits for them
    request_queue_size = 128

    def __init__(self, host: str, port: int, answer: Answerer) -> None:
        super().__init__((host, port), Handler)
        self.host = host
        self.answer = answer
        self.errors: list[BaseException] = []
        self._open: set[socket.socket] = set()
        self._loop = threading.Thread(target=self.serve_forever, args=(_POLL,), name="test Hub")
        self._loop.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def origin(self) -> str:
        return f"http://{self.host}:{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """A connection that was cut is no error; a mistake of the server's is kept for whoever stops it."""
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            self.errors.append(error)

    def deafen(self) -> None:
        """Refuse new connections; the loop and the sockets of old ones go on until ``close``."""
        self.shutdown()
        self._loop.join()
        self.socket.close()

    def close(self) -> None:
        """Cut every connection and wait for its thread."""
        self.deafen()
        for connection in list(self._open):
            hang_up(connection)
        self.server_close()


def hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was first
        return


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes
    server: Listener

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class's name)
        """Nothing: the log is ``Exchange``."""

    def _handle(self) -> None:
        headers = {name.title(): text for name, text in self.headers.items()}
        body = Body(cast(BinaryIO, self.rfile), headers)
        request = Request(self.command, self.path, headers, body)
        exchange = Exchange(self.command, self.path, headers.get("Range", ""), "Authorization" in headers)
        try:
            answer = self.server.answer(request, exchange)
            body.drain()
            exchange.received = body.received
            if isinstance(answer, Response):
                self._send(answer, exchange, None)
            else:
                if answer.response is not None:
                    self._send(answer.response, exchange, answer.after)
                self._cut()
        except ConnectionError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815  (the base class looks for these)

    def _cut(self) -> None:
        self.close_connection = True
        hang_up(self.connection)

    def _send(self, response: Response, exchange: Exchange, limit: int | None) -> None:
        """The log has the status, and the bytes of each piece, before the client has them."""
        exchange.status = response.status
        self.send_response(response.status)
        for name, text in {**response.headers, "Content-Length": str(len(response.body))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        for piece in _pieces(response.body, limit):
            exchange.sent += len(piece)
            self.wfile.write(piece)


def _pieces(body: bytes | Part, limit: int | None) -> Iterator[bytes]:
    left = len(body) if limit is None else min(limit, len(body))
    if isinstance(body, bytes):
        yield body[:left]
        return
    with open(body.path, "rb") as file:
        file.seek(body.start)
        while left:
            piece = file.read(min(left, _PIECE))
            left -= len(piece)
            yield piece
