"""What the API server does beside serving: the statistics line, a flood of log lines, its own violent end.

Each is a daemon thread that waits on an event with a deadline; none touches a connection.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

from vllm_watchdog.sim import logs
from vllm_watchdog.sim.flags import Options
from vllm_watchdog.sim.metrics import Metrics

FLOOD_LIMIT_S = 60.0
FLOOD_BURST_S = 0.05
FLOOD_WORDS = "the request asks for a plain answer in as many words as it takes "


def start(options: Options, log: logs.Log, metrics: Metrics) -> None:
    """Starts what the flags ask for."""
    if options.log_stats:
        _thread("stats", lambda: _stats(options, log, metrics))
    if options.sim.flood_mb_per_s:
        flood(log, options.sim.flood_mb_per_s, FLOOD_LIMIT_S)
    if options.sim.die_with:
        die(options.sim.die_with, options.sim.die_after_s)


def _thread(name: str, target: Callable[[], None]) -> None:
    threading.Thread(target=target, name=name, daemon=True).start()


def _stats(options: Options, log: logs.Log, metrics: Metrics) -> None:
    """A line an interval while tokens flow, and one more; then silence, also in a hang (vLLM demotes it to DEBUG)."""
    pause, before, active = threading.Event(), metrics.counts(), False
    while not pause.wait(options.stats_interval_s):
        now = metrics.counts()
        prompt, made = now.prompt_tokens - before.prompt_tokens, now.generation_tokens - before.generation_tokens
        if prompt or made or active:
            log.info("loggers.py:335", _stats_text(options.stats_interval_s, prompt, made, before.preemptions, metrics))
        active, before = bool(prompt or made), now


def _stats_text(interval_s: float, prompt: int, made: int, preempted_before: int, metrics: Metrics) -> str:
    now = metrics.counts()
    preempted = now.preemptions - preempted_before
    return (
        f"Engine 000: Avg prompt throughput: {prompt / interval_s:.1f} tokens/s, "
        f"Avg generation throughput: {made / interval_s:.1f} tokens/s, "
        f"Running: {now.running} reqs, Waiting: {now.waiting} reqs, "
        + (f"Preemptions: {preempted}, " if preempted else "")
        + f"GPU KV cache usage: {now.kv_share * 100:.1f}%, Prefix cache hit rate: 0.0%"
    )


def flood(log: logs.Log, mb_per_s: float, for_s: float) -> None:
    """Logs request lines at a rate, for at most FLOOD_LIMIT_S."""
    text = "Received request cmpl-{}: prompt: '" + FLOOD_WORDS * 8 + "', params: SamplingParams(n=1)."
    size = len(text) + 60
    burst = max(1, int(mb_per_s * 1e6 * FLOOD_BURST_S / size))
    until = time.monotonic() + min(for_s, FLOOD_LIMIT_S)

    def run() -> None:
        pause = threading.Event()
        while time.monotonic() < until:
            for number in range(burst):
                log.info("request_logger.py:39", text.format(number))
            pause.wait(FLOOD_BURST_S)

    _thread("flood", run)


def die(name: str, after_s: float) -> None:
    """Sends this process the named signal, with its default action, after a while."""
    number = signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]

    def run() -> None:
        threading.Event().wait(after_s)
        os.kill(os.getpid(), number)

    _thread("die", run)
