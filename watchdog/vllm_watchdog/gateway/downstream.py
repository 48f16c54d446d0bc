"""The client's side: one connection.  Reads one request at a time and answers in order; what is pipelined waits.

Blocks on nothing.  Deadlines (head, body, idle, a client that doesn't read) are looked at by `sweep`, four times a second.
A client that closes its side has gone, also one that only closes its sending half: its request is cancelled at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, cast

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.framing import Chunked, Length, UntilClose
from vllm_watchdog.gateway.heads import CONTINUE, HEAD_LIMIT, BadHeadError, RequestHead
from vllm_watchdog.gateway.incoming import BadBodyError, Body, cut_head
from vllm_watchdog.gateway.routes import DEVELOPER_PATHS, Kind

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher
    from vllm_watchdog.gateway.relay import Exchange
    from vllm_watchdog.gateway.upstream import Upstream

linger_s = 2.0              # to let a client read why it is refused, before what it still sends meets a closed port
body_bytes_per_s = 64 << 10  # slower than this a body gets no more time


class Downstream(asyncio.Protocol):
    """`private`: this is the operators' socket."""

    __slots__ = ("_body", "_buffer", "_buffer_paused", "_charged", "_deadline", "_gate", "_take", "_up", "exchange",
                 "paused_at", "private", "transport")

    def __init__(self, gate: Dispatcher, private: bool = False) -> None:
        self._gate, self.private = gate, private
        self._buffer = b""
        self._body: Body | None = None
        self._charged = 0       # bytes of it that are kept here
        self._take: Callable[[bytes], None] = self._read_head
        self._up: Upstream | None = None
        self._deadline, self.paused_at = inf, inf
        self._buffer_paused = False
        self.exchange: Exchange | None = None

    # -- the transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)      # write at once, not at the end of the loop's turn
        self._deadline = self._gate.now() + self._gate.plan.head_timeout_s
        if not self._gate.admit(self):
            self._take = _nowhere
            self._gate.metrics.refused(errors.TOO_MANY_CONNECTIONS)
            self.transport.write(errors.response(errors.TOO_MANY_CONNECTIONS, keep_alive=False))
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._take(data)

    def connection_lost(self, _: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        self._take, self._body, self._buffer, self._up = _nowhere, None, b"", None
        self._gate.forget(self)
        self._release_bytes()
        if exchange is not None:
            exchange.cancel()

    @property
    def paused(self) -> bool:
        """The client doesn't read as fast as the engine writes."""
        return self.paused_at != inf

    @property
    def draining(self) -> bool:
        return self._gate.draining

    def write(self, data: bytes) -> None:
        """To the client; nothing once it has gone, which the loop may tell us only later."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_writing(self) -> None:
        self.paused_at = self._gate.now()
        if self.exchange is not None:
            self.exchange.pause()

    def resume_writing(self) -> None:
        self.paused_at = inf
        if self.exchange is not None:
            self.exchange.resume()

    # -- a request's head

    def _read_head(self, data: bytes) -> None:
        buffer = (self._buffer + data if self._buffer else data).lstrip(b"\r\n")
        try:
            found = cut_head(buffer)
        except BadHeadError as bad:
            self.refuse(bad.refusal)
            return
        if found is not None:
            head, self._buffer = found
            self._begin(head)
            return
        if buffer and not self._buffer:
            self._deadline = self._gate.now() + self._gate.plan.head_timeout_s
        self._buffer = buffer

    def _begin(self, head: RequestHead) -> None:
        self._deadline = inf
        plan = self._gate.plan
        exchange = self.exchange = self._gate.open(self, head)
        if head.path.rstrip("/") in DEVELOPER_PATHS:
            self.refuse(errors.DEVELOPER)
            return
        if head.length is not None and head.length > plan.max_body_bytes:
            self.refuse(errors.BODY_TOO_LARGE)
            return
        if not head.chunked and len(self._buffer) >= (head.length or 0):
            self._have_whole(exchange, head.length or 0)
            return
        if head.expects and not self._buffer:
            self.transport.write(CONTINUE)
        self._body = Body(Chunked() if head.chunked else Length(head.length or 0), plan.max_body_bytes)
        self._deadline = self._gate.now() + plan.body_timeout_s
        if exchange.kind is Kind.OTHER:
            self._take = self._read_ahead
            self.transport.pause_reading()
            exchange.stream()
        else:
            self._take = self._read_whole
            self._take_buffer()

    def _have_whole(self, exchange: Exchange, size: int) -> None:
        """The usual case: the body came with its head, or there is none."""
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        self._take = self._read_ahead
        self._charged = size
        if not self._gate.charge(size):
            self.refuse(errors.NO_MEMORY)
            return
        self._charged = 0       # the exchange's now
        exchange.ready(body)

    def _take_buffer(self) -> None:
        rest, self._buffer = self._buffer, b""
        if rest:
            self._take(rest)

    # -- its body, kept whole or passed on

    def _read_whole(self, data: bytes) -> None:
        body, exchange = self._body, self.exchange
        if body is None or exchange is None:
            return
        end = self._fed(data, body.keep)
        if end is None:
            return
        self._charged += len(data)
        if not self._gate.charge(len(data)):
            self.refuse(errors.NO_MEMORY)
        elif end >= 0:
            whole = body.whole()
            self._gate.charge(len(whole) - self._charged)       # the framing isn't kept
            self._charged = 0
            exchange.ready(whole)

    def _read_on(self, data: bytes) -> None:
        """Streamed to the engine."""
        up = self._up
        if self._body is None or up is None:
            return
        end = self._fed(data, self._body.count)
        if end is not None:
            up.send_on(data if end < 0 else data[:end])

    def _fed(self, data: bytes, feed: Callable[[bytes], int]) -> int | None:
        """As Framing.feed; None: the request was refused."""
        try:
            end = feed(data)
        except BadBodyError as bad:
            self.refuse(bad.refusal)
            return None
        if end < 0:
            self._deadline += len(data) / body_bytes_per_s
        else:
            self._body, self._up, self._deadline = None, None, inf
            self._buffer, self._take = data[end:], self._read_ahead
        return end

    def _release_bytes(self) -> None:
        self._gate.charge(-self._charged)
        self._charged = 0

    def stream_to(self, upstream: Upstream) -> None:
        """The engine is connected: the body may pass."""
        if self._body is not None:
            self._up, self._take = upstream, self._read_on
            self.transport.resume_reading()
            self._take_buffer()

    def tunnel_to(self, upstream: Upstream) -> None:
        """The engine has switched protocols: bytes both ways from here."""
        self._body, self._take = Body(UntilClose(), 0), upstream.send_on
        self._take_buffer()
        self.transport.resume_reading()

    def pause_body(self) -> None:
        if self._up is not None:
            self.transport.pause_reading()

    def resume_body(self) -> None:
        if self._up is not None:
            self.transport.resume_reading()

    def _read_ahead(self, data: bytes) -> None:
        """The next requests, before this one is answered."""
        self._buffer += data
        if len(self._buffer) > HEAD_LIMIT and not self._buffer_paused:
            self._buffer_paused = True
            self.transport.pause_reading()

    # -- answers

    @property
    def body_pending(self) -> bool:
        """Part of the request has still to come: this connection can't carry another."""
        return self._body is not None

    def finished(self, keep_alive: bool) -> None:
        """The exchange is over, its response written."""
        pending, self.exchange, self._up = self.body_pending, None, None
        if pending or not keep_alive:
            self._close(pending)
            return
        self._deadline = self._gate.now() + self._gate.plan.idle_timeout_s
        self._take = self._read_head
        if self._buffer_paused:
            self._buffer_paused = False
            self.transport.resume_reading()
        if self._buffer:
            self._gate.loop.call_soon(self._next)

    def _next(self) -> None:
        if self._take == self._read_head:
            self._take_buffer()

    def broken(self, delimited: bool) -> None:
        """Half a response is out: its framing shows that it is short, or else a reset must."""
        self.exchange = None
        if delimited:
            self.transport.close()
        else:
            self.transport.abort()

    def refuse(self, refusal: errors.Refusal) -> None:
        """Answers and closes; whatever else the client sends is read and dropped for a while."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            begun = exchange.phase == "begun"
            exchange.cancel()
            if begun:
                self.transport.abort()      # two answers to one request would be worse than half of one
                return
        self._gate.metrics.refused(refusal)
        self.write(errors.response(refusal, keep_alive=False))
        self._close(True)

    def _close(self, pending: bool) -> None:
        self._take, self._body, self._buffer = _nowhere, None, b""
        self._release_bytes()
        if not pending or self.transport.is_closing():
            self.transport.close()
            return
        self._deadline = self._gate.now() + linger_s
        self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def close_if_idle(self) -> None:
        """The gateway drains."""
        if self.exchange is None:
            self.transport.close()

    def sweep(self, at: float) -> None:
        if at - self.paused_at > self._gate.plan.body_timeout_s:
            self.transport.abort()
        elif at > self._deadline:
            reading = self._take != _nowhere and (self._buffer or self._body is not None)
            self._deadline = inf
            if reading:
                self.refuse(errors.HEAD_TIMEOUT)
            else:
                self.transport.abort()


def _nowhere(data: bytes) -> None:
    """The request is refused already."""
