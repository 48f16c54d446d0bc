"""One watchdog and one gateway over a real CUDA vLLM: what `drive` and `pair` move, watch and write down.

Everything lies in a folder of its own under the system's temporary one.  `Host.end` ends what was started and packs logs,
journal, incidents and recordings into one archive, for a lent machine gives back few files; the table is written row by
row, so that a run that is cut off still tells what it saw.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import requests
from tests.fakes.receivers import Server, says
from tests.gpu.meter import Meter

from vllm_watchdog.sense.gpu_helper import NAME as HELPER
from vllm_watchdog.tell.client import Unreachable, call

Doc = dict[str, Any]
Found = Callable[[dict[str, Doc], Doc], bool]

MIB = 1 << 20
STEADY_S = 2.2      # a kill within twice stable_s of a failback would double the wait for the next one
VLLM = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
COMMON = """
[daemon]
state_dir = "{folder}/state"
log_dir = "{folder}/logs"
sample_s = 0.5
listen = "off"
[hang]
still_s = 3
probe_s = 3
patience_s = 4
[thresholds]
vram_warn = 0.85
vram_degrade = 0.9
degrade_after_s = 10
[failover]
stable_s = 1
after_failures = 50
failback = "auto"
[restart]
budget = 50
backoff_s = 0.2
backoff_max_s = 0.2
[evidence]
min_interval_s = 1
[alerts.channels.here]
type = "webhook"
url = "{receiver}"
[gateway]
listen = "127.0.0.1:{port}"
drain_s = 5
[engines.primary]
command = {command}
model = "{model}"
port = {primary}
gpus = {gpus}
[engines.primary.args]
served-model-name = "m"
load-format = "dummy"
dtype = "bfloat16"
"""
# NVLink multicast stays off on a lent machine: a program that uses it can put the host's cards out of service.
ENVIRONMENT = """
[engines.primary.env]
HF_HUB_OFFLINE = "1"
VLLM_USE_FLASHINFER_SAMPLER = "0"
VLLM_ALLREDUCE_USE_SYMM_MEM = "0"
VLLM_ALLREDUCE_USE_FLASHINFER = "0"
VLLM_USE_NCCL_SYMM_MEM = "0"
NCCL_NVLS_ENABLE = "0"
TORCH_SYMM_MEM_DISABLE_MULTICAST = "1"
NVSHMEM_DISABLE_NVLS = "1"
"""


class NoTimeError(Exception):
    """A stage that could not be finished before the script's own deadline is not begun."""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


