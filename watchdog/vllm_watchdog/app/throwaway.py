"""A daemon of our own in a folder of its own, to be shown, broken and thrown away: for `demo` and `drill --sandbox`.

Whatever happens, `end` stops it and all that it started.  Nothing waits longer than `STEP_S`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from vllm_watchdog.config_sources import PREFIX
from vllm_watchdog.proc import deliver, holding, instance_of, marked
from vllm_watchdog.tell.client import Unreachable, call

STEP_S = 25.0       # no step takes longer, on two busy cores
LOOK_S = 0.1
DAEMON = (sys.executable, "-m", "vllm_watchdog.app.cli", "run")

Value = TypeVar("Value")


class StepError(Exception):
    """It did not go as it should: one sentence."""


class Throwaway:
    """`state` and `logs` are what its configuration must say."""

    def __init__(self, folder: Path, program: Sequence[str] = DAEMON, env: dict[str, str] | None = None) -> None:
        self.folder, self.program = folder, program
        self.state, self.logs, self.config = folder / "state", folder / "logs", folder / "config.toml"
        self.socket = self.state / "control.sock"
        self.instance = instance_of(self.state)
        # A setting in the caller's environment is meant for another daemon.
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)} | (env or {})
        self.daemon: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Returns at once."""
        self.daemon = self.launched("daemon", *self.program)

    def launched(self, name: str, *program: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([*program, "--config", str(self.config)], stdin=subprocess.DEVNULL, stdout=log,
                                    stderr=log, cwd=self.folder, env=self.env)

    def serving(self, name: str, after: int = 0) -> dict[str, Any]:
        """Waits until that engine serves with a newer generation than `after`."""
        def found() -> dict[str, Any] | None:
            engines = (self.status() or {}).get("engines", [])
            return next((engine for engine in engines if engine["name"] == name and engine["phase"] == "serving"
                         and engine["generation"] > after), None)

        return self.until(found, f"{name} does not serve")

    def until(self, found: Callable[[], Value | None], failing: str) -> Value:
        """The first value that is something.  Raises StepError."""
        end, pause = time.monotonic() + STEP_S, threading.Event()
        while time.monotonic() < end:
            if value := found():
                return value
            if self.daemon and self.daemon.poll() is not None:
                raise StepError(f"the daemon ended with code {self.daemon.returncode}: {self._last_words()}")
            pause.wait(LOOK_S)
        raise StepError(f"{failing} after {STEP_S:.0f} s")

    def _last_words(self) -> str:
        return (self.folder / "daemon.log").read_text("utf-8", "replace").strip().rpartition("\n")[2]

    def status(self) -> dict[str, Any] | None:
        try:
            return call(self.socket, {"verb": "status"}, 5.0)
        except Unreachable:
            return None

    def stop(self) -> None:
        """A clean one, its engines with it.  Raises StepError."""
        if self.daemon and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(STEP_S)
            except subprocess.TimeoutExpired:
                raise StepError(f"the daemon did not stop within {STEP_S:.0f} s") from None

    def end(self) -> None:
        """Whatever happened: the daemon is stopped, and with it all that it started."""
        with suppress(StepError):
            self.stop()
        if self.daemon and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(STEP_S)
        for members in marked(self.instance).values():      # engines outlive a daemon that did not end as it should
            for who in members:
                with holding(who) as fd:
                    _ = fd is not None and deliver(fd, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
