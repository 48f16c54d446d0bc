"""What is answered at each address.

Handlers read frozen reports; whatever blocks (history, evidence, an operator's wish) runs in a thread of its own, since a
hung one in a shared pool would keep everybody else waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from vllm_watchdog.web import incident, metrics, openapi
from vllm_watchdog.web.guard import BODY_BYTES, Refused, check_token
from vllm_watchdog.web.stream import Hub

ASIDE = 16              # blocking calls at once
BODY_S = 5.0
WRITE_S = 10.0          # a stream's reader that takes nothing for this long is cut off
ALIVE_S = 30.0          # a loop that has not turned for this long hangs; it turns at least each second
FILE_BYTES = 4 << 20    # of one file of evidence: its end
TEXT = 500
FAR = 1e11              # epoch seconds that nobody lives to see
STATIC = Path(__file__).with_name("static")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}
FILES = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in TYPES}     # an upgrade replaces them

Doc = dict[str, Any]
T = TypeVar("T")


class Unavailable(Exception):  # noqa: N818 - it reads as what it says
    """What was asked for can't be read now: one sentence."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where answers come from; all but `report` block, for seconds at most, and may raise Unavailable."""

    report: Callable[[], Doc]
    ask: Callable[[Doc], Doc]               # an operator's wish -> {"ok", "text"}
    incidents: Callable[[int], list[Doc]]
    incident: Callable[[str], Doc | None]
    samples: Callable[[str, float], Doc]    # of a range, newer than; raises KeyError where there is no such range
    incidents_dir: Path
    engines: Mapping[str, str]              # where each engine answers


