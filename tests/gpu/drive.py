"""The product's claims on a real card with a real CUDA vLLM: one script, unattended, under 9 minutes, a table at the end.

    python -m tests.gpu.drive MODEL_FOLDER OUT_FOLDER      one NVIDIA GPU, and a vLLM that this Python imports

Boots a primary and a `sleeping` backup behind the gateway; compares our samples with nvidia-smi's; measures what
watchdog and gateway cost; kills and stops the GPU helper; kills the primary under load; lets a neighbour fill the card
and a long prompt exhaust it; stops the engine core.  Each stage stands for itself: one that fails is a row, and the
next one goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import requests
from tests.gpu.rig import DIRECT, GATEWAY, NEIGHBOUR, Clients, Doc, Host, pause

BUDGET_S = 500.0
PAIRS, PAIR_S, STREAMS = 5, 4.0, 16
MIB = 1 << 20


def both_up(engines: dict[str, Doc], _: Doc) -> bool:
    return engines["primary"]["phase"] == "serving" and engines["backup"]["phase"] == "asleep"


def on_backup(_: dict[str, Doc], doc: Doc) -> bool:
    return bool(doc["services"][0]["serving"] == "backup")


def gpu_known(_: dict[str, Doc], doc: Doc) -> bool:
    return isinstance(doc["gpus"], list)


def gpu_unknown(_: dict[str, Doc], doc: Doc) -> bool:
    return isinstance(doc["gpus"], dict)


# -- stages

def sampling(host: Host) -> None:
    """Our figures beside nvidia-smi's, of the same second; MiB, as nvidia-smi rounds."""
    gpu = (host.status() or {})["gpus"][0]
    used, total = (int(word) for word in smi("--query-gpu=memory.used,memory.total")[0].split(","))
    host.row("memory used, total: ours; nvidia-smi (MiB)",
             f"{gpu['used_bytes'] // MIB}, {gpu['total_bytes'] // MIB}; {used}, {total}")
    theirs = dict(tuple(map(int, line.split(","))) for line in smi("--query-compute-apps=pid,used_memory"))
    ours = {row["pid"]: row["used_bytes"] // MIB for row in gpu["processes"] if row["used_bytes"] is not None}
    host.row("by process: ours; nvidia-smi (MiB)", f"{ours}; {theirs}")
    helper, seconds = host.helper(), 10.0
    spent = sum(helper.cpu_times()[:2])
    pause(seconds)
    host.row("the GPU helper's CPU a minute", f"{(sum(helper.cpu_times()[:2]) - spent) * 60 / seconds * 1000:.0f} ms")


def smi(*query: str) -> list[str]:
    done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          timeout=20, check=False)
    return [line for line in done.stdout.splitlines() if line.strip()]


def overhead(host: Host) -> None:
    """Tokens a second through gateway with the watchdog at work, over those of the engine alone (watchdog stopped)."""
    assert host.daemon
    ratios, speeds = [], []
    for number in range(PAIRS):
        found: dict[str, float] = {}
        for way in (("with", "without") if number % 2 else ("without", "with")):
            helper = host.helper()
            if way == "without":
                os.kill(host.daemon.pid, signal.SIGSTOP)
                helper.suspend()
            try:
                found[way] = tokens_per_s(GATEWAY if way == "with" else DIRECT)
            finally:
                helper.resume()
                os.kill(host.daemon.pid, signal.SIGCONT)
        ratios.append(found["with"] / found["without"])
        speeds.append(found["without"])
    host.row(f"tokens/s with watchdog and gateway, over without: {PAIRS} pairs of {PAIR_S:.0f} s, {STREAMS} clients",
             f"median {median(ratios):.4f} of {median(speeds):.0f} tokens/s; {[round(ratio, 4) for ratio in ratios]}")


