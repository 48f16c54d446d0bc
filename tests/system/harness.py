"""A whole watchdog under test: the real daemon as a process of its own, with stand-in engines, in a folder of its own.

Tests break it and wait, with a deadline, for what must follow; `finish` stops it and proves that nothing was left behind
and that its journal replays.
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import requests

from vllm_watchdog.app import cli
from vllm_watchdog.app.replay import parsed, replay
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MarkIndex, ProcId, instance_of, listeners
from vllm_watchdog.procfs import pids, read, title
from vllm_watchdog.tell.client import Unreachable, call
from vllm_watchdog.tell.journal import files

Value = TypeVar("Value")
Doc = dict[str, Any]

WITHIN_S = 20.0     # the longest wait; on two busy cores everything here takes a fraction of it
LOOK_S = 0.05
TOKEN = "WATCHDOG_UNDER_TEST"       # in the environment of the daemon, and so of all that it starts
SPACE = Path("/proc/self/ns/pid").stat().st_ino     # a bench in a PID namespace of its own has everybody's PID
PORTS = count(20_000 + (os.getpid() * 41 + SPACE * 997) % 10_000)      # workers that run side by side begin apart
SIM = [sys.executable, "-m", "vllm_watchdog.sim"]
REAL = [sys.executable, "-m", "vllm_watchdog.app.cli", "run"]
HASTY = [sys.executable, str(Path(__file__).with_name("hasty.py"))]      # the same with the fixed limits cut short

BASE: Doc = {
    "daemon": {"sample_s": 0.2, "listen": "off"},
    "restart": {"backoff_s": 0.1, "backoff_max_s": 0.2},
    "evidence": {"deadline_s": 4},
}
QUICK_HANG: Doc = {"still_s": 0.4, "probe_s": 1.0, "patience_s": 0.8, "dead_s": 0.8}


def engine(port: int = 0, sim: Doc | None = None, **keys: Any) -> Doc:
    """One engine's table: a stand-in that loads in a tenth of a second.  `sim`: its flags without `sim-`."""
    flags = {f"sim-{name.replace('_', '-')}": value for name, value in ({"load_s": 0.1} | (sim or {})).items()}
    args = flags | keys.pop("args", {})
    return {"command": SIM, "model": "stand-in", "port": port or free_port(), "args": args} | keys


def backup(of: str, **keys: Any) -> Doc:
    return {"backup_for": of, "port": free_port(), "args": {"max-num-seqs": 16}} | keys


def free_port() -> int:
    """Below the kernel's own range, so that no outgoing connection takes it before the engine does."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def command(*words: str) -> Said:
    """One command, in this process: what it prints is what a user reads."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.main(words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
    return Said(code, out.getvalue(), err.getvalue())


