"""The one response to one request, as the client gets it: passed on, broken off with a word, or our own.

Knows the client's version of HTTP and whether its connection stays; nothing of engines.  Never waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.framing import CRLF, Unchunked
from vllm_watchdog.gateway.heads import RequestHead, ResponseHead, encode_response
from vllm_watchdog.gateway.merging import Merging, merges
from vllm_watchdog.gateway_plan import GatewayPlan

if TYPE_CHECKING:
    from vllm_watchdog.gateway.downstream import Downstream


class Reply:
    """The functions return whether the connection stays open for another request.  `note`: a header line of our own."""

    __slots__ = ("_down", "_loop", "_merging", "_plan", "_request", "note")

    def __init__(self, plan: GatewayPlan, loop: asyncio.AbstractEventLoop, down: Downstream, request: RequestHead) -> None:
        self._plan, self._loop, self._down, self._request = plan, loop, down, request
        self._merging: Merging | None = None
        self.note = b""

    def begin(self, answer: ResponseHead, data: bytes) -> Callable[[bytes], object]:
        """Writes the engine's head and first bytes; where the rest goes."""
        request, write = self._request, self._down.write
        head = encode_response(answer, request.http11, self.stays(answer))
        if self.note:
            head = head[: -len(CRLF)] + self.note + CRLF
        if merges(self._plan, request, answer):
            merging = self._merging = Merging(self._plan, self._loop, answer.chunked and request.http11, write)
            take = Unchunked(merging.feed) if answer.chunked else merging.feed
            write(head)
            take(data)
            return take
        if not answer.chunked or request.http11:
            write(head + data)
            return write
        unchunked = Unchunked(write)
        write(head)
        unchunked(data)
        return unchunked

    def end(self, answer: ResponseHead) -> bool:
        """The engine has said all of it."""
        if self._merging is not None:
            self._merging.end()
        return self.stays(answer)

    def stop(self) -> None:
        """Nothing more is written."""
        if self._merging is not None:
            self._merging.stop()

    def stays(self, answer: ResponseHead) -> bool:
        """After this response, if it ends as it should."""
        request, down = self._request, self._down
        if not request.keep_alive or down.body_pending or down.draining:
            return False
        if answer.chunked:
            return request.http11
        return answer.length is not None or answer.bodiless or request.method == b"HEAD"

    def cut(self, answer: ResponseHead, refusal: errors.Refusal, insertable: bool) -> bool | None:
        """The rest will not come: says so inside where the form allows it.  None: it is broken off instead."""
        if self._merging is not None:       # its events are whole, whatever the engine's last one was
            self._merging.flush()
            insertable = True
        if not answer.event_stream or not insertable:
            self._down.broken(delimited=(answer.chunked and self._request.http11) or answer.length is not None)
            return None
        if not answer.chunked or not self._request.http11:
            self._down.write(errors.event(refusal))
            return False
        self._down.write(errors.chunk(errors.event(refusal)) + errors.LAST_CHUNK)
        return self.stays(answer)

    def refuse(self, refusal: errors.Refusal) -> bool:
        keep_alive = self._own_stays()
        self._down.write(errors.response(refusal, keep_alive, self._request.method == b"HEAD"))
        return keep_alive

    def own(self, status: int, body: bytes, kind: str) -> bool:
        keep_alive = self._own_stays()
        self._down.write(errors.answer(status, body, kind, keep_alive, self._request.method == b"HEAD"))
        return keep_alive

    def _own_stays(self) -> bool:
        request, down = self._request, self._down
        return request.keep_alive and request.http11 and not down.body_pending and not down.draining
