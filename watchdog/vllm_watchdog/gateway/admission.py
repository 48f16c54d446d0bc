"""Who may go to an engine now, who waits in the service's line, and who is told that there is no room.  Never waits.

"Busy" is 429 with the time after which the line is likely to have moved; "down", or an engine that only fails, is 503.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.ask import key_in
from vllm_watchdog.gateway.lines import Line, Station
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.request import Phase
from vllm_watchdog.gateway.routes import Kind
from vllm_watchdog.gateway.seats import Claim

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

FAILURES = (errors.HUNG_UP, errors.BAD_UPSTREAM)      # an engine's that lives


class Admission:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate

    def place(self, exchange: Exchange, line: Line) -> None:
        """As much is known of it as matters: it goes to the engine, or waits."""
        station, claim = line.open, self._claim(exchange)
        exchange.claim = claim
        if station is not None and line.takes(station, claim, self._gate.now()):
            self._send(exchange, station)
        elif exchange.kind is Kind.OTHER:
            exchange.refuse(errors.NOT_SERVING.because(line.service.why))
        elif line.refuses(claim):
            exchange.refuse(self._no_room(line))
        else:
            self._hold(exchange, line)

    def _claim(self, exchange: Exchange) -> Claim:
        """What it asks of an engine."""
        if exchange.kind is not Kind.GENERATION:
            return Claim(exchange.size, seat=False)
        tokens = exchange.tokens
        return Claim(exchange.size, tokens, key_in(exchange.head), tokens >= self._gate.plan.long_tokens)

    def _hold(self, exchange: Exchange, line: Line) -> None:
        exchange.phase = Phase.WAITING
        for each in line.queue.put(exchange, exchange.claim, self._gate.now()):
            each.refuse(self._no_room(line))
        self.pump(line)        # it may go before others
        if exchange.phase is Phase.WAITING:
            exchange.gap_at = exchange.gap_at or self._gate.now()
            self._gate.metrics.held += 1

    def _no_room(self, line: Line) -> errors.Refusal:
        if line.open is None:
            return errors.QUEUE_FULL if self._gate.plan.hold_s > 0 else errors.NOT_SERVING.because(line.service.why)
        return errors.CROWDED.in_s(line.pace.retry_after_s(len(line.queue), self._gate.now()))

    def _too_late(self, line: Line, at: float) -> errors.Refusal:
        """It has waited for `hold_s`."""
        if line.open is None:
            return errors.HELD_TOO_LONG.because(line.service.why)
        if not line.open.breaker.allows(at):
            return errors.FAILING
        return errors.BUSY.because(line.why).in_s(line.pace.retry_after_s(len(line.queue), at))

    def _send(self, exchange: Exchange, station: Station) -> None:
        station.enter(exchange)
        exchange.send(station)

    def pump(self, line: Line) -> None:
        while line.queue and (station := line.open) is not None:
            exchange = line.queue.take(line.blocked(station, self._gate.now()), alone=station.alone is None)
            if exchange is None:
                return
            self._send(exchange, station)

    def pump_waiting(self) -> None:
        """A breaker may let one through by now, a throttle one more."""
        for line in tuple(self._gate.lines.values()):
            self.pump(line)

    def sweep(self, at: float) -> None:
        for line in self._gate.lines.values():
            for exchange in line.queue.expire(at):
                exchange.refuse(self._too_late(line, at))
        for station in self._gate.stations.values():
            if station.throttle.observe(station.seats.requests, at):
                self._say("gateway.throttled", station, limit=station.throttle.limit or "none", why=station.throttle.why)
        self.pump_waiting()

    def refused(self, exchange: Exchange, refusal: errors.Refusal) -> None:
        """Our own answer goes out in the engine's place."""
        self._gate.metrics.refused(refusal)
        if refusal in FAILURES and exchange.station is not None and exchange.claim.seat:
            self.asked(exchange, exchange.station, failed=True)

    def asked(self, exchange: Exchange, station: Station, failed: bool) -> None:
        """A word on whether the engine is worth asking."""
        breaker = station.breaker
        changed = breaker.failed(exchange.id, exchange.digest, self._gate.now()) if failed else breaker.answered()
        if changed:
            self._say("gateway.breaker", station, state=breaker.state(self._gate.now()).value)

    def _say(self, event: str, station: Station, **fields: str | float) -> None:
        self._gate.say(event, engine=station.target.engine, generation=station.target.generation, **fields)
