"""Two services behind one gateway: which of them gets a request by the rules, also while one of them is down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.gateway.harness import Answer, Backend, Bench, ok, run, running, until

from vllm_watchdog.gateway_rules import Rule, WhenDown, key_of
from vllm_watchdog.prompt_plan import PromptPlan

LONG = "x" * 5000
WAIT, REFUSE, SPILL = WhenDown


@dataclass
class Two:
    """A gateway in front of `short` and `long`."""

    bench: Bench
    short: Backend
    long: Backend

    def route(self, *rules: Rule, down: str = "") -> None:
        bench = self.bench
        bench.version += 1
        services = [{"name": each.name, "models": ["m"], "serving": None if each.name in down.split() else each.serving(),
                     "why": f"{each.name} is starting"} for each in (self.short, self.long)]
        draft = bench.folder / "route.new"
        draft.write_text(json.dumps({"version": bench.version, "services": services,
                                     "rules": [rule.document() for rule in rules]}))
        draft.replace(bench.gateway.plan.route_file)
        bench.gateway.follow.read_file()

    async def by(self, prompt: str = "short", more: str = "", path: str = "/v1/completions") -> str:
        """Who answered, or the error's code."""
        return by(await self.bench.ask("POST", path, json.dumps({"model": "m", "prompt": prompt}).encode(), more))


def by(answer: Answer) -> str:
    return str(answer.json["by"]) if answer.status == 200 else f"{answer.status} {answer.code}"


class ByBytes:
    """Counts a token for each byte, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    async def count(self, plan: PromptPlan, path: str, body: bytes, enough: int | None) -> dict[str, Any]:
        self.asked += 1
        return {"tokens": len(body), "longest": len(body), "exact": True, "max_tokens": None}


@asynccontextmanager
async def two(**plan: Any) -> AsyncIterator[Two]:
    async with running(**plan) as bench:
        bench.gateway.dispatcher.sizing._counter = ByBytes()  # type: ignore[assignment]
        yield Two(bench, await Backend(name="short").start(), await Backend(name="long").start())


def with_two(work: Callable[[Two], Awaitable[None]], **plan: Any) -> None:
    async def whole() -> None:
        async with two(**plan) as both:
            await work(both)

    run(whole())


def by_length(when_down: WhenDown) -> Rule:
    return Rule("long", when_down, tokens_min=4000)


def test_a_long_prompt_goes_to_the_long_engine_and_the_rest_by_its_model() -> None:
    async def work(both: Two) -> None:
        both.route(by_length(WAIT))
        assert [await both.by(), await both.by(LONG), await both.by()] == ["short", "long", "short"]
        assert both.bench.gateway.dispatcher.sizing._counter.asked == 1, "the bytes of the others decide"  # type: ignore[attr-defined]
        both.route()
        assert await both.by(LONG) == "short", "rules are followed live"

    with_two(work)


@pytest.mark.parametrize("rule", [
    Rule("long", path="/v1/chat/*"), Rule("long", header="X-Tier: batch"), Rule("long", key=key_of(b"sk-1")),
    Rule("long", model="m", header="x-tier")])
def test_rules_look_at_path_header_and_key(rule: Rule) -> None:
    async def work(both: Two) -> None:
        both.route(rule)
        assert await both.by() == "short"
        more = "X-Tier: batch\r\nAuthorization: Bearer sk-1\r\n"
        assert await both.by("", more, "/v1/chat/completions") == "long"

    with_two(work)


def test_reads_and_unknown_requests_follow_rules_too_and_have_no_prompt() -> None:
    async def work(both: Two) -> None:
        both.route(Rule("long", tokens_max=10), Rule("short"))
        assert by(await both.bench.ask("GET", "/version")) == "long"
        assert by(await both.bench.ask("POST", "/v1/load_lora_adapter", b"{}")) == "long"

    with_two(work)


def test_a_model_that_two_services_serve_is_listed_once() -> None:
    async def work(both: Two) -> None:
        both.route(by_length(WAIT))
        assert [card["id"] for card in (await both.bench.ask("GET", "/v1/models")).json["data"]] == ["m"]

    with_two(work)


def test_an_engine_that_only_fails_is_as_good_as_down() -> None:
    async def work(both: Two) -> None:
        async def fails(_: Backend, __: Any, writer: asyncio.StreamWriter, ___: Any) -> None:
            writer.write(ok(b"{}", "504 X"))

        both.long.behaviour = fails
        both.route(by_length(SPILL))
        failed = [(await both.bench.complete(LONG + str(number))).status for number in range(5)]
        assert failed == [504] * 5, "they are passed on, and open its breaker"
        assert await both.by(LONG) == "short"

    with_two(work)


def test_refuse_says_no_at_once_and_why() -> None:
    async def work(both: Two) -> None:
        both.route(by_length(REFUSE), down="long")
        answer = await both.bench.complete(LONG)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "engine_unavailable", "5")
        assert "long is starting" in answer.json["error"]["message"]
        assert await both.by() == "short"

    with_two(work)


def test_spill_goes_elsewhere_while_it_is_down_and_comes_back() -> None:
    async def work(both: Two) -> None:
        both.route(by_length(SPILL), down="long")
        assert await both.by(LONG) == "short"
        both.route(by_length(SPILL))
        assert await both.by(LONG) == "long"

    with_two(work)


def test_wait_waits_and_what_waits_spills_once_its_rule_says_so() -> None:
    async def work(both: Two) -> None:
        both.route(by_length(WAIT), down="long")
        asked = [asyncio.create_task(both.by(LONG)) for _ in range(2)]
        await until(lambda: both.bench.gauge("holding") == 2, "both wait")
        assert await both.by() == "short", "nobody waits for a neighbour"
        both.route(by_length(SPILL), down="long")
        assert await asyncio.gather(*asked) == ["short", "short"]

    with_two(work)


def test_what_an_engine_had_when_it_died_spills() -> None:
    async def work(both: Two) -> None:
        async def never(backend: Backend, *_: Any) -> None:
            await asyncio.sleep(60)

        both.long.behaviour = never
        both.route(by_length(SPILL))
        asked = asyncio.create_task(both.by(LONG))
        await until(lambda: both.long.asked, "it arrives")
        both.long.die()
        assert await asked == "short"

    with_two(work)
