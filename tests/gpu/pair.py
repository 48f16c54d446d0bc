"""The product's claims on two cards with a real CUDA vLLM: one script, unattended, under 9 minutes, a table at the end.

    python -m tests.gpu.pair MODEL_FOLDER OUT_FOLDER [--stages NAME,NAME…] [--seconds S]

Two hosts, one after the other: a primary on GPU 0 with a `hot` backup on GPU 1 (kills, order, neighbour), then one engine
over both cards by tensor parallelism (worker, server, stopped).  What does not fit into the seconds is said not to have run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import psutil
from tests.gpu.load import Clients, asked
from tests.gpu.look import aftermath, compare
from tests.gpu.meter import held_by, seconds, used
from tests.gpu.neighbour import Neighbour
from tests.gpu.rig import MIB, STEADY_S, Doc, Host, pause

from vllm_watchdog.cards import index_of
from vllm_watchdog.sense.gpu_helper import source

KILLS = 5
START_S = 60.0      # of a small model; a stage that kills needs it after
HOT = """
enforce-eager = true
gpu-memory-utilization = 0.5
max-model-len = 8192
max-num-seqs = 64
[engines.backup]
backup_for = "primary"
standby = "hot"
port = {backup}
gpus = [{second}]
args = {{ max-num-seqs = 16 }}
"""
PARALLEL = """
enforce-eager = true
gpu-memory-utilization = 0.4
max-model-len = 8192
tensor-parallel-size = 2
disable-custom-all-reduce = true
"""
# What CUDA calls its first card, by the same address that NVML gives: one line a way of saying which.
FIRST_CARD = """
import torch
print("GPU-" + str(torch.cuda.get_device_properties(0).uuid).removeprefix("GPU-"))
"""


def home(engines: dict[str, Doc], doc: Doc) -> bool:
    """Both serve, and the primary has the route."""
    return all(engine["phase"] == "serving" for engine in engines.values()) and doc["services"][0]["serving"] == "primary"


def serving(engines: dict[str, Doc], _: Doc) -> bool:
    return engines["primary"]["phase"] == "serving"


def on_backup(_: dict[str, Doc], doc: Doc) -> bool:
    return bool(doc["services"][0]["serving"] == "backup")


def second_card() -> str | int:
    """GPU 1 by its UUID, where the host lets a configuration name it so."""
    uuid = next(card["uuid"] for card in source().read() if card["index"] == 1)
    try:
        return uuid if index_of(uuid) == 1 else 1
    except ValueError:
        return 1


class Pair:
    """GPU 0 and GPU 1, an engine each."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.gaps: list[float] = []

    def kills(self) -> None:
        host = self.host
        compare(host, (0, 1), "hot-pair")
        with Clients(host.gateway_url) as clients:
            for number in range(1, KILLS + 1):
                host.tried(partial(self.kill, clients, number), START_S + 10, f"hot kill {number}")
        answers = clients.said()
        host.row(f"hot: client gap at {len(self.gaps)} kills (goal 0.25 s)",
                 f"p50 {median(self.gaps):.3f} s of {[round(gap, 3) for gap in self.gaps]}" if self.gaps else "none")
        host.row("hot: lost of the not yet begun, failbacks included (goal 0)",
                 f"{sum(count for status, count in answers.items() if status != '200')}; answers {answers}")

    def kill(self, clients: Clients, number: int) -> None:
        """Odd: the API server alone; even: the engine core."""
        host, orphaned = self.host, number % 2 == 1
        host.until(home, START_S)
        pause(STEADY_S)
        members, core = host.members("primary"), host.core("primary")
        before = host.meter.read()
        held = held_by(before, 0).get(core) or 0
        other = host.engine("backup")["generation"]
        label = f"hot kill {number}, {'API server' if orphaned else 'EngineCore'}"
        began = time.monotonic()
        os.kill(members["api"] if orphaned else core, signal.SIGKILL)
        served = host.until(on_backup, 30)
        pause(2)
        self.gaps.append(gap := clients.gap_s(began, time.monotonic()))
        back = host.meter.back_s(0, members.values(), began, before)
        host.row(label, f"backup has the route after {served:.3f} s; longest gap {gap:.3f} s; "
                        f"GPU 0's {held / 2**30:.1f} GiB back after {seconds(back)}")
        host.row(f"{label}: primary serves and has the route again", f"{host.until(home, 150):.1f} s")
        aftermath(host, began, label)
        host.row(f"{label}: backup not restarted; answers since", f"{host.engine('backup')['generation'] == other}; "
                                                                  f"{clients.said(began)}")

    def order(self) -> None:
        """CUDA's first card by each way of naming the second one, and what the daemon took a UUID for."""
        cards = {card["index"]: card for card in self.host.meter.read()}
        want = cards[1]["uuid"]
        self.host.row("NVML's order", {index: (card["uuid"], card["bus_id"]) for index, card in cards.items()})
        for env in ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_VISIBLE_DEVICES": want},
                    {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}):
            first = subprocess.run([sys.executable, "-c", FIRST_CARD], env=os.environ | env, capture_output=True, text=True,
                                   timeout=60, check=False).stdout.strip()
            self.host.row(f"{env}: CUDA's first card is NVML's 1", f"{first == want} ({first})")
        core = self.host.core("backup")
        holds = [index for index in cards if held_by(self.host.meter.read(), index).get(core)]
        self.host.row(f"backup configured as {second_card()!r}: its cards in the report; where its core holds memory",
                      f"{self.host.engine('backup')['gpus']}; {holds}")

    def neighbour(self) -> None:
        """GPU 0 is filled by somebody else; then its engine dies, and GPU 1's serves on."""
        host = self.host
        host.until(home, START_S)
        host.calm(50)
        other = host.engine("backup")
        total = used(host.meter.read(), 0)[1] // MIB
        with Clients(host.gateway_url) as clients, Neighbour(0) as neighbour:
            neighbour.leaves(int(total * 0.13))
            host.until(lambda _, doc: any(s["class"] == "vram_high" for s in doc["symptoms"]), 10)
            pause(1)
            told = [alert for alert in host.told() if alert.get("class") == "vram_high"]
            host.row("GPU 0 filled: the alert", json.dumps(told[-1:], ensure_ascii=False)[:600])
            neighbour.leaves(600)
            began = time.monotonic()
            os.kill(host.core("primary"), signal.SIGKILL)
            host.until(on_backup, 30)
            host.until(lambda engines, _: engines["primary"]["phase"] == "releasing", 30)
            pause(4)
            waits = not host.first(began, "engine.spawned", engine="primary")
            host.row("the restart waits for GPU 0; why", f"{waits}; {host.engine('primary')['waits']}")
            now = host.engine("backup")
            host.row("GPU 1's engine: same process, serving; neighbour lives",
                     f"{now['pid'] == other['pid']}, {now['phase'] == 'serving'}; {neighbour.lives()}")
            host.record("gpu0-full", host.meter.read())
            left = time.monotonic()
        host.until(lambda engines, _: engines["primary"]["phase"] in ("starting", "loading", "serving"), 30)
        spawned = host.first(left, "engine.spawned", engine="primary")
        host.row("neighbour gone: exec after", f"{spawned['at'] - left:.2f} s" if spawned else "not seen")
        host.row("neighbour gone: primary serves again after", f"{host.until(home, 150):.1f} s")
        host.row("neighbour: answers to the clients", clients.said())


