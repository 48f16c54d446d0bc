"""Random faults for an hour, from a seed, on the real daemon and gateway with stand-in engines under load.

    python -m tests.bench.soak [steady] [rough] [--seed 8] [--minutes 60] [--report FILE] [--samples FILE]

Two hosts at the same time.  The steady one has a hot pair, and only its engines fail, so that its daemon and gateway live
for the whole time: their memory, descriptors and threads are sampled, and its page and metrics are read.  The rough one
has a cold pair, in its second half a sleeping one, and its daemon, gateway and receiver of alerts are killed, too.  One
fault in six comes while the last one is not over yet.  The order of the faults is the seed's; the moments depend on how
long the host takes.

At the end: 0 orphans, 0 double engines, 0 lost alerts, 0 requests lost that had not begun (but for those that a killed
gateway had), memory that grows by 1 MiB an hour at most after the warm-up.  Exit 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests
from tests.bench.soak_notes import Struck, told
from tests.bench.soak_report import Sample, Tally, judged, report, sample, trend
from tests.system.faults import FAULTS
from tests.system.harness import Receiver, free_port
from tests.system.stage import Stage, Watch

from vllm_watchdog.tell.history import HistoryError, Reader

PAUSE_S = (3.0, 12.0)       # between calm and the next fault
OVERLAP, OVERLAP_S = 1 / 6, (0.0, 1.5)
AWAY_S = 5.0
LOSSES_TOLD = 20
CALM_S = 120.0
ALL = 1_000         # incidents
SAMPLE_S = 5.0
WARM_UP = 1 / 3             # of the time: the plots' quarter of an hour fills, and the allocators' highest level is reached
RECEIVER_AWAY = "receiver away"
ENDING = threading.Event()  # SIGTERM: each host finishes the fault that it has, is judged and taken down
SCENES = ("port taken", "both engines")         # they need a calm host to begin with
HANG = {"still_s": 2.0, "probe_s": 5.0, "patience_s": 3.0, "dead_s": 4.0}      # others work on this machine, too

DAEMON = {"sample_s": 1.0, "listen": "off"}


@dataclass(frozen=True)
class Step:
    """Wait `pause_s`, break; `overlap_s` later break again before the first is over, if there are two."""

    pause_s: float
    faults: tuple[str, ...]
    overlap_s: float


def plan(seed: int, rough: bool, standby: str) -> Iterator[Step]:
    """Endless, and the same for the same seed."""
    chance = random.Random(f"{seed}/{rough}/{standby}")
    names = [name for name, fault in FAULTS.items() if standby in fault.standbys and (rough or not fault.ends)]
    names += [RECEIVER_AWAY] * rough
    plain = [name for name in names if name not in SCENES]
    while True:
        faults = chance.sample(plain, 2) if chance.random() < OVERLAP else [chance.choice(names)]
        yield Step(chance.uniform(*PAUSE_S), tuple(faults), chance.uniform(*OVERLAP_S))


# -- one host


def receiver_away(stage: Stage) -> None:
    """Nobody takes alerts for a while; what was told before is kept."""
    old = stage.receiver
    port = int(old.url.split(":")[2].split("/")[0])
    old.close()
    time.sleep(AWAY_S)
    stage.receiver = Receiver(port)
    stage.receiver.letters[:0] = old.letters


def strike(stage: Stage, name: str, tally: Tally) -> bool:
    """Must an incident follow?"""
    at, fault = time.time(), FAULTS.get(name)
    try:
        if fault:
            fault.strike(stage)
        else:
            receiver_away(stage)
    except LookupError:     # the first fault has ended what the second one looks for
        tally.faults["nobody left to strike"] += 1
        return False
    tally.faults[name] += 1
    if fault and fault.ends == "gateway":
        stage.answered()
        tally.struck.append(Struck(at, name, answered=time.time()))
    else:
        tally.struck.append(Struck(at, name))
    return bool(fault and fault.classes)


def work(stage: Stage, steps: Iterator[Step], seconds: float, tally: Tally) -> None:
    """Steps until the time is over; what is not as promised is noted, and it goes on, unless the host stays ill."""
    began = time.monotonic()
    with Watch(stage) as watch:
        for step in steps:
            left_s = began + seconds - time.monotonic()
            if left_s <= 0 or ENDING.wait(min(step.pause_s, left_s)):
                break
            if not _struck(stage, step, tally) and not _mended(stage, tally):
                break
    tally.lasted_s = time.monotonic() - began
    tally.doubles |= watch.seen
    alerted(stage, tally)


def _struck(stage: Stage, step: Step, tally: Tally) -> bool:
    """One step, until all is as before; False: it is not, and that is noted.  Without its incident all may look well, for a
    hang takes seconds to be seen."""
    try:
        known, failed = set(stage.incidents()), False
        for number, name in enumerate(step.faults):
            time.sleep(step.overlap_s * number)
            failed |= strike(stage, name, tally)
        if failed:
            stage.host.until(lambda: set(stage.incidents()) - known, "no incident")
        stage.rest()
        stage.answered()
        tally.orphans += [f"after {' + '.join(step.faults)}: {stray}" for stray in stage.strays()]
    except (AssertionError, OSError) as error:
        tally.problems.append(f"{' + '.join(step.faults)}: {type(error).__name__} {str(error)[:2000]}")
        print(f"{tally.name}: {tally.problems[-1]}", flush=True)
        return False
    return True


def _mended(stage: Stage, tally: Tally) -> bool:
    try:
        stage.rest()
    except AssertionError:
        tally.problems.append("it stayed ill: this host ended early")
        return False
    return True


def alerted(stage: Stage, tally: Tally) -> None:
    """Every incident of the history: told when it opened, and when it ended.  Of the file, as `llm-watchdog incidents` reads
    it: a daemon that is asked for all of them holds them all at once."""
    history = Reader(stage.host.logs / "history.db")

    def known() -> dict[str, float | None]:
        return {row["id"]: row["wall_resolved"] for row in history.incidents(ALL) if row["service"] == "primary"}

    for key in known():
        tally.incidents += 1
        try:
            stage.resolution_told(key)
        except AssertionError:
            tally.untold.append(f"{key}: {dict(stage.letters(key))}")
        letters = stage.letters(key)
        if not letters["opened"]:
            tally.untold.append(f"{key}: never opened")
        if max(letters["opened"], letters["resolved"]) > 1:
            tally.twice.append(f"{key}: {dict(letters)}")
    tally.problems += [f"{key} is still open" for key, over in known().items() if over is None]     # it is told after that


def close(stage: Stage, tally: Tally) -> None:
    for loss in stage.crowd.losses:
        if any(each.had(loss) for each in tally.struck):
            tally.with_gateway[loss.outcome] += 1
        else:
            tally.lost[loss.outcome] += 1
            if len(tally.losses) < LOSSES_TOLD:
                tally.losses.append(told(loss, tally.struck, stage.host.folder))
    tally.whole += stage.crowd.outcomes["whole"]
    tally.cut += stage.crowd.outcomes["cut"]


def rough(folder: Path, seed: int, seconds: float, tally: Tally) -> None:
    for standby in ("cold", "sleeping"):
        own = Tally(tally.name)
        if ENDING.is_set():
            break
        stage = Stage(folder / standby, standby, True, CALM_S, hang=HANG, daemon=DAEMON)
        try:
            with stage:
                work(stage, plan(seed, True, standby), seconds / 2, own)
                stage.crowd.stopping = True
        except (AssertionError, HistoryError) as error:
            own.problems.append(f"{standby}: {error}")
        close(stage, own)
        merge(tally, own)


def merge(tally: Tally, own: Tally) -> None:
    for name, value in vars(own).items():
        if name != "name":
            setattr(tally, name, value if not getattr(tally, name) else
                    getattr(tally, name) | value if isinstance(value, set) else getattr(tally, name) + value)


def steady(folder: Path, seed: int, seconds: float, tally: Tally, samples: dict[str, list[Sample]]) -> None:
    page = free_port()
    over = threading.Event()
    stage = Stage(folder, "hot", True, CALM_S, hang=HANG, daemon=DAEMON | {"listen": f"127.0.0.1:{page}"})
    try:
        with stage:
            assert stage.host.daemon
            pids = {"daemon": stage.host.daemon.pid, "gateway": stage.gateway.pid}
            began = time.monotonic()

            def look() -> None:
                while not over.wait(SAMPLE_S):
                    for path in ("", "api/v1/status", "metrics"):
                        requests.get(f"http://127.0.0.1:{page}/{path}", timeout=30)
                    for name, pid in pids.items():
                        samples[name].append(sample(pid, time.monotonic() - began))

            watcher = threading.Thread(target=look, daemon=True)
            watcher.start()
            work(stage, plan(seed, False, "hot"), seconds, tally)
            over.set()
            watcher.join(60)
            stage.crowd.stopping = True
    except (AssertionError, HistoryError) as error:
        tally.problems.append(str(error))
    finally:
        over.set()
    close(stage, tally)


def commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", metavar="steady|rough", help="both, if none is named")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--report", type=Path, help="the table as Markdown")
    parser.add_argument("--samples", type=Path, help="memory, descriptors, threads as CSV")
    options = parser.parse_args()
    if unknown := set(options.hosts) - {"steady", "rough"}:
        parser.error(f"no such host: {', '.join(unknown)}; expected steady or rough")
    signal.signal(signal.SIGTERM, lambda *_: ENDING.set())
    seconds, samples = options.minutes * 60, dict[str, list[Sample]](daemon=[], gateway=[])
    tallies = [Tally(name) for name in options.hosts or ("steady", "rough")]
    heading = (f"Seed {options.seed}, {options.minutes:g} minutes, commit {commit()}; {platform.machine()}, "
               f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the start.")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        lives = {"steady": lambda tally: steady(Path(folder) / "steady", options.seed, seconds, tally, samples),
                 "rough": lambda tally: rough(Path(folder) / "rough", options.seed, seconds, tally)}
        hosts = [threading.Thread(target=lives[tally.name], args=(tally,)) for tally in tallies]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join()
    if options.samples:
        lines = [f"{name},{each.at_s:.0f},{each.pss_mib:.2f},{each.anon_mib:.2f},{each.fds},{each.threads}"
                 for name, taken in samples.items() for each in taken]
        options.samples.write_text("\n".join(["process,at_s,pss_mib,anon_mib,fds,threads", *lines]) + "\n", "utf-8")
    warm_s = WARM_UP * seconds
    trends = {name: trend(each, warm_s) for name, each in samples.items() if sum(one.at_s >= warm_s for one in each) > 1}
    rows = judged(tallies, trends, seconds)
    text = report(rows, tallies, heading)
    print(text)
    if options.report:
        options.report.write_text(text, "utf-8")
    return int(any(met is False for *_, met in rows))


if __name__ == "__main__":
    sys.exit(main())
