"""Is this engine dead, and what becomes of the requests that were there?

An engine is dead when its port refuses, when /health says 5xx while a request is in doubt, or when the route has left it
meanwhile or names a newer generation of it.  Then everyone who was there is judged, once.  A dead one that the route
still names is asked for /health, and serves again when it says 200: the route may be right.

Looks are tasks with a deadline of their own; nobody waits for them but the requests in doubt, for `patience_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.last_words import patience_s
from vllm_watchdog.gateway.lines import Line, Station
from vllm_watchdog.gateway.quarantine import Present, Quarantine, Verdict, tokens_of
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.report import Casualty, casualty
from vllm_watchdog.gateway.request import Phase
from vllm_watchdog.gateway.routes import Kind, Target
from vllm_watchdog.gateway.vitals import DEAD_FROM, health

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

examine_s = (0.0, 0.02, 0.05, 0.1, 0.2)     # pauses between looks at a doubted engine; the last one repeats
revive_s = 0.5                              # between looks at a dead one
lost_limit = 64                             # begun responses remembered for the report of a death

REFUSALS = {Verdict.SUSPECT: errors.SUSPECT, Verdict.REFUSED: errors.SEEN_TWICE}


class Deaths:
    """`report` is given the casualties of each death."""

    def __init__(self, gate: Dispatcher, quarantine: Quarantine, report: Callable[[Target, list[Casualty]], None]) -> None:
        self._gate, self._quarantine, self._report = gate, quarantine, report

    # -- signs

    def no_connection(self, exchange: Exchange, station: Station, refused: bool) -> None:
        if refused and not station.dead:
            self.died(station, "its port refuses connections")      # judges this exchange, too
        else:
            exchange.unanswered()

    def doubt(self, station: Station) -> None:
        """Something happened that its death would explain."""
        if station.dead:
            return
        station.doubt_until = self._gate.now() + patience_s
        if station.watched is None:
            station.watched = self._gate.spawn(self._examine(station))

    def cut(self, exchange: Exchange, station: Station) -> None:
        """A begun response broke off: it will be missing among those in flight when the death is certain."""
        if station.dead:
            return      # it was counted among those in flight
        if len(station.lost) < lost_limit:
            station.lost.append(casualty(exchange, self._gate.now(), "cut"))
        self.doubt(station)

    async def _examine(self, station: Station) -> None:
        looks = count()
        while self._gate.now() < station.doubt_until and not station.dead:
            await asyncio.sleep(examine_s[min(next(looks), len(examine_s) - 1)])
            status = await health(station.target)
            if status is None or status >= DEAD_FROM:
                self.died(station, "its port refuses connections" if status is None else f"/health says {status}")
        station.watched, station.lost = None, []

    def named(self, station: Station) -> None:
        """The route leads to it: a dead one is looked at until it lives, or the route leads elsewhere."""
        if station.dead and not station.reviving:
            station.reviving = True
            self._gate.spawn(self._revive(station))

    async def _revive(self, station: Station) -> None:
        while station.dead and station.serves:
            await asyncio.sleep(revive_s)
            if await health(station.target) == 200 and station.dead:
                station.dead = False
                self._gate.say("gateway.engine_back", engine=station.target.engine, generation=station.target.generation)
                self._gate.pump_all()
        station.reviving = False

    # -- the verdict

    def died(self, station: Station, why: str) -> None:
        """Once for each life."""
        if station.dead:
            return
        station.dead = True
        station.close()
        present = sorted(station.in_flight, key=lambda exchange: exchange.id)
        told = station.lost + [casualty(each, self._gate.now(), "") for each in present if each.reached]
        station.lost = []
        words = self._settle(station, present, self._judge(present))
        self._gate.metrics.deaths += 1
        self._gate.say("gateway.engine_died", engine=station.target.engine, generation=station.target.generation,
                       why=why, in_flight=len(told))
        self._report(station.target, [each if each.verdict else each.with_verdict(words[each.id]) for each in told])
        if station.serves:
            self.named(station)
        self._gate.pump_all()
        self._gate.retire(station)

    def _judge(self, present: list[Exchange]) -> dict[int, Verdict]:
        """What was stopped on purpose is nobody's fault, and neither is a death of a request that wasn't there yet."""
        if any(exchange.line is not None and exchange.line.service.planned for exchange in present):
            return {}
        suspects = [
            Present(exchange.id, exchange.digest, tokens_of(exchange.size), exchange.deaths)
            for exchange in present
            if exchange.kind is Kind.GENERATION and exchange.reached and exchange.phase is not Phase.BEGUN
        ]
        return self._quarantine.judge(suspects, self._gate.now())

    def _settle(self, station: Station, present: list[Exchange], verdicts: dict[int, Verdict]) -> dict[int, str]:
        """Carries the verdicts out; a word for each."""
        words: dict[int, str] = {}
        back: dict[Line, list[Exchange]] = {}
        for exchange in present:
            verdict = verdicts.get(exchange.id, Verdict.INNOCENT)
            words[exchange.id] = self._sentence(exchange, station, verdict)
            if exchange.phase is Phase.WAITING and exchange.line is not None:
                exchange.alone = verdict is Verdict.ALONE
                back.setdefault(exchange.line, []).append(exchange)
        for line, exchanges in back.items():
            line.queue.put_back([(each, each.claim, each.alone) for each in exchanges], self._gate.now())
            self._gate.disband_if_gone(line)
        return words

    def _sentence(self, exchange: Exchange, station: Station, verdict: Verdict) -> str:
        if exchange.phase is Phase.BEGUN:
            return "cut"        # it ends when its connection does, with what the engine still says
        if verdict in REFUSALS:
            exchange.refuse(REFUSALS[verdict])
            return verdict.value
        if exchange.kind is Kind.OTHER or (exchange.reached and not exchange.repeatable):
            exchange.refuse(errors.ENGINE_DIED if exchange.reached else errors.NOT_SERVING)
            return "cut"
        exchange.retreat()
        station.leave(exchange)
        exchange.gap_at = exchange.gap_at or self._gate.now()
        self._gate.metrics.replayed += 1
        return "replayed" if exchange.line is not None and exchange.line.open is not None else "held"