class Parallel:
    """One engine over both cards; rank 0 on GPU 1, so that a mixed-up order shows."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def tree(self) -> None:
        host = self.host
        members = host.members("primary")
        host.row("TP 2: the process tree", members)
        host.row("TP 2, gpus = [1, 0]: an answer", asked(host.gateway_url, "hello")[:60])
        compare(host, (0, 1), "tensor-parallel")
        cards = host.meter.read()
        for title, pid in members.items():
            if "Worker" in title:
                host.row(f"{title} holds memory on GPU", [gpu for gpu in (0, 1) if held_by(cards, gpu).get(pid)])

    def die(self, label: str, who: str) -> float:
        """SIGKILL of one process; nothing of the engine may be left on either card."""
        host = self.host
        members = host.members("primary")
        before = host.meter.read()
        began = time.monotonic()
        os.kill(next(pid for title, pid in members.items() if who in title), signal.SIGKILL)
        host.until(lambda engines, _: engines["primary"]["phase"] not in ("serving", "suspect"), 60)
        host.until(lambda engines, _: engines["primary"]["phase"] in ("releasing", "starting", "loading", "backoff"), 60)
        pause(1)
        back = [host.meter.back_s(gpu, members.values(), began, before) for gpu in (0, 1)]
        host.row(f"{label}: nothing of it left; memory back on GPU 0, GPU 1",
                 f"{not any(map(psutil.pid_exists, members.values()))}; {', '.join(map(seconds, back))}")
        return began

    def worker(self) -> None:
        began = self.die("TP worker killed", "Worker_TP1")
        self._again(began, "TP worker killed")

    def server(self) -> None:
        began = self.die("TP API server killed", "api")
        self._again(began, "TP API server killed")

    def _again(self, began: float, label: str) -> None:
        self.host.row(f"{label}: serves again after", f"{self.host.until(serving, 150):.1f} s")
        aftermath(self.host, began, label)

    def stopped(self) -> None:
        """One worker is stopped while a request runs; the other one waits for it."""
        host = self.host
        host.until(serving, 150)
        members = host.members("primary")
        with Clients(host.gateway_url) as clients:
            pause(2)
            began = time.monotonic()
            os.kill(next(pid for title, pid in members.items() if "Worker_TP0" in title), signal.SIGSTOP)
            host.until(lambda engines, _: engines["primary"]["phase"] not in ("serving", "suspect"), 60)
            host.row("TP worker stopped: judged wedged after (patience 3 + 3 + 4 s)", f"{time.monotonic() - began:.1f} s")
            host.until(lambda engines, _: engines["primary"]["phase"] in ("releasing", "starting", "loading", "backoff"), 60)
            host.row("TP worker stopped: nothing of it left", not any(map(psutil.pid_exists, members.values())))
            host.tried(lambda: self._again(began, "TP worker stopped"), START_S, "restart of it")
        host.row("TP worker stopped: answers to the clients", clients.said())


HOT_STAGES = {"kills": 0.0, "order": 30.0, "neighbour": START_S + 55}
PARALLEL_STAGES = {"tree": 10.0, "worker": START_S + 15, "server": START_S + 15, "stopped": 40.0}


def run(host: Host, up: Callable[[dict[str, Doc], Doc], bool], stages: object, needs: dict[str, float],
        wanted: list[str]) -> int:
    def boot() -> None:
        host.row("boot", f"{host.until(up, 200):.1f} s")

    try:
        host.start()
        host.tried(boot)
        for name in needs:
            if name in wanted:
                host.tried(getattr(stages, name), needs[name])
    finally:
        host.end()
    return host.failed


def main(words: list[str]) -> int:
    reader = argparse.ArgumentParser()
    reader.add_argument("model")
    reader.add_argument("out", type=Path)
    reader.add_argument("--stages", default=",".join([*HOT_STAGES, *PARALLEL_STAGES]))
    reader.add_argument("--seconds", type=float, default=500)
    options = reader.parse_args(words)
    wanted, until, failed = options.stages.split(","), time.monotonic() + options.seconds, 0
    if set(wanted) & set(HOT_STAGES):
        layout = HOT.replace("{second}", json.dumps(second_card()))
        host = Host(options.model, options.out / "hot", until - time.monotonic(), layout, [0], 18000)
        failed += run(host, home, Pair(host), HOT_STAGES, wanted)
    if set(wanted) & set(PARALLEL_STAGES):
        host = Host(options.model, options.out / "parallel", until - time.monotonic(), PARALLEL, [1, 0], 18020)
        failed += run(host, serving, Parallel(host), PARALLEL_STAGES, wanted)
    for table in sorted(options.out.glob("*/table.txt")):
        print(table.read_text())
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
