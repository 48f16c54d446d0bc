"""A process of its own that streams answers from an engine or a gateway, so that who asks is not what is measured.

    python -m tests.gpu.streams

Each line that it reads is `URL ROUNDS TOKENS`: STREAMS streams take so many answers of so many tokens, one after the other.
It answers with the seconds that they took together, or with `failed: WHY`.  It ends with its input.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from types import TracebackType

import aiohttp

STREAMS = 16
ANSWER_S = 60.0
COMMAND = (sys.executable, "-m", "tests.gpu.streams")


class Streams:
    """The process, and who waits for it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait(20)

    def take_s(self, base: str, rounds: int, tokens: int) -> float:
        """Raises RuntimeError with what went wrong."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{base} {rounds} {tokens}\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline().strip()
        try:
            return float(said)
        except ValueError:
            raise RuntimeError(said or "the client process died") from None


async def _stream(session: aiohttp.ClientSession, base: str, number: int, rounds: int, tokens: int) -> None:
    body = {"model": "m", "prompt": f"{number} says", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    for _ in range(rounds):
        async with session.post(f"{base}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for _ in reply.content.iter_any():
                pass


async def _take(base: str, rounds: int, tokens: int) -> float:
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(_stream(session, base, number, rounds, tokens) for number in range(STREAMS)))
        return time.perf_counter() - began


def main() -> None:
    for line in sys.stdin:
        base, rounds, tokens = line.split()
        try:
            print(f"{asyncio.run(_take(base, int(rounds), int(tokens))):.6f}", flush=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"failed: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