def tokens_per_s(base: str) -> float:
    counted, until = [0] * STREAMS, time.monotonic() + PAIR_S

    def ask(number: int) -> None:
        with requests.Session() as session:
            while time.monotonic() < until:
                body = {"model": "m", "prompt": f"{number} says", "max_tokens": 64, "ignore_eos": True}
                reply = session.post(f"{base}/v1/completions", json=body, timeout=60)
                counted[number] += reply.json()["usage"]["completion_tokens"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(STREAMS)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return sum(counted) / (time.monotonic() - began)


def helper_lost(host: Host) -> None:
    old, began = host.helper(), time.monotonic()
    old.kill()
    while host.helper().pid == old.pid:
        pause(0.01)
    host.until(gpu_known, 30)
    host.row("GPU helper killed: the next one samples after", f"{time.monotonic() - began:.2f} s")
    host.helper().suspend()
    host.row("GPU helper stopped: said to be unknown after", f"{host.until(gpu_unknown, 30):.1f} s")
    host.row("... and samples again after", f"{host.until(gpu_known, 90):.1f} s")


def kill(host: Host, clients: Clients, number: int) -> float:
    """Odd: the engine core; even: the API server alone, whose core stays behind with the memory."""
    orphaned = number % 2 == 0
    victim = host.engine("primary")["pid"] if orphaned else host.core("primary")
    core = host.core("primary")
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    host.until(on_backup, 60)
    served = time.monotonic() - began
    pause(2)
    gap = clients.gap_s(began)
    what = "the API server" if orphaned else "EngineCore"
    host.row(f"kill {number}, {what}: backup serves after; longest gap of the clients", f"{served:.2f} s; {gap:.2f} s")
    if orphaned:
        host.row(f"kill {number}: its core is gone", not psutil.pid_exists(core))
    host.row(f"kill {number}: primary back, backup asleep again", f"{host.until(both_up, 240):.1f} s")
    spawned, ready = (host.said(name)[-1]["at"] for name in ("engine.spawned", "engine.ready"))
    host.row(f"kill {number}: what a cold start of it takes, exec to ready", f"{ready - spawned:.1f} s")
    return gap


def exhaust(host: Host, clients: Clients) -> float:
    """A neighbour takes the rest of the card: degraded; then a long prompt: the articles' crash."""
    neighbour = subprocess.Popen([sys.executable, "-c", NEIGHBOUR, "600"], stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout
        neighbour.stdout.readline()
        host.row("neighbour holds the rest, PID", neighbour.pid)
        took = host.until(lambda _, doc: any(s["class"] == "vram_degrade" for s in doc["symptoms"]), 30)
        host.row("over the threshold for 5 s: told after", f"{took:.1f} s")
        pause(2)
        host.row("... and the service", json.dumps((host.status() or {})["services"][0]))
        host.row("... evidence so far", host.incident()["incident"]["evidence"])
        (host.out / "nvml-full-card.jsonl").write_text(recorded())
        began = time.monotonic()
        body = {"model": "m", "prompt": [5] * 60_000, "max_tokens": 4}
        told: list[str] = []
        asker = threading.Thread(target=lambda: told.append(asked(body)))
        asker.start()
        host.row("the long prompt: backup serves after", f"{host.until(on_backup, 60):.2f} s")
        asker.join(60)
        host.row("... and its client was told", told)
        pause(2)
        gap = clients.gap_s(began)
        host.row("... longest gap of the other clients", f"{gap:.2f} s")
        newest = host.incident()
        host.row("... classified", f"{newest['class']}: {newest['incident']['text'][:300]}")
        return gap
    finally:
        neighbour.kill()
        neighbour.wait(10)


def asked(body: Doc) -> str:
    try:
        reply = requests.post(f"{GATEWAY}/v1/completions", json=body, timeout=60)
    except requests.RequestException as error:
        return type(error).__name__
    return f"{reply.status_code} {reply.text[:300]}"


def recorded() -> str:
    """One sample as the helper prints it: a recording for tests."""
    helper = [sys.executable, "-m", "vllm_watchdog.sense.gpu_helper"]
    return subprocess.run(helper, input="1\n", capture_output=True, text=True, timeout=20, check=False).stdout


def hang(host: Host) -> None:
    """The core of whoever serves is stopped; /health says 200 all the while."""
    name = (host.status() or {})["services"][0]["serving"]
    began = time.monotonic()
    os.kill(host.core(name), signal.SIGSTOP)
    body = {"model": "m", "prompt": "hello", "max_tokens": 4}
    threading.Thread(target=lambda: asked(body), daemon=True).start()
    host.until(lambda engines, _: engines[name]["phase"] not in ("serving", "suspect"), 60)
    host.row(f"{name}'s core stopped, /health 200: judged wedged after (patience 3 + 3 + 4 s)",
             f"{time.monotonic() - began:.1f} s")


def tried(host: Host, stage: Callable[[], None]) -> None:
    """The card is lent: what fails is a row, and the other stages still count."""
    try:
        stage()
    except Exception as error:
        host.row("FAILED", f"{type(error).__name__}: {error}"[:2000])


def main() -> int:
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    host = Host(sys.argv[1], out, BUDGET_S)
    gaps: list[float] = []
    try:
        began = time.monotonic()
        host.start()
        host.until(both_up, 300)
        host.row("boot: backup asleep, primary serving", f"{time.monotonic() - began:.1f} s")
        (out / "nvml-both-up.jsonl").write_text(recorded())
        tried(host, lambda: sampling(host))
        tried(host, lambda: overhead(host))
        tried(host, lambda: helper_lost(host))
        clients = Clients()
        for number in range(1, 5):
            tried(host, lambda number=number: gaps.append(kill(host, clients, number)))     # type: ignore[misc]
        tried(host, lambda: gaps.append(exhaust(host, clients)))
        host.row(f"client gap at {len(gaps)} deaths", f"median {median(gaps):.2f} s of {[round(gap, 2) for gap in gaps]}")
        host.row("answers to the clients", clients.end())
        tried(host, lambda: hang(host))
    except TimeoutError as error:
        host.row("FAILED", error)
    finally:
        host.end()
    return int(any(what == "FAILED" for what, _ in host.rows))


if __name__ == "__main__":
    sys.exit(main())
