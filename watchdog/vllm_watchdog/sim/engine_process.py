"""The API server's hold on its EngineCore process: forks it, stops it with vLLM's order of signals and lines, reaps it.

`stop` waits at most its timeout, then kills the tree. Nobody else waits for the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_watchdog.sim import core_process, link, logs
from vllm_watchdog.sim.flags import Options

DEFAULT_S = 5.0  # vLLM's grace where no --shutdown-timeout is in play
POLL_S = 0.01
REAP_S = 5.0
KILL_S = 0.1  # what looking up the tree takes vLLM; EngineCore says goodbye to its requests meanwhile


class EngineProcess:
    """One EngineCore."""

    def __init__(self, options: Options, log: logs.Log, in_child: Callable[[], None]) -> None:
        """Forks; `in_child` closes there what the engine must not keep. Call it before any thread exists."""
        self._log = log
        self._lock = threading.Lock()
        self._reaped = self._stopped = False
        self.link, theirs = link.pair()
        self.pid = os.fork()
        if self.pid == 0:
            self.link.close()
            in_child()
            os._exit(core_process.main(options, theirs))
        theirs.close()

    def alive(self) -> bool:
        """Whether it still runs; reaps it when it has ended."""
        with self._lock:
            if not self._reaped:
                self._reaped = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            return not self._reaped

    def _gone_within(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        pause = threading.Event()
        while self.alive():
            if time.monotonic() >= until:
                return False
            pause.wait(POLL_S)
        return True

    def reap(self) -> None:
        """Waits for a process that is known to have ended."""
        self._gone_within(REAP_S)

    def stop(self, timeout_s: float | None) -> None:
        """SIGTERM, `timeout_s` (None: vLLM's default), SIGKILL of the tree; a second call does nothing."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        said = "default" if timeout_s is None else f"{timeout_s:g}s"
        self._say(770, f"start timeout={said}")
        self._say(772, "stopping engine manager")
        if self.alive():
            self._log.info("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
            self._signal(self.pid, signal.SIGTERM)
            if not self._gone_within(DEFAULT_S if timeout_s is None else timeout_s):
                self._kill()
        self._say(774, "engine manager stopped")
        self._say(775, "cleaning up background resources")
        self._say(777, "complete")

    def _say(self, line: int, text: str) -> None:
        self._log.info(f"core_client.py:{line}", f"[shutdown] MPClient: {text}")

    def _kill(self) -> None:
        what = "[shutdown] Process manager: force killing remaining process"
        self._log.warning("utils.py:648", f"{what}es count=1")
        self._log.warning("utils.py:653", f"{what} EngineCore pid {self.pid}")
        if self._gone_within(KILL_S):
            return
        for child in _children(self.pid):
            name = Path(f"/proc/{child}/comm").read_text().strip()
            self._log.warning("system_utils.py:235", f"[shutdown] force killing sub process {name} pid {child}")
            self._signal(child, signal.SIGKILL)
        self._signal(self.pid, signal.SIGKILL)
        self._gone_within(REAP_S)

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            os.kill(pid, number)


def _children(pid: int) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except FileNotFoundError:
        return ()
