"""A gateway in this process, tiny backends that do what a test says, and clients that speak raw bytes.

Everything runs on one uvloop; `running` ends a test that left a connection, a task or an exchange behind.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import uvloop

from vllm_watchdog.gateway.app import Gateway
from vllm_watchdog.gateway.report import Casualty
from vllm_watchdog.gateway.routes import Target
from vllm_watchdog.gateway_plan import GatewayPlan

DEADLINE_S = 10.0


class Mortal(Protocol):
    """What a test started; what it leaves, also when it fails, is ended after it."""

    def die(self) -> None: ...


STARTED: list[Mortal] = []
SERVING: set[asyncio.Task[Any]] = set()


def run(work: Coroutine[Any, Any, None], deadline_s: float = 20.0) -> None:
    async def bounded() -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await work
        finally:
            for one in tuple(STARTED):
                one.die()
            await asyncio.gather(*SERVING, return_exceptions=True)
            STARTED.clear()

    uvloop.run(bounded())


async def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while not (value := condition()):
        assert loop.time() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.005)
    return value


@dataclass
class Asked:
    """A request as a backend got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    raw_head: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    headers = [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines]
    asked = Asked(method, target, headers, b"", head)
    if asked.header("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).partition(b";")[0], 16):
            asked.body += await reader.readexactly(size)
            await reader.readexactly(2)
        while await reader.readline() != b"\r\n":
            pass
    else:
        asked.body = await reader.readexactly(int(asked.header("content-length") or 0))
    return asked


Behaviour = Callable[["Backend", Asked, asyncio.StreamWriter, asyncio.StreamReader], Awaitable[None]]


def ok(body: bytes = b'{"ok":true}', status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def echo(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    body = json.dumps(
        {"by": backend.name, "method": asked.method, "target": asked.target, "size": len(asked.body)}
    ).encode()
    writer.write(ok(body if asked.method != "HEAD" else b""))


@dataclass
class Backend:
    """An engine made of one coroutine.  `health` is what /health says."""

    behaviour: Behaviour = echo
    name: str = "a"
    health: int = 200
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    accepted: int = 0
    gone: int = 0  # connections that ended while a request was being answered

    async def start(self, port: int = 0) -> Backend:
        self.writers: set[asyncio.StreamWriter] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 26)
        self.port = self.server.sockets[0].getsockname()[1]
        STARTED.append(self)
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        SERVING.add(task)
        self.writers.add(writer)
        self.connections += 1
        self.accepted += 1
        try:
            while (asked := await read_request(reader)) is not None:
                if asked.target == "/health":
                    writer.write(ok(b"", f"{self.health} X"))
                else:
                    self.asked.append(asked)
                    await self.behaviour(self, asked, writer, reader)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            self.gone += 1
        finally:
            self.tasks.discard(task)
            SERVING.discard(task)
            self.connections -= 1
            self.writers.discard(writer)
            writer.close()

    def die(self) -> None:
        """As after SIGKILL: port closed, every connection reset."""
        self.server.close()
        for writer in tuple(self.writers):
            writer.transport.abort()
        for task in self.tasks:
            task.cancel()

    def serving(self, generation: int = 1) -> dict[str, Any]:
        return {"engine": self.name, "generation": generation, "host": "127.0.0.1", "port": self.port}


def route(serving: dict[str, Any] | None, version: int = 1, **more: Any) -> dict[str, Any]:
    service = {"name": "primary", "models": ["m"], "serving": serving, "max_concurrent": None, "why": "", **more}
    return {"version": version, "services": [service]}


@dataclass
class Bench:
    """The gateway under test."""

    gateway: Gateway
    folder: Path
    said: list[tuple[str, dict[str, Any]]]
    told: list[tuple[Target, list[Casualty]]]
    port: int
    version: int = 0

    def serve(self, serving: dict[str, Any] | None, **more: Any) -> None:
        """As the daemon does: a new word in the file."""
        self.version += 1
        draft = self.folder / "route.new"
        draft.write_text(json.dumps(route(serving, self.version, **more)))
        draft.replace(self.gateway.plan.route_file)
        self.gateway.follow.read_file()

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        return Client(reader, writer)

    async def ask(self, method: str, path: str, body: bytes = b"", more: str = "") -> Answer:
        client = await self.connect()
        try:
            client.send(request(method, path, body, more))
            return await client.answer(head_only=method == "HEAD")
        finally:
            client.close()

    async def complete(self, prompt: str = "a b c", **more: Any) -> Answer:
        return await self.ask("POST", "/v1/completions", json.dumps({"model": "m", "prompt": prompt, **more}).encode())

    def gauge(self, name: str) -> float:
        text = self.gateway.dispatcher.own._metrics()[1].decode()  # type: ignore[attr-defined]
        return next(
            float(line.split()[1]) for line in text.splitlines() if line.startswith(f"llm_watchdog_gateway_{name} ")
        )


@asynccontextmanager
async def running(*, private: bool = False, **plan: Any) -> AsyncIterator[Bench]:
    said: list[tuple[str, dict[str, Any]]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings = {
            "host": "127.0.0.1",
            "port": 0,
            "control": folder / "control.sock",
            "route_file": folder / "route.json",
            "drain_s": 0.0,
            "admin": folder / "admin.sock" if private else None,
            **plan,
        }
        before = asyncio.all_tasks()
        gateway = Gateway(GatewayPlan(**settings), lambda event, /, **fields: said.append((event, fields)))
        told: list[tuple[Target, list[Casualty]]] = []
        gateway.dispatcher.deaths._report = lambda target, all_: told.append((target, all_))
        await gateway.start()
        try:
            yield Bench(gateway, folder, said, told, gateway.port)
            await until(lambda: not gateway.dispatcher.exchanges, "every exchange is over", 3)
            assert not any(station.in_flight or station.seats.requests for station in gateway.dispatcher.stations.values())
            assert gateway.dispatcher._charged == 0, "every byte is released"
        finally:
            await gateway.drain()
        await until(lambda: not (asyncio.all_tasks() - before - SERVING), "no task is left", 3)


def request(method: str, path: str, body: bytes = b"", more: str = "", version: str = "1.1") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body or method == "POST" else ""
    return f"{method} {path} HTTP/{version}\r\nHost: test\r\n{length}{more}\r\n".encode() + body


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    head: bytes
    whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Client:
    """One connection.  `deadline_s`: of each thing that it reads."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline_s: float = DEADLINE_S) -> None:
        self.reader, self.writer, self.deadline_s = reader, writer, deadline_s

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> Answer:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), self.deadline_s)
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in lines}
        return Answer(int(first.split(" ")[1]), headers, b"", raw)

    async def chunk(self) -> bytes:
        """The next chunk; empty: the last."""
        size = int(await asyncio.wait_for(self.reader.readline(), self.deadline_s), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def answer(self, head_only: bool = False) -> Answer:
        answer = await self.head()
        if head_only or answer.status in (204, 304):
            return answer
        try:
            if answer.headers.get("transfer-encoding") == "chunked":
                while data := await self.chunk():
                    answer.body += data
            elif "content-length" in answer.headers:
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            else:
                answer.body = await self.reader.read()
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            answer.whole = False
        return answer

    async def ended(self) -> bytes:
        """What comes before the gateway closes."""
        with suppress(ConnectionError):
            return await asyncio.wait_for(self.reader.read(), self.deadline_s)
        return b""

    def close(self) -> None:
        self.writer.transport.abort()
