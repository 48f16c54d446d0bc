"""What all benchmarks print: one line for the machine, one row a figure, and whether its goal was met."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

Row = tuple[str, str, str, bool | None]         # what, figure, goal, whether it was met
REAL_TIME = (os.SCHED_RR, os.SCHED_FIFO)
ROOT = Path(__file__).parents[2]


def machine() -> str:
    """Processor, cores, load, Python, commit: what a figure means nothing without.

    On a machine that others use, too, run it as root under `chrt -r 1`: then they hardly disturb it, and the line says so.
    """
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True,
                            check=False).stdout.strip()
    return (f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, "
            f"load average {os.getloadavg()[0]:.1f}{', real-time' * (os.sched_getscheduler(0) in REAL_TIME)}, "
            f"commit {commit or 'unknown'}")


def show(rows: Iterable[Row]) -> int:
    """Prints them as they come; 1 where a goal was missed, as an exit code."""
    missed = False
    for what, figure, goal, met in rows:
        missed |= met is False
        verdict = "" if met is None else f"goal {goal}: {'met' if met else 'MISSED'}"
        print(f"{what:66} {figure:34} {verdict}", flush=True)
    return int(missed)


def program(name: str) -> str | None:
    """A peer: on PATH, in Debian's sbin, or in a folder of BENCH_PATH."""
    folders = (os.environ.get("PATH", ""), os.environ.get("BENCH_PATH", ""), "/usr/sbin", "/sbin")
    return shutil.which(name, path=os.pathsep.join(filter(None, folders)))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by this share of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def spread(values: Sequence[float], unit: str, digits: int = 1) -> str:
    """`median (smallest-largest) unit`."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f}) {unit}"
