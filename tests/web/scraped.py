"""A real Prometheus reads the daemon while its engines die, fail over and come back: no scrape may fail, no series be new.

    python -m tests.web.scraped [--minutes 10] [--keep FOLDER]

Needs `prometheus` and `promtool` (Debian's package) on PATH.  It runs docs/monitoring/prometheus.yml, with alerts.yml, of
which only address and interval are changed, with vLLM's own metrics merged in.  In the first round everything that has
a series happens once; from then on the number of series must stay.  Prints what it measured; exit 1 where it fell short.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from tests.system.harness import Watchdog, backup, engine, free_port
from tests.system.kills import change_sides

MONITORING = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
EVERY_S = 4         # a scrape; longer than one waits for an engine's page; the documented 15 s would see too little
ROUND_S = 60.0
TEN_MINUTES = 10.0
WARM_UP = 3         # rounds, after which every cause has its series
EVER = 'last_over_time({job="llm-watchdog", __name__!~"ALERTS.*"}[2h])'     # series, gone ones too; those are Prometheus's
FAILED = 'count_over_time(up{job="llm-watchdog"}[2h]) - sum_over_time(up{job="llm-watchdog"}[2h])'
SLOWEST = 'max_over_time(scrape_duration_seconds{job="llm-watchdog"}[2h])'


class Prometheus:
    def __init__(self, folder: Path, target: str) -> None:
        self.port = free_port()
        self._folder, self._at = folder, f"http://127.0.0.1:{self.port}"
        text = (MONITORING / "prometheus.yml").read_text("utf-8")
        changed = text.replace("127.0.0.1:9178", target).replace("15s", f"{EVERY_S}s")
        changed = changed.replace("    metrics_path: /metrics", '    params: { engines: ["1"] }\n    metrics_path: /metrics')
        assert changed.count(target) == 1 and f"{EVERY_S}s" in changed and "params:" in changed
        (folder / "prometheus.yml").write_text(changed, "utf-8")
        shutil.copy(MONITORING / "alerts.yml", folder)

    @contextmanager
    def running(self) -> Iterator[Prometheus]:
        log = (self._folder / "prometheus.log").open("wb")
        with log, subprocess.Popen(
                ["prometheus", f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/tsdb",
                 f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log) as process:
            try:
                yield self
            finally:
                process.terminate()

    def api(self, path: str, **given: str) -> Any:
        return requests.get(f"{self._at}/api/v1/{path}", params=given, timeout=10).json()["data"]

    def series(self) -> set[str]:
        """All that it ever got from us, as `name{labels}`."""
        found = (each["metric"] for each in self.api("query", query=EVER)["result"])
        return {f"{labels.pop('__name__')}{labels}" for labels in found}

    def value(self, query: str) -> float:
        """Of a query with one answer; 0 where it has none."""
        found = self.api("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def target(self) -> Any:
        return self.api("targets")["activeTargets"][0]

    def sick_rules(self) -> list[str]:
        rules = [rule for group in self.api("rules")["groups"] for rule in group["rules"]]
        assert rules
        return [rule["name"] for rule in rules if rule["health"] not in ("ok", "unknown")]

    def complaints(self) -> list[str]:
        """What it says of our scrape: duplicates, bad timestamps, a page that can't be parsed."""
        lines = (self._folder / "prometheus.log").read_text("utf-8").splitlines()
        return [line for line in lines if "level=warn" in line or "level=error" in line]


def one_round(watchdog: Watchdog) -> None:
    """An OOM, a dead core, a death by signal, and what an operator does: each hits who serves, until one serves again."""
    for act in (lambda name: watchdog.fault(name, "oom"), lambda name: os.kill(watchdog.core(name), signal.SIGKILL),
                lambda name: watchdog.fault(name, "die"), lambda name: watchdog.ask("restart", engine=name),
                lambda _: change_sides(watchdog), lambda _: change_sides(watchdog)):
        before = serves(watchdog)
        act(before[0])
        watchdog.until(lambda before=before: serves(watchdog) != before, "nothing new serves", ROUND_S)
        name, _ = serves(watchdog)
        watchdog.prompt(name, 20, 8)
        time.sleep(EVERY_S)         # it is idle for long enough to be probed


def serves(watchdog: Watchdog) -> tuple[str, int]:
    """Name and generation of the engine that does."""
    def found() -> tuple[str, int] | None:
        doc = watchdog.status()
        name = doc and doc["services"][0]["serving"]
        return next(((name, each["generation"]) for each in doc["engines"] if each["name"] == name), None) if doc else None

    return watchdog.until(found, "nobody serves", ROUND_S)


def measured(folder: Path, minutes: float) -> bool:
    cards = folder / "gpu.json"
    cards.write_text('{"total_bytes": 85899345920, "count": 1}')
    listen = f"127.0.0.1:{free_port()}"
    watchdog = Watchdog(
        folder / "w", {"primary": engine(gpus=[0], args={"gpu-memory-utilization": 0.8}), "backup": backup("primary")},
        env={"LLM_WATCHDOG_SIM_GPU": str(folder)}, daemon={"listen": listen}, restart={"budget": 1000},
        hang={"still_s": 1.0})
    try:
        with Prometheus(folder, listen).running() as prometheus:
            watchdog.start()
            for _ in range(WARM_UP):
                one_round(watchdog)
            time.sleep(3 * EVERY_S)
            began, end, rounds = prometheus.series(), time.monotonic() + 60 * minutes, 0
            while time.monotonic() < end:
                next_at = time.monotonic() + ROUND_S
                one_round(watchdog)
                rounds += 1
                time.sleep(max(min(next_at, end) - time.monotonic(), 0.0))
            ended, failed = prometheus.series(), prometheus.value(FAILED)
            found = {"series at first": len(began), "series in the end": len(ended), "scrapes that failed": failed,
                     "slowest scrape, ms": 1000 * prometheus.value(SLOWEST), "rounds of six faults": rounds}
            sick, complaints, target = prometheus.sick_rules(), prometheus.complaints(), prometheus.target()
        watchdog.finish()
    finally:
        watchdog.clear()
    print("\n".join(f"{value:8.0f}  {what}" for what, value in found.items()))
    wrong = [*sorted(ended - began), *sick, *complaints, *filter(None, (target["lastError"],))]
    print("\n".join(wrong) or "Prometheus complains of nothing")
    return bool(ended) and not failed and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=TEN_MINUTES)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where logs and journal stay")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir()
        return 0 if measured(options.keep, options.minutes) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if measured(Path(folder), options.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
