"""Long prompts wait for the KV cache that the engine itself reports; short ones pass them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.gateway.harness import SSE_HEAD, Asked, Backend, Client, chunk, ok, request, run, running, until

from vllm_watchdog.gateway import kv
from vllm_watchdog.gateway.seats import Block, Claim, Limits, Seats

LONG = 1000         # tokens, by their bytes


class Engine:
    """Long prompts stay until they are let go; `used` is what /metrics says."""

    def __init__(self) -> None:
        self.used = "0.0"
        self.go = asyncio.Event()

    async def __call__(self, backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: asyncio.StreamReader) -> None:
        if asked.target == "/metrics":
            size = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
            writer.write(ok(size + f'vllm:kv_cache_usage_perc{{engine="0"}} {self.used}\n'.encode()))
        elif asked.method == "GET":
            writer.write(ok())
        elif len(asked.body) > LONG:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
            await self.go.wait()
            writer.write(chunk(b""))
        else:
            writer.write(ok())


async def ask(bench: Any, tokens: int) -> Client:
    client: Client = await bench.connect()
    client.send(request("POST", "/v1/completions", b'{"prompt":"' + b"x" * (4 * tokens) + b'"}'))
    return client


def long_ones(backend: Backend) -> int:
    return sum(len(each.body) > LONG for each in backend.asked)


@pytest.mark.parametrize("over", ["wait", "refuse"])
def test_a_long_prompt_waits_for_room_in_the_engines_cache(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "every_s", 0.0)

    async def work() -> None:
        async with running(long_tokens=LONG) as bench:
            engine = Engine()
            backend = await Backend(engine).start()
            bench.serve(backend.serving(), prompt={"over": over, "media_tokens": 1})
            engine.used = "0.75"
            first = await ask(bench, 2000)
            (station,) = bench.gateway.dispatcher.stations.values()
            await until(lambda: station.kv_free == 4000, "the cache is looked at")
            second = await ask(bench, 5000)
            if over == "refuse":
                answer = await second.answer()
                assert answer.status == 429 and int(answer.headers["retry-after"]) > 0
            else:
                await until(lambda: bench.gauge("holding") == 1, "the second one waits")
                assert (await bench.complete("short")).status == 200 and long_ones(backend) == 1
                engine.used = "5e-1"
                await until(lambda: long_ones(backend) == 2, "it goes when there is room")
            engine.go.set()
            await first.answer()
            first.close()
            second.close()
            await until(lambda: station.kv_free is None, "nobody looks when it doesn't matter")

    run(work())


def test_one_long_prompt_goes_where_nobody_is() -> None:
    seats, limits = Seats(), Limits(free=10)
    assert seats.blocked(Claim(1, 1000, long=True), limits) is None
    seats.enter(Claim(1, 5))
    assert seats.blocked(Claim(1, 1000, long=True), limits) is Block.KIND
    assert seats.blocked(Claim(1, 1000), limits) is None and seats.blocked(Claim(1, 10, long=True), limits) is None
