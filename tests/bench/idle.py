"""What watching costs while nothing happens: CPU a minute and memory, beside monit and circus with two children each.

    python -m tests.bench.idle [ours|monit|circus]... [--seconds 60]

`ours` is the daemon and its GPU helper (a simulated card), two stand-in engines that serve, a sample a second, the status
page first closed, then open (a client that reads the event stream and asks for the plots as the page does).  Engines
and clients are not counted.  monit and circus run their shortest cycle, 1 s, and look only whether two processes live.
CPU is of the processes' own account; memory is PSS: what is shared, shared out.  The host has CROWD more processes, which
sleep: monit looks at each of them each second, and we do when they are new.  On a machine where others start processes
all the time, `unshare -pf --mount-proc` in front keeps those out of the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests
from tests.bench.peers import AbsentError, running, wanted
from tests.bench.table import Row, show
from tests.system.harness import Watchdog, backup, engine, free_port
from tests.system.test_gateway import simulated_card

WARM_S = 8.0            # after the start, before it is measured
PLOTS_S = 2.0           # how often the page asks for the newest samples
MONIT_MS = (0.2, 115.0)         # of monit's CPU, and what that was on the machine of the goal
PSS_MB = 62.0
CROWD = 100
CHILD = "exec sleep 1000000"


class Cost:
    """`processes`: whose."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self._before, self._at = self._cpu_s(), time.monotonic()

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def ms_a_minute(self) -> float:
        return (self._cpu_s() - self._before) * 1e3 / (time.monotonic() - self._at) * 60

    def pss_mb(self) -> float:
        return sum(process.memory_full_info().pss for process in self._processes) / 1e6


def measured_processes(watchdog: Watchdog) -> list[psutil.Process]:
    """The daemon and its GPU helper."""
    assert watchdog.daemon
    daemon = psutil.Process(watchdog.daemon.pid)
    return [daemon, *(child for child in daemon.children() if any("gpu_helper" in word for word in child.cmdline()))]


@contextmanager
def ours(folder: Path) -> Iterator[tuple[list[psutil.Process], str]]:
    """The daemon and its helper, and the page's address."""
    port = free_port()
    engines = {"primary": engine(gpus=[0], args={"gpu-memory-utilization": 0.5}),
               "backup": backup("primary", standby="hot", args={"gpu-memory-utilization": 0.3})}
    watchdog = Watchdog(folder, engines, env=simulated_card(folder.with_name("card")),
                        daemon={"sample_s": 1.0, "listen": f"127.0.0.1:{port}"})
    watchdog.start()
    try:
        for name in engines:
            watchdog.serving(name) if name == "primary" else watchdog.in_phase(name, "serving")
        yield measured_processes(watchdog), f"http://127.0.0.1:{port}"
        watchdog.finish()
    finally:
        watchdog.clear()


@contextmanager
def page(url: str) -> Iterator[None]:
    """Somebody looks at it."""
    over = threading.Event()

    def stream() -> None:
        with requests.get(f"{url}/api/v1/events", stream=True, timeout=30) as answer:
            for _ in answer.iter_lines():
                if over.is_set():
                    return

    def plots() -> None:
        last = 0.0
        with requests.Session() as session:
            while not over.wait(PLOTS_S):
                since = f"&since={last}" if last else ""
                series = session.get(f"{url}/api/v1/samples?range=10m{since}", timeout=30).json()["series"]
                last = max((each["t"][-1] for each in series.values() if each["t"]), default=last)

    threads = [threading.Thread(target=work, daemon=True) for work in (stream, plots)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


@contextmanager
def monit(folder: Path) -> Iterator[list[psutil.Process]]:
    folder.mkdir()
    checks = ""
    for name in ("one", "two"):
        start = folder / name
        start.write_text(f"#!/bin/sh\nsh -c '{CHILD}' &\necho $! >{folder}/{name}.pid\n")
        start.chmod(0o755)
        checks += f'check process {name} with pidfile {folder}/{name}.pid\n  start program = "{start}"\n'
    rc = folder / "monitrc"
    rc.write_text(f"set daemon 1\nset pidfile {folder}/pid\nset idfile {folder}/id\nset statefile {folder}/state\n"
                  f"set logfile {folder}/log\n{checks}")
    rc.chmod(0o600)
    with running([wanted("monit"), "-I", "-c", str(rc)]) as process:
        try:
            yield [process]
        finally:
            for name in ("one", "two"):
                psutil.Process(int((folder / f"{name}.pid").read_text())).kill()


@contextmanager
def circus(folder: Path) -> Iterator[list[psutil.Process]]:
    folder.mkdir()
    ini = folder / "circus.ini"
    watchers = "".join(f"[watcher:{name}]\ncmd = sleep 1000000\n" for name in ("one", "two"))
    ini.write_text(f"[circus]\ncheck_delay = 1\nendpoint = ipc://{folder}/endpoint\n"
                   f"pubsub_endpoint = ipc://{folder}/pubsub\n{watchers}")
    with running([wanted("circusd"), str(ini)]) as process:
        yield [process]


@contextmanager
def crowd() -> Iterator[None]:
    sleepers = [subprocess.Popen(["sleep", "1000000"]) for _ in range(CROWD)]
    try:
        yield
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def figures(processes: list[psutil.Process], seconds: float) -> tuple[float, float]:
    """CPU milliseconds a minute, PSS in MB."""
    time.sleep(WARM_S)
    cost = Cost(processes)
    time.sleep(seconds)
    return cost.ms_a_minute(), cost.pss_mb()


def rows(names: list[str], seconds: float, folder: Path) -> Iterator[Row]:
    peers: dict[str, Callable[[Path], object]] = {"monit": monit, "circus": circus}
    found: dict[str, float] = {}
    for name in [name for name in names if name in peers]:
        try:
            with peers[name](folder / name) as processes:       # type: ignore[attr-defined]
                found[name], pss = figures(processes, seconds)
        except AbsentError as error:
            yield name, f"left out: {error}", "", None
            continue
        yield name, f"{found[name]:.0f} ms/min, PSS {pss:.1f} MB", "", None
    if "ours" not in names:
        return
    with ours(folder / "ours") as (processes, url):
        for title, looked_at in (("page closed", False), ("page open", True)):
            if looked_at:
                with page(url):
                    cpu, pss = figures(processes, seconds)
            else:
                cpu, pss = figures(processes, seconds)
            yield f"ours, {title}: CPU", f"{cpu:.0f} ms/min", "", None
            yield f"ours, {title}: PSS of daemon and helper", f"{pss:.1f} MB", f"<= {PSS_MB:.0f} MB", pss <= PSS_MB
            if "monit" in found:
                ratio = cpu / found["monit"]
                yield f"ours, {title}: CPU / monit's", f"{ratio:.2f}", f"<= {MONIT_MS[0]}", ratio <= MONIT_MS[0]
        parts = {process.name(): process.memory_full_info().pss / 1e6 for process in processes}
        yield "ours: PSS of each", json.dumps({name: round(pss, 1) for name, pss in parts.items()}), "", None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], "ours", "monit", "circus"], metavar="ours|monit|circus")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="idle-") as folder, crowd():
        return show(rows(options.names or ["ours", "monit", "circus"], options.seconds, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
