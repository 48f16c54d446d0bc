"""The service that a drill breaks: who its processes are, proved, and what its daemon says of it.

Nobody is signalled before the kernel has vouched for it, while a pidfd holds that very process: a process of an engine by
PID, start time and mark; daemon and gateway by being the listener of their own socket; the GPU helper by its parent.
Every question to the daemon has a deadline.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_watchdog.config import Settings
from vllm_watchdog.core.drills import Part
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.launch import Launch
from vllm_watchdog.proc import ProcId, deliver, holding, identify, instance_of, marked, read_stat, title
from vllm_watchdog.procfs import pids, read
from vllm_watchdog.tell.client import Unreachable, call
from vllm_watchdog.tell.wire import peer_of

ASK_S = 5.0
OPERATOR_S = 15.0
TITLES = {Part.CORE: "VLLM::EngineCore", Part.WORKER: "VLLM::Worker"}
HELPER = "watchdog-gpu"

Doc = dict[str, Any]


class NotHereError(Exception):
    """This drill can't be done on this host: one sentence."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process, and the question whether it is still who we take it for."""

    who: ProcId
    ours: Callable[[], bool]
    name: str


class Site:
    """One service of one daemon."""

    sandboxed = False

    def __init__(self, settings: Settings, service: str) -> None:
        self.settings, self.service = settings, service
        self.plan = settings.plan(0)
        self.instance = instance_of(settings.daemon.state_dir)
        self.launches: dict[str, Launch] = settings.launches()
        self.socket = settings.daemon.socket
        self.admin = settings.gateway_plan().admin or Path()
        self.journal = settings.daemon.log_dir / "journal"
        self.struck_at = 0.0        # the instant of the last blow; finding the victim takes a while

    # -- what its daemon says

    def status(self) -> Doc:
        """The report.  Raises Unreachable."""
        return call(self.socket, {"verb": "status"}, ASK_S)

    def report(self) -> Doc | None:
        with suppress(Unreachable):
            return self.status()
        return None

    def ask(self, verb: str, **fields: str) -> Doc:
        """An operator's wish; a refusal is an answer.  Raises Unreachable."""
        return call(self.socket, {"verb": verb} | fields, OPERATOR_S)

    def drilled(self, incident: str, fault: str) -> None:
        """Tells the daemon that it was us, for its history alone."""
        with suppress(Unreachable):
            call(self.socket, {"verb": "drilled", "incident": incident, "fault": fault}, ASK_S)

    def incident_class(self, incident: str) -> str:
        """What an incident is called by now; empty where nobody tells."""
        with suppress(Unreachable):
            return str(call(self.socket, {"verb": "incident", "id": incident}, ASK_S).get("class", ""))
        return ""

    def serving(self) -> Doc:
        """The engine that serves.  Raises NotHereError."""
        doc = self.report() or {"services": [], "engines": []}
        name = next((each["serving"] for each in doc["services"] if each["name"] == self.service), None)
        for engine in doc["engines"]:
            if engine["name"] == name and engine["pid"]:
                return dict(engine)
        raise NotHereError(f"no engine serves {self.service}")

    # -- its processes

    def victim(self, part: Part) -> Victim:
        """Raises NotHereError."""
        if part in (Part.DAEMON, Part.GATEWAY):
            return self._listener(part)
        return self._helper() if part is Part.HELPER else self._member(part)

    def supervised(self, part: Part) -> None:
        """Somebody starts it again when it dies.  Raises NotHereError."""
        if not self.sandboxed and b"INVOCATION_ID=" not in read(self.victim(part).who.pid, "environ"):
            raise NotHereError(f"the {part} runs outside of systemd, so nobody would start it again")

    def _member(self, part: Part) -> Victim:
        engine = self.serving()
        mark = Mark(engine["name"], engine["generation"])

        def plays(who: ProcId) -> bool:
            return who.pid == engine["pid"] if part is Part.API else title(who.pid).startswith(TITLES[part])

        who = next(filter(plays, marked(self.instance).get(mark, ())), None)
        if who is None:
            raise NotHereError(f"{mark} has no process of its own that is a {part}")
        return Victim(who, lambda: who in marked(self.instance).get(mark, ()), f"{part} of {mark}")

    def _listener(self, part: Part) -> Victim:
        path = self.socket if part is Part.DAEMON else self.admin

        def pid() -> int:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(ASK_S)
                try:
                    peer.connect(str(path))
                except OSError:
                    return 0
                return peer_of(peer)[0]

        who = identify(pid())
        if who is None:
            raise NotHereError(f"no {part} listens on {path}")
        return Victim(who, lambda: pid() == who.pid, str(part))

    def _helper(self) -> Victim:
        daemon = self._listener(Part.DAEMON).who

        def born(pid: int) -> bool:
            stat = read_stat(pid)
            return stat is not None and stat.ppid == daemon.pid and title(pid) == HELPER

        for pid in pids():
            if born(pid) and (who := identify(pid)):
                return Victim(who, lambda: born(who.pid), str(Part.HELPER))
        raise NotHereError("no GPU helper runs: there is no NVIDIA driver")


    def signalled(self, victim: Victim, number: signal.Signals) -> bool:
        """False: it is gone, or not who it was."""
        with holding(victim.who) as fd:
            if fd is None or not victim.ours():
                return False
            self.struck_at = time.monotonic()
            return deliver(fd, number)
