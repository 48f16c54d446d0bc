"""What the watchdog and the gateway cost: the same work with both, and on the engine alone with the watchdog stopped.

Pairs in ABBA order, so that a drift of the machine falls on both; each half warms up before it is timed.  The client is a
process of its own, and nothing else of ours runs meanwhile.
"""

from __future__ import annotations

import random
import signal
import time
from statistics import median

import psutil
from tests.gpu.rig import Host, pause
from tests.gpu.streams import STREAMS, Streams

HALF_S = 8.0
PAIR_S = 2.2 * HALF_S       # with both warm-ups
TOKENS, WARM_TOKENS = 64, 16
RESAMPLED = 10_000          # of the bootstrap
GOAL = 0.995


class Overhead:
    """`pairs` at most, as many as fit before `reserve_s` of the script's time are left."""

    def __init__(self, host: Host, pairs: int, reserve_s: float = 0.0) -> None:
        self.host, self.pairs, self.reserve_s = host, pairs, reserve_s
        self.direct = f"http://127.0.0.1:{host.ports['primary']}"

    def run(self) -> None:
        host, spent = self.host, []
        with Streams() as streams, host.meter.resting():
            streams.take_s(self.direct, 1, TOKENS)
            rounds = max(1, round(HALF_S / streams.take_s(self.direct, 1, TOKENS)))
            while len(spent) < self.pairs and host.deadline - time.monotonic() > self.reserve_s + PAIR_S:
                ways = ("without", "with") if len(spent) % 2 else ("with", "without")
                spent.append({way: self._half(streams, way, rounds) for way in ways})
        tokens = rounds * STREAMS * TOKENS
        ratios = [pair["without"] / pair["with"] for pair in spent]
        low, high = interval(ratios)
        speeds = {way: tokens / median(pair[way] for pair in spent) for way in ("with", "without")}
        host.row(f"tokens/s with watchdog and gateway over without (goal {GOAL}): {len(spent)} pairs, {STREAMS} streams, "
                 f"{tokens} tokens a half",
                 f"median {median(ratios):.4f}, 95 % between {low:.4f} and {high:.4f}; {speeds['with']:.0f} and "
                 f"{speeds['without']:.0f} tokens/s; {[round(ratio, 4) for ratio in ratios]}")

    def _half(self, streams: Streams, way: str, rounds: int) -> float:
        if way == "with":
            return self._timed(streams, self.host.gateway_url, rounds)
        assert self.host.daemon
        stopped = [psutil.Process(self.host.daemon.pid), self.host.helper()]
        for process in stopped:
            process.suspend()
        try:
            return self._timed(streams, self.direct, rounds)
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
            pause(0.5)      # what has come due meanwhile is done before the next half

    def _timed(self, streams: Streams, base: str, rounds: int) -> float:
        streams.take_s(base, 1, WARM_TOKENS)
        return streams.take_s(base, rounds, TOKENS)


def interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by bootstrap with a fixed seed."""
    dice = random.Random(1)
    medians = sorted(median(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return medians[round(0.025 * RESAMPLED)], medians[round(0.975 * RESAMPLED) - 1]
