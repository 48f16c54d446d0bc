"""Which of several classes is the cause: a number a class, the greater the more specific."""

from __future__ import annotations

from vllm_watchdog.core.findings import KERNEL_RANK
from vllm_watchdog.core.signatures import ROWS

# What the watchdog sees for itself.  A log line that names a cause says more than a silence or an exit.
OWN = {
    "unexpected_exit": 5, "api_unreachable": 6, "vram_growth": 7, "kv_pressure": 7, "rss_leak": 7, "rss_high": 7,
    "vram_high": 8, "vram_degrade": 9, "disk_low": 9, "engine_hang": 15, "load_timeout": 15, "budget_spent": 4,
    "sleep_failed": 15, "standby_lost": 4, "fd_leak": 7, "preemptions": 7, "oom_rate": 3, "crash_loop": 3,
    "engine_down": 2, "log_lost": 4,
    "vram_held": 60, "wedged": 90, "port_stranger": 90, "spawn_failed": 90, "gpu_driver_unresponsive": 60,
}
_RANKS = {row.class_: max(other.rank for other in ROWS if other.class_ == row.class_) for row in ROWS} | KERNEL_RANK | OWN
_RANKS["oom_runtime"] = _RANKS["oom"]


def specificity(class_: str) -> int:
    """0 for no class at all; 1 for one that is not in the catalogue."""
    return _RANKS.get(class_, 1) if class_ else 0
