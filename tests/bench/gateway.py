"""What the gateway costs, beside nginx and the Rust vllm-router, against one synthetic engine in one run.

    python tests/bench/gateway.py [ROUNDS [FILE]]

CPU seconds of the proxy per million ~220-byte chunks at 64 and 256 streams with 20 ms between tokens; time to the first
chunk at 256 streams beyond the direct way's; CPU seconds per million POSTs that are not streamed.  Prompts differ in length,
so heads do, too.  All contenders run all the time, and idle while another one is asked; each round asks them in another
order.  What other processes disturbed is measured again, whatever it said, up to three times.  Medians over the rounds (with
FILE: also over those that it holds from earlier calls); compare the ratios.
The gateway runs as its unit starts it (Nice=, where that is allowed) and plainly; vllm-router as it comes (only its limit of
requests is raised) and lean: its cheapest policy, no log.  As it comes it sends no chunk before the answer has ended, so
the goals for first chunks are held against the lean one.
nginx: `apt-get install nginx-light`; vllm-router: into an environment of its own in a temporary folder (or
VLLM_ROUTER=/path/to/vllm-router).  What is not there is left out, with a note.  Some 45 s a round.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
import uvloop

TOKEN_S = 0.02
TOKENS = 50
RAMP_S, SECONDS = 1.0, 3.0              # the streams begin one after the other; what is measured begins then
POSTS, POSTERS = 8000, 16
DISTURBED, TRIES = 0.15, 3              # cores that other processes used
HOST = "127.0.0.1"
STREAM = re.compile(rb'"stream": ?true')
CHUNK = (
    b"data: "
    + b'{"id":"cmpl-0","object":"text_completion","choices":[{"index":0,"text":" word"}]}'.ljust(205)
    + b"\n\n"
)
CHUNK = b"%x\r\n%b\r\n" % (len(CHUNK), CHUNK)
HEAD = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b'{"id":"cmpl-0","object":"text_completion","model":"m","choices":[{"index":0,"text":"word"}],"usage":{}}'
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
UNIT = Path(__file__).parents[2] / "systemd/llm-gateway.service"
PLAIN, ROUTER, LEAN = "gateway, plain", "vllm-router", "vllm-router, lean"
GOALS = {       # of the gateway to others
    "CPU s/M chunks, 64": {ROUTER: 1.0, "nginx": 1.3},
    "CPU s/M chunks, 256": {ROUTER: 1.0, "nginx": 1.3},
    "CPU s/M POSTs": {ROUTER: 0.5},
    "first chunk +us p50, 256": {LEAN: 0.6},
    "first chunk +us p99, 256": {LEAN: 1.0},
}


# -- the engine


class Engine(asyncio.Protocol):
    def connection_made(self, transport) -> None:  # type: ignore[no-untyped-def]
        self.transport, self.buffer, self.gone = transport, b"", False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (at := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:at].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self.buffer) < at + 4 + length:
                return
            body, self.buffer = self.buffer[at + 4 : at + 4 + length], self.buffer[at + 4 + length :]
            if not head.startswith(b"post"):
                self.answer(MODELS if b"/v1/models" in head else b"{}")
            elif STREAM.search(body):  # vllm-router adds flags of its own
                self.transport.write(HEAD + CHUNK)
                asyncio.get_running_loop().call_later(TOKEN_S, self.token, TOKENS - 1)
            else:
                self.answer(WHOLE)

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True

    def answer(self, body: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def token(self, left: int) -> None:
        if self.gone:
            return
        self.transport.write(CHUNK if left else b"0\r\n\r\n")
        if left:
            asyncio.get_running_loop().call_later(TOKEN_S, self.token, left - 1)


async def engine(port: int) -> None:
    await asyncio.get_running_loop().create_server(Engine, HOST, port, backlog=1024)
    await asyncio.Event().wait()


# -- the load


def requests(stream: bool) -> list[bytes]:
    made = []
    for words in random.sample(range(1, 100), 50):
        body = json.dumps({"model": "m", "prompt": "word " * words, "max_tokens": TOKENS, "stream": stream}).encode()
        made.append(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer none\r\nUser-Agent: OpenAI/Python 1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
    return made


class Client(asyncio.Protocol):
    """Asks again as soon as it is answered, until `end`, or `left` times."""

    def __init__(self, stream: bool, begin: float, end: float, left: int) -> None:
        self.stream, self.begin, self.end, self.left = stream, begin, end, left
        self.requests = requests(stream)
        self.first_s: list[float] = []      # of what was asked after `begin`
        self.done = asyncio.Event()
        self.chunks, self.answers = 0, 0

    def connection_made(self, transport) -> None:  # type: ignore[no-untyped-def]
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        self.sent_at, self.waiting, self.rest = time.perf_counter(), True, b""
        self.transport.write(self.requests[self.answers % len(self.requests)])

    def data_received(self, data: bytes) -> None:
        if self.waiting and b"\n\n" in data:
            self.waiting = False
            if self.sent_at > self.begin:
                self.first_s.append(time.perf_counter() - self.sent_at)
        self.chunks += data.count(b"data: ")
        if self.complete(data):
            self.answers += 1
            self.left -= 1
            if time.perf_counter() < self.end and self.left:
                self.ask()
            else:
                self.done.set()

    def complete(self, data: bytes) -> bool:
        self.rest += data
        if self.stream:
            self.rest = self.rest[-7:]
            return self.rest == b"\r\n0\r\n\r\n"
        head, mark, body = self.rest.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]
        return bool(mark) and (len(body) >= int(length) if length else body.endswith(b"0\r\n\r\n"))

    def connection_lost(self, error: Exception | None) -> None:
        self.done.set()


async def load(port: int, count: int, stream: bool, each: int) -> dict[str, object]:
    loop, now = asyncio.get_running_loop(), time.perf_counter()
    begin, end = (now + RAMP_S, now + RAMP_S + SECONDS) if stream else (now, now + 60)
    clients = [Client(stream, begin, end, each) for _ in range(count)]
    for number, client in enumerate(clients):
        await loop.create_connection(lambda c=client: c, HOST, port)
        await asyncio.sleep(max(0.0, now + RAMP_S * number / count - time.perf_counter()) if stream else 0)
    await asyncio.wait_for(asyncio.gather(*(client.done.wait() for client in clients)), 90)
    for client in clients:
        client.transport.close()
    return {
        "chunks": sum(client.chunks for client in clients),
        "answers": sum(client.answers for client in clients),
        "first_s": [each for client in clients for each in client.first_s],
        "cpu_s": time.process_time(),
    }


# -- the contenders


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def process(command: list[str], port: int) -> Iterator[psutil.Process]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection((HOST, port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit(f"it does not listen: {' '.join(command)[:200]}")
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait(20)


def unit_gateway(folder: Path, engine_port: int, port: int) -> list[str]:
    nice = re.search(r"^Nice=(-?\d+)$", UNIT.read_text(), re.MULTILINE)
    assert nice is not None
    return [*(["nice", "-n", nice[1]] if os.geteuid() == 0 else []), *gateway(folder, engine_port, port)]


def gateway(folder: Path, engine_port: int, port: int) -> list[str]:
    serving = {"engine": "e", "generation": 1, "host": HOST, "port": engine_port}
    route = {"version": 1, "services": [{"name": "s", "models": ["m"], "serving": serving}]}
    (folder / "route.json").write_text(json.dumps(route))
    code = (
        "import sys; from pathlib import Path; from vllm_watchdog.gateway.app import run;"
        "from vllm_watchdog.gateway_plan import GatewayPlan; folder = Path(sys.argv[1]);"
        "run(GatewayPlan(sys.argv[2], int(sys.argv[3]), folder / 'no.sock', folder / 'route.json', drain_s=0))"
    )
    return [sys.executable, "-c", code, str(folder), HOST, str(port)]


def nginx(folder: Path, engine_port: int, port: int) -> list[str] | None:
    found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    (folder / "nginx.conf").write_text(f"""
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; tcp_nodelay on; keepalive_timeout 75s; keepalive_requests 1000000; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server {HOST}:{engine_port}; keepalive 512; keepalive_requests 1000000; }}
  server {{ listen {HOST}:{port}; location / {{
    proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
  }} }}
}}""")
    return [found, "-c", str(folder / "nginx.conf"), "-p", str(folder)] if found else None


def router(folder: Path, engine_port: int, port: int, *flags: str) -> list[str] | None:
    found = router_program(folder.parent / "router")
    ours = ["--worker-urls", f"http://{HOST}:{engine_port}", "--prometheus-port", str(free_port())]
    more = ["--max-concurrent-requests", "1000", *flags]
    return [found, "--host", HOST, "--port", str(port), *ours, *more] if Path(found).exists() else None


def lean_router(folder: Path, engine_port: int, port: int) -> list[str] | None:
    return router(folder, engine_port, port, "--policy", "round_robin", "--log-level", "error")


def router_program(home: Path) -> str:
    found = os.environ.get("VLLM_ROUTER")
    if not found:
        found = str(home / "bin/vllm-router")
        if not home.exists():
            venv.create(home, with_pip=True)
            subprocess.run([home / "bin/pip", "install", "-q", "vllm-router"], check=False, capture_output=True)
    return found


def cpu_s(process: psutil.Process | None) -> float:
    every = [process, *process.children(recursive=True)] if process else []
    return sum(sum(each.cpu_times()[:2]) for each in every)


def machine_s() -> float:
    """CPU seconds of the whole machine that were not idle."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


