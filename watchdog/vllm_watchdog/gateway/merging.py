"""A stream's way to a slow client: unframed, its deltas merged, framed again; what is kept goes out after `coalesce_s`.

For one response, and only where `coalesce_chars` asks for it: everything else is passed on untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.coalesce import Coalescer
from vllm_watchdog.gateway.heads import RequestHead, ResponseHead
from vllm_watchdog.gateway_plan import GatewayPlan


def merges(plan: GatewayPlan, request: RequestHead, answer: ResponseHead) -> bool:
    """Is it a stream of events whose deltas shall be merged?"""
    return (plan.coalesce_chars > 0 and answer.event_stream and request.method == b"POST" and answer.status == 200
            and answer.length is None and not any(name.lower() == b"content-encoding" for name, _ in answer.pairs))


class Merging:
    """`chunked`: the client gets chunks."""

    __slots__ = ("_chunked", "_coalescer", "_loop", "_timer", "_wait_s", "_write")

    def __init__(self, plan: GatewayPlan, loop: asyncio.AbstractEventLoop, chunked: bool,
                 write: Callable[[bytes], object]) -> None:
        self._loop, self._wait_s, self._chunked, self._write = loop, plan.coalesce_s, chunked, write
        self._coalescer = Coalescer(plan.coalesce_chars)
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, events: bytes) -> None:
        """What the engine's chunks carry."""
        self._send(self._coalescer.feed(events))
        if not self._coalescer.pending:
            self.stop()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self.flush)

    def flush(self) -> None:
        """What is kept."""
        self.stop()
        self._send(self._coalescer.flush())

    def end(self) -> None:
        """The engine's stream has ended."""
        self.stop()
        self._send(self._coalescer.end())
        if self._chunked:
            self._write(errors.LAST_CHUNK)

    def stop(self) -> None:
        """Nothing is written later."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send(self, events: bytes) -> None:
        if events:
            self._write(errors.chunk(events) if self._chunked else events)
