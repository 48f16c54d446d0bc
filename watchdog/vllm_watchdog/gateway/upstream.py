"""The engine's side: one connection, and the pool of one life of one engine.

A connection carries one request at a time and is used again after a clean end.  While a body passes, a read costs one
count of its framing and one write.  Backpressure: the client's transport pauses this one, and the other way round.
Waits only for a connect, at most `connect_s`; how long an engine may think is the daemon's to judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from vllm_watchdog.gateway.framing import Chunked, Framing, FramingError, Length, UntilClose
from vllm_watchdog.gateway.heads import END, HEAD_LIMIT, SWITCHING, BadHeadError, ResponseHead, parse_response
from vllm_watchdog.gateway.routes import Target

if TYPE_CHECKING:
    from vllm_watchdog.gateway.relay import Exchange

connect_s = 2.0     # an engine is on this host; its backlog may be full, its process stopped
idle_reuse_s = 4.0  # uvicorn closes an idle connection after 5 s: don't race it
idle_limit = 256    # connections kept for later


class Upstream(asyncio.Protocol):
    """`fresh`: it carries its first request.  `flow` None: no body passes at the moment."""

    __slots__ = ("_buffer", "_flow", "_pool", "exchange", "fresh", "idle_at", "lost", "reusable", "transport", "write")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._buffer = b""
        self._flow: Framing | None = None
        self.exchange: Exchange | None = None
        self.fresh, self.reusable, self.lost = True, True, False
        self.idle_at = 0.0
        self.write: Callable[[bytes], object] = _nowhere      # where the body goes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)      # write at once, not at the end of the loop's turn
        self._pool.open.add(self)

    @property
    def insertable(self) -> bool:
        return self._flow is not None and self._flow.insertable

    def begin(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Sends a request."""
        self.exchange = exchange
        self.transport.write(head + body if len(body) < HEAD_LIMIT else head)
        if len(body) >= HEAD_LIMIT:
            self.transport.write(body)

    def send_on(self, data: bytes) -> None:
        """More of a request's body."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        flow = self._flow
        if flow is None:
            self._head(data)
            return
        try:
            end = flow.feed(data)
        except FramingError:
            self._garbage()
            return
        if end < 0:
            self.write(data)
        else:
            self._end(data, end)

    def _head(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:        # nobody asked
            self.abort()
            return
        self._buffer = buffer = self._buffer + data
        at = buffer.find(END)
        if at < 0:
            if len(buffer) > HEAD_LIMIT or not b"HTTP/1.".startswith(buffer[:7]):
                self._garbage()
            return
        self._buffer = b""
        try:
            head = parse_response(buffer[: at + 4])
        except BadHeadError:
            self._garbage()
            return
        if head.status < 200 and head.status != SWITCHING:
            exchange.on_interim(head)
            if rest := buffer[at + 4 :]:
                self._head(rest)
            return
        self._answer(exchange, head, buffer[at + 4 :])

    def _answer(self, exchange: Exchange, head: ResponseHead, rest: bytes) -> None:
        self.reusable = head.keep_alive
        switched = head.status == SWITCHING
        if switched and not exchange.head.upgrade:
            self._garbage()
            return
        size = 0 if head.bodiless or exchange.head.method == b"HEAD" else head.length
        if size is not None and len(rest) >= size and not switched:     # all of it is here
            exchange.on_head(self, head)
            self._end(rest, size)
            return
        self._flow = _flow(head, switched)
        exchange.on_head(self, head)
        if rest and not self.lost:
            self.data_received(rest)

    def _end(self, data: bytes, end: int) -> None:
        if end:
            self.write(data[:end])
        exchange = self.exchange
        if end < len(data):
            self.reusable = False       # it says more than was asked
        self._release()
        if exchange is not None:
            exchange.on_end()

    def _release(self) -> None:
        self._flow, self.exchange, self.write, self.fresh = None, None, _nowhere, False
        if self.lost:
            return
        self.transport.resume_reading()
        if self.reusable:
            self._pool.put(self)
        else:
            self.transport.close()

    def _garbage(self) -> None:
        exchange, self.exchange, self._flow = self.exchange, None, None
        self.abort()
        if exchange is not None:
            exchange.on_garbage()

    def abort(self) -> None:
        """Closes at once, which cancels the request at the engine; the exchange hears nothing more."""
        self._flow, self.exchange, self.write, self.lost = None, None, _nowhere, True
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._pool.drop(self)
        exchange, complete, insertable = self.exchange, isinstance(self._flow, UntilClose) and error is None, self.insertable
        self.exchange, self._flow, self.write = None, None, _nowhere
        if exchange is None:
            return
        if complete:
            exchange.on_end()
        else:
            exchange.on_lost(self.fresh, insertable)

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.down.pause_body()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.down.resume_body()


class Pool:
    """The connections to one target; the one used last is used first."""

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.target, self._loop = target, loop
        self.open: set[Upstream] = set()
        self._idle: list[Upstream] = []
        self.closed = False

    def take(self) -> Upstream | None:
        oldest = self._loop.time() - idle_reuse_s
        while self._idle:
            upstream = self._idle.pop()
            if upstream.idle_at > oldest and not upstream.lost:
                return upstream
            upstream.abort()
        return None

    def put(self, upstream: Upstream) -> None:
        if self.closed or len(self._idle) >= idle_limit:
            upstream.transport.close()
            return
        upstream.idle_at = self._loop.time()
        self._idle.append(upstream)

    def drop(self, upstream: Upstream) -> None:
        self.open.discard(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)

    def sweep(self, at: float) -> None:
        """Closes what has been idle for too long to be used again."""
        while self._idle and self._idle[0].idle_at <= at - idle_reuse_s:
            self._idle.pop(0).abort()

    def close(self) -> None:
        """Idle connections at once, the others when their request is done."""
        self.closed = True
        while self._idle:
            self._idle.pop().abort()

    async def connect(self) -> Upstream:
        """Raises OSError, TimeoutError."""
        upstream = Upstream(self)
        try:
            async with asyncio.timeout(connect_s):
                await self._loop.create_connection(lambda: upstream, self.target.host, self.target.port)
        except BaseException:       # cancelled after the connection was made: it has no other owner
            if upstream in self.open:
                upstream.abort()
            raise
        return upstream


def _flow(head: ResponseHead, switched: bool) -> Framing:
    if switched:
        return UntilClose()
    if head.chunked:
        return Chunked()
    return UntilClose() if head.length is None else Length(head.length)


def _nowhere(data: bytes) -> None:
    """Nobody waits for this."""
