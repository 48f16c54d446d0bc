"""The control socket: how people and the gateway ask a running daemon.  Newline-JSON, one request a connection.

`{"verb": "status"}` -> the report; `samples` -> the last ten minutes for plots; `incidents` (`limit`), `incident` (`id`);
`events` streams the journal's lines as they happen, `route` the route, at once and at each change; `casualties`, `waited`
and `load` are the gateway's words on who was in flight when an engine died, how long clients waited, and how busy it is,
`drilled` a drill's word on an incident; `reload` reads the configuration again; `restart failover failback pause resume
snapshot handover` (`engine`, `text`) become `Asked` and wait for `Answer`.
Every answer has `ok`; where it is false, `text` says why in one sentence.

Owner-only: the socket is 0600 and the peer must be root or our own user.  Each connection has a thread that waits on
its peer for at most `idle_s`, on an answer for at most `answer_s`; there are at most `connection_limit` of them.  The
loop calls only `answer`, the journal's thread only `publish`; neither waits.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from vllm_watchdog.core.commands import Answer
from vllm_watchdog.core.events import Asked
from vllm_watchdog.say import Say
from vllm_watchdog.tell.backlog import Backlog
from vllm_watchdog.tell.history import HistoryError
from vllm_watchdog.tell.wire import RequestError, bind, check_peer, line, receive, send

connection_limit = 16
idle_s = 10.0
answer_s = 60.0
answer_max_s = 600.0
heartbeat_s = 15.0          # an empty line on a silent stream tells a live daemon from a hung one
subscriber_lines = 1_000

operator_verbs = ("restart", "failover", "failback", "pause", "resume", "snapshot", "handover")

EVENTS, ROUTE = "events", "route"   # the topics that are streamed
LOAD = "load"

Request = dict[str, Any]
Response = dict[str, Any]


def _unheard(_: Request) -> None:
    """Nobody wants to know."""


def _unsampled() -> Response:
    """Nobody keeps any."""
    return {}


def _fixed() -> tuple[bool, str]:
    return False, "this daemon reads its configuration only once"


class Control:
    """`post` takes `Asked`; `report` is the newest status document; `incidents(limit)` and `incident(id)` read the
    history; `clock` is monotonic seconds; `heard` takes the gateway's words, raising ValueError for what it can't read;
    `reload` reads the configuration again in the caller's thread, and says what came of it."""

    def __init__(self, path: Path, post: Callable[[Asked], None], report: Callable[[], Response],
                 incidents: Callable[[int], list[dict[str, Any]]], incident: Callable[[str], dict[str, Any] | None],
                 clock: Callable[[], float], say: Say, heard: Callable[[Request], None] = _unheard,
                 reload: Callable[[], tuple[bool, str]] = _fixed,
                 samples: Callable[[], Response] = _unsampled) -> None:
        self._path, self._post, self._report, self._clock, self._say = path, post, report, clock, say
        self._heard, self._reload = heard, reload
        self._incidents, self._incident = incidents, incident
        self._refs = count(1)
        self._lock = threading.Condition()  # over the tables below, for dictionary operations only
        self._waiting: dict[int, _Slot] = {}
        self._subscribers: dict[int, tuple[str, Backlog[dict[str, Any]]]] = {}
        self._last: dict[str, dict[str, Any]] = {}      # what a new reader of a topic is told first
        self._connections = 0
        self._stopping = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._verbs: dict[str, Callable[[Request], Response]] = {
            "status": self._tell_status, "samples": lambda _: {"ok": True} | samples(),
            "reload": self._tell_reload, "incidents": self._tell_incidents, "incident": self._tell_incident,
            **dict.fromkeys(("casualties", "waited", LOAD, "drilled"), self._hear),
            **dict.fromkeys(operator_verbs, self.ask),
        }

    def start(self) -> None:
        """Raises ControlError."""
        bind(self._listener, self._path)
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Removes the socket and ends the streams; whoever waits for an answer is told that the daemon stops."""
        if self._thread.is_alive():
            self._stopping.set()
            self._path.unlink(missing_ok=True)      # only ever our own: `start` refused anyone else's
            self._listener.shutdown(socket.SHUT_RDWR)       # wakes accept
            with self._lock:
                for _, subscriber in self._subscribers.values():
                    subscriber.close()
                for slot in self._waiting.values():
                    slot.fill(False, "the watchdog is stopping")
                self._lock.wait_for(lambda: not self._connections, deadline_s)
        self._listener.close()

    def answer(self, answer: Answer) -> None:
        """An answer nobody waits for any more is dropped."""
        with self._lock:
            slot = self._waiting.get(answer.ref)
        if slot:
            slot.fill(answer.ok, answer.text)

    def publish(self, what: Mapping[str, Any], topic: str = EVENTS) -> None:
        """To every stream of the topic.  Whoever is `subscriber_lines` behind is dropped, and that is said."""
        with self._lock:
            if topic == ROUTE:
                self._last[topic] = dict(what)
            subscribers = [subscriber for its, subscriber in self._subscribers.values() if its == topic]
        for subscriber in subscribers:
            if not subscriber.closed and not subscriber.put(dict(what)):
                subscriber.close()
                self._say("control.reader_dropped", lines_behind=subscriber_lines)

    # -- one thread accepts

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping.is_set():
                    self._say("control.accept_failed", why=error.strerror or type(error).__name__)
                    self._stopping.wait(1.0)        # out of descriptors: the next one may find one
                continue
            peer.settimeout(idle_s)
            self._admit(peer)

    def _admit(self, peer: socket.socket) -> None:
        with self._lock:
            full = self._connections >= connection_limit
            self._connections += not full
        if full:
            with peer:
                send(peer, line({"ok": False, "text": f"more than {connection_limit} connections at once"}))
        else:
            threading.Thread(target=self._serve, args=(peer,), name="control-peer", daemon=True).start()

    # -- one thread a connection

    def _serve(self, peer: socket.socket) -> None:
        try:
            with peer:
                response = self._respond(peer)
                if response is not None:
                    peer.settimeout(idle_s)
                    send(peer, line(response))
        finally:
            with self._lock:
                self._connections -= 1
                self._lock.notify_all()

    def _respond(self, peer: socket.socket) -> Response | None:
        """None: the answer was a stream, and it is over."""
        try:
            check_peer(peer)
            request = receive(peer, idle_s)
            if (topic := request.get("verb")) in (EVENTS, ROUTE):
                self._stream(peer, topic)
                return None
            return self._verb(request)(request)
        except (RequestError, HistoryError) as error:
            return {"ok": False, "text": str(error)}

    def _verb(self, request: Request) -> Callable[[Request], Response]:
        verb = request.get("verb")
        if isinstance(verb, str) and verb in self._verbs:
            return self._verbs[verb]
        known = ", ".join((EVENTS, ROUTE, *self._verbs))
        raise RequestError(f"verb {str(verb)[:40]!r} is not known, expected one of {known}")

    def _tell_status(self, _: Request) -> Response:
        return {"ok": True} | self._report()

    def _tell_incidents(self, request: Request) -> Response:
        limit = request.get("limit", 50)
        if not isinstance(limit, int) or not 0 < limit <= 1000:
            raise RequestError("limit: expected a whole number from 1 to 1000")
        return {"ok": True, "incidents": self._incidents(limit)}

    def _tell_incident(self, request: Request) -> Response:
        id_ = _text(request, "id")
        found = self._incident(id_)
        return {"ok": True} | found if found else {"ok": False, "text": f"no incident {id_[:100]!r}"}

    def _hear(self, request: Request) -> Response:
        try:
            self._heard(request)
        except ValueError as error:
            raise RequestError(str(error)) from None
        return {"ok": True}

    def _tell_reload(self, _: Request) -> Response:
        ok, text = self._reload()
        return {"ok": ok, "text": text}

    def ask(self, request: Request) -> Response:
        """An operator's wish, and what was done; blocks for at most `wait_s` of the request.  Raises RequestError."""
        wait_s = request.get("wait_s", answer_s)
        if not isinstance(wait_s, int | float) or not 0 < wait_s <= answer_max_s:
            raise RequestError(f"wait_s: expected seconds, more than 0 and at most {answer_max_s:g}")
        engine = _text(request, "engine") if request.get("engine") is not None else None
        ref, slot = next(self._refs), _Slot()
        with self._lock:
            self._waiting[ref] = slot
        if self._stopping.is_set():
            slot.fill(False, "the watchdog is stopping")
        try:
            self._post(Asked(self._clock(), ref, request["verb"], engine, _text(request, "text")))
            return slot.wait(wait_s) or {"ok": False, "text": f"{request['verb']}: no answer within {wait_s:g} s"}
        finally:
            with self._lock:
                del self._waiting[ref]

    def _stream(self, peer: socket.socket, topic: str) -> None:
        lines: Backlog[dict[str, Any]] = Backlog(subscriber_lines)
        key = next(self._refs)
        with self._lock:
            self._subscribers[key] = (topic, lines)
            if topic in self._last:
                lines.put(self._last[topic])
        if self._stopping.is_set():
            lines.close()
        try:
            self._pump(lines, peer)
        finally:
            with self._lock:
                del self._subscribers[key]

    def _pump(self, lines: Backlog[dict[str, Any]], peer: socket.socket) -> None:
        peer.settimeout(idle_s)
        behind = 0
        while not lines.over:
            batch, behind = lines.take(heartbeat_s)
            if not send(peer, b"".join(map(line, batch)) or b"\n"):
                return
        if behind:
            send(peer, line({"say": "events.dropped", "text": f"this reader fell {subscriber_lines} lines behind"}))


class _Slot:
    """Where one connection waits for its answer."""

    def __init__(self) -> None:
        self._filled = threading.Event()
        self._response: Response = {}

    def fill(self, ok: bool, text: str) -> None:
        if not self._filled.is_set():
            self._response = {"ok": ok, "text": text}
            self._filled.set()

    def wait(self, wait_s: float) -> Response | None:
        return self._response if self._filled.wait(wait_s) else None


def _text(request: Request, key: str) -> str:
    value = request.get(key, "")
    if not isinstance(value, str):
        raise RequestError(f"{key}: expected text")
    return value
