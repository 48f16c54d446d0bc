"""The daemon with the limits that no configuration key sets cut short, so that a test need not wait for them.

`HASTY_RELEASE_S` and `HASTY_CONFIRM_S` in the environment cut two of them less short.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_watchdog.app.daemon import Daemon
from vllm_watchdog.config import Settings
from vllm_watchdog.config_load import load
from vllm_watchdog.core.plan import Plan


class Hasty:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)

    def plan(self, seed: int) -> Plan:
        plan = self._settings.plan(seed)
        release_s, confirm_s = (float(os.environ.get(f"HASTY_{name}_S", "1.0")) for name in ("RELEASE", "CONFIRM"))
        engines = tuple(replace(engine, limits=replace(engine.limits, release_s=release_s, kill_s=5.0, wake_s=2.0))
                        for engine in plan.engines)
        return replace(
            plan, engines=engines, confirm_s=confirm_s, failover=replace(plan.failover, idle_s=0.5),
            thresholds=replace(plan.thresholds, clear_after_s=0.5))


if __name__ == "__main__":
    def again() -> Any:
        return Hasty(load(Path(sys.argv[sys.argv.index("--config") + 1])))

    sys.exit(Daemon(again(), again).run())
