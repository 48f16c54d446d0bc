from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from tests.fakes.tell import Clock, Said

from vllm_watchdog.core.commands import Answer
from vllm_watchdog.core.events import Asked
from vllm_watchdog.tell import client, control, wire
from vllm_watchdog.tell.client import Unreachable, call, stream
from vllm_watchdog.tell.control import Control
from vllm_watchdog.tell.history import HistoryError
from vllm_watchdog.tell.lock import Busy, Lock
from vllm_watchdog.tell.wire import ControlError


class Daemon:
    """Stands for the loop: its report, its history, and an inbox."""

    def __init__(self, path):
        self.path, self.inbox, self.said = path, queue.SimpleQueue(), Said()
        self.control = Control(path, self.inbox.put, lambda: {"health": "healthy", "engines": []}, self.incidents,
                               lambda id_: {"id": id_} if id_ == "known" else None, Clock(7.0), self.said)

    def incidents(self, limit):
        if limit == 13:
            raise HistoryError("history.db: file is not a database")
        return [{"id": str(number)} for number in range(limit)]

    def answers(self, ok, text):
        asked = self.inbox.get(timeout=5)
        self.control.answer(Answer(asked.ref, ok, text))
        return asked


@pytest.fixture
def daemon(tmp_path):
    made = Daemon(tmp_path / "run" / "control.sock")
    made.control.start()
    yield made
    made.control.stop(5)


def raw(path, data, *, end=True):
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(5)
        peer.connect(str(path))
        peer.sendall(data)
        if end:
            peer.shutdown(socket.SHUT_WR)
        return json.loads(peer.makefile("rb").readline())


def test_status_and_history_are_answered(daemon):
    assert call(daemon.path, {"verb": "status"}, 5) == {"ok": True, "health": "healthy", "engines": []}
    assert call(daemon.path, {"verb": "incidents", "limit": 2}, 5)["incidents"] == [{"id": "0"}, {"id": "1"}]
    assert len(call(daemon.path, {"verb": "incidents"}, 5)["incidents"]) == 50
    assert call(daemon.path, {"verb": "incident", "id": "known"}, 5) == {"ok": True, "id": "known"}


@pytest.mark.parametrize(("request_", "why"), [
    (b'{"verb":"dance"}\n', "verb 'dance' is not known, expected one of events, route, status, samples, "
                            "reload, incidents, incident, casualties, waited, load, drilled, restart"),
    (b'{"verb":["status"]}\n', "is not known"), (b"{}\n", "verb 'None' is not known"),
    (b"[]\n", "expected one JSON object"),
    (b"status\n", "expected one JSON object"), (b"", "expected one JSON object"),
    (b"\xff\n", "expected one JSON object"),
    (b"[" * 60_000 + b"\n", "expected one JSON object"),
    (b'{"verb":"incidents","limit":0}\n', "limit: expected a whole number from 1 to 1000"),
    (b'{"verb":"incidents","limit":"all"}\n', "limit: expected"),
    (b'{"verb":"incidents","limit":13}\n', "history.db: file is not a database"),
    (b'{"verb":"incident","id":7}\n', "id: expected text"), (b'{"verb":"incident","id":"x"}\n', "no incident 'x'"),
    (b'{"verb":"restart","engine":7}\n', "engine: expected text"),
    (b'{"verb":"pause","wait_s":1e9}\n', "wait_s: expected seconds"),
    (b'{"verb":"' + b"x" * 70_000 + b'"}\n', "request over 64 KiB"),
])
def test_bad_requests_get_one_sentence(daemon, request_, why):
    response = raw(daemon.path, request_)
    assert response["ok"] is False and why in response["text"] and "\n" not in response["text"]


@pytest.mark.parametrize("verb", control.operator_verbs)
def test_an_operator_is_told_what_was_done(daemon, verb):
    got = queue.SimpleQueue()
    request = {"verb": verb, "engine": "primary", "text": "because"}
    threading.Thread(target=lambda: got.put(call(daemon.path, request, 5)), daemon=True).start()
    asked = daemon.answers(True, "primary is being restarted")
    assert asked == Asked(7.0, asked.ref, verb, "primary", "because")
    assert got.get(timeout=5) == {"ok": True, "text": "primary is being restarted"}


