"""`llm-watchdog demo`: the main job on this machine with the stand-in engine: no GPU, no configuration, under a minute.

It runs the real daemon, as a process of its own, in a folder of its own; breaks what it started; shows what was done and
where to look; and cleans up after itself.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import requests

from vllm_watchdog.app import show, status
from vllm_watchdog.proc import instance_of, marked, send
from vllm_watchdog.tell.client import Unreachable, call
from vllm_watchdog.tell.history import Reader

STEP_S = 25.0       # no step of the demo takes longer, on two busy cores
LONG_PROMPT = "lorem ipsum " * 3000

CONFIG = """
[daemon]
state_dir = {state}
log_dir = {logs}
sample_s = 0.5
listen = "off"

[engines.primary]
command = [{python}, "-m", "vllm_watchdog.sim"]
model = "stand-in"
port = {port}
args = {{ max-num-seqs = 64, sim-oom-over-tokens = 4000 }}

[engines.backup]
backup_for = "primary"
port = {backup_port}
args = {{ max-num-seqs = 16 }}
"""


class DemoError(Exception):
    """The demo did not go as promised: one sentence."""


def demo(out: TextIO, keep: bool = False) -> int:
    folder = Path(tempfile.mkdtemp(prefix="llm-watchdog-demo-"))
    stage = Stage(folder, out)
    try:
        stage.play()
        return 0
    except DemoError as error:
        print(f"\nThe demo failed: {error}\nThe daemon's output: {folder / 'daemon.log'}", file=out)
        keep = True
        return 1
    finally:
        stage.end()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"kept: {folder}", file=out)


class Stage:
    def __init__(self, folder: Path, out: TextIO) -> None:
        self.folder, self.out = folder, out
        self.port, self.backup_port = free_port(), free_port()
        self.socket = folder / "state" / "control.sock"
        self.daemon: subprocess.Popen[bytes] | None = None
        self.began_at = time.monotonic()

    def play(self) -> None:
        self.tell("starting the watchdog with a primary and a cold backup of a stand-in engine (no GPU is needed)")
        self._boot()
        first = self.serving("primary")
        self.tell(f"primary serves on port {self.port}, PID {first['pid']}")

        self.tell("one prompt of 36,000 characters comes in: more than this engine's memory can take")
        self._prompt()
        second = self.serving("primary", after=first["generation"])
        self.tell("the engine died of it and exited with code 0; it is replaced: "
                  f"generation {second['generation']}, PID {second['pid']}")

        self.tell("the same prompt again")
        self._prompt()
        backup = self.serving("backup")
        self.tell("twice is enough: the backup with its lower --max-num-seqs serves "
                  f"on port {self.backup_port}, PID {backup['pid']}")

        self.tell("this is what `llm-watchdog status` says now\n")
        if doc := self._status():
            status.show(doc, {}, False, status.console(self.out))
        rows = Reader(self.folder / "logs" / "history.db").incidents(10)
        self.tell("and `llm-watchdog incidents`\n")
        print(show.incidents(rows), file=self.out)
        page = self.folder / "logs" / "incidents" / rows[-1]["id"] / "README.md"
        self.tell(f"each incident has one folder; its page, {page.name}, begins\n")
        print("\n".join("    " + line for line in page.read_text("utf-8").splitlines()[:34]), file=self.out)
        files = sorted(path.name for path in page.parent.iterdir())
        self.tell("beside it lie " + ", ".join(files))
        self._stop()
        self.tell("stopped; no process is left")

    def tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began_at:5.1f} s] {text}", file=self.out, flush=True)

    # -- steps

    def _boot(self) -> None:
        config = self.folder / "config.toml"
        values = {"state": self.folder / "state", "logs": self.folder / "logs", "python": sys.executable}
        quoted = {key: json.dumps(str(value)) for key, value in values.items()}
        config.write_text(CONFIG.format(**quoted, port=self.port, backup_port=self.backup_port), "utf-8")
        with (self.folder / "daemon.log").open("wb") as log:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "vllm_watchdog.app.cli", "run", "--config", str(config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder)

    def _prompt(self) -> None:
        """What a client sees: an error, or a connection that is cut."""
        with suppress(requests.RequestException):
            requests.post(f"http://127.0.0.1:{self.port}/v1/completions", timeout=STEP_S,
                          json={"model": "stand-in", "prompt": LONG_PROMPT, "max_tokens": 8})

    def serving(self, name: str, after: int = 0) -> dict[str, Any]:
        """Waits until that engine serves with a newer generation than `after`."""
        def found() -> dict[str, Any] | None:
            engines = (self._status() or {}).get("engines", [])
            return next((engine for engine in engines if engine["name"] == name and engine["phase"] == "serving"
                         and engine["generation"] > after), None)

        return self.until(found, f"{name} does not serve")

    def until(self, found: Callable[[], dict[str, Any] | None], failing: str) -> dict[str, Any]:
        end, pause = time.monotonic() + STEP_S, threading.Event()
        while time.monotonic() < end:
            if (value := found()) is not None:
                return value
            if self.daemon and self.daemon.poll() is not None:
                raise DemoError(f"the daemon ended with code {self.daemon.returncode}: {self._last_words()}")
            pause.wait(0.1)
        raise DemoError(f"{failing} after {STEP_S:.0f} s")

    def _last_words(self) -> str:
        return (self.folder / "daemon.log").read_text("utf-8", "replace").strip().rpartition("\n")[2]

    def _status(self) -> dict[str, Any] | None:
        try:
            return call(self.socket, {"verb": "status"}, 5.0)
        except Unreachable:
            return None

    def _stop(self) -> None:
        if self.daemon and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(STEP_S)
            except subprocess.TimeoutExpired:
                raise DemoError(f"the daemon did not stop within {STEP_S:.0f} s") from None

    def end(self) -> None:
        """Whatever happened: the daemon is stopped, and with it all that it started."""
        with suppress(DemoError):
            self._stop()
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(STEP_S)
        instance = instance_of(self.folder / "state")
        for mark, members in marked(instance).items():      # engines outlive a daemon that did not end as it should
            for who in members:
                send(who, signal.SIGKILL, mark, instance)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
