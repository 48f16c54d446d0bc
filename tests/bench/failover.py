"""What clients see when engines die: the real daemon and gateway, stand-in engines, real kills; beside nginx alone.

    python -m tests.bench.failover [hot] [sleeping] [poison] [memory] [nginx] [--kills 20]

Each client asks again as soon as it is answered, and holds each answer against its own request (no two of a time have the
same length of prompt), so a lost, doubled or swapped answer shows.  A gap is the longest time around a kill in which nobody
was answered.  nginx has the same two engines, the second as `backup`, and `proxy_next_upstream`; who was killed is started
again 0.3 s later.
Prints a table with the goals; exit 1 where one is missed.  Some five minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import requests
import uvloop
from tests.gateway.harness import Client, request
from tests.system.harness import SIM, Doc, Watchdog, backup, engine, free_port
from tests.system.test_gateway import gateway, simulated_card

CLIENTS, STREAMS = 32, 8        # so many of them ask for streams
TOKEN_S, PREFILL = 0.01, 1_000_000
POISONS, NORMAL = 5, 100
MEMORY_REQUESTS = 100_000
BEGUN = ("whole", "cut")
BEFORE_AGAIN_S = {"whole": 0.0, "ConnectionRefusedError": 0.2}
Row = tuple[str, str, str, bool | None]         # what, figure, goal, whether it was met


# -- the clients


@dataclass(frozen=True)
class Loss:
    """A request that failed: its `outcome`, and when it was asked and given up (epoch seconds)."""

    outcome: str
    stream: bool
    asked: float
    over: float


class Crowd:
    """`outcomes`: whole; cut (a stream that had begun, and said so); anything else is a failure, by its name, and one of the
    `losses`."""

    def __init__(self, port: int, tokens: int = 4, until: Callable[[int], bool] = lambda _: False,
                 patience_s: float = 10) -> None:
        """`patience_s`: without a byte; an answer may take two and a half times as long."""
        self.port, self.tokens, self._until, self._patience_s = port, tokens, until, patience_s
        self.outcomes, self.answered_at, self.losses = Counter[str](), list[float](), list[Loss]()
        self.stopping = False
        self._numbers = count(1)

    async def client(self, stream: bool) -> None:
        client: Client | None = None
        while not self.stopping and not self._until(self.outcomes.total()):
            asked = time.time()
            try:
                if client is None:
                    ends = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
                    client = Client(*ends, deadline_s=self._patience_s)
                outcome, stays = await self._ask(client, stream)
            except (OSError, EOFError, TimeoutError, ValueError, LookupError) as error:
                outcome, stays = type(error).__name__, False
            self.outcomes[outcome] += 1
            self.answered_at.append(time.monotonic())
            if outcome not in BEGUN:
                self.losses.append(Loss(outcome, stream, asked, time.time()))
            if not stays:
                if client is not None:
                    client.close()
                    client = None
                await asyncio.sleep(BEFORE_AGAIN_S.get(outcome, 0.02))      # as a client would, before it tries again
        if client is not None:
            client.close()

    async def _ask(self, client: Client, stream: bool) -> tuple[str, bool]:
        words = next(self._numbers) % 997 + 1
        body: Doc = {"model": "stand-in", "prompt": "word " * words, "max_tokens": self.tokens, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        client.send(request("POST", "/v1/completions", json.dumps(body).encode()))
        async with asyncio.timeout(2.5 * self._patience_s):
            answer = await client.answer()
        stays = answer.whole and answer.headers.get("connection") != "close"
        if answer.status != 200:
            return str(answer.status), stays
        if b'data: {"error"' in answer.body and answer.whole:
            return "cut", stays
        if not answer.whole:
            return "broken off" if answer.body else "broken off before its body", False
        text = answer.body.decode()
        usages = [json.loads(line)["usage"] for line in text.split("data: ") if '"usage":{' in line.replace(" ", "")]
        right = [usage["prompt_tokens"] for usage in usages] == [words]
        return "whole" if right else "another's answer", stays

    def gap_s(self, around: float) -> float:
        """The longest time without an answer that has to do with what happened then."""
        times = [at for at in self.answered_at if around - 1.0 <= at <= around + 15.0]
        return max((after - before for before, after in pairwise(times) if after >= around), default=15.0)

    @property
    def failed(self) -> dict[str, int]:
        return {name: number for name, number in self.outcomes.items() if name not in BEGUN}

    @property
    def failures(self) -> str:
        return f"{sum(self.failed.values())} {self.failed or ''}"


def figures(gaps: list[float]) -> str:
    return f"{median(gaps):.3f} s (at most {max(gaps):.3f})"


async def under(crowd: Crowd, work: Callable[[], Any], clients: int = CLIENTS, streams: int = STREAMS) -> None:
    """`work`, which blocks, in a thread while the crowd asks."""
    tasks = [asyncio.create_task(crowd.client(number < streams)) for number in range(clients)]
    try:
        await asyncio.to_thread(work)
    finally:
        crowd.stopping = True
        await asyncio.gather(*tasks)


def run(work: Coroutine[Any, Any, None]) -> None:
    uvloop.run(work)


# -- the watchdog's hosts


@contextmanager
def host(folder: Path, standby: str, **sim: Any) -> Iterator[tuple[Watchdog, int]]:
    """A daemon, its gateway and its pair, ready; and the gateway's port."""
    folder.mkdir()
    port = free_port()
    flags = {"token_s": TOKEN_S, "prefill_tokens_per_s": PREFILL} | sim
    engines = {"primary": engine(sim=flags, gpus=[0], args={"gpu-memory-utilization": 0.5}),
               "backup": backup("primary", standby=standby, args={"gpu-memory-utilization": 0.3})}
    watchdog = Watchdog(
        folder / "host", engines, env=simulated_card(folder / "card"), gateway={"listen": f"127.0.0.1:{port}"},
        restart={"budget": 1000}, failover={"failback": "manual"}, evidence={"deadline_s": 0.2},
    ).start()
    try:
        watchdog.serving("primary")
        watchdog.in_phase("backup", "asleep" if standby == "sleeping" else "serving")
        with gateway(watchdog):
            yield watchdog, port
        watchdog.finish()
    finally:
        watchdog.clear()