class Api:
    """`token` empty: nothing can be changed here."""

    def __init__(self, sources: Sources, hub: Hub, token: str) -> None:
        self._sources, self._hub, self._token = sources, hub, token
        self._aside = 0

    def routes(self) -> list[web.RouteDef]:
        v1 = "/api/v1"
        operator = [web.post(f"{v1}/{verb}", self._operate) for verb in openapi.VERBS]
        return [
            web.get("/", self._page), web.get("/static/{name}", self._static),
            web.get("/livez", self._livez), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics),
            web.get(f"{v1}/openapi.json", self._openapi), web.get(f"{v1}/status", self._status),
            web.get(f"{v1}/classes", self._classes),
            web.get(f"{v1}/incidents", self._incidents), web.get(f"{v1}/incidents/{{id}}", self._incident),
            web.get(f"{v1}/incidents/{{id}}/files", self._files),
            web.get(f"{v1}/incidents/{{id}}/files/{{name}}", self._file),
            web.get(f"{v1}/events", self._events), web.get(f"{v1}/samples", self._samples),
            web.post(f"{v1}/engines/{{engine}}/restart", self._operate), *operator,
        ]

    # -- the page

    async def _page(self, _: web.Request) -> web.Response:
        return _static("index.html")

    async def _static(self, request: web.Request) -> web.Response:
        return _static(request.match_info["name"])

    # -- for machines

    async def _livez(self, _: web.Request) -> web.Response:
        age_s = time.time() - self._sources.report()["at"]
        if age_s > ALIVE_S:
            raise Refused(503, f"the loop has not turned for {age_s:.0f} s")
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        health = self._sources.report()["health"]
        if health == "down":
            raise Refused(503, "down: not every service is served")
        return web.Response(text=f"{health}\n")

    async def _metrics(self, request: web.Request) -> web.Response:
        wanted = _one_of(request, "engines", ("0", "1"), "0") == "1"
        report = self._sources.report()
        pages = await metrics.engine_pages(report, self._sources.engines) if wanted else {}
        accept = request.headers.get("Accept", "")
        body, content_type = await self._blocking(lambda: metrics.exposition(report, time.time(), pages, accept))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _openapi(self, _: web.Request) -> web.Response:
        return _json(openapi.document())

    async def _status(self, _: web.Request) -> web.Response:
        return _json(self._sources.report())

    async def _classes(self, _: web.Request) -> web.Response:
        return _json({"classes": incident.classes()})

    async def _incidents(self, request: web.Request) -> web.Response:
        limit = _whole(request, "limit", 50, 1000)
        return _json({"incidents": await self._blocking(lambda: self._sources.incidents(limit))})

    async def _incident(self, request: web.Request) -> web.Response:
        return _json(await self._found(request))

    async def _found(self, request: web.Request) -> Doc:
        id_ = request.match_info["id"]
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", id_) or not (found := await self._blocking(
                lambda: self._sources.incident(id_))):
            raise Refused(404, f"no incident {id_[:100]!r}; /api/v1/incidents lists them")
        return incident.told(found)

    async def _files(self, request: web.Request) -> web.Response:
        check_token(request, self._token)
        row = await self._found(request)
        folder = self._sources.incidents_dir / row["id"]
        return _json({"folder": str(folder), "files": await self._blocking(lambda: _listing(folder))})

    async def _file(self, request: web.Request) -> web.Response:
        check_token(request, self._token)
        row, name = await self._found(request), request.match_info["name"]
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
            raise Refused(404, f"no file {name[:100]!r}")
        data = await self._blocking(lambda: _tail(self._sources.incidents_dir / row["id"] / name))
        return web.Response(body=data, content_type="text/plain", charset="utf-8")

    async def _samples(self, request: web.Request) -> web.Response:
        name, since = request.query.get("range", "10m"), _instant(request, "since")
        try:
            found = await self._blocking(lambda: _json(self._sources.samples(name, since)))
        except KeyError:
            raise Refused(400, f"range: {name[:20]!r} is not kept, expected 10m, 6h or 7d") from None
        return found

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._hub.full:
            raise Refused(503, "too many listen already", {"Retry-After": "10"})
        response = web.StreamResponse(headers={
            "Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        with self._hub.reader() as reader, suppress(ConnectionError):
            await response.write(b"retry: 1000\n\n")
            while (part := await self._hub.next(reader)) is not None:
                try:
                    async with asyncio.timeout(WRITE_S):
                        await response.write(part)
                except TimeoutError:
                    if request.transport:
                        request.transport.abort()
                    break
        return response

    # -- for operators

    async def _operate(self, request: web.Request) -> web.Response:
        check_token(request, self._token)
        body = await _body(request)
        engine = request.match_info.get("engine", body.get("engine"))
        known = [each["name"] for each in self._sources.report()["engines"]]
        if engine is not None and engine not in known:
            raise Refused(404, f"no engine {str(engine)[:40]!r}, expected one of {', '.join(known)}")
        wish = {"verb": request.path.rpartition("/")[2], "engine": engine, "text": body.get("reason", ""), "wait_s": 15.0}
        answer = await self._blocking(lambda: self._sources.ask({key: value for key, value in wish.items() if value}))
        if not answer.get("ok"):
            raise Refused(409, answer.get("text", "refused"))
        return _json({"ok": True, "text": answer.get("text", "")})

    async def _blocking(self, work: Callable[[], T]) -> T:
        """The answer of a call that may block.  Raises Refused where too many do, or nothing can be read."""
        if self._aside >= ASIDE:
            raise Refused(503, f"{ASIDE} questions wait for an answer already", {"Retry-After": "5"})
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def over(value: Any, error: Exception | None) -> None:
            self._aside -= 1
            if not answer.done():       # else nobody waits any more
                answer.set_exception(error) if error else answer.set_result(value)

        def run() -> None:
            value, error = None, None
            try:
                value = work()
            except Exception as raised:     # it belongs to whoever asked
                error = raised
            with suppress(RuntimeError):    # the page is closed
                loop.call_soon_threadsafe(over, value, error)

        self._aside += 1
        threading.Thread(target=run, name="web-aside", daemon=True).start()
        try:
            return await answer
        except Unavailable as error:
            raise Refused(503, str(error)) from None


def _json(document: Any) -> web.Response:
    return web.Response(body=json.dumps(document, ensure_ascii=False, default=str).encode(), content_type="application/json")


def _static(name: str) -> web.Response:
    if name not in FILES:
        raise Refused(404, f"no file {name[:100]!r}")
    return web.Response(body=FILES[name], content_type=TYPES[Path(name).suffix], charset="utf-8")


def _whole(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= most):
        raise Refused(400, f"{name}: {text[:20]!r}, expected a whole number from 1 to {most}")
    return int(text)


def _instant(request: web.Request, name: str) -> float:
    text = request.query.get(name, "0")
    with suppress(ValueError):
        if 0 <= (value := float(text)) < FAR:       # no nan either
            return value
    raise Refused(400, f"{name}: {text[:20]!r}, expected epoch seconds")


def _one_of(request: web.Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    text = request.query.get(name, default)
    if text not in allowed:
        raise Refused(400, f"{name}: {text[:20]!r}, expected {' or '.join(allowed)}")
    return text


async def _body(request: web.Request) -> Doc:
    """An object with `engine` and `reason`, or nothing at all."""
    try:
        async with asyncio.timeout(BODY_S):
            data = await request.read()
    except TimeoutError:
        raise Refused(408, f"the body did not come within {BODY_S:.0f} s") from None
    if not data:
        return {}
    if request.content_type != "application/json":
        raise Refused(415, "expected application/json")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    fits = isinstance(body, dict) and body.keys() <= {"engine", "reason"} and len(data) <= BODY_BYTES
    if not fits or not all(isinstance(value, str) and len(value) <= TEXT for value in body.values()):
        raise Refused(400, f'expected {{"engine": …, "reason": …}}, both optional, text of at most {TEXT} characters')
    return dict(body)


def _listing(folder: Path) -> list[Doc]:
    with suppress(OSError):
        found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
        return [{"name": name, "bytes": info.st_size} for name, info in sorted(found) if stat.S_ISREG(info.st_mode)]
    return []       # it was removed to make room, or is not written yet


def _tail(path: Path) -> bytes:
    """Raises Refused.  Follows no link: what a bundle holds is a plain file."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            info = os.fstat(file.fileno())
            if stat.S_ISREG(info.st_mode):
                file.seek(max(0, info.st_size - FILE_BYTES))
                return file.read(FILE_BYTES)
    except OSError:
        pass
    raise Refused(404, f"no file {path.name!r}")
