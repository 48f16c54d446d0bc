"""The journeys of the gateway against the stand-in engine: real processes that are really killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.crowd import crowd, verdicts
from tests.gateway.harness import Answer, Bench, request, run, running, until

from vllm_watchdog.gateway.routes import Target
from vllm_watchdog.gateway.vitals import health

RUNNING: dict[int, subprocess.Popen[bytes]] = {}


class Sim:
    """One engine, started anew after each kill."""

    def __init__(self, name: str, *flags: str) -> None:
        self.name, self.flags, self.generation = name, flags, 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])

    async def start(self) -> Sim:
        self.generation += 1
        command = [sys.executable, "-m", "vllm_watchdog.sim", "serve", "--model", "m", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--sim-load-s", "0", "--sim-token-s", "0.005", *self.flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        RUNNING[self.process.pid] = self.process
        target = Target(self.name, self.generation, "127.0.0.1", self.port)
        for _ in range(400):
            if await health(target) == 200:
                return self
            await asyncio.sleep(0.025)
        raise AssertionError("the stand-in did not come up")

    def serving(self) -> dict[str, Any]:
        return {"engine": self.name, "generation": self.generation, "host": "127.0.0.1", "port": self.port}

    def kill(self) -> None:
        end(self.process)


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # of its own session: a stranger can't be in it
    process.wait(5)
    RUNNING.pop(process.pid, None)


@pytest.fixture(autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    yield
    for process in tuple(RUNNING.values()):
        end(process)


def asked(prompt: str, stream: bool, tokens: int = 8) -> bytes:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": tokens, "stream": stream}).encode()
    return request("POST", "/v1/completions", body)


def verdict(answer: Answer, stream: bool) -> str:
    """whole, cut (begun, and said so), or what went wrong."""
    if answer.status != 200 or not answer.whole:
        return f"{answer.status} {answer.body[:200]!r} whole={answer.whole}"
    if not stream:
        return "whole" if answer.json["choices"][0]["finish_reason"] == "length" else "odd"
    if answer.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer.body:
        return "whole"
    return "cut" if b'"error"' in answer.body and answer.body.startswith(b'data: {"id"') else repr(answer.body[-300:])


async def client(bench: Bench, number: int, until_done: asyncio.Event, tally: Counter[str]) -> None:
    connection = await bench.connect()
    turn = 0
    while not until_done.is_set():
        stream = (number + turn) % 2 == 0
        connection.send(asked("the same few words", stream))
        tally[verdict(await connection.answer(), stream)] += 1
        turn += 1
    connection.close()


def test_kills_under_load_fail_no_request_that_had_not_begun(kills: int = 3) -> None:
    async def work() -> None:
        sims = [await Sim("primary").start(), await Sim("backup").start()]
        async with running(hold_s=20) as bench:
            bench.serve(sims[0].serving())
            done, tally = asyncio.Event(), Counter[str]()
            clients = [asyncio.create_task(client(bench, n, done, tally)) for n in range(32)]
            for _ in range(kills):
                before = tally.total()
                await until(lambda b=before: tally.total() > b + 64, "they are served")
                sims[0].kill()
                await asyncio.sleep(0.02)
                sims.reverse()
                bench.serve(sims[0].serving())
                await sims[1].start()
            done.set()
            await asyncio.gather(*clients)
            assert set(tally) <= {"whole", "cut"}, tally
            assert bench.gauge("engine_deaths_total") == kills
            assert bench.gauge("replayed_total") > 0

    run(work(), 40)


def test_a_poisonous_prompt_costs_one_engine_and_no_other_request() -> None:
    async def work() -> None:
        flags = ("--sim-oom-over-tokens", "5000", "--sim-prefill-tokens-per-s", "100000", "--max-num-seqs", "256")
        sims = [await Sim(name, *flags).start() for name in ("primary", "backup")]
        async with running() as bench:
            bench.serve(sims[0].serving())

            async def one(number: int) -> str:
                connection = await bench.connect()
                connection.send(asked(f"innocent number {number}", number % 2 == 0, 100 if number < 50 else 20))
                answer = await connection.answer()
                connection.close()
                return verdict(answer, number % 2 == 0)

            async def poison() -> Answer:
                connection = await bench.connect()
                connection.send(asked("poison " * 6000, True))
                answer = await connection.answer()
                connection.close()
                return answer

            normal = [asyncio.create_task(one(n)) for n in range(50)]
            await until(lambda: bench.gauge("in_flight") > 20, "they are on their way")
            poisonous = asyncio.create_task(poison())
            normal += [asyncio.create_task(one(n)) for n in range(50, 100)]
            await until(lambda: bench.gauge("engine_deaths_total"), "the poison works")
            bench.serve(sims[1].serving())
            answer = await poisonous
            assert (answer.status, answer.code) == (422, "prompt_quarantined")
            assert Counter(await asyncio.gather(*normal)).keys() <= {"whole", "cut"}
            assert (await poison()).code == "prompt_quarantined"
            assert bench.gauge("engine_deaths_total") == 1
            assert sims[1].process.poll() is None

    run(work(), 40)


def test_a_dead_core_under_a_live_server_is_noticed_before_its_port_closes() -> None:
    async def work() -> None:
        first, second = await Sim("primary").start(), await Sim("backup").start()
        async with running() as bench:
            bench.serve(first.serving())
            connection = await bench.connect()
            connection.send(asked("words", False, 100))
            await until(lambda: bench.gauge("in_flight") == 1, "it is there")
            await asyncio.sleep(0.05)
            bench.serve(second.serving())
            fault = Bench(bench.gateway, bench.folder, [], [], first.port)
            await fault.ask("POST", "/sim/fault", b'{"name": "core_death"}')
            bench_answer = await connection.answer()
            assert bench_answer.status == 200
            assert bench_answer.json["usage"]["completion_tokens"] == 100
            connection.close()

    run(work(), 40)


@pytest.mark.parametrize("limited", [True, False])
def test_prompts_of_all_sizes_never_meet_the_memory_cliff_if_they_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limited: bool
) -> None:
    """The articles' case in small: what 8 clients ask for at once takes more memory than there is."""
    (tmp_path / "gpu.json").write_text(json.dumps({"total_bytes": 20 << 30}))
    monkeypatch.setenv("LLM_WATCHDOG_SIM_GPU", str(tmp_path))

    async def work() -> None:
        flags = ("--sim-kib-per-token", "1024", "--gpu-memory-utilization", "0.5", "--served-model-name", "stand-in",
                 "--long-prefill-token-threshold", "500")
        sim = await Sim("primary", *flags).start()
        async with running(long_tokens=1000, suspect_tokens=1000, hold_s=60.0 if limited else 0.1) as bench:
            bench.serve(sim.serving(), max_tokens=9000 if limited else None)
            got = await crowd(bench.port, 3, 5, 0.5, ((50, 100), (1000, 8000)), answer=20, deadline_s=20)
            if limited:
                assert verdicts(got).keys() == {"short whole", "long whole"}
                assert sim.process.poll() is None
            else:
                assert "long whole" not in verdicts(got), "no cliff, no proof"
                await until(lambda: sim.process.poll() is not None, "the engine dies")

    run(work(), 40)
