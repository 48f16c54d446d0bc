"""Local receivers that check what the real services check, from their documents, and answer as they do.

Each is a function of one request: (path with query, headers, body) -> (status, headers, body); `Server` puts it on a
socket.  What a service accepted is in `taken`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import queue
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Answer = tuple[int, Mapping[str, str], bytes]
OK = (200, {}, b"ok")


class Server:
    """An HTTP server on loopback.  `answer(handler)` writes what it likes; `got` holds (path, headers, JSON body)."""

    def __init__(self, answer: Callable[[Any], None], path: str = "T00/hunter2", port: int = 0) -> None:
        got: queue.SimpleQueue[tuple[str, dict[str, str], Any]] = queue.SimpleQueue()
        self.got = got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.body = self.rfile.read(int(self.headers["Content-Length"]))
                got.put((self.path, dict(self.headers), json.loads(self.body)))
                answer(self)

            def log_message(self, *_: object) -> None: ...

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass            # a client that hangs up is what these tests are about

        self._server = Quiet(("127.0.0.1", port), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/{path}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def says(status: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    """The same answer to everybody; `Retry_After` is the header Retry-After."""
    def answer(handler: Any) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    return answer


class Service:
    """One service: `check` says the error answer, or None where the message is taken."""

    yes: Answer = OK

    def __init__(self, clock: Callable[[], float], secret: str = "") -> None:
        self.clock, self.secret = clock, secret
        self.taken: list[Any] = []

    def __call__(self, handler: Any) -> None:
        body = json.loads(handler.body)
        answer = self.check(handler.path, handler.headers, handler.body, body)
        if answer is None:
            self.taken.append(body)
        status, headers, text = answer or self.yes
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text)

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        raise NotImplementedError


def _json(code_: int = 200, /, **values: Any) -> Answer:
    return code_, {"Content-Type": "application/json"}, json.dumps(values, ensure_ascii=False).encode()


def _sign(key: str, text: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


class DingTalk(Service):
    """Its custom robot: token, sign within an hour, a known type, 20,000 bytes."""

    yes = _json(errcode=0, errmsg="ok")

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        query = parse_qs(urlsplit(path).query)
        if query.get("access_token") != ["tok3n"]:
            return _json(errcode=300005, errmsg="token is not exist")
        if self.secret:
            stamp, sign = query.get("timestamp", [""])[0], query.get("sign", [""])[0]
            if not stamp.isdecimal() or abs(int(stamp) / 1000 - self.clock()) > 3600:
                return _json(errcode=310000, errmsg="invalid timestamp")
            if sign != _sign(self.secret, f"{stamp}\n{self.secret}"):
                return _json(errcode=310000, errmsg=f"sign not match, more: access_token={query['access_token'][0]}")
        if len(raw) > 20_000:
            return _json(errcode=460101, errmsg="message too long")
        if body["msgtype"] != "markdown" or not body["markdown"]["title"] or not body["markdown"]["text"]:
            return _json(errcode=400105, errmsg="unsupported msgtype")
        return None


class Feishu(Service):
    """Its custom bot: sign within an hour in the body, a card, 20 KB."""

    yes = _json(code=0, msg="success", data={})

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        if self.secret:
            stamp = str(body.get("timestamp", ""))
            fresh = stamp.isdecimal() and abs(int(stamp) - self.clock()) <= 3600
            if not fresh or body.get("sign") != _sign(f"{stamp}\n{self.secret}", ""):
                return _json(code=19021, msg="sign match fail or timestamp is not within one hour from current time")
        card = body.get("card", {})
        if len(raw) > 20 << 10 or body.get("msg_type") != "interactive" or not card.get("elements"):
            return _json(400, code=9499, msg="Bad Request")
        if card["header"]["title"]["tag"] != "plain_text" or not card["elements"][0]["content"]:
            return _json(400, code=11246, msg="card content error")
        return None


class WeCom(Service):
    """Its group robot: key, markdown of 4,096 bytes."""

    yes = _json(errcode=0, errmsg="ok")

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        if parse_qs(urlsplit(path).query).get("key") != ["k3y-of-the-robot"]:
            return _json(errcode=93000, errmsg="invalid webhook url")
        if body["msgtype"] != "markdown" or not body["markdown"]["content"]:
            return _json(errcode=40008, errmsg="invalid message type")
        if len(body["markdown"]["content"].encode()) > 4096:
            return _json(errcode=40058, errmsg="markdown.content exceed max length 4096")
        return None


class Slack(Service):
    """Its incoming webhook: known blocks within their limits."""

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        if set(body) - {"text", "blocks"} or not body.get("text") or len(body["text"]) > 40_000:
            return 400, {}, b"invalid_payload"
        for block in body["blocks"]:
            kind, text = {"header": ("plain_text", 150), "section": ("mrkdwn", 3000)}[block["type"]], block["text"]
            if text["type"] != kind[0] or not 0 < len(text["text"]) <= kind[1]:
                return 400, {}, b"invalid_blocks"
        return None


class PagerDuty(Service):
    """Events API v2.  `open` holds the dedup keys of what is triggered and not resolved."""

    yes = _json(202, status="success", message="Event processed")

    def __init__(self, clock: Callable[[], float], secret: str = "") -> None:
        super().__init__(clock, secret)
        self.open: set[str] = set()

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        inner = body.get("payload", {})
        errors = []
        if len(body.get("routing_key", "")) != 32:
            errors.append("Length of 'routing_key' is incorrect (should be 32 characters)")
        if body.get("event_action") not in ("trigger", "acknowledge", "resolve"):
            errors.append("'event_action' is invalid")
        if not 0 < len(inner.get("summary", "")) <= 1024 or not inner.get("source"):
            errors.append("'payload.summary' is missing or blank")
        if inner.get("severity") not in ("critical", "error", "warning", "info") or len(body.get("dedup_key", "")) > 255:
            errors.append("'payload.severity' is invalid")
        if errors or len(raw) > 512 << 10:
            return _json(400, status="invalid event", message="Event object is invalid", errors=errors)
        if body["routing_key"] != self.secret:
            return _json(400, status="invalid event", message="Invalid routing key")
        (self.open.add if body["event_action"] == "trigger" else self.open.discard)(body["dedup_key"])
        return None


class Alertmanager(Service):
    """POST /api/v2/alerts.  `firing` are the label sets that fire now, as it would tell them."""

    yes = (200, {}, b"")

    def __init__(self, clock: Callable[[], float], secret: str = "") -> None:
        super().__init__(clock, secret)
        self._ends: dict[tuple[tuple[str, str], ...], str] = {}
        self.now = ""

    @property
    def firing(self) -> list[dict[str, str]]:
        return [dict(labels) for labels, ends in self._ends.items() if ends > self.now]

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        if path != "/api/v2/alerts" or not isinstance(body, list):
            return 404, {}, b"404 page not found"
        for alert in body:
            strings = all(isinstance(value, str) for value in (*alert["labels"].values(), *alert["annotations"].values()))
            if not strings or "alertname" not in alert["labels"] or alert["endsAt"] < alert["startsAt"]:
                return _json(400, code=601, message="invalid alert")
        for alert in body:
            self._ends[tuple(sorted(alert["labels"].items()))] = alert["endsAt"]
        return None


class Hook(Service):
    """Whoever takes our own webhook, as docs/alerts.md tells him to check it.  `kept` is deduplicated by the id."""

    def __init__(self, clock: Callable[[], float], secret: str = "") -> None:
        super().__init__(clock, secret)
        self.kept: dict[str, Any] = {}

    def check(self, path: str, headers: Any, raw: bytes, body: Any) -> Answer | None:
        if self.secret:
            stamp, sign = headers["X-LLM-Watchdog-Timestamp"], headers["X-LLM-Watchdog-Signature"]
            mine = hmac.new(self.secret.encode(), f"{stamp}.".encode() + raw, hashlib.sha256).hexdigest()
            if not hmac.compare_digest(f"sha256={mine}", sign or "") or abs(int(stamp) - self.clock()) > 300:
                return 401, {}, b"bad signature"
        self.kept.setdefault(body["id"], body)
        return None
