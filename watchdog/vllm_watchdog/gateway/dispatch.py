"""Where each request goes, waits, or is refused: the route and the requests come in, sends and refusals go out.

The route says which engine serves a service; until one does, requests wait in the service's line.  What has been sent is
the exchange's own business, and `deaths`'.  Never waits; what waits is a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.admission import Admission
from vllm_watchdog.gateway.deaths import Deaths
from vllm_watchdog.gateway.downstream import Downstream
from vllm_watchdog.gateway.heads import RequestHead, ResponseHead
from vllm_watchdog.gateway.kv import KvWatch
from vllm_watchdog.gateway.lines import Line, Station
from vllm_watchdog.gateway.quarantine import Quarantine
from vllm_watchdog.gateway.queue import Queue
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.report import Casualty, Metrics
from vllm_watchdog.gateway.routes import Kind, Route, Service, Target, kind_of
from vllm_watchdog.gateway.seats import Limits
from vllm_watchdog.gateway.sizing import Sizing
from vllm_watchdog.gateway.steering import NOBODY, Steering
from vllm_watchdog.gateway_plan import GatewayPlan
from vllm_watchdog.say import Say

kept_bytes = 4096       # of a body, until its response is over: that costs less than to hash it
Handler = Callable[[Exchange], bool]


class Dispatcher:
    """`own(exchange)` answers what is ours to answer, and is false where that is the engine's."""

    def __init__(self, plan: GatewayPlan, loop: asyncio.AbstractEventLoop, say: Say,
                 report: Callable[[Target, list[Casualty]], None], own: Callable[[Dispatcher], Handler]) -> None:
        self.plan, self.loop, self.say, self.now = plan, loop, say, loop.time
        self.metrics = Metrics()
        self.quarantine = Quarantine(plan.suspect_tokens, plan.refuse_s)
        self.admission = Admission(self)
        self.sizing = Sizing(self)
        self.kv = KvWatch(self)
        self.steering = Steering(self)
        self.deaths = Deaths(self, self.quarantine, report)
        self.own = own(self)
        self.route = Route()
        self.lines: dict[str, Line] = {}
        self.stations: dict[Target, Station] = {}
        self.connections: set[Downstream] = set()
        self.exchanges: set[Exchange] = set()
        self.draining = False
        self._ids = count(1)
        self._charged = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.line_of(NOBODY)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Nothing runs any more after this."""
        for task in tuple(self._tasks):
            task.cancel()
        for station in self.stations.values():
            station.close()
        for down in tuple(self.connections):
            down.transport.abort()

    # -- connections and their memory

    def admit(self, down: Downstream) -> bool:
        if len(self.connections) >= self.plan.max_connections and not down.private:
            return False
        self.connections.add(down)
        return True

    def forget(self, down: Downstream) -> None:
        self.connections.discard(down)

    def charge(self, size: int) -> bool:
        """Bytes of bodies in memory, or (negative) no longer.  False: more than `hold_bytes` twice."""
        self._charged += size
        return self._charged <= 2 * self.plan.hold_bytes

    def sweep(self, at: float) -> None:
        """Everything that has a deadline."""
        for down in tuple(self.connections):
            down.sweep(at)
        for station in self.stations.values():
            station.pool.sweep(at)
        self.kv.sweep(at)
        self.admission.sweep(at)

    def waits(self, at: float) -> Iterator[dict[str, Any]]:
        """What the daemon shall know of holds that have ended."""
        for line in self.lines.values():
            if line.open is not None and not line.queue and (message := line.waits.told(line.service.name, at)):
                yield message

    # -- requests

    def open(self, down: Downstream, head: RequestHead) -> Exchange:
        exchange = Exchange(self, down, head, kind_of(head.method, head.path), next(self._ids))
        self.exchanges.add(exchange)
        self.metrics.requests += 1
        return exchange

    def submit(self, exchange: Exchange) -> None:
        """The request is here: send it, hold it, or refuse it."""
        if self.own(exchange):
            return
        if self._quarantined(exchange):
            exchange.refuse(errors.QUARANTINED)
            return
        line = self.steering.line(exchange)
        if line is None:
            return
        exchange.line = line
        if not self.sizing.begun(exchange, line.service):
            self.admission.place(exchange, line)

    def _quarantined(self, exchange: Exchange) -> bool:
        if exchange.kind is not Kind.GENERATION or not len(self.quarantine):
            return False
        return self.quarantine.refused(exchange.digest, self.now()) is not None

    def line_of(self, service: Service) -> Line:
        """A new one for a service that is new."""
        line = self.lines.get(service.name)
        if line is None:
            plan = self.plan
            queue: Queue[Exchange] = Queue(plan.hold_requests, plan.hold_bytes, plan.hold_s, plan.long_share)
            line = Line(service, queue, Limits(key_requests=plan.key_concurrent, long_share=plan.long_share), self.now())
            self.lines[service.name] = line
        line.service = service
        return line

    def pump_all(self) -> None:
        """Some engine came or went."""
        for line in tuple(self.lines.values()):
            line.room = self.sizing.budget(line.service).room
            line.mark(self.now())
            self.admission.pump(line)
            self.steering.spill(line)

    def began(self, exchange: Exchange, head: ResponseHead, failed: bool) -> None:
        """The response's first bytes go out: the body is needed no more."""
        since, at, line = exchange.gap_at, self.now(), exchange.line
        self.metrics.began(head.status, at - since if since is not None else None)
        if exchange.station is not None and exchange.claim.seat:
            self.admission.asked(exchange, exchange.station, failed)
            if head.event_stream and not exchange.claim.long:
                exchange.station.throttle.first_token(at - exchange.sent_at)
        if since is not None and line is not None and line.waited(since):
            line.waits.answered(exchange.at, at, replayed=exchange.deaths > 0)
        exchange.gap_at = None
        if exchange.size > kept_bytes:
            exchange.remember_digest()      # an incident may ask which requests were there
            self._drop_body(exchange)

    def _drop_body(self, exchange: Exchange) -> None:
        if exchange.body:
            self.charge(-len(exchange.body))
        exchange.body = None

    def over(self, exchange: Exchange) -> None:
        """It has its answer, or needs none."""
        self.exchanges.discard(exchange)
        self._drop_body(exchange)
        line, station = exchange.line, exchange.station
        if line is not None and exchange.gap_at is not None and line.waited(exchange.gap_at):
            line.waits.failed()
        if station is not None:
            station.leave(exchange)
            if not station.serves:
                self.retire(station)
            if line is not None and exchange.claim.seat:
                line.pace.ended(self.now())
        elif line is not None:
            line.queue.remove(exchange)
        if line is not None:
            self.admission.pump(line)

    # -- the route

    def follow(self, route: Route) -> None:
        """The daemon's newest word."""
        known = replace(route, version=self.route.version) == self.route
        self.route = route
        if known:
            self._heed_preemptions()
            return
        self.sizing.follow(route.services)
        for service in route.services:
            self.line_of(service).station = self._station(service.serving) if service.serving else None
        for station in self.stations.values():
            station.serves = any(line.station is station for line in self.lines.values() if route.service(line.service.name))
        gone = [self.lines.pop(name) for name in tuple(self.lines) if route.service(name) is None]
        for station in tuple(self.stations.values()):
            if any(_supersedes(line.station, station) for line in self.lines.values()):
                self.deaths.died(station, "a newer generation of it serves")
            elif station.watched is not None and not station.serves:
                self.deaths.died(station, "the route left it while it was in doubt")
            elif station.serves:
                self.deaths.named(station)
            self.retire(station)
        for line in gone:
            self.disband_if_gone(line)
        self._heed_preemptions()
        self.pump_all()
        self.say("gateway.route", version=route.version, **{line.service.name: str(line) for line in self.lines.values()})

    def _heed_preemptions(self) -> None:
        for service in self.route.services:
            if service.preempted is not None and service.serving is not None and service.serving in self.stations:
                self.stations[service.serving].throttle.preempted(service.preempted)

    def _station(self, target: Target) -> Station:
        if target not in self.stations:
            self.stations[target] = Station(target, self.loop, self.plan.first_token_s)
        return self.stations[target]

    def retire(self, station: Station) -> None:
        """Unless somebody needs it still."""
        if not station.in_flight and not station.serves and self.stations.get(station.target) is station:
            del self.stations[station.target]
            station.close()

    def disband_if_gone(self, line: Line) -> None:
        """The route has its service no more: its requests are looked at again."""
        if self.lines.get(line.service.name) is not line:
            for exchange in tuple(line.queue):
                line.queue.remove(exchange)
                self.submit(exchange)


def _supersedes(new: Station | None, old: Station) -> bool:
    return new is not None and new.target.engine == old.target.engine and new.target.generation > old.target.generation
