"""One request's way: from the client to an engine, perhaps to a second one, and exactly one response back.

    READING ─> SIZING ─> WAITING ─> SENT ─> BEGUN ─> DONE   DOUBTED: the engine gave no answer, or an error that may be its
                            ^          │                    last; what it said is kept back until it is known whether it died
                            └─ DOUBTED ┘                    SIZING: its tokens are being counted, where that decides anything

A response has begun when its first body byte went to the client; until then its head is kept back too, because vLLM sends
the head of a stream before it has read the prompt.  Waits at most `patience_s`, for that verdict; the client's leaving
ends it in any phase.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.heads import SWITCHING, RequestHead, ResponseHead, encode_request
from vllm_watchdog.gateway.last_words import Answer, broken_statuses, hung_up_s, of_status_s, patience_s
from vllm_watchdog.gateway.reply import Reply
from vllm_watchdog.gateway.request import Phase, Request
from vllm_watchdog.gateway.routes import Kind
from vllm_watchdog.gateway.seats import NO_SEAT, Claim

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher
    from vllm_watchdog.gateway.downstream import Downstream
    from vllm_watchdog.gateway.lines import Line, Station
    from vllm_watchdog.gateway.upstream import Upstream

resend_limit = 1    # to an engine that lives but hung up


class Exchange(Request):
    """`gap_at`: since when it has waited for an engine.  `reached`: the engine may have seen it, so may have died of it."""

    __slots__ = ("_answer", "_gate", "_reply", "_resent", "_task", "_timer", "_upstream", "claim", "down", "gap_at",
                 "line", "phase", "reached", "sent_at", "station")

    def __init__(self, gate: Dispatcher, down: Downstream, head: RequestHead, kind: Kind, id_: int) -> None:
        super().__init__(head, kind, id_, gate.now())
        self._gate, self.down = gate, down
        self._reply = Reply(gate.plan, gate.loop, down, head)
        self.phase = Phase.READING
        self._resent, self.reached = 0, False
        self.gap_at: float | None = None
        self.line: Line | None = None
        self.station: Station | None = None
        self.claim: Claim = NO_SEAT
        self.sent_at = 0.0
        self._upstream: Upstream | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answer = Answer()

    # -- towards the engine

    def ready(self, body: bytes) -> None:
        """The request is here whole; its bytes are charged already."""
        self.body, self.size = body, len(body)
        self._gate.submit(self)

    def stream(self) -> None:
        """Its body is passed on as it comes."""
        self.size = self.head.length or 0
        self._gate.submit(self)

    def size_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Its tokens are counted before it goes anywhere; the client's leaving ends that."""
        self.phase = Phase.SIZING
        self._task = self._gate.spawn(work)

    def sized(self) -> None:
        """The work is done, and submits it again."""
        self._task = None

    def replaced(self, body: bytes, note: str) -> None:
        """Another body goes to the engine in the client's place, and the answer says so in a header of its own."""
        self.remember_digest()      # of what the client sent: it may come again
        self._gate.charge(len(body) - len(self.body or b""))
        self.body, self.size = body, len(body)
        self.head = self.head._replace(length=len(body))
        self._reply.note = note.encode() + b"\r\n"

    def send(self, station: Station) -> None:
        self.station, self.phase, self.sent_at = station, Phase.SENT, self._gate.now()
        if self.claim.seat:
            station.breaker.went(self.id)
        upstream = station.pool.take() if self.repeatable else None     # a stale connection could swallow it
        if upstream is not None:
            self._send_on(upstream)
        else:
            self._task = self._gate.spawn(self._connect(station))

    async def _connect(self, station: Station) -> None:
        try:
            upstream = await station.pool.connect()
        except (OSError, TimeoutError) as error:
            self._task = None
            self._gate.deaths.no_connection(self, station, isinstance(error, ConnectionRefusedError))
        else:
            self._task = None
            self._send_on(upstream)

    def _send_on(self, upstream: Upstream) -> None:
        self._upstream, self.reached = upstream, True
        upstream.begin(self, encode_request(self.head, self.body), self.body or b"")
        if self.body is None:
            self.down.stream_to(upstream)

    # -- the engine's answer

    def on_interim(self, head: ResponseHead) -> None:
        if head.status != 100 and self.head.http11:     # we have answered Expect ourselves
            self.down.write(head.raw)

    def on_head(self, upstream: Upstream, head: ResponseHead) -> None:
        self._answer.head = head
        upstream.write = self._first
        if self._suspicious() and head.status in of_status_s:
            self._doubt(of_status_s[head.status])
        elif not self.repeatable:
            self._begin(b"")
        if head.status == SWITCHING:
            self._begin(b"")
            self.down.tunnel_to(upstream)

    def _suspicious(self) -> bool:
        """An error of this request may be an engine's last words."""
        return self.kind is Kind.GENERATION and self.repeatable

    def _first(self, data: bytes) -> None:
        if self._answer.is_error_event(data) and self._suspicious():
            self._doubt(patience_s)
            self._keep(data)
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        if self.phase is Phase.BEGUN:
            return
        head = self._answer.head
        failed = head.status in broken_statuses or (self.phase is Phase.DOUBTED and head.status < 300)
        self.phase = Phase.BEGUN
        self._gate.began(self, head, failed)
        write = self._reply.begin(head, data)
        if self._upstream is not None:
            self._upstream.write = write
            if self.down.paused:
                self.pause()

    def on_end(self) -> None:
        self._upstream = None
        if self.phase is Phase.DOUBTED:
            self._answer.ended = True
        else:
            if self.phase is not Phase.BEGUN:
                self._begin(b"")
            self._finish(self._reply.end(self._answer.head))

    def on_lost(self, fresh: bool, insertable: bool) -> None:
        """The connection is gone before the response was whole."""
        self._upstream = None
        if self.phase is Phase.BEGUN:
            if self.station is not None:
                self._gate.deaths.cut(self, self.station)
            self.cut(errors.ENGINE_CUT, insertable)
        elif self.phase is Phase.DOUBTED:
            self._answer.broken = True
        elif not fresh and self.repeatable and self.station is not None:    # idle, and closed by the engine meanwhile
            self._task = self._gate.spawn(self._connect(self.station))
        else:
            self.unanswered()

    def unanswered(self) -> None:
        """Sent, and no answer will come: is the engine dead?"""
        if self.repeatable:
            self._answer.broken = True
            self._doubt(hung_up_s)
        else:
            self._doubt_engine()
            self.refuse(errors.ENGINE_DIED)

    def on_garbage(self) -> None:
        self._upstream = None
        if self.phase is Phase.BEGUN:
            self.cut(errors.BAD_UPSTREAM, insertable=False)
        else:
            self.refuse(errors.BAD_UPSTREAM)

    # -- doubt

    def _doubt(self, wait_s: float) -> None:
        self.phase = Phase.DOUBTED
        self._timer = self._gate.loop.call_later(wait_s, self._lives)
        if self._upstream is not None:
            self._upstream.write = self._keep
        self._doubt_engine()

    def _doubt_engine(self) -> None:
        if self.station is not None:
            self._gate.deaths.doubt(self.station)

    def _keep(self, data: bytes) -> None:
        if not self._answer.keep(data) and self._upstream is not None:
            self._upstream.transport.pause_reading()

    def _lives(self) -> None:
        """The engine did not die, so what it said stands."""
        self._timer = None
        answer = self._answer
        if answer.broken:
            self._hung_up()
            return
        self._begin(answer.kept())
        if answer.ended:
            self._finish(self._reply.end(answer.head))
        elif self._upstream is not None and not self.down.paused:
            self._upstream.transport.resume_reading()

    def _hung_up(self) -> None:
        if self._resent >= resend_limit or self.station is None:
            self.refuse(errors.HUNG_UP)
            return
        self._resent += 1
        self._answer = Answer()
        self.phase = Phase.SENT
        self._task = self._gate.spawn(self._connect(self.station))

    def retreat(self) -> None:
        """Its engine is dead: back to where it can be sent from again."""
        self._leave()
        self._answer = Answer()
        self.deaths += self.reached
        self.phase, self.station, self.reached = Phase.WAITING, None, False

    # -- the end

    def pause(self) -> None:
        if self._upstream is not None and not self._upstream.lost:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        if self._upstream is not None and not self._upstream.lost:
            self._upstream.transport.resume_reading()

    def cut(self, refusal: errors.Refusal, insertable: bool) -> None:
        """A response that has begun can't be completed."""
        self._leave()
        stays = self._reply.cut(self._answer.head, refusal, insertable)
        if stays is None:
            self._over()
        else:
            self._finish(stays)

    def interrupt(self, refusal: errors.Refusal) -> None:
        """The gateway ends."""
        if self.phase is Phase.BEGUN:
            self.cut(refusal, self._upstream is not None and self._upstream.insertable)
        else:
            self.refuse(refusal)

    def refuse(self, refusal: errors.Refusal) -> None:
        """Our own answer in the engine's place."""
        self._gate.admission.refused(self, refusal)
        self._finish(self._reply.refuse(refusal))

    def reply(self, status: int, body: bytes, kind: str) -> None:
        """An answer for the service or the gateway."""
        self._gate.metrics.began(status, None)
        self._finish(self._reply.own(status, body, kind))

    def cancel(self) -> None:
        """The client has gone."""
        self._gate.metrics.cancelled += self.phase is not Phase.READING
        self._over()

    def _finish(self, keep_alive: bool) -> None:
        down = self.down
        self._over()
        down.finished(keep_alive)

    def _over(self) -> None:
        self._leave()
        self._reply.stop()
        self.phase = Phase.DONE
        self._gate.over(self)

    def _leave(self) -> None:
        """Lets go of the engine; a request that it still works on is cancelled there."""
        task, timer, upstream = self._task, self._timer, self._upstream
        self._task, self._timer, self._upstream = None, None, None
        if task is not None:
            task.cancel()
        if timer is not None:
            timer.cancel()
        if upstream is not None:
            upstream.abort()
