"""A service to throw away: stand-in engines on simulated cards, daemon, gateway, a receiver of alerts, in its own folder.

Everything listens on loopback.  It starts daemon and gateway again when they die, as systemd would.  Whatever happens,
`end` stops all of it; it also ends with the process that made it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_watchdog.app.drill.sandbox_daemon import KMSG, shortened
from vllm_watchdog.app.drill.site import NotHereError, Site
from vllm_watchdog.app.throwaway import STEP_S, Throwaway, free_port
from vllm_watchdog.config_load import load
from vllm_watchdog.core.drills import Part

AGAIN_S = 0.1           # systemd would take RestartSec=1
CARD_BYTES = 80 << 30
PRIMARY, BACKUP, MODEL = "primary", "backup", "stand-in"
LEASHED = (sys.executable, "-m", "vllm_watchdog.app.drill.leash")
DAEMON = (*LEASHED, "vllm_watchdog.app.drill.sandbox_daemon")
GATEWAY = (*LEASHED, "vllm_watchdog.app.cli", "gateway")

CONFIG = """
[daemon]
state_dir = {state}
log_dir = {logs}
sample_s = 0.5
listen = "off"

[gateway]
listen = "127.0.0.1:{gateway_port}"
hold_s = 30

[engines.primary]
command = [{python}, "-m", "vllm_watchdog.sim"]
model = {model}
port = {port}
gpus = [0, 1]
stop_timeout_s = 2
args = {{ served-model-name = "stand-in", max-num-seqs = 64, tensor-parallel-size = 2, gpu-memory-utilization = 0.5, \
sim-load-s = 0.2, sim-token-s = 0.01{flag} }}

[engines.backup]
backup_for = "primary"
standby = "sleeping"
model = {spare_model}
port = {backup_port}
args = {{ max-num-seqs = 16, gpu-memory-utilization = 0.3{unset} }}

[thresholds]
disk_free_gib = 0.01
crash_loop = 1000
oom_rate = 1000

[hang]
still_s = 0.5
probe_s = 1.5
patience_s = 1.5
patience_blind_s = 2
dead_s = 2

[restart]
backoff_s = 0.2
backoff_max_s = 1
budget = 1000

[failover]
failback = "manual"
stable_s = 1

[evidence]
deadline_s = 5
min_interval_s = 1

[alerts.channels.drill]
url = "http://127.0.0.1:{hook_port}/hook"
timeout_s = 2
"""
FLAG = ", no-such-flag = true"
UNSET = ', no-such-flag = "unset"'

# What a driver's tool looks like to whoever runs it; it hangs while there is a file `hung` beside it.
NVIDIA_SMI = """#!/bin/sh
[ -e "$(dirname "$0")/hung" ] && exec sleep 60
echo "a simulated card"
"""


class Sandbox(Site):
    """A site in which everything may be broken."""

    sandboxed = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hook = Hook()
        self.models = folder / "models"
        self.bin, self.cards, self.kmsg = folder / "bin", folder / "cards", folder / KMSG
        self.house = Throwaway(folder, DAEMON, {
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "LLM_WATCHDOG_SIM_GPU": str(self.cards)})
        self._ports = {"port": free_port(), "backup_port": free_port(), "gateway_port": free_port()}
        self._furnish()
        self.configure()
        super().__init__(load(self.house.config), PRIMARY)
        self.plan = shortened(self.plan)
        self._over = threading.Event()
        self._gateway: subprocess.Popen[bytes] | None = None
        self._watch = threading.Thread(target=self._supervise, name="supervise", daemon=True)

    def _furnish(self) -> None:
        for part in (self.bin, self.cards, self.models / PRIMARY, self.models / BACKUP):
            part.mkdir(parents=True, exist_ok=True)
        (self.cards / "gpu.json").write_text(json.dumps({"total_bytes": CARD_BYTES, "count": 2}), "ascii")
        tool = self.bin / "nvidia-smi"
        tool.write_text(NVIDIA_SMI, "ascii")
        tool.chmod(0o700)
        os.mkfifo(self.kmsg, 0o600)

    def configure(self, bad_flag: bool = False) -> None:
        """Writes the configuration; the bad flag is the primary's alone."""
        paths = {"state": self.house.state, "logs": self.house.logs, "python": sys.executable,
                 "model": self.models / PRIMARY, "spare_model": self.models / BACKUP}
        quoted = {key: json.dumps(str(value)) for key, value in paths.items()}
        self.house.config.write_text(CONFIG.format(
            **quoted, **self._ports, hook_port=self.hook.port, flag=FLAG if bad_flag else "",
            unset=UNSET if bad_flag else ""), "utf-8")

    # -- its life

    def boot(self) -> None:
        """Until the primary serves, the backup sleeps and the gateway answers.  Raises StepError."""
        self._watch.start()
        self.house.serving(PRIMARY)
        self.house.until(lambda: self._phase(BACKUP) == "asleep", "the standby does not fall asleep")
        self.house.until(self._gated, "the gateway does not listen")

    def _gated(self) -> bool:
        with suppress(NotHereError):
            return bool(self.victim(Part.GATEWAY))
        return False

    def _phase(self, name: str) -> str:
        doc: dict[str, Any] = self.report() or {"engines": []}
        return next((engine["phase"] for engine in doc["engines"] if engine["name"] == name), "")

    def _supervise(self) -> None:
        while not self._over.wait(AGAIN_S):
            if self.house.daemon is None or self.house.daemon.poll() is not None:
                self.house.boot()
            if self._gateway is None or self._gateway.poll() is not None:
                self._gateway = self.house.launched("gateway", *GATEWAY)

    def end(self) -> None:
        self._over.set()
        if self._watch.is_alive():
            self._watch.join(STEP_S)
        if self._gateway and self._gateway.poll() is None:
            self._gateway.kill()
            self._gateway.wait(STEP_S)
        self.house.end()
        self.hook.close()


@contextmanager
def sandbox(folder: Path) -> Iterator[Sandbox]:
    """A service that runs, and is gone afterwards.  Raises StepError where it does not come up."""
    made = Sandbox(folder)
    try:
        made.boot()
        yield made
    finally:
        made.end()


class Hook:
    """The receiver of alerts: answers 200, or not at all while it is `hung`."""

    def __init__(self) -> None:
        self.hung, self._free = threading.Event(), threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                while hook.hung.is_set() and not hook._free.wait(AGAIN_S):
                    pass
                with suppress(OSError):
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(AGAIN_S,), name="hook", daemon=True).start()

    def close(self) -> None:
        self._free.set()
        self._server.shutdown()
        self._server.server_close()
