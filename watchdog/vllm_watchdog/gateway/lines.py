"""What the dispatcher keeps: one `Line` for each service, one `Station` for each life of an engine.  Data, no decisions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from vllm_watchdog.gateway.hold import Hold
from vllm_watchdog.gateway.report import Casualty
from vllm_watchdog.gateway.routes import Kind, Service, Target
from vllm_watchdog.gateway.upstream import Pool
from vllm_watchdog.gateway.waits import Waits

if TYPE_CHECKING:
    from vllm_watchdog.gateway.relay import Exchange


class Station:
    """One life of one engine, as the gateway sees it."""

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.target, self._loop = target, loop
        self.pool = Pool(target, loop)
        self.in_flight: dict[Exchange, None] = {}
        self.busy = 0                       # of them, generations
        self.alone: Exchange | None = None  # the one that must go alone, while it is here
        self.dead = False
        self.serves = False                 # the route names it
        self.doubt_until = 0.0
        self.watched: asyncio.Task[None] | None = None
        self.lost: list[Casualty] = []      # begun responses that broke off and may be a sign of death

    def enter(self, exchange: Exchange) -> None:
        self.in_flight[exchange] = None
        self.busy += exchange.kind is Kind.GENERATION
        if exchange.alone:
            self.alone = exchange

    def leave(self, exchange: Exchange) -> None:
        del self.in_flight[exchange]
        self.busy -= exchange.kind is Kind.GENERATION
        if self.alone is exchange:
            self.alone = None

    def close(self) -> None:
        """No connection made so far carries another request."""
        self.pool.close()
        self.pool = Pool(self.target, self._loop)


class Line:
    """A service's requests that wait, and where they go.  `down_since` None: somebody serves."""

    def __init__(self, service: Service, hold: Hold[Exchange], at: float) -> None:
        self.service, self.hold = service, hold
        self.station: Station | None = None
        self.down_since: float | None = at
        self.waits = Waits()

    @property
    def open(self) -> Station | None:
        station = self.station
        return station if station is not None and not station.dead else None

    def has_room(self, station: Station) -> bool:
        limit = self.service.max_concurrent
        return limit is None or station.busy < limit

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