CONTENDERS = {"gateway": unit_gateway, PLAIN: gateway, "nginx": nginx, ROUTER: router, LEAN: lean_router}


Load = tuple[str, int, bool, int]       # its name, clients, whether streamed, requests of each (-1: as many as go)
LOADS: tuple[Load, ...] = (("64", 64, True, -1), ("256", 256, True, -1), ("posts", POSTERS, False, POSTS // POSTERS))


def measured(port: int, proxy: psutil.Process | None, engine: psutil.Process) -> dict[str, float]:
    """One round of one contender."""
    figures: dict[str, float] = {}
    for load in LOADS:
        tries = [one(load, port, proxy, engine)]
        while tries[-1][f"others {load[0]}"] > DISTURBED and len(tries) < TRIES:
            tries.append(one(load, port, proxy, engine))
        figures |= min(tries, key=lambda found: found[f"others {load[0]}"])
    return figures


def one(load: Load, port: int, proxy: psutil.Process | None, engine: psutil.Process) -> dict[str, float]:
    figures: dict[str, float] = {}
    name, count, stream, each = load
    before, ours, all_, began = cpu_s(proxy), cpu_s(engine) + cpu_s(proxy), machine_s(), time.perf_counter()
    words = [sys.executable, __file__, "load", str(port), str(count), str(int(stream)), str(each)]
    output = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
    got = json.loads(output)
    took = time.perf_counter() - began
    figures[f"cpu {name}"] = (cpu_s(proxy) - before) * 1e6 / (got["chunks"] if stream else got["answers"])
    ours = cpu_s(engine) + cpu_s(proxy) + got["cpu_s"] - ours
    figures[f"others {name}"] = max(0.0, machine_s() - all_ - ours) / took
    if stream:
        cuts = quantiles(got["first_s"], n=100)
        figures[f"p50 {name}"], figures[f"p99 {name}"] = cuts[49] * 1e6, cuts[98] * 1e6
    return figures


def main(rounds: int, kept: Path | None) -> None:
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
          f"load average at the start {os.getloadavg()[0]:.1f}")
    results: dict[str, list[dict[str, float]]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port = free_port()
        engine = stack.enter_context(process([sys.executable, __file__, "engine", str(engine_port)], engine_port))
        ways: list[tuple[str, int, psutil.Process | None]] = [("direct", engine_port, None)]
        for title, make in CONTENDERS.items():
            own = folder / title
            own.mkdir()
            port = free_port()
            command = make(own, engine_port, port)
            if command is None:
                print(f"{title}: not here, left out")
            else:
                ways.append((title, port, stack.enter_context(process(command, port))))
        for _ in range(rounds):
            at = len(results.get("gateway", ())) % len(ways)
            for title, port, proxy in (ways[at:] + ways[:at])[:: -1 if at % 2 else 1]:
                results.setdefault(title, []).append(measured(port, proxy, engine))
            if kept:
                kept.write_text(json.dumps(results))
    show(results)


def show(results: dict[str, list[dict[str, float]]]) -> None:
    table = {
        title: {key: median(each[key] for each in rounds) for key in rounds[0]} for title, rounds in results.items()
    }
    others = [value for rounds in results.values() for each in rounds for key, value in each.items() if "others" in key]
    count, usual, worst = len(results["gateway"]), median(others), max(others)
    print(f"{count} rounds; other processes used {usual:.2f} cores (median; at most {worst:.2f})")
    direct = table.pop("direct")
    print(f"direct: first chunk p50 {direct['p50 256']:.0f} us, p99 {direct['p99 256']:.0f} us at 256 streams")
    rows = {
        title: {
            "CPU s/M chunks, 64": row["cpu 64"],
            "CPU s/M chunks, 256": row["cpu 256"],
            "CPU s/M POSTs": row["cpu posts"],
            "first chunk +us p50, 256": row["p50 256"] - direct["p50 256"],
            "first chunk +us p99, 256": row["p99 256"] - direct["p99 256"],
        }
        for title, row in table.items()
    }
    for key, goals in GOALS.items():
        ours = rows["gateway"][key]
        print(f"{key:26} gateway {ours:.1f}")
        for title in rows.keys() - {"gateway"}:
            goal = f", goal {goals[title]}" if title in goals else ""
            print(f"{'':26} {title:18} {rows[title][key]:9.1f}   ours is x{ours / rows[title][key]:.2f}{goal}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["engine", port]:
            uvloop.run(engine(int(port)))
        case ["load", port, count, stream, each]:
            print(json.dumps(uvloop.run(load(int(port), int(count), stream == "1", int(each)))))
        case [] | [_] | [_, _]:
            rounds, kept = [*sys.argv[1:], *("5", "")[len(sys.argv) - 1 :]]
            main(int(rounds), Path(kept) if kept else None)