class Watchdog:
    def __init__(self, folder: Path, engines: dict[str, Doc], env: dict[str, str] | None = None,
                 program: list[str] = REAL, **sections: Doc) -> None:
        self.folder, self.program = folder, program
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LLM_WATCHDOG_")}
        self.env = inherited | {TOKEN: str(folder)} | (env or {})
        self.state, self.logs = folder / "state", folder / "logs"
        self.config, self.socket = folder / "config.toml", folder / "state" / "control.sock"
        self.output = folder / "daemon.log"
        self.engines = engines
        self.instance = instance_of(self.state)
        self.daemon: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        self.configure(**sections)

    def configure(self, **sections: Doc) -> None:
        tables = {name: BASE.get(name, {}) | sections.get(name, {}) for name in {**BASE, **sections}}
        tables["daemon"] = tables["daemon"] | {"state_dir": str(self.state), "log_dir": str(self.logs)}
        tables |= {f"engines.{name}": keys for name, keys in self.engines.items()}
        channels = tables.pop("channels", {})
        tables |= {f"alerts.channels.{name}": keys for name, keys in channels.items()}
        lines = [line for name, keys in tables.items()
                 for line in (f"[{name}]", *(f"{key} = {toml(value)}" for key, value in keys.items()))]
        self.config.write_text("\n".join(lines) + "\n", "utf-8")

    # -- its life

    def start(self) -> Watchdog:
        """Returns at once; `serving` waits."""
        with self.output.open("ab") as log:
            self.daemon = subprocess.Popen([*self.program, "--config", str(self.config)], stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log, cwd=self.folder, env=self.env)
        return self

    def kill(self) -> None:
        """kill -9 of the daemon alone."""
        assert self.daemon
        self.daemon.kill()
        self.daemon.wait(WITHIN_S)

    def term(self) -> None:
        assert self.daemon
        self.daemon.terminate()

    def stop(self) -> int:
        """A clean stop; its exit code."""
        daemon = self.daemon
        assert daemon
        self.until(lambda: (self.state / "lock").exists() or daemon.poll() is not None, "it does not even begin")
        self.term()
        return daemon.wait(WITHIN_S)

    def finish(self) -> None:
        """Stops it, and proves what holds after every run."""
        try:
            if self.daemon and self.daemon.poll() is None:
                assert self.stop() == 0, self.tail()
            left = self.processes()
            assert not left, f"left behind: {left}"
            self.until(lambda: not self.descendants(), "left behind: a process that the daemon started", 3.0)
            assert not (self.state / "lock").exists()
            assert not self.socket.exists()
            for name, keys in self.engines.items():
                holders = [holder for holder in listeners(keys["port"], self.instance) if holder.pid != os.getpid()]
                assert not holders, f"the port of {name} is still held by {holders}"
            assert "Traceback" not in self.output.read_text("utf-8", "replace"), self.tail()
            self.replays()
        finally:
            self.clear()

    def clear(self) -> None:
        """After a failed test too: nothing of it may disturb the next."""
        if self.daemon and self.daemon.poll() is None:
            self.kill()
        for members in self.processes().values():
            for who in members:
                with suppress(ProcessLookupError):
                    os.kill(who.pid, signal.SIGKILL)

    def replays(self) -> None:
        lines = list(self.lines())
        done = replay(parsed(lines))
        assert done.difference is None, done.difference
        assert done.events

    def tail(self) -> str:
        return self.output.read_text("utf-8", "replace")[-3000:]

    # -- looking

    def status(self) -> Doc | None:
        with suppress(Unreachable):
            return call(self.socket, {"verb": "status"}, 5.0)
        return None

    def ask(self, verb: str, **fields: Any) -> Doc:
        return call(self.socket, {"verb": verb} | fields, 10.0)

    def engine(self, name: str) -> Doc:
        doc = self.until(self.status, "no status")
        return next(each for each in doc["engines"] if each["name"] == name)

    def until(self, found: Callable[[], Value | None], failing: str, within_s: float = WITHIN_S) -> Value:
        """The first value that is true."""
        end = time.monotonic() + within_s
        pause = threading.Event()
        while time.monotonic() < end:
            if value := found():
                return value
            pause.wait(LOOK_S)
        doc = self.status()
        seen = [(each["name"], each["phase"], each["cause"], each["why"]) for each in doc["engines"]] if doc else "no answer"
        raise AssertionError(f"{failing} after {within_s:.0f} s; engines: {seen}\n{self.tail()}")

    def engine_when(self, name: str, wanted: Callable[[Doc], bool], failing: str, within_s: float = WITHIN_S) -> Doc:
        def found() -> Doc | None:
            engines = (self.status() or {"engines": []})["engines"]
            return next((each for each in engines if each["name"] == name and wanted(each)), None)

        return self.until(found, f"{name}: {failing}", within_s)

    def serving(self, name: str, after: int = 0, within_s: float = WITHIN_S) -> Doc:
        """Waits until the engine serves with a generation newer than `after`."""
        return self.engine_when(name, lambda doc: doc["phase"] == "serving" and doc["generation"] > after,
                                f"not serving a generation after {after}", within_s)

    def in_phase(self, name: str, *phases: str) -> Doc:
        return self.engine_when(name, lambda doc: doc["phase"] in phases, f"never {phases}")

    def processes(self) -> dict[Mark, tuple[ProcId, ...]]:
        return MarkIndex(self.instance).marked()

    def of(self, name: str) -> tuple[int, ...]:
        """PIDs of one engine, the leader first."""
        return tuple(who.pid for mark, members in self.processes().items() if mark.engine == name for who in members)

    def descendants(self) -> list[tuple[int, str]]:
        """Whatever the daemon started, by itself or by its engines: GPU helper and stack dumpers too."""
        token = f"{TOKEN}={self.folder}".encode()
        return [(pid, title(pid)) for pid in pids() if token in read(pid, "environ").split(b"\0")]

    def core(self, name: str) -> int:
        """The PID of EngineCore: the leader's first child."""
        leader = self.engine(name)["pid"]
        return int(Path(f"/proc/{leader}/task/{leader}/children").read_text().split()[0])

    def incident(self, service: str, **wanted: Any) -> Doc | None:
        """The newest incident of a service with these values, whole."""
        with suppress(Unreachable):
            for row in self.ask("incidents", limit=100).get("incidents", ()):
                if row["service"] == service and all(row[key] == value for key, value in wanted.items()):
                    return self.ask("incident", id=row["id"])
        return None

    def bundle(self, row: Doc) -> Path:
        """An incident's folder, once its evidence is there."""
        def evidence() -> bool:
            return any(line["say"] == "evidence.done" and line["incident"] == row["id"] for line in self.said())

        self.until(evidence, f"no evidence of {row['id']}")
        return self.logs / "incidents" / row["id"]

    def lines(self) -> Iterator[str]:
        for path in files(self.logs / "journal"):
            yield from path.read_text("utf-8", "replace").splitlines(keepends=True)

    def said(self, name: str = "") -> list[Doc]:
        """What the journal says in words, so far."""
        found = []
        for line in self.lines():
            if line.endswith("\n") and '"say":' in line:
                with suppress(ValueError):
                    found.append(json.loads(line))
        return [line for line in found if line.get("say", "").startswith(name)]

    def settled(self, name: str = "") -> list[Doc]:
        """The same, with all that status shows by now: the journal is written a moment after what it tells of."""
        def caught_up() -> bool:
            if doc := self.status():
                return bool(doc["daemon"]["queues"]["journal"] == 0)
            return self.daemon is None or self.daemon.poll() is not None

        self.until(caught_up, "the journal does not follow")
        return self.said(name)

    # -- using

    def cli(self, *words: str) -> Said:
        return command(*words, "--config", str(self.config))

    def replay(self, journal: Path) -> Said:
        return command("replay", str(journal))

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.engines[name]['port']}"

    def post(self, name: str, body: Doc, path: str = "/v1/completions", timeout_s: float = WITHIN_S) -> int:
        """The status a client gets; 0 where the connection was cut."""
        try:
            return requests.post(self.url(name) + path, json=body, timeout=timeout_s).status_code
        except requests.RequestException:
            return 0

    def prompt(self, name: str, words: int = 3, max_tokens: int = 4, timeout_s: float = WITHIN_S) -> int:
        body = {"model": "stand-in", "prompt": "word " * words, "max_tokens": max_tokens}
        return self.post(name, body, timeout_s=timeout_s)

    def fault(self, name: str, fault: str, **given: Any) -> int:
        return self.post(name, {"name": fault} | given, "/sim/fault", 5.0)


class Receiver:
    """A webhook's other end: a real HTTP server.  `letters` are the bodies it took, in order."""

    def __init__(self, port: int = 0) -> None:
        letters: list[Doc] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                letters.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.letters = letters
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="receiver", daemon=True).start()

    def of(self, service: str, **wanted: str) -> list[Doc]:
        return [letter for letter in list(self.letters)
                if letter["service"] == service and all(letter[key] == value for key, value in wanted.items())]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
