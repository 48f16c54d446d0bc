"""Clients of all sizes that ask again as soon as they are answered, and what each of them got.

A prompt of N tokens has N words of three letters, which is what the stand-in counts, and what four bytes a token estimates.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.gateway.harness import Answer, Client, request

ANSWER = 64                     # tokens
ARTICLE = ("to be or not" * 8400)[:99_999].rpartition(" ")[0]       # the articles' 100,000 characters


@dataclass(frozen=True)
class Got:
    """One request's fate: `whole`, or what went wrong.  Seconds since it was sent."""

    long: bool
    verdict: str
    first_s: float
    total_s: float


def prompt(tokens: int) -> str:
    return "wor" + " wor" * (tokens - 1)


async def ask(port: int, model: str, text: str, answer: int, deadline_s: float) -> tuple[str, float, float, int]:
    """Verdict, seconds to the first token and to the end, seconds to wait before the next try."""
    loop = asyncio.get_running_loop()
    asked = {"model": model, "prompt": text, "max_tokens": answer, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    began = loop.time()
    try:
        async with asyncio.timeout(deadline_s):
            client = Client(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))
            try:
                client.send(request("POST", "/v1/completions", body, "Content-Type: application/json\r\n"))
                head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), deadline_s)
                status = int(head.split(b" ", 2)[1])
                data = await client.reader.read(1 << 16)
                first = loop.time() - began
                rest = data
                while b"0\r\n\r\n" not in rest[-7:] and status == 200:
                    if not (data := await client.reader.read(1 << 16)):
                        break
                    rest = rest[-200:] + data
            finally:
                client.close()
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        return type(error).__name__, 0.0, loop.time() - began, 0
    total = loop.time() - began
    if status != 200:
        after = [line for line in head.split(b"\r\n") if line.lower().startswith(b"retry-after:")]
        return f"{status} {code(data)}", first, total, int(after[0].split(b":")[1]) if after else 0
    return ("whole" if b"[DONE]" in rest and b'"error"' not in rest else "cut"), first, total, 0


def code(body: bytes) -> str:
    try:
        return str(Answer(0, {}, body, b"").code)
    except (ValueError, KeyError):
        return "?"


async def crowd(port: int, shorts: int, longs: int, seconds: float, sizes: Sequence[tuple[int, int]], article: bool = False,
                answer: int = ANSWER, deadline_s: float = 900.0, model: str = "stand-in") -> list[Got]:
    """`sizes`: tokens from and to, of the short prompts and of the long ones; `article`: and the articles' own."""
    got: list[Got] = []
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def client(number: int, long: bool) -> None:
        chance = random.Random(7000 + number)
        await asyncio.sleep(chance.random() * 0.1)
        turn = 0
        while loop.time() < end:
            text = ARTICLE if article and number == 0 and turn % 2 == 0 else prompt(chance.randint(*sizes[long]))
            verdict, first, total, wait_s = await ask(port, model, text, answer, deadline_s)
            got.append(Got(long, verdict, first, total))
            turn += 1
            if wait_s:
                await asyncio.sleep(min(wait_s, max(0.0, end - loop.time())))

    await asyncio.gather(*(client(number, long=True) for number in range(longs)),
                         *(client(number, long=False) for number in range(longs, longs + shorts)))
    return got


def p95(got: list[Got], first: bool) -> float:
    """Of the short ones."""
    times = [each.first_s if first else each.total_s for each in got if not each.long and each.verdict == "whole"]
    return quantiles(times, n=20)[-1] if len(times) > 1 else float("nan")


def verdicts(got: list[Got]) -> dict[str, int]:
    return dict(sorted(Counter(f"{'long' if each.long else 'short'} {each.verdict}" for each in got).items()))
