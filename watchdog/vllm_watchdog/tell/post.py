"""One HTTP POST of a message, with a deadline for all of it.

`timeout_s` bounds a whole try: the timeouts of `requests` are per socket operation, so a receiver that drips a byte a
second would hold one for hours; a timer shuts the socket at the deadline.  (Only the name server can hold a try up for
longer, as long as the resolver's own limits.)  The address and the headers are secrets: they appear in no message; what
is told is a status or the name of an error.  Replies are read up to `reply_limit`.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import requests
import requests.adapters
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from vllm_watchdog.tell.letter import Reply, Request, retry_after

reply_limit = 64 << 10
operation_s = 5.0           # to connect, and between two bytes

logging.getLogger("urllib3").setLevel(logging.CRITICAL)     # its warnings and debug lines hold whole addresses

_world = (requests.RequestException, urllib3.exceptions.HTTPError, OSError, UnicodeError)


def post(request: Request, timeout_s: float, wall: Callable[[], float] = time.time) -> Reply:
    """`wall`: epoch seconds, to read a Retry-After that is a date."""
    with _Deadline(timeout_s) as deadline, requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter(deadline))
        headers = {"Content-Type": "application/json", **request.headers, "User-Agent": "llm-watchdog"}
        try:
            reply = session.post(request.url, data=request.body, headers=headers, stream=True,
                                 timeout=min(operation_s, timeout_s), allow_redirects=False, auth=_as_it_is)
        except _world as error:
            return Reply(None, f"no answer within {timeout_s:g} s" if deadline.passed else reason(error))
        hint = ", a redirect: give the final address" if 300 <= reply.status_code < 400 else ""
        retry_after_s = retry_after(reply.headers.get("Retry-After", ""), wall())
        return Reply(reply.status_code, f"HTTP {reply.status_code}{hint}", _body(reply), retry_after_s)


def _body(reply: requests.Response) -> bytes:
    """What there is of it.  The status has decided: a body that never ends must not have the alert sent again."""
    try:
        body: bytes = reply.raw.read(reply_limit, decode_content=True)
    except _world:
        return b""
    return body


class _Deadline:
    """Shuts every socket of one try when its time is over."""

    def __init__(self, deadline_s: float) -> None:
        self._end = time.monotonic() + deadline_s
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(deadline_s, self._shut)
        self._timer.daemon, self._timer.name = True, "alert-deadline"

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._timer.cancel()
        with self._lock:
            self._sockets.clear()       # closed by now: their descriptors may be someone else's

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def watch(self, peer: socket.socket) -> None:
        with self._lock:
            self._sockets.append(peer)
        if self.passed:
            self._shut()

    def _shut(self) -> None:
        with self._lock:
            for peer in self._sockets:
                try:
                    socket.socket.shutdown(peer, socket.SHUT_RDWR)      # below TLS, whose state is another thread's
                except OSError:
                    continue            # gone already


class _Adapter(requests.adapters.HTTPAdapter):
    """Gives every connection, through a proxy or not, to the deadline."""

    def __init__(self, deadline: _Deadline) -> None:
        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                deadline.watch(self.sock)

        class Tls(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                deadline.watch(self.sock)

        class PlainPool(urllib3.HTTPConnectionPool):
            ConnectionCls = Plain

        class TlsPool(urllib3.HTTPSConnectionPool):
            ConnectionCls = Tls

        self._pools = {"http": PlainPool, "https": TlsPool}
        super().__init__(max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._pools
        return manager


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Without this, a ~/.netrc that knows the host would replace the Authorization header."""
    return request


def reason(error: BaseException) -> str:
    """The error's name, and what the kernel said under it; never its text, which holds the address."""
    cause: BaseException | None = error
    for _ in range(10):
        if isinstance(cause, socket.gaierror):
            return f"{type(error).__name__} (the name was not resolved)"
        if isinstance(cause, ssl.SSLError) and cause.reason:
            return f"{type(error).__name__} ({cause.reason})"       # OpenSSL's constant; its errno is not the kernel's
        if isinstance(cause, OSError) and not isinstance(cause, requests.RequestException) and cause.errno:
            return f"{type(error).__name__} ({os.strerror(cause.errno)})"
        cause = cause and (cause.__cause__ or cause.__context__)
    return type(error).__name__
