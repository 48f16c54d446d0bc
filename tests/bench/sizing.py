"""What it costs to know how long a prompt is: `python -m tests.bench.sizing`.  One process, with its client and its engine.

Prints the time that a short request takes with and without a limit, in turns; how long one of 100,000 characters takes to be
counted and refused; and the longest turn of the loop meanwhile, in CPU time, which is what a stream would have to wait.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.fakes.model import write
from tests.gateway.harness import Backend, Client, request, run, running

ROUNDS, SHORT, LONG = 20, 100, 50
CHARACTERS = 100_000


class Turns:
    """The longest turn of the loop so far, in seconds of CPU: others on the machine don't count."""

    def __init__(self) -> None:
        self.longest_s, self._last = 0.0, time.thread_time()
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        now = time.thread_time()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        self._handle = asyncio.get_running_loop().call_soon(self._turn)

    def stop(self) -> float:
        self._handle.cancel()
        return self.longest_s


async def timed(client: Client, body: bytes) -> tuple[float, int]:
    began = time.perf_counter()
    client.send(request("POST", "/v1/chat/completions", body))
    answer = await client.answer()
    return time.perf_counter() - began, answer.status


def chat(words: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": words}], "max_tokens": 100}).encode()


async def bench(folder: Path) -> None:
    async with running() as at:
        backend, client = await Backend().start(), await at.connect()
        plan = {"tokenizer": str(write(folder / "model")), "limit": 32_768}
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(ROUNDS * 2):
            limited = number % 2 == 1
            at.serve(backend.serving(), **({"prompt": plan} if limited else {}))
            await timed(client, chat("warm"))
            took[limited] += [(await timed(client, chat("a short question, " * 20)))[0] for _ in range(SHORT)]
        plain, limited_s = median(took[False]), median(took[True])
        print(f"short request, p50: {plain * 1e3:.3f} ms; a limit adds {(limited_s - plain) * 1e3:.3f} ms")
        await timed(client, chat("x" * CHARACTERS))
        bodies = [chat(f"{number} " + "some words, " * (CHARACTERS // 12)) for number in range(LONG)]
        turns = Turns()
        long = [await timed(client, body) for body in bodies]
        assert {status for _, status in long} == {400}
        print(f"{CHARACTERS} characters counted and refused, p50: {median(one for one, _ in long) * 1e3:.1f} ms")
        print(f"the longest turn of the loop meanwhile: {turns.stop() * 1e3:.2f} ms of CPU")
        client.close()


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        run(bench(Path(name)), 200)