def test_two_operators_get_their_own_answers(daemon):
    got = {}

    def restart(engine):
        got[engine] = call(daemon.path, {"verb": "restart", "engine": engine}, 5)

    threads = [threading.Thread(target=restart, args=(engine,)) for engine in ("primary", "backup")]
    for thread in threads:
        thread.start()
    asked = [daemon.inbox.get(timeout=5) for _ in threads]
    for each in reversed(asked):
        daemon.control.answer(Answer(each.ref, False, f"not {each.engine}"))
    for thread in threads:
        thread.join(5)
    assert got == {name: {"ok": False, "text": f"not {name}"} for name in ("primary", "backup")}


def test_an_operator_whom_nobody_answers_is_told_so(daemon):
    response = call(daemon.path, {"verb": "pause", "wait_s": 0.05}, 5)
    assert response == {"ok": False, "text": "pause: no answer within 0.05 s"}
    daemon.answers(True, "too late")        # dropped, without an error
    assert daemon.control._waiting == {}


def test_a_stop_answers_those_who_wait_ends_streams_and_removes_the_socket(daemon):
    lines = stream(daemon.path, {"verb": "events"}, 5)
    got = queue.SimpleQueue()
    threading.Thread(target=lambda: got.put(call(daemon.path, {"verb": "pause"}, 5)), daemon=True).start()
    daemon.inbox.get(timeout=5)
    threading.Thread(target=lambda: got.put(list(lines)), daemon=True).start()
    subscribed(daemon, 1)
    daemon.control.stop(5)
    assert sorted([str(got.get(timeout=5)), str(got.get(timeout=5))]) == [
        "[]", "{'ok': False, 'text': 'the watchdog is stopping'}"]
    assert not daemon.path.exists()
    with pytest.raises(Unreachable, match="no daemon answers there"):
        call(daemon.path, {"verb": "status"}, 1)


def subscribed(daemon, count, deadline_s=5.0):
    end = time.monotonic() + deadline_s
    while len(daemon.control._subscribers) != count:
        assert time.monotonic() < end
        threading.Event().wait(0.002)


def test_a_stream_shows_each_line_as_it_happens(daemon, monkeypatch):
    monkeypatch.setattr(control, "heartbeat_s", 0.02)
    with closing(stream(daemon.path, {"verb": "events"}, 5)) as lines:
        threading.Thread(target=publish_when_heard, args=(daemon,), daemon=True).start()
        assert list(itertools.islice(lines, 3)) == [{"say": "a", "number": n, "text": "显存"} for n in range(3)]
    daemon.control.publish({"say": "nobody reads"})
    subscribed(daemon, 0)


def publish_when_heard(daemon):
    subscribed(daemon, 1)
    for number in range(3):
        daemon.control.publish({"say": "a", "number": number, "text": "显存"})


def test_a_reader_that_does_not_read_is_dropped_and_holds_up_nobody(daemon, monkeypatch):
    monkeypatch.setattr(control, "idle_s", 0.2)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(daemon.path))
        peer.sendall(b'{"verb":"events"}\n')
        subscribed(daemon, 1)
        began = time.monotonic()
        for _ in range(4 * control.subscriber_lines):
            daemon.control.publish({"pad": "x" * 1000})
        assert time.monotonic() - began < 1
        assert len(daemon.said.of("control.reader_dropped")) == 1
        subscribed(daemon, 0)


def test_more_connections_than_the_limit_are_refused_not_queued(daemon):
    peers = [socket.socket(socket.AF_UNIX) for _ in range(control.connection_limit)]
    try:
        for number, peer in enumerate(peers, 1):
            peer.connect(str(daemon.path))
            peer.sendall(b'{"verb":"events"}\n')
            subscribed(daemon, number)
        assert call(daemon.path, {"verb": "status"}, 5) == {"ok": False, "text": "more than 16 connections at once"}
    finally:
        for peer in peers:
            peer.close()


def test_a_peer_that_says_nothing_is_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "idle_s", 0.1)
    daemon = Daemon(tmp_path / "c.sock")
    daemon.control.start()
    assert raw(daemon.path, b'{"verb":', end=False)["text"] == "no whole request within 0.1 s"
    daemon.control.stop(5)


def test_only_the_owner_may_connect(daemon, monkeypatch):
    assert daemon.path.stat().st_mode & 0o777 == 0o600
    assert daemon.path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(wire, "peer_of", lambda peer: (1, 65_534))
    assert call(daemon.path, {"verb": "status"}, 5) == {
        "ok": False, "text": f"user 65534 may not, expected root or user {os.geteuid()}"}


