"""What the dispatcher keeps: one `Line` for each service, one `Station` for each life of an engine.

What may go where, and when, is decided by the rules that they hold: queue, seats, throttle, breaker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_watchdog.gateway.breaker import Breaker
from vllm_watchdog.gateway.pace import Pace
from vllm_watchdog.gateway.queue import Queue
from vllm_watchdog.gateway.report import Casualty
from vllm_watchdog.gateway.routes import Service, Target
from vllm_watchdog.gateway.seats import NO_LIMITS, Block, Claim, Limits, Seats
from vllm_watchdog.gateway.throttle import Throttle
from vllm_watchdog.gateway.upstream import Pool
from vllm_watchdog.gateway.waits import Waits
from vllm_watchdog.prompt_plan import Over

if TYPE_CHECKING:
    from vllm_watchdog.gateway.relay import Exchange


NONE_AT_ONCE = (None, None, None, None)


class Station:
    """One life of one engine, as the gateway sees it."""

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop, first_token_s: float | None = None) -> None:
        self.target, self._loop = target, loop
        self.pool = Pool(target, loop)
        self.in_flight: dict[Exchange, None] = {}
        self.seats = Seats()
        self.throttle = Throttle(first_token_s)
        self.breaker = Breaker()
        self.kv_free: int | None = None     # tokens, when it was last looked at; None: that is not known, or doesn't matter
        self.kv_at = float("-inf")
        self.alone: Exchange | None = None  # the one that must go alone, while it is here
        self.dead = False
        self.reviving = False               # it is looked at, whether it lives again
        self.serves = False                 # the route names it
        self.doubt_until = 0.0
        self.watched: asyncio.Task[None] | None = None
        self.lost: list[Casualty] = []      # begun responses that broke off and may be a sign of death

    def enter(self, exchange: Exchange) -> None:
        self.in_flight[exchange] = None
        self.seats.enter(exchange.claim)
        if exchange.alone:
            self.alone = exchange

    def leave(self, exchange: Exchange) -> None:
        del self.in_flight[exchange]
        self.seats.leave(exchange.claim)
        self.breaker.withdrew(exchange.id)
        if self.alone is exchange:
            self.alone = None

    @property
    def free(self) -> int | None:
        """Tokens of KV cache that are nobody's, taking it that none of what is being read is in them yet."""
        if self.kv_free is None:
            return None
        return self.kv_free - sum(each.claim.tokens for each in self.in_flight if each.claim.long and each.phase != "begun")

    def close(self) -> None:
        """No connection made so far carries another request; if it comes back, it is asked as if nothing had been."""
        self.pool.close()
        self.pool = Pool(self.target, self._loop)
        self.breaker = Breaker()


class Line:
    """A service's requests that wait, and where they go.  `down_since` None: somebody serves."""

    def __init__(self, service: Service, queue: Queue[Exchange], limits: Limits, at: float) -> None:
        """`limits`: those that hold for every service."""
        self.service, self.queue, self._limits = service, queue, limits
        self.station: Station | None = None
        self.room: int | None = None        # tokens of prompts at once, by the memory that there is
        self.down_since: float | None = at
        self.waits = Waits()
        self.pace = Pace()

    @property
    def open(self) -> Station | None:
        station = self.station
        return station if station is not None and not station.dead else None

    def limits(self, station: Station) -> Limits:
        """Of what it may have at once."""
        at_once = (self.service.max_concurrent, station.throttle.limit, self.service.max_tokens, self.room)
        if at_once == NONE_AT_ONCE and self._limits.key_requests is None and station.kv_free is None:
            return NO_LIMITS        # the usual case
        most = min(filter(None, at_once[:2]), default=None)
        tokens = min(filter(None, at_once[2:]), default=None)
        return replace(self._limits, requests=most, tokens=tokens, free=station.free)

    def blocked(self, station: Station, at: float) -> Callable[[Claim], Block | None]:
        """What keeps a request from going there now."""
        if not station.breaker.allows(at):
            return lambda claim: Block.ALL if claim.seat else None
        limits = self.limits(station)
        return lambda claim: station.seats.blocked(claim, limits)

    def takes(self, station: Station, claim: Claim, at: float) -> bool:
        """May it go there now, in nobody's place?"""
        if not claim.seat:
            return True
        free = not self.queue and station.breaker.allows(at)
        return free and station.seats.blocked(claim, self.limits(station)) is None

    def refuses(self, claim: Claim) -> bool:
        """Its operator wants no request to wait for memory, and this one would."""
        station = self.open
        return (self.service.prompt.over is Over.REFUSE and station is not None
                and station.seats.short_of_memory(claim, self.limits(station)))

    @property
    def why(self) -> str:
        """Why requests wait, for a client that has waited for too long."""
        station = self.open
        if self.service.why or station is None:
            return self.service.why
        limits = self.limits(station)
        most = [f"{limits.requests} requests"] if limits.requests is not None else []
        most += [f"{limits.tokens} tokens of prompts"] if limits.tokens is not None else []
        most += [f"{limits.key_requests} requests of one API key"] if limits.key_requests is not None else []
        because = f" ({station.throttle.why})" if station.throttle.limit is not None else ""
        return f"it takes at most {', '.join(most)} at a time{because}" if most else ""

    def mark(self, at: float) -> None:
        """Notes since when nobody serves."""
        if self.open is not None:
            if self.down_since is not None:
                self.waits.up_at = at
            self.down_since = None
        elif self.down_since is None:
            self.down_since = at

    def waited(self, since: float) -> bool:
        """Did a request that waits since then wait for an engine, and not for room?"""
        return self.down_since is not None or since < self.waits.up_at

    def __str__(self) -> str:
        target = self.station.target if self.station is not None else None
        return f"{target.engine}:{target.generation}" if target is not None else self.service.why or "nobody serves"
