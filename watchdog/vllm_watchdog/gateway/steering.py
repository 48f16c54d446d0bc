"""Finds the line of each request: by the route's rules where there are any, else by its model.

A rule that depends on the length of a prompt has it counted first, where its bytes can't decide.  Never waits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.ask import Ask, key_in
from vllm_watchdog.gateway.heads import header
from vllm_watchdog.gateway.lines import Line
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.routes import Service, model_of
from vllm_watchdog.gateway.rules import Choice, choose
from vllm_watchdog.gateway_rules import WhenDown

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

NOBODY = Service("", why="the watchdog has not said yet which engine serves")


class Steering:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate

    def line(self, exchange: Exchange) -> Line | None:
        """None: it is counted first, or was refused."""
        gate = self._gate
        if not gate.route.rules:
            return self._by_model(exchange)
        ask = self._ask(exchange)
        choice = self._choice(exchange, ask)
        if choice is None:
            gate.sizing.count(exchange, ask, self._usual(ask))
            return None
        service = choice.service or NOBODY
        if choice.refused:
            exchange.refuse(errors.NOT_SERVING.because(service.why))
            return None
        return gate.line_of(service)

    def _by_model(self, exchange: Exchange) -> Line:
        gate = self._gate
        if len(gate.lines) == 1:        # of a service, or of nobody
            return next(iter(gate.lines.values()))
        model = exchange.ask.model if exchange.ask is not None else model_of(exchange.body or b"")
        return gate.line_of(gate.route.pick(model) or NOBODY)

    def _ask(self, exchange: Exchange) -> Ask:
        """What isn't for the model has no prompt."""
        head, ask = exchange.head, exchange.ask
        if ask is None:
            return Ask(head.path, key_in(head), model_of(exchange.body or b""), 0, tokens=0)
        return replace(ask, bound=ask.bound + ask.media * self._usual(ask).prompt.media_tokens) if ask.media else ask

    def _usual(self, ask: Ask) -> Service:
        """Where it would go without rules: its tokenizer counts for all of that model."""
        return self._gate.route.pick(ask.model) or NOBODY

    def _choice(self, exchange: Exchange, ask: Ask) -> Choice | None:
        def shown(name: str) -> str | None:
            value = header(exchange.head, name.encode())
            return None if value is None else value.decode("latin-1")

        def room(service: Service) -> bool:
            limit = self._gate.sizing.budget(service).longest
            return limit is None or ask.cost <= limit

        return choose(self._gate.route, ask, shown, self._up, room)

    def _up(self, service: Service) -> bool:
        line = self._gate.lines.get(service.name)
        return line is not None and line.open is not None and line.open.breaker.allows(self._gate.now())

    def spill(self, line: Line) -> None:
        """Its engine is down: what waits for it goes where its rule lets it go."""
        route = self._gate.route
        if self._up(line.service) or all(rule.when_down is not WhenDown.SPILL for rule in route.rules):
            return
        for exchange in tuple(line.queue):
            if exchange.alone:
                continue        # it keeps its place
            choice = self._choice(exchange, self._ask(exchange))
            if choice is not None and choice.service not in (None, line.service) and not choice.refused:
                line.queue.remove(exchange)
                self._gate.submit(exchange)