def serving(watchdog: Watchdog) -> str:
    return str((watchdog.status() or {})["services"][0]["serving"])


def kill(watchdog: Watchdog, name: str) -> tuple[float, int]:
    """When, and which generation."""
    doc = watchdog.engine(name)
    at = time.monotonic()
    os.kill(doc["pid"], signal.SIGKILL)
    return at, doc["generation"]


def hot(folder: Path, kills: int) -> list[Row]:
    gaps: list[float] = []
    with host(folder, "hot") as (watchdog, port):
        crowd = Crowd(port)

        def work() -> None:
            for _ in range(kills):
                name = serving(watchdog)
                time.sleep(0.5)
                at, generation = kill(watchdog, name)
                watchdog.serving(name, after=generation)
                gaps.append(crowd.gap_s(at))

        run(under(crowd, work))
    outcomes = crowd.outcomes
    return [
        (f"hot: gap, p50 of {kills}", figures(gaps), "≤ 0.25 s", median(gaps) <= 0.25),
        (f"hot: {kills} kills under {CLIENTS} clients: failed, not begun", crowd.failures, "0", not crowd.failed),
        ("... answered once each / begun, and ended with a word", f"{outcomes['whole']} / {outcomes['cut']}", "", None),
    ]


def sleeping(folder: Path, kills: int) -> list[Row]:
    gaps: list[float] = []
    wakes: list[float] = []
    with host(folder, "sleeping") as (watchdog, port):
        crowd = Crowd(port)

        def work() -> None:
            for _ in range(kills):
                time.sleep(0.3)
                at, generation = kill(watchdog, "primary")
                watchdog.serving("backup")
                wakes.append(_wake_s(watchdog))
                time.sleep(0.3)
                gaps.append(crowd.gap_s(at) - wakes[-1])
                watchdog.until(lambda: watchdog.ask("failback").get("ok"), "no failback")
                watchdog.serving("primary", after=generation)
                watchdog.in_phase("backup", "asleep")

        run(under(crowd, work))
    return [
        (f"sleeping: gap less the wake itself, p50 of {kills}", figures(gaps), "≤ 0.5 s", median(gaps) <= 0.5),
        ("... the wake itself, p50", f"{median(wakes):.3f} s", "", None),
        (f"sleeping: {kills} kills under {CLIENTS} clients: failed, not begun", crowd.failures, "0", not crowd.failed),
    ]


def _wake_s(watchdog: Watchdog) -> float:
    """From the order to the first token, by the journal."""
    return float(watchdog.said("engine.woke")[-1]["took_s"])


def poison(folder: Path, _: int) -> list[Row]:
    """Each poison is another text, so that none is refused for the last one's sake."""
    answers: list[str] = []
    with host(folder, "hot", oom_over_tokens=9000) as (watchdog, port):
        crowd = Crowd(port, until=lambda asked: asked >= POISONS * NORMAL)

        def work() -> None:
            for number in range(POISONS):
                while crowd.outcomes.total() < (number + 0.5) * NORMAL:
                    time.sleep(0.005)
                body = {"model": "stand-in", "prompt": f"{number} " + "word " * 10_000, "max_tokens": 4}
                said = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=25)
                answers.append(str(said.status_code))
                for name in ("primary", "backup"):
                    watchdog.in_phase(name, "serving")
            while crowd.outcomes.total() < POISONS * NORMAL:
                time.sleep(0.005)

        run(under(crowd, work, clients=16, streams=0))
        deaths = len(watchdog.said("engine.exited"))
    return [
        (f"{POISONS} poisonous prompts: engines that died", str(deaths), f"≤ {POISONS}", deaths <= POISONS),
        (f"... of {crowd.outcomes.total()} normal requests lost", crowd.failures, "0", not crowd.failed),
        ("... what their senders were told", " ".join(answers), "422", set(answers) == {"422"}),
    ]