def test_a_dead_daemons_socket_is_replaced_and_a_live_ones_is_not(tmp_path):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    first, second = Daemon(path), Daemon(path)
    first.control.start()
    with pytest.raises(ControlError, match=f"PID {os.getpid()} answers there, expected no other daemon"):
        second.control.start()
    second.control.stop(1)
    assert call(path, {"verb": "status"}, 5)["ok"]
    first.control.stop(5)


def test_a_file_in_the_way_is_named_and_kept(tmp_path):
    path = tmp_path / "control.sock"
    path.write_text("mine")
    daemon = Daemon(path)
    with pytest.raises(ControlError, match="not a socket"):
        daemon.control.start()
    daemon.control.stop(1)
    assert path.read_text() == "mine"


def test_a_path_that_the_kernel_cannot_take_is_named_with_its_limit(tmp_path):
    path = tmp_path / ("x" * 120)
    daemon = Daemon(path)
    with pytest.raises(ControlError, match=r"bytes, expected a socket path of at most 107"):
        daemon.control.start()
    daemon.control.stop(1)
    with pytest.raises(Unreachable, match="at most 107"):
        call(path, {"verb": "status"}, 1)


def server(path, reply):
    """A daemon that is hung, or none of ours."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)

    def serve():
        with listener, listener.accept()[0] as peer:
            peer.recv(1000)
            reply(peer)

    threading.Thread(target=serve, daemon=True).start()


def drip(peer):
    with pytest.raises(OSError):
        while True:
            peer.sendall(b"x")
            threading.Event().wait(0.01)


@pytest.mark.parametrize(("reply", "why"), [
    (lambda peer: peer.recv(1), r"the daemon gave no answer within 0\.2 s"), (drip, r"no answer within 0\.2 s"),
    (lambda peer: peer.sendall(b"HTTP/1.1 400\r\n"), "whoever answers there is no llm-watchdog"),
    (lambda peer: peer.sendall(b'{"ok":'), "hung up before its answer was whole"),
])
def test_a_client_is_told_in_one_sentence_within_its_deadline(tmp_path, reply, why):
    server(tmp_path / "s", reply)
    began = time.monotonic()
    with pytest.raises(Unreachable, match=why):
        call(tmp_path / "s", {"verb": "status"}, 0.2)
    assert time.monotonic() - began < 2


def test_a_silent_stream_is_told_apart_from_a_quiet_one(tmp_path):
    server(tmp_path / "s", lambda peer: peer.recv(1))
    with pytest.raises(Unreachable, match="no answer within"):
        list(stream(tmp_path / "s", {"verb": "events"}, 0.1))
    assert client.silence_s > 2 * control.heartbeat_s


def test_a_second_daemon_is_told_who_holds_the_lock(tmp_path):
    path = tmp_path / "state" / "lock"
    lock = Lock.acquire(path)
    assert path.read_text() == f"{os.getpid()}\n" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Busy, match=f"held by PID {os.getpid()}: a watchdog of this state folder already runs") as busy:
        Lock.acquire(path)
    assert busy.value.pid == os.getpid()
    lock.release()
    assert not path.exists()
    Lock.acquire(path).release()


def test_a_killed_daemon_leaves_no_lock_and_its_engines_do_not_inherit_one(tmp_path):
    path = tmp_path / "lock"
    script = ("import subprocess, sys; from pathlib import Path; from vllm_watchdog.tell.lock import Lock\n"
              "lock = Lock.acquire(Path(sys.argv[1]))\n"
              "engine = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=sys.stdin)\n"
              "print('held', flush=True); engine.wait()\n")
    child = subprocess.Popen([sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(Busy) as busy:
            Lock.acquire(path)
        assert busy.value.pid == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait(5)
        lock = Lock.acquire(path)       # although the engine still runs
        assert path.read_text() == f"{os.getpid()}\n"
        lock.release()


def test_a_reader_of_the_route_gets_the_last_one_at_once_and_then_each_change(daemon):
    daemon.control.publish({"version": 1}, "route")
    with closing(stream(daemon.path, {"verb": "route"}, 5.0)) as lines:
        assert next(lines) == {"version": 1}
        daemon.control.publish({"version": 2}, "route")
        assert next(lines) == {"version": 2}
