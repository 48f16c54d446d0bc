"""The daemon against a real CUDA vLLM on a real card: one script, unattended, a table at the end.

Run on a machine with one NVIDIA GPU and a vLLM that this Python imports:
    python -m tests.gpu.drive MODEL_FOLDER OUT_FOLDER
Boots a primary and a `sleeping` backup behind the gateway, kills the primary under load again and again, lets a
neighbour fill the card and a long prompt exhaust it.  Ends what it started.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from vllm_watchdog.tell.client import Unreachable, call

CONFIG = """
[daemon]
state_dir = "{folder}/state"
log_dir = "{folder}/logs"
sample_s = 0.5
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


KILLS = 5
CLIENTS = 8


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
                    said = str(session.post("http://127.0.0.1:18000/v1/completions", json=body, timeout=90).status_code)
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


class Drive:
    def __init__(self, model: str, out: Path) -> None:
        self.out, self.folder = out, Path("/tmp/llm-watchdog-gpu")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
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

    def status(self) -> dict[str, Any] | None:
        try:
            return call(self.folder / "state" / "control.sock", {"verb": "status"}, 3.0)
        except Unreachable:
            return None

    def until(self, found: Callable[[dict[str, dict[str, Any]], dict[str, Any]], bool], within_s: float) -> float:
        began, pause = time.monotonic(), threading.Event()
        while time.monotonic() - began < within_s:
            doc = self.status()
            if doc and doc["engines"] and found({e["name"]: e for e in doc["engines"]}, doc):
                return time.monotonic() - began
            pause.wait(0.01)
        raise TimeoutError(f"not within {within_s} s: {json.dumps(self.status())[:3000]}")

    def pid(self, name: str) -> int:
        doc = self.status() or {}
        return next(int(e["pid"]) for e in doc["engines"] if e["name"] == name)

    def end(self) -> None:
        if self.gateway and self.gateway.poll() is None:
            self.gateway.terminate()
            self.row("gateway drained, exit code", self.gateway.wait(60))
        if self.daemon and self.daemon.poll() is None:
            began = time.monotonic()
            self.daemon.send_signal(signal.SIGTERM)
            self.row("clean stop, exit code", f"{self.daemon.wait(60)} after {time.monotonic() - began:.1f} s")
        for name in ("incidents", "journal"):
            if (self.folder / "logs" / name).exists():
                shutil.make_archive(str(self.out / name), "gztar", self.folder / "logs" / name)
        for log in (self.folder / "logs").glob("*.log"):
            shutil.copy(log, self.out)
        (self.out / "table.txt").write_text("\n".join(f"| {what} | {figure} |" for what, figure in self.rows) + "\n")


def both_up(engines: dict[str, dict[str, Any]], _: dict[str, Any]) -> bool:
    return engines["primary"]["phase"] == "serving" and engines["backup"]["phase"] == "asleep"


def on_backup(_: dict[str, dict[str, Any]], doc: dict[str, Any]) -> bool:
    return bool(doc["services"][0]["serving"] == "backup")


def kill(drive: Drive, clients: Clients, number: int) -> float:
    began = time.monotonic()
    os.kill(drive.pid("primary"), signal.SIGKILL)
    drive.until(on_backup, 60)
    served = time.monotonic() - began
    threading.Event().wait(2)
    gap = clients.gap_s(began)
    drive.row(f"kill {number}: backup serves; longest gap for {CLIENTS} clients", f"{served:.2f} s; {gap:.2f} s")
    drive.row(f"kill {number}: primary back, backup asleep again", f"{drive.until(both_up, 240):.1f} s")
    return gap


def exhaust(drive: Drive) -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, "600"], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout
        neighbour.stdout.readline()
        drive.row("neighbour holds the rest", neighbour.pid)
        began = time.monotonic()
        try:
            body = {"model": "m", "prompt": [5] * 60_000, "max_tokens": 4}
            answer = requests.post("http://127.0.0.1:18100/v1/completions", json=body, timeout=60)
            drive.row("the long prompt was answered", f"{answer.status_code} after {time.monotonic() - began:.2f} s")
        except requests.RequestException as error:
            drive.row("the long prompt was cut", f"{type(error).__name__} after {time.monotonic() - began:.2f} s")
        drive.row("service again after the OOM, by the backup", f"{drive.until(on_backup, 60):.2f} s")
    finally:
        neighbour.kill()
        neighbour.wait(10)


def main() -> int:
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    drive = Drive(sys.argv[1], out)
    try:
        began = time.monotonic()
        drive.start()
        drive.until(both_up, 300)
        drive.row("boot: backup asleep, primary serving", f"{time.monotonic() - began:.1f} s")
        doc = drive.status() or {}
        drive.row("gpus", json.dumps(doc.get("gpus"))[:600])
        drive.row("nvidia-smi", subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader"], capture_output=True,
            text=True, timeout=20, check=False).stdout.strip())
        clients = Clients()
        gaps = sorted(kill(drive, clients, number) for number in range(1, KILLS + 1))
        drive.row("client gap, median of the kills", f"{gaps[len(gaps) // 2]:.2f} s")
        drive.row("answers", clients.end())
        exhaust(drive)
    except (TimeoutError, AssertionError) as error:
        drive.row("FAILED", error)
        return 1
    finally:
        drive.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