def memory(folder: Path, _: int) -> list[Row]:
    """The first tenth warms up."""
    mib: dict[str, list[float]] = {"gateway": [], "daemon": []}
    with host(folder, "hot", token_s=0.001) as (watchdog, port):
        assert watchdog.daemon
        processes = {"daemon": psutil.Process(watchdog.daemon.pid)}
        processes["gateway"] = next(
            each for each in psutil.Process().children() if {"gateway", str(watchdog.config)} <= set(each.cmdline())
        )
        crowd = Crowd(port, tokens=1, until=lambda asked: asked >= MEMORY_REQUESTS)

        def work() -> None:
            for mark in (0.1, 1.0):
                while crowd.outcomes.total() < MEMORY_REQUESTS * mark:
                    time.sleep(0.05)
                for name, process in processes.items():
                    mib[name].append(process.memory_info().rss / 2**20)

        run(under(crowd, work, clients=64, streams=8))
    grown = {name: after - before for name, (before, after) in mib.items()}
    return [
        (f"RSS of the {name} over {crowd.outcomes.total()} requests", "{:.1f} -> {:.1f} MiB".format(*mib[name]), "+ ≤ 2 MiB",
         grown[name] <= 2.0) for name in ("gateway", "daemon")
    ] + [("... failed", crowd.failures, "0", not crowd.failed)]


# -- the peer


class Pair:
    """Two engines without a watchdog."""

    def __init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.running = [self._spawn(port) for port in self.ports]

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        words = [*SIM, "serve", "--model", "stand-in", "--host", "127.0.0.1", "--port", str(port), "--sim-load-s", "0.1",
                 "--sim-token-s", str(TOKEN_S), "--sim-prefill-tokens-per-s", str(PREFILL)]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def healthy(self, at: int) -> None:
        for _ in range(400):
            try:
                if requests.get(f"http://127.0.0.1:{self.ports[at]}/health", timeout=1).ok:
                    return
            except requests.RequestException:
                time.sleep(0.05)
        raise SystemExit("an engine does not come up")

    def kill(self, at: int) -> None:
        os.killpg(self.running[at].pid, signal.SIGKILL)  # of its own session
        self.running[at].wait(5)

    def again(self, at: int) -> None:
        self.running[at] = self._spawn(self.ports[at])
        self.healthy(at)


@contextmanager
def nginx_over(pair: Pair, folder: Path, next_upstream: str) -> Iterator[int]:
    found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    assert found
    folder.mkdir()
    port = free_port()
    first, second = (f"127.0.0.1:{each}" for each in pair.ports)
    paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in ("proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(f"""
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; tcp_nodelay on; client_body_temp_path {folder}/body; {paths}
  upstream engine {{ server {first} max_fails=1 fail_timeout=1s; server {second} backup; keepalive 64; }}
  server {{ listen 127.0.0.1:{port}; location / {{
    proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    proxy_next_upstream {next_upstream};
  }} }}
}}""")
    process = subprocess.Popen([found, "-c", str(folder / "nginx.conf"), "-p", str(folder)], stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def nginx(folder: Path, kills: int) -> list[Row]:
    if not (shutil.which("nginx") or shutil.which("/usr/sbin/nginx")):
        return [("nginx", "not here, left out", "", None)]
    folder.mkdir()
    rows: list[Row] = []
    pair = Pair()
    try:
        for number, words in enumerate(("error timeout", "error timeout http_500 http_502 http_503 non_idempotent")):
            pair.healthy(0)
            pair.healthy(1)
            rows += _nginx(pair, folder / str(number), words, kills)
    finally:
        for at in (0, 1):
            pair.kill(at)
    return rows


def _nginx(pair: Pair, folder: Path, words: str, kills: int) -> list[Row]:
    gaps: list[float] = []
    with nginx_over(pair, folder, words) as port:
        crowd = Crowd(port)

        def work() -> None:
            for _ in range(kills):
                time.sleep(0.5)
                at = time.monotonic()
                pair.kill(0)
                time.sleep(0.3)
                pair.again(0)
                gaps.append(crowd.gap_s(at))
                time.sleep(1.0)

        run(under(crowd, work))
    title = "nginx, POSTs sent again" if "non_idempotent" in words else "nginx, as it is"
    return [
        (f"{title}: gap, p50 of {kills}", figures(gaps), "", None),
        (f"{title}: failed", crowd.failures, "", None),
        ("... answered once each", str(crowd.outcomes["whole"]), "", None),
    ]


PARTS: dict[str, Callable[[Path, int], list[Row]]] = {
    "hot": hot, "sleeping": sleeping, "poison": poison, "memory": memory, "nginx": nginx,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS))
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    print(f"{os.cpu_count()} cores, load average at the start {os.getloadavg()[0]:.1f}", flush=True)
    missed = False
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        for name in options.parts or PARTS:
            for what, figure, goal, met in PARTS[name](Path(folder) / name, options.kills):
                missed |= met is False
                verdict = "" if met is None else f"goal {goal}: {'met' if met else 'MISSED'}"
                print(f"{what:66} {figure:34} {verdict}", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
