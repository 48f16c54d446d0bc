"""The sandbox's daemon: the real one, with the limits that no configuration key sets cut short, so that nobody waits a
minute for what a drill can show in a second, and with a wall clock and a kernel log that a drill may tamper with.

    python -m vllm_watchdog.app.drill.sandbox_daemon --config FOLDER/config.toml

`FOLDER/clock` holds the seconds by which the wall clock is wrong, `FOLDER/kmsg` is a FIFO; neither needs to be there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from vllm_watchdog.app.daemon import Daemon
from vllm_watchdog.config import Settings
from vllm_watchdog.config_load import load
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.sense.kernel import open_kmsg

CLOCK, KMSG = "clock", "kmsg"


class Short:
    """The settings, whose plan has short limits."""

    def __init__(self, settings: Settings, shorten: Callable[[Plan], Plan]) -> None:
        self._settings, self._shorten = settings, shorten

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)

    def plan(self, seed: int) -> Plan:
        return self._shorten(self._settings.plan(seed))


def shortened(plan: Plan, release_s: float = 1.0, confirm_s: float = 1.0) -> Plan:
    engines = tuple(replace(engine, limits=replace(engine.limits, release_s=release_s, kill_s=5.0, wake_s=2.0))
                    for engine in plan.engines)
    return replace(plan, engines=engines, confirm_s=confirm_s, failover=replace(plan.failover, idle_s=0.5),
                   thresholds=replace(plan.thresholds, clear_after_s=0.5))


def main(config: Path, shorten: Callable[[Plan], Plan] = shortened) -> int:
    """Until it is stopped; its exit code."""
    def again() -> Settings:
        return cast(Settings, Short(load(config), shorten))

    def wall() -> float:
        try:
            return time.time() + float((config.parent / CLOCK).read_text("ascii"))
        except (FileNotFoundError, ValueError):
            return time.time()

    def kernel_log() -> int:
        fifo = config.parent / KMSG
        # Opened for both, it never reaches its end.
        return os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) if fifo.is_fifo() else open_kmsg()

    return Daemon(again(), again, wall, kernel_log).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    sys.exit(main(parser.parse_args().config))
