"""HTTP requests on one kept connection, each under a deadline for the whole of it.

`timeout=` of urllib3 and requests is per socket operation: a server that drips a byte a second holds it for ever.  The
sockets here look at the deadline before every operation.  urllib3 without requests on top: no proxy, no netrc, no
redirect may come between us and an engine of this host.  For one thread; blocks it for `within_s` at most.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from urllib3 import HTTPConnectionPool, Timeout
from urllib3.connection import HTTPConnection
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.exceptions import TimeoutError as TimedOut

BLOCK = 65536


class RefusedError(Exception):
    """Nobody listens."""


class SilentError(Exception):
    """Connected, but no whole answer came; the text says what came instead."""


class TooLongError(Exception):
    """The body is longer than its cap."""


class Deadline:
    """One for all sockets of an exchange."""

    def __init__(self) -> None:
        self.at = 0.0

    def left(self) -> float:
        """Seconds; raises TimeoutError when there are none."""
        if (left := self.at - time.monotonic()) <= 0:
            raise TimeoutError("deadline")
        return left


class DeadlineSocket(socket.socket):
    deadline: Deadline

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self.settimeout(self.deadline.left())
        return super().recv_into(*args, **kwargs)

    def sendall(self, *args: Any, **kwargs: Any) -> None:
        self.settimeout(self.deadline.left())
        super().sendall(*args, **kwargs)


class Connection(HTTPConnection):
    def __init__(self, exchange: Exchange, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = exchange

    def _new_conn(self) -> socket.socket:
        bound = DeadlineSocket(fileno=super()._new_conn().detach())
        bound.deadline = self._exchange.deadline
        self._exchange.connects += 1
        return bound


class Exchange:
    """`connects` counts connections made: while it stands still, the same process has answered."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str] | None = None) -> None:
        self.deadline, self.connects = Deadline(), 0
        self._pool = HTTPConnectionPool(host, port, maxsize=1, retries=False, headers=headers)
        self._pool.ConnectionCls = partial(Connection, self)  # type: ignore[assignment]  # urllib3 only calls it

    def ask(self, method: str, path: str, within_s: float, cap: int, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body.  Raises RefusedError, SilentError, TooLongError."""
        self.deadline.at = time.monotonic() + within_s
        before = self.connects
        try:
            return self._once(method, path, cap, body)
        except SilentError:
            if before == 0 or self.connects != before or self.deadline.at <= time.monotonic():
                raise
        # The server closed the kept connection while it was idle: that says nothing about its health.
        return self._once(method, path, cap, body)

    def close(self) -> None:
        self._pool.close()

    def _once(self, method: str, path: str, cap: int, body: bytes | None) -> tuple[int, bytes]:
        try:
            response = self._pool.urlopen(
                method, path, body=body, redirect=False, preload_content=False,
                timeout=Timeout(connect=self.deadline.left()),
            )
            content = b""
            # Up to the empty read that ends it: only that one notices a body shorter than it was announced.
            while len(content) <= cap and (part := response.read(BLOCK, decode_content=False)):
                content += part
        except NewConnectionError:
            raise RefusedError from None
        except (TimedOut, TimeoutError):
            raise SilentError("no whole answer in time") from None
        except HTTPError as error:
            raise SilentError(f"the connection ended without an answer ({type(error).__name__})") from None
        if len(content) > cap:
            response.close()
            raise TooLongError(f"more than {cap >> 20} MiB")
        response.release_conn()
        return response.status, content
