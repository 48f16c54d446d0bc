"""How long is this prompt, and may it be?  Counts where the bytes don't decide it; the counting is `counter`'s.

Most requests pass with one comparison.  Never waits itself: a request that has to be counted gets a task, and is submitted
again with what is known of it then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.ask import Ask
from vllm_watchdog.gateway.counter import Counter
from vllm_watchdog.gateway.heads import header
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.routes import Service
from vllm_watchdog.prompt_plan import PromptPlan

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

plain = (None, b"", b"identity")        # a body that is as it seems


class Sizing:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate
        self._counter = Counter(gate.spawn)

    def limit(self, service: Service) -> int | None:
        """Tokens of the longest prompt that this service takes; None: not known."""
        known = (service.prompt.limit, service.prompt.context)
        return min((each for each in known if each is not None), default=None)

    def begun(self, exchange: Exchange, service: Service) -> bool:
        """True: it is being counted, or has its answer; once it is counted it is submitted again."""
        ask, limit = exchange.ask, self.limit(service)
        if ask is None or limit is None:
            return False
        if self._encoded(exchange):
            return True
        if ask.tokens is not None:
            return self._refused(exchange, ask, limit)
        if ask.bound + ask.media * service.prompt.media_tokens <= limit:
            return False
        exchange.size_up(self._count(exchange, ask, service.prompt, limit))
        return True

    def count(self, exchange: Exchange, ask: Ask, service: Service) -> None:
        """A rule depends on its tokens: it is submitted again once they are counted."""
        if not self._encoded(exchange):
            exchange.size_up(self._count(exchange, ask, service.prompt, None))

    def _encoded(self, exchange: Exchange) -> bool:
        if header(exchange.head, b"content-encoding") in plain:
            return False
        exchange.refuse(errors.ENCODED)
        return True

    def _refused(self, exchange: Exchange, ask: Ask, limit: int) -> bool:
        if ask.longest <= limit:
            return False
        exchange.refuse(errors.too_long(ask.longest, limit, ask.exact, ask.path))
        return True

    async def _count(self, exchange: Exchange, ask: Ask, plan: PromptPlan, enough: int | None) -> None:
        body = exchange.body or b""
        said = await self._counter.count(plan, ask.path, body, enough)
        exchange.sized()
        if "bad" in said:
            exchange.refuse(errors.UNREADABLE.because(str(said["bad"])))
            return
        if "lacks" in said:
            estimate = len(body) // 4
            said = {"tokens": estimate, "longest": estimate, "exact": False, "max_tokens": None}
        exchange.ask = replace(ask, **{key: said[key] for key in ("tokens", "longest", "exact", "max_tokens")})
        self._gate.submit(exchange)
