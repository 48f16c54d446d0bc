"""kill -9 of the daemon in the middle of its work, again and again, on one host; used by the quick tests and `sweep.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.system.harness import HASTY, WITHIN_S, Watchdog, backup, engine

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MarkIndex

LOOK_S = 0.03


def one_card(folder: Path) -> Watchdog:
    """A primary and its backup that share a card; no card is named, so they share every one."""
    engines = {"big": engine(stop_timeout_s=2), "small": backup("big")}
    return Watchdog(folder, engines, program=HASTY, restart={"budget": 1000})


@contextmanager
def never_two(watchdog: Watchdog) -> Iterator[None]:
    """While this lasts, two generations never live at the same time."""
    over, together = threading.Event(), set[tuple[Mark, ...]]()

    def watch() -> None:
        index = MarkIndex(watchdog.instance)
        while not over.wait(LOOK_S):
            marks = index.marked()
            if len(marks) > 1:
                together.add(tuple(sorted(marks, key=str)))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(WITHIN_S)
    assert not together, f"lived at the same time: {together}"


def after(delay_s: float) -> Callable[[Watchdog, int], None]:
    def wait(watchdog: Watchdog, seen: int) -> None:
        threading.Event().wait(delay_s)

    return wait


def at(words: str) -> Callable[[Watchdog, int], None]:
    """The moment that the daemon says this, on standard error, which it does within a millisecond or two."""
    def wait(watchdog: Watchdog, seen: int) -> None:
        end, pause = time.monotonic() + WITHIN_S, threading.Event()
        with watchdog.output.open("rb") as log:
            log.seek(seen)
            text = b""
            while words.encode() not in text:
                assert time.monotonic() < end, f"it never said {words!r}: {text.decode()}"
                text += log.read()
                pause.wait(0.001)

    return wait


def killed(watchdog: Watchdog, begin: Callable[[Watchdog], object], moment: Callable[[Watchdog, int], None]) -> None:
    """`begin` something, kill the daemon at `moment`; the next one ends with exactly one engine serving."""
    seen = watchdog.output.stat().st_size if watchdog.output.exists() else 0
    begin(watchdog)
    moment(watchdog, seen)
    watchdog.kill()
    watchdog.start()
    settled(watchdog)


def settled(watchdog: Watchdog) -> None:
    def one() -> bool:
        doc = watchdog.status()
        if doc is None or not doc["services"] or doc["services"][0]["serving"] is None:
            return False
        phases = {each["name"]: each["phase"] for each in doc["engines"]}
        wanted = doc["services"][0]["wanted"]
        idle = {name for name, phase in phases.items() if phase == "stopped"}
        return phases[wanted] == "serving" and idle == set(phases) - {wanted}

    watchdog.until(one, "no engine serves alone")
    assert len(watchdog.processes()) == 1


def start(watchdog: Watchdog) -> None:
    """From nothing: whatever runs is stopped first."""
    if watchdog.daemon and watchdog.daemon.poll() is None:
        assert watchdog.stop() == 0
    watchdog.start()


def restart(watchdog: Watchdog) -> None:
    doc = watchdog.status()
    assert doc
    watchdog.ask("restart", engine=doc["services"][0]["wanted"])


def change_sides(watchdog: Watchdog) -> None:
    doc = watchdog.status()
    assert doc
    watchdog.ask("failover" if doc["services"][0]["side"] == "primary" else "failback")


def die(watchdog: Watchdog) -> None:
    """An engine's own death."""
    doc = watchdog.status()
    assert doc
    watchdog.fault(doc["services"][0]["wanted"], "oom")


def stop(watchdog: Watchdog) -> None:
    watchdog.term()


BEGIN: dict[str, Callable[[Watchdog], object]] = {
    "start": start, "restart": restart, "failover": change_sides, "death": die, "stop": stop,
}


Step = tuple[str, Callable[[Watchdog, int], None]]


def chain(folder: Path, steps: Iterable[Step]) -> None:
    """One kill after the other on the same host, each but a `start` from a settled state."""
    watchdog = one_card(folder)
    try:
        with never_two(watchdog):
            for what, moment in steps:
                if what != "start" and watchdog.daemon is None:
                    watchdog.start()
                    settled(watchdog)
                killed(watchdog, BEGIN[what], moment)
        watchdog.finish()
    finally:
        watchdog.clear()
