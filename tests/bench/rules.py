"""What choosing by rules and merging deltas cost by themselves: `python -m tests.bench.rules`.  CPU, the best of five."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.gateway.test_coalesce import say

from vllm_watchdog.gateway.ask import Ask
from vllm_watchdog.gateway.coalesce import Coalescer
from vllm_watchdog.gateway.errors import chunk
from vllm_watchdog.gateway.framing import Unchunked
from vllm_watchdog.gateway.routes import Route, Service
from vllm_watchdog.gateway.rules import choose
from vllm_watchdog.gateway_rules import Rule

COUNT = 20_000
EVENTS = [chunk(say(f"tok{number % 10} ")) for number in range(COUNT)]
ROUTE = Route(1, (Service("short", ("m",)), Service("long", ("m",))),
              (Rule("long", tokens_min=6000), Rule("long", header="X-Tier: batch"), Rule("short")))
ASK = Ask("/v1/chat/completions", "", "m", 1200)


def merge() -> int:
    """How many events are left."""
    coalescer, out = Coalescer(128), list[bytes]()
    take = Unchunked(lambda events: out.append(coalescer.feed(events)))
    for event in EVENTS:
        take(event)
    return b"".join(out).count(b"\n\n")


def ask() -> None:
    for _ in range(COUNT):
        choose(ROUTE, ASK, lambda _: None, lambda _: True, lambda _: True)


def us(work: Callable[[], object]) -> float:
    """Microseconds of CPU of one of COUNT."""
    took = []
    for _ in range(5):
        began = time.process_time()
        work()
        took.append(time.process_time() - began)
    return min(took) / COUNT * 1e6


if __name__ == "__main__":
    print(f"merging an event: {us(merge):.1f} us; {COUNT} become {merge()}")
    print(f"choosing by three rules: {us(ask):.1f} us a request")
