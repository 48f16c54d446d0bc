"""How the cost of watching grows with the host: engines, cards, processes, alerts.

    python -m tests.bench.growth [core|alerts|host]...

`core`: one second of samples through `advance`, `count` and the journal's encoding, at more and more engines and cards; the
cost of one more must stay what it was.  `alerts`: a webhook that takes all, 10 and 1,000 alerts: CPU each, written down,
sent, crossed out.  `host`: the real daemon over 8 engines of 100 processes each, and 8 simulated cards that hold them, a
sample a second: its CPU a second, and how late the loop is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median

from tests.bench.idle import Cost, measured_processes
from tests.bench.table import Row, quantile, show
from tests.core.scenes import GIB, WALL, gpu, mark
from tests.fakes.tell import incident
from tests.system.harness import Watchdog, free_port

from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.plan import EnginePlan, Plan
from vllm_watchdog.core.readings import Gpu, Health, Holder, Host, Metrics, Process, Progress, Tree
from vllm_watchdog.core.totals import Totals, count
from vllm_watchdog.core.world import World
from vllm_watchdog.tell.channel import HttpChannel
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.machine import WebhookForm
from vllm_watchdog.tell.manners import Manners
from vllm_watchdog.tell.outbox import Outbox
from vllm_watchdog.tell.payload import Templates, Writer
from vllm_watchdog.tell.phrases import Language

ENGINES, CARDS, ALERTS = (1, 4, 16), (1, 8, 64), (10, 1000)
ROUNDS = 60         # seconds of samples
FLAT = 1.5          # the cost of one, at the most, over the cost of one where there are few
MEMBERS = 100
SECONDS = 20.0
LAG_MS = 10.0


# -- the core


def second(at: float, engines: int, cards: int, tokens: float) -> list[e.Event]:
    """What the sensors tell in one second."""
    told: list[e.Event] = []
    trees = []
    for number in range(engines):
        which = mark(f"e{number}#1")
        processes = tuple(Process(1000 * number + k, "vllm", GIB, None, 0.5, 20, 50) for k in range(4))
        trees.append(Tree(which, processes, int(tokens)))
        told.append(e.Probed(at, which, Health.OK, (Holder(1000 * number, "vllm", which),)))
        told.append(e.Scraped(at, which, Metrics(Progress(tokens, tokens, tokens, tokens), 4.0, 0.0, 0.3, 0.0)))
    told.append(e.GpusSampled(at, tuple(card_of(number, number % engines) for number in range(cards))))
    told.append(e.HostSampled(at, Host(64 * GIB, 30 * GIB, 100 * GIB, 50 * GIB, 1.0), tuple(trees)))
    return told


def card_of(number: int, engine: int) -> Gpu:
    rows = ((1000 * engine + k, "vllm", mark(f"e{engine}#1"), 12.0) for k in range(4))
    return gpu(50, *rows, index=number)


def second_ms(engines: int, cards: int) -> float:
    """CPU of one second's events, the median."""
    share = [tuple(card for card in range(cards) if card % engines == number) for number in range(engines)]
    world, totals, took = World(), Totals(), []
    plans = tuple(EnginePlan(f"e{number}", 8100 + number, share[number]) for number in range(engines))
    empty = tuple(gpu(0, index=card) for card in range(cards))
    first: list[e.Event] = [e.Booted(0.0, Plan(plans), WALL, "boot"), e.GpusSampled(0.1, empty)]
    first += [e.Spawned(0.2, mark(f"e{number}#1"), 1000 * number) for number in range(engines)]
    for event in first:
        world, _ = advance(world, event)
    for number in range(1, ROUNDS):
        began = time.thread_time()
        for event in second(float(number), engines, cards, 100.0 * number):
            before = world
            world, commands = advance(world, event)
            totals = count(totals, before, event, world, commands)
            json.dumps(encode(event))
        took.append((time.thread_time() - began) * 1e3)
    assert all(engine.generation == 1 for engine in world.engines), world.engines
    return median(took)


