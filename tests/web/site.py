"""A real web server over a report that a test sets, and a client that says exactly what it is told to."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from tests.core.scenes import GIB, Scene, gpu, host, mark, metrics, plan, tree
from tests.fakes.tell import Said

from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.plan import FailoverPlan, Thresholds
from vllm_watchdog.core.report import report
from vllm_watchdog.core.totals import Totals, count, told
from vllm_watchdog.web.api import Sources, Unavailable
from vllm_watchdog.web.server import Web

TOKEN = "correct-horse-battery"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
ID = "20261129T144157Z-primary-oom_runtime"
ROW = {"id": ID, "service": "primary", "engine": "primary", "class": "oom_runtime", "urgency": "critical",
       "wall_opened": 1.0, "wall_resolved": None}
M = mark("primary#1")
GATEWAY = {"at": 5.0, "connections": 4, "quarantined": 1, "services": [
    {"service": "primary", "waiting": 3, "waiting_long": 1, "engine": "primary", "requests": 16, "max_concurrent": 16,
     "prompt_tokens": 48000, "max_tokens": 235000, "breaker": "half_open",
     "throttled": "first tokens took 2.1 s, 1 are wanted"}]}


class Story(Scene):
    """A scene whose turns are counted, and its document."""

    def __init__(self, *given: Any, **more: Any) -> None:
        self.totals = Totals()
        super().__init__(*given, **more)

    def feed(self, event: e.Event) -> Any:
        self.now, before = event.at, self.world
        self.world, self.latest = advance(before, event)
        self.totals = count(self.totals, before, event, self.world, self.latest)
        self.told += self.latest
        return self.latest

    def document(self) -> dict[str, Any]:
        document = report(self.world)
        for engine in document["engines"]:
            engine["profile"] = {"model": "m", "max-num-seqs": 64}
        return document | {
            "pid": 1, "alerts": [{"name": "oncall", "waiting": 2, "delivered_wall": None, "failing": "HTTP 500",
                                    "failing_since_wall": 5.0}],
            "totals": told(self.totals, self.world.wall_offset), "gateway": GATEWAY,
            "daemon": {"version": "0", "host": "h", "started": 1.0, "lag_s": 0.001, "queues": {"inbox": 0},
                       "lost": {"journal": 0}, "alerts": {"failed": 3}, "log_dir": "/logs", "operable": True},
        }


def story() -> Story:
    """The primary serves on card 0; somebody else holds some of it too."""
    made = Story(plan(gpus=(0,), share=0.5, failover=FailoverPlan(after_failures=0), thresholds=Thresholds(
        vram_warn=((0, 0.8),), vram_degrade=((0, 0.9),))))
    made.gpus(0.5, gpu(0.1))
    made.serve()
    made.gpus(1.0, gpu(60, (9, "core", M, 39), (7, "x", None, 20)))
    made.feed(e.HostSampled(1.0, host(), (tree(M, 2),)))
    made.feed(e.Scraped(1.0, M, metrics(10, running=3, waiting=1, kv=0.5)))
    return made


class Site:
    def __init__(self, folder: Path, document: dict[str, Any], token: str = TOKEN,
                 engines: dict[str, str] | None = None) -> None:
        self.document, self.said, self.asked = document, Said(), list[dict[str, Any]]()
        self.answer: Any = {"ok": True, "text": "done"}
        self.folder = folder
        sources = Sources(lambda: self.document, self._ask, self._incidents, lambda id_: ROW if id_ == ID else None,
                          self._samples, folder, engines or {})
        self.web = Web("127.0.0.1", 0, token, sources, self.said)
        self.web.start()
        self.port = self.web.port

    def _ask(self, wish: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(wish)
        return self.answer(wish) if callable(self.answer) else self.answer

    def _incidents(self, limit: int) -> list[dict[str, Any]]:
        if limit == 13:
            raise Unavailable("history.db: is locked")
        return [ROW] * min(limit, 3)

    def _samples(self, name: str, since: float) -> dict[str, Any]:
        if name == "7d":
            raise ZeroDivisionError
        return {"10m": {"range": "10m", "step_s": 1, "series": {"gpu/0": {"t": [1.0 + since], "used_bytes": [GIB]}}}}[name]

    def get(self, path: str, headers: dict[str, str] | None = None, method: str = "GET", body: Any = None) -> Answer:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            data = json.dumps(body) if isinstance(body, dict | list) else body
            kind = {"Content-Type": "application/json"} if isinstance(body, dict | list) else {}
            link.request(method, path, body=data, headers=kind | (headers or {}))
            response = link.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            link.close()

    def post(self, path: str, headers: dict[str, str] | None = None, body: Any = None) -> Answer:
        return self.get(path, BEARER if headers is None else headers, "POST", body)

    def connect(self) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.port), 10)
        link.settimeout(10)
        return link


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The sentence of an error; it must be one."""
        assert self.headers["Content-Type"].startswith("application/problem+json"), self.headers
        assert self.json["status"] == self.status and self.json["type"] == "about:blank"
        detail: str = self.json["detail"]
        return detail
