"""A host on which faults are rehearsed: the real daemon and gateway, stand-in engines on two simulated cards, people
who are told, and clients who ask; and what must be true of it before, while and after something breaks.

The harness plays systemd: a daemon or a gateway that was killed is started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import requests
import uvloop
from tests.bench.failover import Crowd
from tests.bench.soak_notes import process
from tests.system.harness import HASTY, Doc, Receiver, Value, Watchdog, backup, engine, free_port

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MarkIndex
from vllm_watchdog.procfs import title
from vllm_watchdog.sim import vram
from vllm_watchdog.tell.client import Unreachable

PATIENCE_S = 60.0   # of every wait and every client: with forty processes on two cores a daemon's start alone took 20 s
CALM_S = 90.0       # until all is as before: a doubled wait for the failback, an incident's end
CARD = 80 << 30
PHASES: dict[str, dict[str, str]] = {       # of every engine, while nothing is wrong
    "none": {"primary": "serving"},
    "cold": {"primary": "serving", "backup": "stopped"},
    "sleeping": {"primary": "serving", "backup": "asleep"},
    "hot": {"primary": "serving", "backup": "serving"},
}
SHARES = {"none": (0.85, 0.0), "cold": (0.85, 0.5), "sleeping": (0.85, 0.5), "hot": (0.5, 0.4)}
LOAD_IDLE_S = 30.0      # one that is stopped while it loads is noticed by this
HANG: Doc = {"still_s": 0.6, "probe_s": 2.0, "patience_s": 1.0, "dead_s": 1.5}      # patient enough for two busy cores
LESS_HASTY = {"HASTY_RELEASE_S": "10", "HASTY_CONFIRM_S": "2", "HASTY_KILL_S": "30"}      # for busy cores
LOADED = (4, 2)     # clients, of whom some ask for streams
TOKEN_S = 0.03
INCIDENTS = 20          # that are asked for: the newest


class Patient(Watchdog):
    def until(self, found: Callable[[], Value | None], failing: str, within_s: float = PATIENCE_S) -> Value:
        return super().until(found, failing, max(within_s, PATIENCE_S))


@dataclass
class Gateway:
    """The second process; `port` is what clients know."""

    host: Watchdog
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self.host.folder / "gateway.log"
        seen = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm_watchdog.app.cli", "gateway", "--config", str(self.host.config)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.host.folder, env=self.host.env)
        self.host.until(lambda: b"gateway.ready" in log.read_bytes()[seen:], "the gateway does not come up")

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def kill(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        assert self.process
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, "the gateway does not drain"

    def ask(self, tokens: int = 2) -> int:
        """The status of one completion; 0 where none came."""
        body = {"model": "stand-in", "prompt": f"asked at {time.monotonic()}", "max_tokens": tokens}
        try:
            return requests.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, timeout=PATIENCE_S).status_code
        except requests.RequestException:
            return 0


@dataclass
class Watch:
    """Whatever was seen of two engines where one is allowed."""

    stage: Stage
    seen: set[str] = field(default_factory=set)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)

    def _look(self) -> None:
        index = MarkIndex(self.stage.host.instance)
        while not self._over.wait(0.1):
            self.seen |= set(doubled(index.marked().keys(), alone=self.stage.standby in ("none", "cold")))
            for card, used in self.stage.held().items():
                if used > CARD:
                    self.seen.add(f"card {card} holds {used >> 30} of {CARD >> 30} GiB")


def doubled(marks: Iterable[Mark], alone: bool) -> Iterator[str]:
    """Two generations of one engine; or, where one card is for one engine, any two."""
    generations = sorted(marks, key=str)
    names = Counter(mark.engine for mark in generations)
    if any(number > 1 for number in names.values()) or (alone and len(generations) > 1):
        yield "together: " + ", ".join(map(str, generations))


class Stage:
    """`standby` is one of PHASES; `loaded`: clients ask without a break; `sections` of the configuration over ours."""

    def __init__(self, folder: Path, standby: str, loaded: bool, calm_s: float = CALM_S, **sections: Doc) -> None:
        self.standby, self.loaded, self.calm_s = standby, loaded, calm_s
        folder.mkdir(parents=True, exist_ok=True)
        self.cards = folder / "cards"
        self.cards.mkdir()
        (self.cards / "gpu.json").write_text(json.dumps({"total_bytes": CARD, "count": 2}))
        self.receiver = Receiver()
        share, other = SHARES[standby]
        engines = {"primary": engine(sim={"token_s": TOKEN_S}, gpus=[0, 1], stop_timeout_s=1, load_idle_s=LOAD_IDLE_S,
                                     args={"gpu-memory-utilization": share, "tensor-parallel-size": 2})}
        if standby != "none":
            engines["backup"] = backup("primary", standby=standby, args={"gpu-memory-utilization": other},
                                       load_idle_s=LOAD_IDLE_S)
        port = free_port()
        ours: dict[str, Doc] = {
            "hang": HANG, "gateway": {"listen": f"127.0.0.1:{port}", "hold_s": 2 * PATIENCE_S}, "restart": {"budget": 1000},
            "evidence": {"deadline_s": 1}, "thresholds": {"crash_loop": 1000, "oom_rate": 1000},
            "failover": {"stable_s": 0.5, "failback": "auto"}, "channels": {"people": {"url": self.receiver.url}},
        }
        env = {"LLM_WATCHDOG_SIM_GPU": str(self.cards), "TZ": "UTC"} | LESS_HASTY
        self.host = Patient(folder / "host", engines, env=env, program=HASTY, **(ours | sections))
        self.gateway = Gateway(self.host, port)
        self.crowd = Crowd(port, patience_s=PATIENCE_S)
        self._asking: threading.Thread | None = None

    # -- its life

    def __enter__(self) -> Stage:
        try:
            self.host.start()
            self.gateway.start()
            self.calm()
            if self.loaded:
                self._asking = threading.Thread(target=lambda: uvloop.run(self._ask()), daemon=True)
                self._asking.start()
                self.answered()
        except BaseException as error:      # `with` leaves only what it has entered
            self.__exit__(type(error))
            raise
        return self

    async def _ask(self) -> None:
        clients, streams = LOADED
        await asyncio.gather(*(self.crowd.client(number < streams) for number in range(clients)))

    def __exit__(self, kind: object, *_: object) -> None:
        self.crowd.stopping = True
        try:
            if self._asking:
                self._asking.join(PATIENCE_S)
            if kind is None:
                self.gateway.stop()
                self.host.finish()
        finally:
            if self.gateway.process and self.gateway.process.poll() is None:
                os.kill(self.gateway.pid, signal.SIGCONT)
                self.gateway.kill()
            if self.host.daemon and self.host.daemon.poll() is None:
                os.kill(self.host.daemon.pid, signal.SIGCONT)
            self.host.clear()
            self.receiver.close()

    # -- looking

    def held(self) -> Counter[int]:
        """Bytes in use of each card."""
        found = Counter[int]()
        for use in vram.uses(self.cards):
            found[use.gpu] += use.used_bytes
        return found

    def calm(self) -> dict[str, str]:
        """Waits until nothing is wrong: every engine in its usual phase, the primary serves, no incident is open."""
        return self._settled(PHASES[self.standby])

    def rest(self) -> None:
        """The same after a fault.  A sleeping standby that died comes back with a change of sides and back, which is a
        human's to choose."""
        usual = PHASES[self.standby]
        if self.standby == "sleeping" and self._settled(usual, usual | {"backup": "stopped"})["backup"] == "stopped":
            self.host.until(lambda: self.host.ask("failover").get("ok"), "no failover")
            self.host.serving("backup")
        self.calm()

    def _settled(self, *wanted: dict[str, str]) -> dict[str, str]:
        def found() -> dict[str, str] | None:
            doc = self.host.status()
            if doc is None or doc["incidents"] or self.serving() != "primary":
                return None
            phases = {each["name"]: each["phase"] for each in doc["engines"]}
            return phases if phases in wanted else None

        return self.host.until(found, f"not calm again ({self.standby})", self.calm_s)

    def answered(self, more: int = 4) -> None:
        """Waits until the clients have got so many whole answers more."""
        target = self.crowd.outcomes["whole"] + more
        self.host.until(lambda: self.crowd.outcomes["whole"] >= target, "the clients get no answers")

    def titled(self, name: str, words: str) -> int:
        """The PID of one of an engine's processes by the title that vLLM gives it.  Raises LookupError."""
        found = [pid for pid in self.host.of(name) if title(pid).startswith(words)]
        if not found:
            raise LookupError(f"{name} has no {words}")
        return found[0]

    def incidents(self) -> dict[str, Doc]:
        """The newest of the service by id.  Waits for a daemon that answers."""
        def found() -> list[Doc] | None:
            with suppress(Unreachable):
                return [{}, *self.host.ask("incidents", limit=INCIDENTS).get("incidents", ())]    # none is an answer, too
            return None

        _, *rows = self.host.until(found, "no daemon answers")
        return {row["id"]: row for row in rows if row["service"] == "primary"}

    def letters(self, incident: str) -> Counter[str]:
        """What people were told of it, by kind."""
        return Counter(letter["kind"] for letter in list(self.receiver.letters) if letter["incident"] == incident)

    def resolution_told(self, incident: str) -> None:
        self.host.until(lambda: self.letters(incident)["resolved"], f"nobody was told that {incident} is over")

    def serving(self) -> str | None:
        doc = self.host.status()
        return doc["services"][0]["serving"] if doc and doc["services"] else None

    def failed(self) -> Counter[str]:
        """What clients got instead of an answer, so far, by name; a stream that had begun and was cut is none of them."""
        return Counter(self.crowd.failed)

    def strays(self) -> list[str]:
        """Marked processes that belong to no engine that runs, in words.  Looks when nothing changes: between two looks the
        next generation may start, and an engine that dies has processes still when the daemon has told of its end."""
        def found() -> list[str] | None:
            before, left = self._running(), self.host.processes()
            if before is None or before != self._running():
                return None
            old = [process(mark, who) for mark, members in left.items() if str(mark) not in before for who in members]
            return ["", *old]       # none is an answer, too

        return self.host.until(found, f"never calm for a moment ({self.standby})", self.calm_s)[1:]

    def _running(self) -> set[str] | None:
        """The generations that run; None: some engine is not in its usual phase."""
        engines = (self.host.status() or {"engines": []})["engines"]
        if {each["name"]: each["phase"] for each in engines} != PHASES[self.standby]:
            return None
        return {f"{each['name']}#{each['generation']}" for each in engines if each["pid"] is not None}

    # -- breaking

    def leader(self, name: str = "primary") -> int:
        """Raises LookupError."""
        pid = self.host.engine(name)["pid"]
        if pid is None:
            raise LookupError(f"{name} does not run")
        return int(pid)

    @contextmanager
    def daemon_frozen(self) -> Iterator[None]:
        """What happens meanwhile it sees when it wakes."""
        assert self.host.daemon
        os.kill(self.host.daemon.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.host.daemon.pid, signal.SIGCONT)
