"""What clients see of limits, turns, the throttle and the breaker, over sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest
from tests.gateway.harness import Answer, Asked, Backend, Bench, chunk, echo, ok, request, run, running, until
from tests.gateway.test_failover import hang

from vllm_watchdog.gateway import breaker, throttle
from vllm_watchdog.gateway.last_words import of_status_s


class Gate:
    """An engine that answers when it is told to."""

    def __init__(self, answer: bytes = ok(b"1")) -> None:
        self.here: list[tuple[str, asyncio.Event]] = []
        self.seen: list[str] = []
        self.answer = answer

    async def __call__(self, backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: Any) -> None:
        who = asked.header("x-who") or ""
        event = asyncio.Event()
        self.here.append((who, event))
        self.seen.append(who)
        await event.wait()
        writer.write(self.answer)

    def end(self, who: str = "") -> None:
        """One request, the first of this name."""
        found = next(each for each in self.here if each[0] == who or not who)
        self.here.remove(found)
        found[1].set()

    def names(self) -> Counter[str]:
        return Counter(who for who, _ in self.here)


def asking(bench: Bench, who: str, tokens: int = 10, key: str = "") -> asyncio.Task[Answer]:
    """A prompt of about so many tokens."""
    body = json.dumps({"model": "m", "prompt": "word" * tokens}).encode()
    more = f"X-Who: {who}\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
    return asyncio.create_task(bench.ask("POST", "/v1/completions", body, more))


async def answered(gate: Gate, tasks: list[asyncio.Task[Answer]]) -> list[int]:
    while not all(task.done() for task in tasks):
        if gate.here:
            gate.end()
        await asyncio.sleep(0.002)
    return [task.result().status for task in tasks]


# -- busy is not down

def test_who_waited_for_room_in_vain_is_told_that_it_is_busy_and_why() -> None:
    async def work() -> None:
        backend = await Backend(hang).start()
        async with running(hold_s=0.1) as bench:
            bench.serve(backend.serving(), max_concurrent=1, why="only 1 requests run at a time (kv_pressure of primary)")
            first = asking(bench, "first")
            await until(lambda: backend.asked, "it is there")
            answer = await bench.complete()
            assert (answer.status, answer.code) == (429, "engine_busy")
            assert answer.json["error"]["type"] == "rate_limit_error"
            assert "only 1 requests run at a time (kv_pressure of primary)" in answer.json["error"]["message"]
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            bench.serve(backend.serving(), max_concurrent=1, max_tokens=500)
            answer = await bench.complete()
            assert "it takes at most 1 requests, 500 tokens of prompts at a time" in answer.json["error"]["message"]
            first.cancel()

    run(work())


def test_a_full_queue_is_429_while_the_engine_serves_and_503_while_none_does() -> None:
    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running(hold_requests=2) as bench:
            bench.serve(backend.serving(), max_concurrent=1)
            tasks = [asking(bench, "a")]
            for n in range(40):         # four a second or more, for the pace
                await until(lambda: gate.here, "one is there")
                tasks.append(asking(bench, f"b{n}"))
                gate.end()
            await until(lambda: gate.here, "one is there")
            tasks += [asking(bench, "c"), asking(bench, "d")]
            await until(lambda: bench.gauge("holding") == 2, "two wait")
            answer = await asking(bench, "e")
            assert (answer.status, answer.code) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) == 1, "forty have ended lately"
            assert set(await answered(gate, tasks)) == {200}
            bench.serve(None, why="it restarts")
            held = [asking(bench, "f"), asking(bench, "g")]
            await until(lambda: bench.gauge("holding") == 2, "two are held")
            answer = await asking(bench, "h")
            assert (answer.status, answer.code) == (503, "queue_full")
            bench.serve(backend.serving())
            assert await answered(gate, held) == [200, 200]

    run(work())


# -- turns

def test_a_key_has_its_limit_and_others_pass_it() -> None:
    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running(key_concurrent=2) as bench:
            bench.serve(backend.serving())
            tasks = [asking(bench, "a", key="secret-a") for _ in range(5)]
            await until(lambda: bench.gauge("holding") == 3, "three of five wait")
            tasks.append(asking(bench, "b", key="secret-b"))
            await until(lambda: gate.names() == {"a": 2, "b": 1}, "another key goes")
            assert set(await answered(gate, tasks)) == {200}

    run(work())


def test_a_flood_of_long_prompts_leaves_short_ones_their_seats() -> None:
    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running(long_tokens=1000, private=True) as bench:
            bench.serve(backend.serving(), max_concurrent=4)
            tasks = [asking(bench, "long", 2000) for _ in range(10)]
            await until(lambda: gate.names() == {"long": 2} and bench.gauge("holding") == 8, "two of ten go")
            tasks += [asking(bench, "short") for _ in range(4)]
            await until(lambda: gate.names() == {"long": 2, "short": 2}, "two short ones go")
            metrics = (await bench.ask("GET", "/metrics")).body.decode()
            assert 'llm_watchdog_gateway_waiting{service="primary",kind="long"} 8' in metrics
            assert 'llm_watchdog_gateway_engine_requests{engine="a"} 4' in metrics
            assert 'llm_watchdog_gateway_engine_limit{engine="a"} 4' in metrics
            assert set(await answered(gate, tasks)) == {200}

    run(work())


def test_prompts_together_stay_under_the_tokens_that_an_engine_takes() -> None:
    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running() as bench:
            bench.serve(backend.serving(), max_tokens=3000)
            tasks = [asking(bench, "a", 1400) for _ in range(3)]
            await until(lambda: gate.names() == {"a": 2} and bench.gauge("holding") == 1, "two fit")
            gate.end()
            await until(lambda: len(gate.seen) == 3, "the third goes when one has ended")
            assert set(await answered(gate, tasks)) == {200}

    run(work())


def test_long_prompts_that_must_fit_together_are_counted_not_guessed() -> None:
    """By the engine, where there is no tokenizer: 2,500 tokens by their bytes are 6,000."""
    async def work() -> None:
        gate = Gate()

        async def counting(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: Any) -> None:
            if asked.target == "/tokenize":
                writer.write(ok(b'{"count": 6000, "max_model_len": 100000, "tokens": []}'))
            else:
                await gate(backend, asked, writer, reader)

        backend = await Backend(counting).start()
        async with running() as bench:
            bench.serve(backend.serving(), max_tokens=10_000)
            tasks = [asking(bench, "a", 2500), asking(bench, "a", 2500)]
            await until(lambda: gate.names() == {"a": 1} and bench.gauge("holding") == 1, "one of two fits")
            assert set(await answered(gate, tasks)) == {200}

    run(work())


# -- the breaker

def failing(status: str = "500 Internal Server Error") -> Any:
    async def fail(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: Any) -> None:
        writer.write(ok(b'{"error":{"message":"no"}}', status))

    return fail


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(of_status_s, 500, 0.02)
    monkeypatch.setattr(breaker, "open_s", 0.2)


def states(bench: Bench) -> list[str]:
    return [str(fields["state"]) for event, fields in bench.said if event == "gateway.breaker"]


@pytest.mark.usefixtures("hasty")
def test_an_engine_that_only_fails_is_let_alone_until_one_trial_succeeds() -> None:
    async def work() -> None:
        backend = await Backend(failing()).start()
        async with running() as bench:
            bench.serve(backend.serving())
            for n in range(breaker.failures):
                assert (await bench.complete(f"different {n}")).status == 500
            assert states(bench) == ["open"]
            tasks = [asking(bench, str(n)) for n in range(3)]
            await until(lambda: bench.gauge("holding") == 3, "they wait")
            assert (await bench.ask("GET", "/v1/models")).status == 500, "reads pass"
            asked = len(backend.asked)
            backend.behaviour = echo
            assert [(await task).status for task in tasks] == [200] * 3
            assert len(backend.asked) == asked + 3
            assert states(bench) == ["open", "closed"]

    run(work())


@pytest.mark.usefixtures("hasty")
def test_a_new_generation_is_asked_at_once_whatever_the_old_one_failed() -> None:
    async def work() -> None:
        bad, good = await Backend(failing(), "a").start(), await Backend(echo, "a").start()
        async with running() as bench:
            bench.serve(bad.serving())
            for n in range(breaker.failures):
                await bench.complete(f"different {n}")
            task = asking(bench, "waits")
            await until(lambda: bench.gauge("holding") == 1, "it waits")
            bench.serve(good.serving(2))
            assert (await task).status == 200

    run(work())


@pytest.mark.usefixtures("hasty")
def test_who_waited_for_a_broken_engine_in_vain_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "open_s", 60.0)

    async def work() -> None:
        backend = await Backend(failing()).start()
        async with running(hold_s=0.1) as bench:
            bench.serve(backend.serving())
            for n in range(breaker.failures):
                await bench.complete(f"different {n}")
            answer = await bench.complete()
            assert (answer.status, answer.code) == (503, "engine_failing")

    run(work())


# -- the throttle

def test_preemptions_that_the_daemon_tells_of_lower_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "window_s", 0.1)

    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running() as bench:
            bench.serve(backend.serving(), preempted=7)
            tasks = [asking(bench, str(n)) for n in range(10)]
            await until(lambda: len(gate.here) == 10, "all are there")
            bench.serve(backend.serving(), preempted=30)
            await until(lambda: [fields["limit"] for event, fields in bench.said if event == "gateway.throttled"][:1] == [7],
                        "three of ten less")
            assert not [1 for event, _ in bench.said[1:] if event == "gateway.route"], "no new route: nobody else serves"
            assert set(await answered(gate, tasks)) == {200}

    run(work())


def test_late_first_tokens_lower_the_limit_and_that_is_said_to_who_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "window_s", 0.1)

    over = asyncio.Event()

    async def late(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: Any) -> None:
        await asyncio.sleep(0.1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunk(b'data: {"n":1}\n\n'))
        await over.wait()
        writer.write(b"0\r\n\r\n")

    async def work() -> None:
        backend = await Backend(late).start()
        async with running(first_token_s=0.05, hold_s=0.1) as bench:
            bench.serve(backend.serving())
            tasks = [asking(bench, str(n)) for n in range(8)]
            await until(lambda: [1 for event, _ in bench.said if event == "gateway.throttled"], "the limit is lowered")
            answer = await asking(bench, "late")
            assert (answer.status, answer.code) == (429, "engine_busy")
            assert re.search(r"\(first tokens took \d\.\d s, 0\.05 s are wanted\)", answer.json["error"]["message"])
            over.set()
            assert {(await task).status for task in tasks} == {200}

    run(work())


def test_operators_see_what_waits_and_what_the_engine_has() -> None:
    async def work() -> None:
        gate = Gate()
        backend = await Backend(gate).start()
        async with running(private=True) as bench:
            bench.serve(backend.serving(), max_concurrent=1)
            tasks = [asking(bench, "a"), asking(bench, "b")]
            await until(lambda: bench.gauge("holding") == 1, "one waits")
            assert bench.gateway.plan.admin is not None
            reader, writer = await asyncio.open_unix_connection(str(bench.gateway.plan.admin))
            writer.write(request("GET", "/gateway/inflight", more="Connection: close\r\n"))
            load = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["services"]["primary"]
            writer.close()
            assert load["waiting"] == {"read": 0, "alone": 0, "long": 0, "short": 1}
            assert (load["engine"], load["requests"], load["max_concurrent"], load["breaker"]) == ("a", 1, 1, "closed")
            assert set(await answered(gate, tasks)) == {200}

    run(work())
