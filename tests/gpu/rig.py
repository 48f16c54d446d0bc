"""One watchdog and one gateway over a real CUDA vLLM: what `drive` moves, watches and writes down.

Everything lies in a folder of its own under the system's temporary one; `Host.end` ends what was started, and copies
logs, journal and bundles to the output folder.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests

from vllm_watchdog.sense.gpu_helper import NAME as HELPER
from vllm_watchdog.tell.client import Unreachable, call

Doc = dict[str, Any]

CLIENTS = 8
GATEWAY = "http://127.0.0.1:18000"
DIRECT = "http://127.0.0.1:18100"
CONFIG = """
[daemon]
state_dir = "{folder}/state"
log_dir = "{folder}/logs"
[hang]
still_s = 3
probe_s = 3
patience_s = 4
[thresholds]
degrade_after_s = 5
[failover]
stable_s = 1
after_failures = 50
[restart]
budget = 50
[gateway]
listen = "127.0.0.1:18000"
[engines.primary]
command = ["{python}", "-m", "vllm.entrypoints.openai.api_server"]
model = "{model}"
port = 18100
gpus = [0]
env = {{ HF_HUB_OFFLINE = "1", VLLM_USE_FLASHINFER_SAMPLER = "0" }}
[engines.primary.args]
served-model-name = "m"
enforce-eager = true
gpu-memory-utilization = 0.6
max-model-len = 65536
max-num-batched-tokens = 65536
[engines.backup]
backup_for = "primary"
standby = "sleeping"
port = 18101
args = {{ gpu-memory-utilization = 0.3, max-num-seqs = 16, max-num-batched-tokens = 8192 }}
"""
NEIGHBOUR = """
import sys, time, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(free - float(sys.argv[1]) * 2**20), dtype=torch.uint8, device="cuda")
print("held", flush=True)
time.sleep(120)
"""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Clients:
    """Ask through the gateway until told to stop; `done` holds (monotonic instant, status or error) of every answer."""

    def __init__(self) -> None:
        self.done: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        with requests.Session() as session:
            while not self._stop.is_set():
                body = {"model": "m", "prompt": f"client {number}", "max_tokens": 8}
                try:
                    said = str(session.post(f"{GATEWAY}/v1/completions", json=body, timeout=90).status_code)
                except requests.RequestException as error:
                    said = type(error).__name__
                self.done.append((time.monotonic(), said))

    def gap_s(self, since: float) -> float:
        """The longest time without any answer, from an instant on."""
        answered = [since, *sorted(at for at, said in list(self.done) if at >= since and said == "200")]
        return max(later - earlier for earlier, later in itertools.pairwise(answered))

    def end(self) -> dict[str, int]:
        self._stop.set()
        for thread in self._threads:
            thread.join(95)
        return dict(Counter(said for _, said in self.done))


class Host:
    """`deadline` bounds every wait: a script that hangs on a lent card helps nobody."""

    def __init__(self, model: str, out: Path, deadline_s: float) -> None:
        self.out, self.folder = out, Path(tempfile.mkdtemp(prefix="llm-watchdog-gpu-"))
        self.deadline = time.monotonic() + deadline_s
        self.config = self.folder / "config.toml"
        self.config.write_text(CONFIG.format(folder=self.folder, python=sys.executable, model=model))
        self.rows: list[tuple[str, str]] = []
        self.daemon: subprocess.Popen[bytes] | None = None
        self.gateway: subprocess.Popen[bytes] | None = None

    def row(self, what: str, figure: Any) -> None:
        self.rows.append((what, str(figure)))
        print(f"{time.monotonic():.1f} {what}: {figure}", flush=True)

    def start(self) -> None:
        self.daemon, self.gateway = self._command("run"), self._command("gateway")

    def _command(self, word: str) -> subprocess.Popen[bytes]:
        with (self.out / f"{word}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "vllm_watchdog.app.cli", word, "--config", str(self.config)],
                                    stdout=log, stderr=log)

    def status(self) -> Doc | None:
        try:
            return call(self.folder / "state" / "control.sock", {"verb": "status"}, 3.0)
        except Unreachable:
            return None

    def until(self, found: Callable[[dict[str, Doc], Doc], bool], within_s: float) -> float:
        """Seconds until the status shows it.  Raises TimeoutError."""
        began = time.monotonic()
        while time.monotonic() < min(began + within_s, self.deadline):
            doc = self.status()
            if doc and doc["engines"] and found({e["name"]: e for e in doc["engines"]}, doc):
                return time.monotonic() - began
            pause(0.01)
        raise TimeoutError(f"not within {within_s} s: {json.dumps(self.status())[:3000]}")

    def engine(self, name: str) -> Doc:
        doc = self.status() or {"engines": []}
        return next(engine for engine in doc["engines"] if engine["name"] == name)

    def core(self, name: str) -> int:
        """PID of one engine's core, by the title that vLLM gives it."""
        leader = psutil.Process(self.engine(name)["pid"])
        return next(child.pid for child in leader.children(recursive=True) if "EngineCore" in " ".join(child.cmdline()))

    def helper(self) -> psutil.Process:
        """The process that alone talks to NVML; waits for the next one where it was lost.  Raises TimeoutError."""
        assert self.daemon
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for child in psutil.Process(self.daemon.pid).children():
                if child.name() == HELPER and child.status() != psutil.STATUS_ZOMBIE:
                    return child
            pause(0.05)
        raise TimeoutError("no GPU helper for 60 s")

    def said(self, name: str) -> list[Doc]:
        """The journal's lines of one name."""
        lines = [line for path in sorted((self.folder / "logs" / "journal").glob("*.jsonl"))
                 for line in path.read_text().splitlines()]
        return [doc for doc in map(json.loads, lines) if doc.get("say") == name]

    def incident(self) -> Doc:
        """The newest one, whole."""
        socket = self.folder / "state" / "control.sock"
        return call(socket, {"verb": "incident", "id": call(socket, {"verb": "incidents"}, 3.0)["incidents"][0]["id"]}, 3.0)

    def end(self) -> None:
        if self.gateway and self.gateway.poll() is None:
            self.gateway.terminate()
            self.row("gateway drained, exit code", self.gateway.wait(60))
        if self.daemon and self.daemon.poll() is None:
            began = time.monotonic()
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.send_signal(signal.SIGTERM)
            self.row("clean stop, exit code", f"{self.daemon.wait(60)} after {time.monotonic() - began:.1f} s")
        for name in ("incidents", "journal"):
            if (self.folder / "logs" / name).exists():
                shutil.make_archive(str(self.out / name), "gztar", self.folder / "logs" / name)
        for log in (self.folder / "logs").glob("*.log"):
            shutil.copy(log, self.out)
        (self.out / "table.txt").write_text("\n".join(f"| {what} | {figure} |" for what, figure in self.rows) + "\n")
        shutil.rmtree(self.folder, ignore_errors=True)
