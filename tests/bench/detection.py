"""How soon a failure is known: from the deed to the event that the loop is given, on the real adapters.

    python -m tests.bench.detection [signature|exit|hang|false]... [--times 200]

`signature`: a fatal line is appended to a log that a LogTail follows -> LogRead.  `exit`: SIGKILL of a process that Hands
started -> Exited.  `hang`: SIGSTOP of a stand-in engine's core under the real daemon -> its verdict, beyond the silence that
is asked for, `still_s + probe_s + patience_s`.  `false`: 24 hours of a busy service, simulated second by second through
`advance`: full queues, a full cache, prefills of a minute, late answers, lost samples.  Every incident is a false one.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bench.table import Row, quantile, show
from tests.core.scenes import GIB, WALL, gpu, mark, plan
from tests.system.harness import QUICK_HANG, Watchdog, engine

from vllm_watchdog.act.hands import Hands
from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.commands import Ask, Kill, Spawn
from vllm_watchdog.core.readings import Health, Holder, Host, Metrics, Process, Progress, Tree
from vllm_watchdog.core.world import World
from vllm_watchdog.launch import Launch
from vllm_watchdog.sense.logtail import LogTail

FATAL = ("(EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:844] EngineCore encountered a fatal error.\n")
READY = "INFO:     Application startup complete.\n"
CHATTER = "(APIServer pid=7) INFO 10-26 21:05:17 [loggers.py:123] nothing to see here\n"
ONE = mark("primary#1")
HANGS = 5
DAY_S = 86_400


def within(name: str, times: list[float], goal_ms: float) -> Row:
    """`times`: seconds."""
    ms = [each * 1e3 for each in times]
    p50, p99 = quantile(ms, 0.5), quantile(ms, 0.99)
    return name, f"p50 {p50:.1f}, p99 {p99:.1f}, at most {max(ms):.1f} ms", f"p99 <= {goal_ms:g} ms", p99 <= goal_ms


def signature(folder: Path, times: int) -> Iterator[Row]:
    """Each in a generation of its own; the log talks before it."""
    log, events = folder / "primary.log", queue.Queue[Any]()
    log.touch()
    tail = LogTail("primary", log, folder / "place", events.put, time.monotonic)
    tail.start()
    took = []
    with log.open("a") as file:
        for number in range(times):
            tail.follow(mark(f"primary#{number + 1}"))
            while tail._mark != mark(f"primary#{number + 1}"):      # else it would begin behind the line
                time.sleep(0.01)
            for text in (READY, CHATTER * random.Random(number).randrange(5)):
                file.write(text)
                file.flush()
                time.sleep(random.Random(number).uniform(0.0, 0.05))
            at = time.monotonic()
            file.write(FATAL)
            file.flush()
            event = events.get(timeout=5)
            took.append(event.at - at)
            assert event.findings, event
    tail.stop(5)
    yield within(f"a fatal line is written -> its event, {times} times", took, 20)


def exit_(folder: Path, times: int) -> Iterator[Row]:
    events = queue.Queue[Any]()
    launch = Launch("primary", ("sleep", "1000"), (), folder, "127.0.0.1", 1, ("m",), None, folder / "primary.log")
    hands = Hands(launch, f"bench{os.getpid()}", events.put, time.monotonic)
    hands.start()
    took = []
    for number in range(1, times + 1):
        which = mark(f"primary#{number}")
        hands.do(Spawn(which))
        spawned = events.get(timeout=20)
        time.sleep(0.01)
        at = time.monotonic()
        os.kill(spawned.pid, signal.SIGKILL)
        took.append(events.get(timeout=20).at - at)
        hands.do(Kill(which))
        events.get(timeout=20)
    hands.stop(5)
    yield within(f"SIGKILL -> its event, {times} times", took, 5)


def hang(folder: Path, _: int) -> Iterator[Row]:
    asked_s = sum(QUICK_HANG[key] for key in ("still_s", "probe_s", "patience_s"))
    beyond = []
    for number in range(HANGS):
        watchdog = Watchdog(folder / str(number), {"one": engine(stop_timeout_s=0.5)}, hang=QUICK_HANG)
        try:
            watchdog.start().serving("one")
            time.sleep(1.0)
            at = time.monotonic()
            os.kill(watchdog.core("one"), signal.SIGSTOP)
            watchdog.serving("one", after=1)
            verdict = next(line for line in watchdog.said("engine.phase") if line["now"] == "dumping")
            beyond.append(verdict["at"] - at - asked_s)
            watchdog.finish()
        finally:
            watchdog.clear()
    yield (f"a hang -> its verdict, beyond the {asked_s:g} s asked for, {HANGS} times",
           f"at most {max(beyond):.2f} s", "<= 1 s", max(beyond) <= 1.0)


# -- a busy day, simulated


class Day:
    """A service that is busy and well; what it shows each second comes from a seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._tokens = 0.0
        self._stall = 0         # seconds for which no counter moves yet: one long prefill
        self.world, self.incidents, self.kills = World(), set[str](), 0
        self._answers: list[tuple[float, Ask]] = []
        self.give(e.Booted(0.0, plan(gpus=(0,), share=0.8), WALL, "boot"))
        self.give(e.GpusSampled(0.1, (gpu(1),)))
        self.give(e.Spawned(0.2, ONE, 100))
        self.give(e.Probed(30.0, ONE, Health.OK, (Holder(100, "vllm", ONE),)))

    def give(self, event: e.Event) -> None:
        self.world, commands = advance(self.world, event)
        self.incidents |= {f"{incident.class_}: {incident.text}" for incident in self.world.incidents}
        self.kills += sum(isinstance(command, Kill) for command in commands)
        for command in commands:
            if isinstance(command, Ask):        # the queue is full, so even one token is late
                self._answers.append((event.at + self._chance.uniform(0.1, 9.0), command))

    def second(self, at: float) -> None:
        chance = self._chance
        self._stall = self._stall - 1 if self._stall else chance.choices((0, chance.randrange(5, 55)), (400, 1))[0]
        if not self._stall:
            self._tokens += chance.randrange(50, 3000)
        for due, ask in [answer for answer in self._answers if answer[0] <= at]:
            self._answers.remove((due, ask))
            self.give(e.Answered(at, ask.mark, not self._stall, due - at))
        if chance.random() < 0.995:     # some samples are lost
            self.give(e.Probed(at, ONE, Health.OK if chance.random() < 0.999 else Health.SILENT,
                               (Holder(100, "vllm", ONE),)))
            progress = Progress(self._tokens, self._tokens, self._tokens, self._tokens)
            usage = min(0.94, chance.gauss(0.8, 0.1))
            self.give(e.Scraped(at + 0.01, ONE, Metrics(progress, 64.0, float(chance.randrange(200)), usage, 0.0)))
        self.give(e.GpusSampled(at + 0.02, (gpu(82 + chance.gauss(0, 0.3), (100, "vllm", ONE, 81.0)),)))
        process = Process(100, "vllm", int((20 + chance.gauss(0, 0.2)) * GIB), None, chance.uniform(0.5, 4), 80, 200)
        self.give(e.HostSampled(at + 0.03, Host(64 * GIB, 30 * GIB, 100 * GIB, 50 * GIB, chance.uniform(1, 30)),
                                (Tree(ONE, (process,), int(self._tokens)),)))


def false(_: Path, times: int) -> Iterator[Row]:
    day = Day(seed=8)
    began = time.monotonic()
    for second in range(31, DAY_S):
        day.second(float(second))
    took = time.monotonic() - began
    serving = day.world.engine("primary").mark == ONE
    verdicts = len(day.incidents) + day.kills + (not serving)
    told = f"{verdicts} {sorted(day.incidents)[:3] or ''}"
    yield "false verdicts in 24 simulated hours of busy load", told, "0", not verdicts
    yield "... simulated in", f"{took:.0f} s, {took / DAY_S * 1e6:.0f} us a second of 4 events", "", None


PARTS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "signature": signature, "exit": exit_, "hang": hang, "false": false,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--times", type=int, default=200)
    options = parser.parse_args()
    if unknown := set(options.names) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    missed = 0
    for name in options.names or PARTS:
        with tempfile.TemporaryDirectory(prefix="detection-") as folder:
            missed |= show(PARTS[name](Path(folder), options.times))
    return missed


if __name__ == "__main__":
    sys.exit(main())
