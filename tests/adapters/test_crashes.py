"""A daemon that dies at any moment of telling: nothing is lost, and whoever looks at the ids has each alert exactly once.

A forked child is the daemon, with real threads and the real SQLite file; it ends by `os._exit` at its N-th step, where a
step is any point around a commit or a delivery.  What a receiver took it has in a file, as a receiver would: for good.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.house import QUICK, WRITER
from tests.fakes.tell import WALL, Said, incident

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.tell.channel import Outcome
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.manners import Manners
from vllm_watchdog.tell.outbox import Outbox

KINDS = (("opened", Urgency.CRITICAL), ("worsened", Urgency.PAGE), ("resolved", Urgency.PAGE))
ALERTS = [Alert(kind, incident(number, over=kind == "resolved", urgency=urgency))
          for number in (1, 2, 3) for kind, urgency in KINDS]
IDS = sorted(WRITER.payload(alert, WALL)["id"] for alert in ALERTS)
SIDE_BY_SIDE = 4    # most of a trial waits for the disk and for retries
DEATHS = 3      # of a trial at most, then one daemon lives; 2.7 on average, as a step may be drawn that is never reached


class Mine:
    """Counts the steps of a daemon, and ends it at the one that was drawn; 0: never."""

    def __init__(self, fuse: int) -> None:
        self.fuse, self.steps = fuse, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.fuse:
            os._exit(9)


class Receiver:
    """Takes a message by appending it to its file; says no, or its yes is lost on the way, now and then."""

    def __init__(self, name: str, taken: Path, manners: Manners, mine: Mine, chance: random.Random) -> None:
        self.name, self.manners = name, manners
        self._taken, self._mine, self._chance = taken, mine, chance

    def send(self, payload: Any) -> Outcome:
        self._mine.step()
        if self._chance.random() < 0.2:
            return Outcome(False, "HTTP 503")
        with self._taken.open("a") as file:
            file.write(json.dumps([each["id"] for each in payload.get("alerts", [payload])]) + "\n")
        self._mine.step()
        if self._chance.random() < 0.1:
            with self._taken.with_suffix(".lost").open("a") as file:
                file.write("x")
            return Outcome(False, "ReadTimeout")
        return Outcome(True, "HTTP 200")

    def test(self, payload: Any) -> tuple[Outcome, str]:
        return self.send(payload), ""

    def unusable(self) -> str:
        return ""


class Brittle(Ledger):
    """The ledger, with a step around each of its commits."""

    def __init__(self, history: History, mine: Mine) -> None:
        super().__init__(history)
        self._mine = mine

    def _around(self, work: Callable[[], Any]) -> Any:
        self._mine.step()
        value = work()
        self._mine.step()
        return value

    def add(self, letters: Any) -> Any:
        return self._around(lambda: super(Brittle, self).add(letters))

    def close(self, letters: Any, how: str) -> Any:
        return self._around(lambda: super(Brittle, self).close(letters, how))


def daemon(folder: Path, fuse: int, seed: int) -> None:
    """One life.  It tells everything, as a core does whose state of before the crash is older than the ledger."""
    mine, chance = Mine(fuse), random.Random(seed)
    history = History(folder / "history.db", time.monotonic, lambda: WALL, Said())
    receivers = (Receiver("program", folder / "program", Manners(), mine, chance),
                 Receiver("people", folder / "people", Manners(together=True, gather_s=0.002), mine, chance))
    box = Outbox(receivers, Brittle(history, mine), WRITER, time.monotonic, lambda: WALL, Said(), patience=QUICK)
    history.start()
    box.start()
    for alert in ALERTS:
        mine.step()
        box.tell(alert)
    assert box.written(20)
    end = time.monotonic() + 20
    while any(state.waiting for state in box.states()) and time.monotonic() < end:
        time.sleep(0.001)
    assert box.stop(10) and history.stop(10)


def trial(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    for fuse in [*(chance.randint(1, 40) for _ in range(DEATHS)), 0]:
        child = os.fork()
        if not child:
            try:
                daemon(folder, fuse, chance.randint(0, 1 << 30))
            except BaseException:
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9 if fuse else 0), f"seed {seed}: a daemon ended with {code}"
    for name in ("program", "people"):
        told = [id_ for line in (folder / name).read_text().splitlines() for id_ in json.loads(line)]
        assert sorted(set(told)) == IDS, f"seed {seed}: {name} lacks {set(IDS) - set(told)}"
        if name == "program":
            lost = len((folder / "program.lost").read_text()) if (folder / "program.lost").exists() else 0
            assert len(told) <= len(IDS) + DEATHS + lost, f"seed {seed}: told again although it was written down"
            for number in (1, 2, 3):
                first = [told.index(id_) for id_ in IDS if id_.startswith(f"{incident(number).id}/")]
                opened, resolved, worsened = first
                assert opened < worsened < resolved, f"seed {seed}: out of order"
    for file in folder.iterdir():
        file.unlink()


def trials(folder: Path, seeds: range) -> None:
    """In a process of its own with one thread, since it forks."""
    folder.mkdir(exist_ok=True)
    code = f"from pathlib import Path; from tests.adapters.test_crashes import trial\n" \
           f"for seed in {seeds!r}: trial(Path({str(folder)!r}), seed)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_crash_loses_an_alert_or_tells_it_twice_to_who_looks_at_its_id(tmp_path: Path) -> None:
    trials(tmp_path, range(6))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_crashes_lose_nothing(tmp_path: Path) -> None:
    seeds = range(1000, 1370)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        parts = [pool.submit(trials, tmp_path / f"part-{n}", seeds[n::SIDE_BY_SIDE]) for n in range(SIDE_BY_SIDE)]
    for part in parts:
        part.result()
