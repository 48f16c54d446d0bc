"""How long is this prompt, and may it be?  Counts where the bytes don't decide it; the counting is `counter`'s.

Most requests pass with one comparison.  Never waits itself: a request that has to be counted gets a task, and is submitted
again with what is known of it then.  What an engine takes is asked of it once, when the route first names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_watchdog.core.kv_bytes import KvShape
from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.ask import Ask, most_tokens
from vllm_watchdog.gateway.budget import Budget, Engine, Verdict, budget
from vllm_watchdog.gateway.counter import Answer, Counter
from vllm_watchdog.gateway.heads import header
from vllm_watchdog.gateway.learn import learn, tokenized
from vllm_watchdog.gateway.quarantine import tokens_of
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.routes import Service, Target
from vllm_watchdog.prompt_plan import PromptPlan

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

UNTOLD = PromptPlan()
UNKNOWN = Engine()
NO_BUDGET = Budget()
SIZED = frozenset({         # one prompt, or several that are each on their own; not files, nor texts in pairs
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling", "/classify",
})
learn_s = (0.0, 2.0, 10.0, 60.0)    # pauses before an engine is asked, until it answers
plain = (None, b"", b"identity")        # a body that is as it seems


class Sizing:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate
        self._counter = Counter(gate.spawn)
        self._engines: dict[Target, Engine] = {}
        self._budgets: dict[str, Budget] = {}       # by the service's name

    # -- what engines take

    def follow(self, services: Iterable[Service]) -> None:
        """The route's engines: those that are new are asked, those that left are forgotten."""
        known, self._engines = self._engines, {}
        for service in services:
            target = service.serving
            if target is None or service.prompt == UNTOLD:
                continue
            engine = known.get(target, UNKNOWN)
            self._engines[target] = replace(engine, vram_free=_more(engine.vram_free, service.vram_free))
            if target not in known:
                self._gate.spawn(self._learn(target, service.prompt))
        self._weigh(services)

    async def _learn(self, target: Target, plan: PromptPlan) -> None:
        said = await self._counter.warm(plan)
        shape = KvShape(**said["shape"]) if said.get("shape") else None
        if "lacks" in said:
            self._gate.say("gateway.no_tokenizer", engine=target.engine, why=str(said["lacks"]))
        for pause_s in learn_s:
            await asyncio.sleep(pause_s)
            learned = await learn(target)
            if target not in self._engines:
                return
            self._engines[target] = replace(learned, shape=shape, vram_free=self._engines[target].vram_free)
            self._weigh(self._gate.route.services)
            self._gate.pump_all()       # there may be more room than was thought, or less
            if learned.context is not None:
                return

    def kv_tokens(self, target: Target) -> int | None:
        return self._engines.get(target, UNKNOWN).kv_tokens

    def _weigh(self, services: Iterable[Service]) -> None:
        """What each service's prompts may have: looked up for every request, so worked out here."""
        engines = self._engines
        self._budgets = {
            each.name: budget(each.prompt, UNKNOWN if each.serving is None else engines.get(each.serving, UNKNOWN))
            for each in services
        }

    def budget(self, service: Service) -> Budget:
        """Nothing is known, nothing is limited."""
        return self._budgets.get(service.name, NO_BUDGET)

    # -- one request

    def begun(self, exchange: Exchange, service: Service) -> bool:
        """True: it is being counted, or has its answer; once it is counted it is submitted again."""
        plan, allowed = service.prompt, self.budget(service)
        if not exchange.asked and not self._matters(most_tokens(exchange.size, plan.media_tokens), service, allowed):
            return False
        ask = exchange.ask
        if ask is None or ask.path not in SIZED:
            return False
        if ask.tokens is None and not self._matters(ask.bound + ask.media * plan.media_tokens, service, allowed):
            return False
        if self._encoded(exchange):
            return True
        if ask.tokens is None:
            exchange.size_up(self._count(exchange, ask, plan, service.serving, allowed.longest))
            return True
        verdict = allowed.verdict(ask, plan.over)
        if verdict is Verdict.CUT:
            exchange.size_up(self._cut(exchange, ask, plan, allowed))
        elif verdict is Verdict.TOO_LONG and allowed.longest is not None:
            exchange.refuse(errors.too_long(ask.longest, allowed.longest, ask.exact, ask.path))
        return verdict is not Verdict.FITS

    def _matters(self, bound: int, service: Service, allowed: Budget) -> bool:
        """May one of at most so many tokens be too long, or a long one of those that must fit together?  What is short is
        estimated well enough."""
        if allowed.longest is not None and bound > allowed.longest:
            return True
        together = service.max_tokens is not None or allowed.room is not None
        return together and service.serving is not None and bound >= self._gate.plan.long_tokens

    def count(self, exchange: Exchange, ask: Ask, service: Service) -> None:
        """A rule depends on its tokens: it is submitted again once they are counted."""
        if ask.path not in SIZED:
            exchange.ask = replace(ask, tokens=tokens_of(exchange.size))
            self._gate.submit(exchange)
        elif not self._encoded(exchange):
            exchange.size_up(self._count(exchange, ask, service.prompt, service.serving, None))

    def _encoded(self, exchange: Exchange) -> bool:
        if header(exchange.head, b"content-encoding") in plain:
            return False
        exchange.refuse(errors.ENCODED)
        return True

    async def _count(self, exchange: Exchange, ask: Ask, plan: PromptPlan, target: Target | None,
                     enough: int | None) -> None:
        body = exchange.body or b""
        said = await self._counter.count(plan, ask.path, body, enough)
        if "lacks" in said:
            said = await self._without_tokenizer(exchange, body, target)
        self._measured(exchange, ask, said)

    async def _without_tokenizer(self, exchange: Exchange, body: bytes, target: Target | None) -> Answer:
        """By the engine, else by its size."""
        shown = header(exchange.head, b"authorization") or b""
        tokens = await tokenized(target, body, shown) if target is not None else None
        exact, tokens = tokens is not None, tokens_of(len(body)) if tokens is None else tokens
        return {"tokens": tokens, "longest": tokens, "exact": exact, "max_tokens": None}

    def _measured(self, exchange: Exchange, ask: Ask, said: Answer) -> None:
        exchange.sized()
        if "bad" in said:
            exchange.refuse(errors.UNREADABLE.because(str(said["bad"])))
            return
        exchange.ask = replace(ask, **{key: said[key] for key in ("tokens", "longest", "exact", "max_tokens")})
        self._gate.submit(exchange)

    async def _cut(self, exchange: Exchange, ask: Ask, plan: PromptPlan, allowed: Budget) -> None:
        limit = allowed.cut_to(ask)
        said = await self._counter.cut(plan, ask.path, exchange.body or b"", limit)
        if "tokens" not in said or said["longest"] > limit:
            exchange.sized()
            why = str(said.get("kept") or said.get("bad") or said.get("lacks") or "")
            exchange.refuse(errors.too_long(ask.longest, allowed.longest or limit, ask.exact, ask.path).because(why))
            return
        self._gate.say("gateway.truncated", id=exchange.id, tokens=ask.longest, to=said["longest"], path=ask.path)
        self._gate.metrics.truncated += 1
        exchange.replaced(said["body"], f"X-LLM-Watchdog-Truncated: {ask.longest} to {said['longest']} tokens")
        self._measured(exchange, ask, said)


def _more(before: int | None, now: int | None) -> int | None:
    """Of free VRAM the most in an engine's life: what prompts take of it at the moment is not lost to the next."""
    return max(filter(None, (before, now)), default=None)
