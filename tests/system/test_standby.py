"""A backup that stands by, asleep or hot, with the real daemon and stand-in engines on a simulated card.

The drives run side by side, since each mostly waits.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.system.harness import HASTY, Doc, Watchdog, backup, engine

pytestmark = pytest.mark.slow

GIB = 1 << 30


def pair(folder: Path, standby: str, share: float, stable_s: float = 0.5) -> Watchdog:
    """A primary with 0.85 (hot: 0.5) of a card, and its backup with `share`."""
    folder.mkdir()
    cards = folder / "cards"
    cards.mkdir()
    (cards / "gpu.json").write_text(json.dumps({"total_bytes": 80 * GIB}))
    own = 0.5 if standby == "hot" else 0.85
    engines = {
        "big": engine(gpus=[0], args={"gpu-memory-utilization": own}),
        "small": backup("big", standby=standby, args={"gpu-memory-utilization": share, "max-num-seqs": 8}),
    }
    return Watchdog(folder, engines, env={"LLM_WATCHDOG_SIM_GPU": str(cards)}, program=HASTY,
                    failover={"stable_s": stable_s}).start()


def phases(watchdog: Watchdog) -> dict[str, str]:
    return {doc["name"]: doc["phase"] for doc in (watchdog.status() or {"engines": []})["engines"]}


def settled(watchdog: Watchdog, big: str, small: str) -> dict[str, Doc]:
    watchdog.until(lambda: phases(watchdog) == {"big": big, "small": small}, f"never {big}, {small}")
    return {name: watchdog.engine(name) for name in ("big", "small")}


def awake_by_memory(watchdog: Watchdog, name: str) -> bool:
    """By what the next daemon will read."""
    engines = json.loads((watchdog.state / "state.json").read_text("utf-8"))["engines"]
    return any(engine["name"] == name and engine["served"] and not engine["asleep"] for engine in engines)


def served_by(watchdog: Watchdog) -> str | None:
    doc = watchdog.status()
    return doc["services"][0]["serving"] if doc else None


def sleeps_wakes_and_comes_back(folder: Path) -> None:
    watchdog = pair(folder, "sleeping", 0.5)
    try:
        before = settled(watchdog, "serving", "asleep")
        spawned = [line["engine"] for line in watchdog.settled("engine.spawned")]
        assert spawned == ["small#1", "big#1"], "the backup boots first"
        os.kill(before["big"]["pid"], signal.SIGKILL)
        doc = watchdog.serving("small")
        assert (doc["pid"], doc["generation"]) == (before["small"]["pid"], 1), "woken, not started"
        assert watchdog.prompt("small") == 200
        watchdog.serving("big", after=1)        # stable, idle: back
        after = settled(watchdog, "serving", "asleep")
        assert after["small"]["pid"] == before["small"]["pid"] and watchdog.prompt("big") == 200
        assert [line["because"] for line in watchdog.settled("service.")] == ["down", "stable"]
    finally:
        watchdog.finish()


def is_adopted_asleep_and_awake(folder: Path) -> None:
    watchdog = pair(folder, "sleeping", 0.5, stable_s=600)
    try:
        before = settled(watchdog, "serving", "asleep")
        watchdog.kill()
        watchdog.start()
        assert settled(watchdog, "serving", "asleep")["small"]["pid"] == before["small"]["pid"]
        os.kill(watchdog.engine("big")["pid"], signal.SIGKILL)
        watchdog.serving("small")
        watchdog.until(lambda: awake_by_memory(watchdog, "small"), "not written down")     # a kill before that forgets it
        watchdog.kill()
        assert watchdog.prompt("small") == 200
        watchdog.start()
        after = settled(watchdog, "stopped", "serving")
        assert (after["small"]["pid"], after["small"]["generation"]) == (before["small"]["pid"], 1)
        assert len(watchdog.settled("engine.woke")) == 1, "what serves is not woken again"
    finally:
        watchdog.finish()


def starts_cold_when_it_does_not_wake(folder: Path) -> None:
    watchdog = pair(folder, "sleeping", 0.5, stable_s=600)
    try:
        before = settled(watchdog, "serving", "asleep")
        assert watchdog.fault("small", "hang") == 200
        os.kill(before["big"]["pid"], signal.SIGKILL)
        doc = watchdog.serving("small", after=1)
        assert doc["pid"] != before["small"]["pid"] and watchdog.prompt("small") == 200
        (woke,) = watchdog.settled("engine.woke")
        assert woke["why"]
    finally:
        watchdog.finish()


def hot_takes_over_at_once(folder: Path) -> None:
    watchdog = pair(folder, "hot", 0.4)
    try:
        before = settled(watchdog, "serving", "serving")
        os.kill(before["big"]["pid"], signal.SIGKILL)
        watchdog.until(lambda: served_by(watchdog) == "small", "the backup never served")
        watchdog.serving("big", after=1)
        watchdog.until(lambda: served_by(watchdog) == "big", "it never came back")
        assert watchdog.engine("small")["pid"] == before["small"]["pid"]
        turned = next(line for line in watchdog.settled("service.failover"))
        exited = next(line for line in watchdog.settled("engine.exited"))
        assert turned["at"] == exited["at"], "in the same turn"
    finally:
        watchdog.finish()


DRIVES: dict[str, Callable[[Path], None]] = {drive.__name__: drive for drive in (
    sleeps_wakes_and_comes_back, is_adopted_asleep_and_awake, starts_cold_when_it_does_not_wake, hot_takes_over_at_once)}


@pytest.fixture(scope="module")
def drives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    folder = tmp_path_factory.mktemp("standby")
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(drive, folder / name) for name, drive in DRIVES.items()}


@pytest.mark.parametrize("name", DRIVES)
def test_a_standby(drives: dict[str, Future[None]], name: str) -> None:
    drives[name].result(timeout=50)
