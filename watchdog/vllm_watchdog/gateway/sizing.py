"""Counts a request's tokens where something depends on them, off the event loop.  Never waits itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_watchdog.gateway.relay import Exchange, Phase
from vllm_watchdog.gateway.routes import Service

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher


class Sizing:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate

    def begun(self, exchange: Exchange, service: Service) -> bool:
        """True: it is being counted, or was answered; once that is done it is submitted again."""
        return service.serving is not None and exchange.phase is Phase.SIZING

    def count(self, exchange: Exchange, service: Service) -> None:  # noqa: ARG002
        """A rule depends on its tokens: it is submitted again with them."""
        if exchange.ask is not None:
            exchange.ask = replace(exchange.ask, tokens=exchange.ask.bound)
            self._gate.submit(exchange)
