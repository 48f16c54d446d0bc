"""The product's claims on a real card with a real CUDA vLLM: one script, unattended, under 9 minutes, a table at the end.

    python -m tests.gpu.drive MODEL_FOLDER OUT_FOLDER [--gpu N] [--stages NAME,NAME…] [--seconds S]

Needs an NVIDIA GPU, a vLLM that this Python imports, and a folder from `make_model`.  Boots a primary and a `sleeping`
backup behind the gateway, then the stages, dearest first; each stands for itself, and one that does not fit into the
seconds that are left is said not to have run.  Two of them with other cards and stages may run side by side.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from statistics import median

import psutil
from tests.gpu.load import CLIENTS, LONG, Clients, asked
from tests.gpu.look import aftermath, compare, death_of
from tests.gpu.meter import held_by, seconds, used
from tests.gpu.neighbour import Neighbour
from tests.gpu.overhead import PAIR_S, Overhead
from tests.gpu.rig import MIB, STEADY_S, Doc, Host, pause
from tests.gpu.visit import visit

KILLS = 6
PAIRS = 6
START_S = 75.0          # of a 7 B model, and the sleep that follows: what a stage that kills needs after it
# Both awake stay under the thresholds of COMMON: a failback is no reason for a warning.
LAYOUT = """
enforce-eager = true
gpu-memory-utilization = 0.5
max-model-len = 65536
max-num-batched-tokens = 65536
max-num-seqs = 64
[engines.backup]
backup_for = "primary"
standby = "sleeping"
port = {backup}
args = {{ gpu-memory-utilization = 0.25, max-num-seqs = 16, max-num-batched-tokens = 8192 }}
"""


def both_up(engines: dict[str, Doc], _: Doc) -> bool:
    return engines["primary"]["phase"] == "serving" and engines["backup"]["phase"] == "asleep"


def on_backup(_: dict[str, Doc], doc: Doc) -> bool:
    return bool(doc["services"][0]["serving"] == "backup")


def gpu_known(_: dict[str, Doc], doc: Doc) -> bool:
    return isinstance(doc["gpus"], list)


def gpu_unknown(_: dict[str, Doc], doc: Doc) -> bool:
    return isinstance(doc["gpus"], dict)


# -- stages

class Drive:
    def __init__(self, host: Host, gpu: int) -> None:
        self.host, self.gpu = host, gpu
        self.gaps: list[float] = []
        self.lost = 0

    def sampling(self) -> None:
        host = self.host
        compare(host, (self.gpu,), "both-up")
        host.row("one sample of all cards", f"{host.meter.cost_us():.0f} µs")
        helper, for_s = host.helper(), 5.0
        spent = sum(helper.cpu_times()[:2])
        pause(for_s)
        spent = sum(helper.cpu_times()[:2]) - spent
        host.row("the GPU helper's CPU a minute, two samples a second", f"{spent * 60 / for_s * 1000:.0f} ms")

    def kills(self) -> None:
        with Clients(self.host.gateway_url) as clients:
            for number in range(1, KILLS + 1):
                self.host.tried(partial(self.kill, clients, number), START_S + 15, f"kill {number}")
                if number == 1:
                    self.host.row("answers so far", clients.said())
        self._close(clients)

    def _close(self, clients: Clients) -> None:
        self.lost += sum(count for status, count in clients.said().items() if status != "200")
        if self.gaps:
            self.host.row(f"client gap at {len(self.gaps)} deaths (goal 1.0 s); lost of the not yet begun (goal 0)",
                          f"p50 {median(self.gaps):.2f} s of {[round(gap, 2) for gap in self.gaps]}; {self.lost}")
        self.host.row("answers to the clients", clients.said())

    def kill(self, clients: Clients, number: int) -> None:
        """Even: the engine core; odd: the API server alone, whose core stays behind with the memory."""
        host, orphaned = self.host, number % 2 == 1
        host.until(both_up, 100)
        pause(STEADY_S)
        members, core = host.members("primary"), host.core("primary")
        before = host.meter.read()
        held = held_by(before, self.gpu).get(core) or 0
        victim = members["api"] if orphaned else core
        label = f"kill {number}, {'API server' if orphaned else 'EngineCore'}"
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        served = host.until(on_backup, 60)
        pause(2)
        self.gaps.append(gap := clients.gap_s(began, time.monotonic()))
        back = host.meter.back_s(self.gpu, members.values(), began, before)
        host.row(label, f"backup serves after {served:.2f} s; longest gap of {CLIENTS} clients {gap:.2f} s; "
                        f"{held / 2**30:.1f} GiB back after {seconds(back)}; core gone: {not psutil.pid_exists(core)}")
        if orphaned and (cards := host.meter.first_with(core, began)):
            host.record("orphan", cards)
        host.row(f"{label}: primary back, backup asleep again", f"{host.until(both_up, 200):.1f} s")
        aftermath(host, began, label)

    def exhaust(self) -> None:
        """A neighbour takes the rest of the card; then a long prompt: the articles' crash."""
        self.host.until(both_up, 100)
        self.host.calm(50)
        pause(STEADY_S)
        with Clients(self.host.gateway_url) as clients, Neighbour(self.gpu) as neighbour:
            began = self._oom(neighbour, clients)
            self._gate(neighbour, began)
        self.host.row("OOM: neighbour gone, primary back, backup asleep again", f"{self.host.until(both_up, 200):.1f} s")
        aftermath(self.host, began, "OOM")
        self._close(clients)

    def _oom(self, neighbour: Neighbour, clients: Clients) -> float:
        host = self.host
        neighbour.leaves(600)
        before = host.meter.read()
        host.record("full-card", before)
        members, core = host.members("primary"), host.core("primary")
        took = host.counter("backup", "vllm:prompt_tokens_total")
        told: list[str] = []
        deaths: list[float] = []
        asker = threading.Thread(target=lambda: told.append(asked(host.gateway_url, [5] * LONG)))
        watcher = threading.Thread(target=lambda: deaths.append(death_of(core)), daemon=True)
        watcher.start()
        began = time.monotonic()
        asker.start()
        host.until(on_backup, 60)
        served = time.monotonic()
        watcher.join(5)
        died = deaths[0] if deaths else began
        asker.join(60)
        pause(2)
        self.gaps.append(gap := clients.gap_s(began, time.monotonic()))
        back = host.meter.back_s(self.gpu, members.values(), died, before)
        host.row("OOM: core gone after the prompt; after its death: backup serves; memory back; gap of the clients",
                 f"{died - began:.2f} s; {served - died:.2f} s; {seconds(back)}; {gap:.2f} s")
        host.row("OOM: the client of the long prompt was told", told)
        grown = host.counter("backup", "vllm:prompt_tokens_total") - took
        host.row("OOM: the prompt did not reach the backup", f"{grown < LONG} ({grown:.0f} prompt tokens there since)")
        shown = host.ask(verb="incident", id=host.ask(verb="incidents")["incidents"][0]["id"])
        host.row("OOM: classified", f"{shown['class']}: {shown['incident']['text'][:400]}")
        exited = host.first(began, "engine.exited", engine="primary")
        host.row("OOM: exit code", exited["code"] if exited else "none: it was stopped")
        return died

    def _gate(self, neighbour: Neighbour, began: float) -> None:
        host = self.host
        host.until(lambda engines, _: engines["primary"]["phase"] == "releasing", 20)
        pause(3)
        host.row("OOM: the restart waits while the neighbour holds the card",
                 not host.first(began, "engine.spawned", engine="primary"))
        host.row("OOM: neighbour lives; the incident names it",
                 f"{neighbour.lives()}; {f'PID {neighbour.pid} ' in self._page()}")

    def _page(self) -> str:
        """The newest incident as people read it."""
        folder = max((self.host.folder / "logs" / "incidents").iterdir(), key=lambda path: path.stat().st_mtime)
        return (folder / "README.md").read_text()

    def thresholds(self) -> None:
        """A neighbour crosses both: bundle, alert, fewer requests.  The last stage: the card must be calm for long after."""
        host = self.host
        host.until(both_up, 100)
        host.calm(160)      # a card that was over its limit must be calm for 120 s
        total = used(host.meter.read(), self.gpu)[1] // MIB
        with Neighbour(self.gpu) as neighbour:
            for class_, share in (("vram_high", 0.87), ("vram_degrade", 0.93)):
                since = time.monotonic()
                neighbour.leaves(int(total * (1 - share)))
                filled = time.monotonic()
                raised = host.awaited(since, 40, "symptom.raised", symptom=class_)
                host.row(f"{class_} at {share:.0%}: told after", f"{raised['at'] - filled:.1f} s: {raised['text']}")
                bundle = host.awaited(since, 20, "evidence.done")
                host.row("... evidence complete after; missing",
                         f"{bundle['at'] - filled:.1f} s; {bundle.get('missing', 'nothing')}")
            host.until(lambda _, doc: doc["services"][0]["lowered"] is not None, 5)
            host.row("... lowered", json.dumps((host.status() or {})["services"][0]["lowered"]))
            pause(2)
        told = [(alert.get("kind"), alert.get("class")) for alert in host.told() if "vram" in str(alert.get("class"))]
        host.row("... alerts", told)

    def hang(self) -> None:
        """The primary's core is stopped under load; /health says 200 all the while."""
        host = self.host
        host.until(both_up, 100)
        with Clients(host.gateway_url) as clients:
            pause(2)
            members = host.members("primary")
            began = time.monotonic()
            os.kill(host.core("primary"), signal.SIGSTOP)
            host.until(lambda engines, _: engines["primary"]["phase"] not in ("serving", "suspect"), 60)
            host.row("hang: judged wedged after (patience 3 + 3 + 4 s)", f"{time.monotonic() - began:.1f} s")
            host.until(on_backup, 60)
            host.awaited(began, 60, "engine.emptied", engine="primary")
            host.row("hang: nothing of it left", not any(map(psutil.pid_exists, members.values())))
            host.row("hang: primary back, backup asleep again", f"{host.until(both_up, 200):.1f} s")
            host.row("hang: longest gap of the clients; the longest that one answer took",
                     f"{clients.gap_s(began, time.monotonic()):.1f} s; {clients.longest_s(began):.1f} s")
        aftermath(host, began, "hang")
        host.row("hang: answers to the clients", clients.said())

    def overhead(self) -> None:
        self.host.until(both_up, 100)
        Overhead(self.host, PAIRS).run()

    def helper(self) -> None:
        host = self.host
        host.until(gpu_known, 30)
        old, began = host.helper(), time.monotonic()
        old.kill()
        while host.helper().pid == old.pid:
            pause(0.01)
        host.until(gpu_known, 30)
        host.row("GPU helper killed: the next one samples after", f"{time.monotonic() - began:.2f} s")
        host.helper().suspend()
        host.row("GPU helper stopped: said to be unknown after", f"{host.until(gpu_unknown, 30):.1f} s")
        host.row("... and samples again after", f"{host.until(gpu_known, 90):.1f} s")


NEEDS_S = {"sampling": 15.0, "kills": 0.0, "exhaust": START_S + 80, "hang": START_S + 25,
           "overhead": PAIRS * PAIR_S + 10, "helper": 30.0, "thresholds": 40.0}


if __name__ == "__main__":
    sys.exit(visit(sys.argv[1:], stages=NEEDS_S, seconds=500, layout=LAYOUT, port=18000,
                   up=("boot: backup asleep, primary serving", both_up), make=Drive))
