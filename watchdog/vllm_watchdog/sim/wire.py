"""HTTP/1.1 over one socket: reads a request, writes a response or a stream of chunks. Standard library only, for speed.

Keep-alive with uvicorn's 5 s of patience, Content-Length and chunked bodies, `Expect: 100-continue`. Limits: 64 KiB of
head, 64 MiB of body, 30 s for a started head or body. A broken client is `ClientGoneError`, a bad one `BadHttpError`.
"""

from __future__ import annotations

import json
import select
import socket
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

HEAD_BYTES = 64 << 10
BODY_BYTES = 64 << 20
READ_S = 30.0
KEEP_ALIVE_S = 5.0


class ClientGoneError(Exception):
    """The client has closed the connection or sends nothing more."""


class BadHttpError(Exception):
    """The client doesn't speak HTTP."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; header names are lower-case, the path is without its query."""

    method: str
    target: str
    path: str
    query: dict[str, str]
    version: str
    headers: dict[str, str]
    body: bytes

    @property
    def keep_alive(self) -> bool:
        wish = self.headers.get("connection", "").lower()
        return "close" not in wish and (self.version == "HTTP/1.1" or "keep-alive" in wish)


class Connection:
    """One client."""

    def __init__(self, end: socket.socket, client: str) -> None:
        self._end, self.client, self._buffer = end, client, b""
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self) -> Request:
        """The next request. Raises ClientGoneError or BadHttpError."""
        if not self._buffer:
            self._end.settimeout(KEEP_ALIVE_S)
            self._more()
        self._end.settimeout(READ_S)
        head = self._until(b"\r\n\r\n", HEAD_BYTES).decode("latin-1")
        first, *rest = head.split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise BadHttpError(first[:80])
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        if headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        path, _, query = parts[1].partition("?")
        pairs = dict(pair.partition("=")[::2] for pair in query.split("&") if pair)
        return Request(parts[0], parts[1], path, pairs, parts[2], headers, self._body(headers))

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            try:
                return self._exactly(int(headers.get("content-length", "0")))
            except ValueError as error:
                raise BadHttpError("Content-Length is not a number") from error
        body = b""
        while True:
            size = int(self._until(b"\r\n", HEAD_BYTES).split(b";")[0] or b"0", 16)
            body += self._exactly(size)
            self._until(b"\r\n", HEAD_BYTES)
            if size == 0 or len(body) > BODY_BYTES:
                return body

    def _more(self) -> None:
        try:
            data = self._end.recv(1 << 16)
        except (OSError, TimeoutError) as error:
            raise ClientGoneError from error
        if not data:
            raise ClientGoneError
        self._buffer += data

    def _until(self, mark: bytes, limit: int) -> bytes:
        while mark not in self._buffer:
            if len(self._buffer) > limit:
                raise BadHttpError("head too long")
            self._more()
        found, _, self._buffer = self._buffer.partition(mark)
        return found

    def _exactly(self, size: int) -> bytes:
        if not 0 <= size <= BODY_BYTES:
            raise BadHttpError("body too long")
        while len(self._buffer) < size:
            self._more()
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def send(self, data: bytes) -> None:
        """Raises ClientGoneError."""
        try:
            self._end.sendall(data)
        except (OSError, TimeoutError) as error:
            raise ClientGoneError from error

    def respond(self, request: Request, status: int, body: bytes, kind: str = "application/json") -> None:
        """A whole response."""
        head = self._head(request, status, kind) + f"content-length: {len(body)}\r\n\r\n".encode()
        self.send(head if request.method == "HEAD" else head + body)

    def begin(self, request: Request) -> None:
        """The head of an event stream."""
        self.send(self._head(request, 200, "text/event-stream; charset=utf-8") + b"transfer-encoding: chunked\r\n\r\n")

    def chunk(self, data: bytes) -> None:
        """One chunk of a stream; an empty one ends it."""
        self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def gone(self) -> bool:
        """Whether the client has closed its side, without taking what it has sent."""
        if not select.select([self._end], [], [], 0)[0]:
            return False
        try:
            return not self._end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._end.close()

    @staticmethod
    def _head(request: Request, status: int, kind: str) -> bytes:
        close = "" if request.keep_alive else "connection: close\r\n"
        reason = HTTPStatus(status).phrase
        return f"HTTP/1.1 {status} {reason}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n{close}".encode()


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