def core(_: Path) -> Iterator[Row]:
    few = second_ms(1, 1)
    for engines in ENGINES:
        ms = second_ms(engines, engines)
        yield (f"core: {engines} engines, a card each: one second", f"{ms:.2f} ms, {ms / engines:.2f} an engine",
               f"<= {FLAT} x one's", ms / engines <= FLAT * few)
    alone = second_ms(1, 1)
    for cards in CARDS:
        ms = second_ms(1, cards)
        yield (f"core: 1 engine, {cards} cards (MIG): one second", f"{ms:.2f} ms, {ms / cards:.2f} a card",
               f"<= {FLAT} x one's", ms / cards <= FLAT * alone)


# -- alerts


class _Takes(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    taken = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        _Takes.taken += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def alerts(folder: Path) -> Iterator[Row]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    each: dict[int, float] = {}
    for number in ALERTS:
        each[number] = _alert_ms(folder / str(number), number, f"http://127.0.0.1:{server.server_port}/")
        yield f"alerts: {number}, CPU each (with the receiver's)", f"{each[number]:.2f} ms", "", None
    server.shutdown()
    server.server_close()
    few, many = (each[number] for number in ALERTS)
    yield f"alerts: one of {ALERTS[1]} / one of {ALERTS[0]}", f"{many / few:.2f}", f"<= {FLAT}", many / few <= FLAT


def _alert_ms(folder: Path, number: int, url: str) -> float:
    folder.mkdir(parents=True)
    history = History(folder / "history.db", time.monotonic, time.time, lambda *_, **__: None)
    history.start()
    manners = Manners(most_per_hour=0, together=False)
    channel = HttpChannel("hook", WebhookForm(url, {}, ""), (), manners)
    writer = Writer("host", folder, Language.EN, Templates("", ""))
    outbox = Outbox((channel,), Ledger(history), writer, time.monotonic, time.time, lambda *_, **__: None)
    outbox.start()
    _Takes.taken = 0
    began = time.process_time()
    for one in range(number):
        outbox.tell(Alert("opened", incident(one)))
        while outbox.states()[0].waiting > 20:
            time.sleep(0.005)
    until = time.monotonic() + 120
    while _Takes.taken < number or outbox.states()[0].waiting:
        assert time.monotonic() < until, outbox.states()
        time.sleep(0.01)
    took = time.process_time() - began
    outbox.stop(5)
    history.stop(5)
    return took * 1e3 / number


# -- the daemon over a full host


def host(folder: Path) -> Iterator[Row]:
    """The engines never become ready: they are probed, and walked, and their logs are followed all the same."""
    folder.mkdir()
    card = folder / "card"
    card.mkdir()
    (card / "gpu.json").write_text(json.dumps({"total_bytes": 100 * 10**9, "count": 8}))
    crowd = f"for each in $(seq {MEMBERS - 1}); do sleep 1000000 & done; wait"
    engines = {f"e{number}": {"command": ["/bin/sh", "-c", crowd], "model": "m", "port": free_port(), "gpus": [number]}
               for number in range(8)}
    watchdog = Watchdog(folder / "host", engines, env={"LLM_WATCHDOG_SIM_GPU": str(card)}, daemon={"sample_s": 1.0})
    watchdog.start()
    try:
        for name in engines:
            watchdog.in_phase(name, "loading")
        processes = measured_processes(watchdog)
        pids = [who.pid for members in watchdog.processes().values() for who in members]
        for number, pid in enumerate(pids):
            (card / f"{pid}.json").write_text(json.dumps({"pid": pid, "gpu": number % 8, "used_bytes": 10**8}))
        time.sleep(5)
        cost, lags = Cost(processes), []
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            lags.append((watchdog.status() or {})["daemon"]["lag_s"] * 1e3)
            time.sleep(0.05)
        ms = cost.ms_a_minute() / 60
        watchdog.finish()
    finally:
        watchdog.clear()
    title = f"daemon: 8 engines, 8 cards, {len(pids)} processes, asked 20 times a second"
    yield title, f"{ms:.1f} ms CPU a second", "", None
    yield ("... how late the loop is", f"p50 {quantile(lags, 0.5):.2f}, p99 {quantile(lags, 0.99):.2f} ms",
           f"p99 <= {LAG_MS:g} ms", quantile(lags, 0.99) <= LAG_MS)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {"core": core, "alerts": alerts, "host": host}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.names) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PARTS)}")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        for name in options.names or PARTS:
            missed |= show(PARTS[name](Path(folder) / name))
    return missed


if __name__ == "__main__":
    sys.exit(main())
