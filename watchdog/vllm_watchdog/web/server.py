"""The daemon's own web page, API and metrics: aiohttp in one thread with a loop of its own.

It serves frozen reports and never touches the daemon's loop, which calls only `changed` and `said`; neither waits.  A port
that is taken is said, and the daemon goes on without a page.  Everything has a limit: connections, the time for a request,
streams and how far their readers may fall behind, bodies, blocking questions.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from typing import Any, cast

from aiohttp import web

from vllm_watchdog.say import Say
from vllm_watchdog.web.api import Api, Sources
from vllm_watchdog.web.guard import BODY_BYTES, Handler, front
from vllm_watchdog.web.stream import Hub

CONNECTIONS = 64
HEAD_S = 10.0           # a new connection's first request must be there
REQUEST_S = 30.0        # ... and be over; an operator's wish takes 15 at most
KEEP_S = 15.0
START_S = 5.0
HEAD_BYTES = 8190


class Web:
    """`host`, `port`: where it listens; `token` empty: nothing can be changed over HTTP."""

    def __init__(self, host: str, port: int, token: str, sources: Sources, say: Say) -> None:
        self.host, self.port = host, port
        self._token, self._sources, self._say = token, sources, say
        self._hub = Hub(sources.report)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self._over: asyncio.Event | None = None
        self._pending = False
        self._timers: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)

    def start(self) -> None:
        """Waits until it listens, or can't: that is said, and is no error of the daemon's."""
        self._thread.start()
        self._up.wait(START_S)

    def stop(self, deadline_s: float) -> None:
        if self._thread.is_alive():
            self._post(self._end)
            self._thread.join(deadline_s)

    def changed(self) -> None:
        """There is a newer report."""
        if self._hub.watched and not self._pending and self._loop:
            self._pending = True
            self._post(self._changed)

    def said(self, line: dict[str, Any]) -> None:
        """A journal line in words."""
        self._post(self._hub.said, line)

    def _post(self, call: Any, *values: Any) -> None:
        with suppress(RuntimeError):        # its loop is closed already
            if self._loop:
                self._loop.call_soon_threadsafe(call, *values)

    # -- everything below runs in the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._up.set()

    def _end(self) -> None:
        self._hub.close()
        if self._over:
            self._over.set()

    def _changed(self) -> None:
        self._pending = False
        self._hub.changed()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[front(self.host, self._say), self._timed], client_max_size=BODY_BYTES)
        app.add_routes(Api(self._sources, self._hub, self._token).routes())
        runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEP_S, handler_cancellation=True,
                               shutdown_timeout=1.0, max_line_size=HEAD_BYTES, max_field_size=HEAD_BYTES)
        await runner.setup()
        try:
            listener = await self._loop.create_server(
                lambda: self._connected(runner), self.host, self.port, backlog=CONNECTIONS)
        except OSError as error:
            self._say("web.no_page", listen=f"{self.host}:{self.port}", why=os.strerror(error.errno or 0))
            await runner.cleanup()
            return
        self.port = listener.sockets[0].getsockname()[1]
        self._say("web.listening", url=f"http://{self.host}:{self.port}/")
        self._up.set()
        await self._over.wait()
        listener.close()
        await runner.cleanup()

    def _connected(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        server = cast(web.Server, runner.server)
        if len(server.connections) >= CONNECTIONS:
            return _Full()
        protocol: asyncio.BaseProtocol = server()
        self._limit(protocol, HEAD_S)
        return protocol

    @web.middleware
    async def _timed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A stream sets limits of its own to each write; everything else must be over in time, and be read in time."""
        self._limit(request.protocol, None if request.path == "/api/v1/events" else REQUEST_S)
        return await handler(request)

    def _limit(self, protocol: asyncio.BaseProtocol, seconds: float | None) -> None:
        if timer := self._timers.pop(protocol, None):
            timer.cancel()
        if seconds is not None and self._loop:
            self._timers[protocol] = self._loop.call_later(seconds, self._cut, protocol)

    def _cut(self, protocol: Any) -> None:
        del self._timers[protocol]
        if protocol.transport:      # else it is closed already
            protocol.transport.abort()


class _Full(asyncio.Protocol):
    """One connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()