class Host:
    """`layout` follows COMMON in the configuration: the primary's further args, then more tables.

    `deadline_s` bounds every wait: a script that hangs on a lent card helps nobody.
    """

    def __init__(self, model: str, out: Path, deadline_s: float, layout: str, gpus: list[Any], port: int) -> None:
        self.out, self.folder = out, Path(tempfile.mkdtemp(prefix="llm-watchdog-gpu-"))
        out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + deadline_s
        self.recordings = self.folder / "recordings"
        self.recordings.mkdir()
        self.gateway_url, self.ports = f"http://127.0.0.1:{port}", {"primary": port + 1, "backup": port + 2}
        self.receiver = Server(says(200))
        self.alerts: list[Doc] = []
        self.config = self.folder / "config.toml"
        self.config.write_text((COMMON + layout + ENVIRONMENT).format(
            folder=self.folder, command=json.dumps(VLLM), model=model, port=port, gpus=json.dumps(gpus),
            receiver=self.receiver.url, **self.ports))
        self.meter = Meter()
        self.failed = 0
        self.daemon: subprocess.Popen[bytes] | None = None
        self.gateway: subprocess.Popen[bytes] | None = None

    # -- the table

    def row(self, what: str, figure: Any) -> None:
        print(f"{time.monotonic():.1f} {what}: {figure}", flush=True)
        with (self.out / "table.txt").open("a") as table:
            table.write(f"| {what} | {figure} |\n")

    def tried(self, stage: Callable[[], Any], needs_s: float = 0.0, name: str = "") -> None:
        """The card is lent: what fails is a row, and the other stages still count."""
        name = name or stage.__name__
        left = self.deadline - time.monotonic()
        if left < needs_s:
            self.row(f"{name}: NOT RUN", f"{left:.0f} s left, {needs_s:.0f} s needed")
            return
        try:
            stage()
        except Exception as error:
            self.failed += 1
            self.row(f"{name}: FAILED", f"{type(error).__name__}: {error}"[:2000])

    # -- its processes

    def start(self) -> None:
        self.meter.start()
        self.daemon, self.gateway = self._command("run"), self._command("gateway")

    def _command(self, word: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{word}.txt").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "vllm_watchdog.app.cli", word, "--config", str(self.config)],
                                    stdout=log, stderr=log)

    def members(self, name: str) -> dict[str, int]:
        """PIDs of an engine by the titles that vLLM gives them; its API server is `api`."""
        leader = psutil.Process(self.engine(name)["pid"])
        titled = {" ".join(child.cmdline()).strip(): child.pid for child in leader.children(recursive=True)}
        return {"api": leader.pid} | {title: pid for title, pid in titled.items() if title.startswith("VLLM::")}

    def core(self, name: str) -> int:
        return next(pid for title, pid in self.members(name).items() if "EngineCore" in title)

    def helper(self) -> psutil.Process:
        """The process that alone talks to NVML; waits for the next one where it was lost.  Raises TimeoutError."""
        assert self.daemon
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for child in psutil.Process(self.daemon.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if child.name() == HELPER and child.status() != psutil.STATUS_ZOMBIE:
                        return child
            pause(0.05)
        raise TimeoutError("no GPU helper for 60 s")

    # -- what it says

    def ask(self, **request: Any) -> Doc:
        return call(self.folder / "state" / "control.sock", request, 5.0)

    def status(self) -> Doc | None:
        try:
            return self.ask(verb="status")
        except Unreachable:
            return None

    def until(self, found: Found, within_s: float) -> float:
        """Seconds until the status shows it.  Raises TimeoutError."""
        began = time.monotonic()
        while time.monotonic() < min(began + within_s, self.deadline):
            doc = self.status()
            if doc and doc["engines"] and found({e["name"]: e for e in doc["engines"]}, doc):
                return time.monotonic() - began
            pause(0.01)
        doc = self.status() or {}
        keys = ("name", "phase", "generation", "cause", "why")
        brief = [{key: row[key] for key in keys} for row in doc.get("engines", ())]
        raise TimeoutError(f"not within {within_s:.0f} s: {json.dumps(brief)} {json.dumps(doc.get('services'))}")

    def engine(self, name: str) -> Doc:
        doc = self.status() or {"engines": []}
        return next(engine for engine in doc["engines"] if engine["name"] == name)

    def served_by(self) -> str | None:
        doc = self.status()
        return doc["services"][0]["serving"] if doc else None

    def said(self, since: float, *names: str, **fields: str) -> list[Doc]:
        """The journal's lines of these names from an instant on (monotonic, our clock is the daemon's).

        `engine="primary"` is any generation of it.
        """
        lines = [line for path in sorted((self.folder / "logs" / "journal").glob("*.jsonl"))
                 for line in path.read_text().splitlines() if '"say"' in line]
        docs = [doc for doc in map(json.loads, lines) if doc.get("say") in names and doc["at"] >= since]
        return [doc for doc in docs if all(str(doc.get(key, "")).split("#")[0] == value for key, value in fields.items())]

    def first(self, since: float, *names: str, **fields: str) -> Doc | None:
        return next(iter(self.said(since, *names, **fields)), None)

    def awaited(self, since: float, within_s: float, *names: str, **fields: str) -> Doc:
        """The same, waited for: the journal's own thread writes a moment later.  Raises TimeoutError."""
        until = min(time.monotonic() + within_s, self.deadline)
        while time.monotonic() < until:
            if (doc := self.first(since, *names, **fields)) is not None:
                return doc
            pause(0.05)
        raise TimeoutError(f"the journal does not say {names} {fields} within {within_s:.0f} s")

    def told(self) -> list[Doc]:
        """Every alert that the webhook got so far."""
        while not self.receiver.got.empty():
            self.alerts.append(self.receiver.got.get()[2])
        return self.alerts

    def calm(self, within_s: float) -> None:
        """Until no incident is open: what joins an open one is not alerted again.  Raises TimeoutError."""
        self.until(lambda _, doc: not doc["incidents"], within_s)

    def counter(self, name: str, metric: str) -> float:
        """The sum of one metric of an engine itself."""
        text = requests.get(f"http://127.0.0.1:{self.ports[name]}/metrics", timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith((f"{metric}{{", f"{metric} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def record(self, name: str, cards: list[Doc]) -> None:
        """One sample, as the helper prints it: a recording for tests."""
        (self.recordings / f"{name}.jsonl").write_text(json.dumps({"seq": 1, "gpus": cards}) + "\n")

    # -- its end

    def end(self) -> None:
        if self.gateway and self.gateway.poll() is None:
            self.gateway.terminate()
            self.row("gateway drained, exit code", self.gateway.wait(60))
        if self.daemon and self.daemon.poll() is None:
            began = time.monotonic()
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.send_signal(signal.SIGTERM)
            self.row("clean stop, exit code", f"{self.daemon.wait(60)} after {time.monotonic() - began:.1f} s")
        self.meter.stop()
        (self.recordings / "alerts.jsonl").write_text("".join(json.dumps(alert) + "\n" for alert in self.told()))
        self.receiver.close()
        with tarfile.open(self.out / "all.tar.gz", "w:gz") as archive:
            for path in (self.recordings, *self.folder.glob("*.t*"), *(self.folder / "logs").glob("*")):
                archive.add(path, path.name)
        shutil.rmtree(self.folder, ignore_errors=True)
