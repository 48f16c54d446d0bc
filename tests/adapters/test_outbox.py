from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from dataclasses import replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.tell import WALL, Clock, Said, incident

from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Entry, Urgency
from vllm_watchdog.tell import history as history_module
from vllm_watchdog.tell import ledger as ledger_module
from vllm_watchdog.tell import outbox as outbox_module
from vllm_watchdog.tell import webhook as webhook_module
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.journal import Journal
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.outbox import ChannelState, Outbox, Outcome, Patience
from vllm_watchdog.tell.payload import Language, Writer, trial
from vllm_watchdog.tell.store import Store
from vllm_watchdog.tell.webhook import Webhook

SECRET = "T00/hunter2"
QUICK = Patience(first_s=0.01, most_s=0.05)
WRITER = Writer("gpu-1", Path("/var/log/llm-watchdog/incidents"))
YES = Outcome(True, "HTTP 200")


class Receiver:
    """A channel that answers from a list, then always yes, and can be held up."""

    def __init__(self, name="oncall", *outcomes):
        self.name, self.outcomes = name, list(outcomes)
        self.got = queue.Queue()
        self.go = threading.Event()
        self.go.set()

    def send(self, payload):
        self.got.put(payload)
        assert self.go.wait(20)
        return self.outcomes.pop(0) if self.outcomes else YES

    def kinds(self, count):
        return [self.got.get(timeout=5)["kind"] for _ in range(count)]


class House:
    """A history and an outbox on one file: what one daemon has."""

    def __init__(self, path, *receivers, patience=QUICK, wall=WALL, broken=False):
        self.said, self.wall = Said(), Clock(wall)
        self.history = History(path, time.monotonic, self.wall, self.said)
        self.box = Outbox(receivers, Ledger(self.history), WRITER.payload, time.monotonic, self.wall, self.said,
                          patience=patience, chance=lambda: 0.5)
        self.history.start()
        self.box.start()

    def stop(self, deadline_s=5.0):
        over = self.box.stop(deadline_s)
        return self.history.stop(5) and over


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.db"


def test_each_alert_is_told_once_on_each_channel(path):
    first, second = Receiver("oncall"), Receiver("team")
    house = House(path, first, second)
    for _ in range(3):
        house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("resolved", incident(over=True)))
    house.said.wait("alert.delivered", 4)
    assert house.stop()
    assert [first.kinds(2), second.kinds(2)] == [["opened", "resolved"]] * 2
    assert first.got.empty() and second.got.empty()


def test_an_incident_that_worsens_twice_is_told_twice(path):
    receiver = Receiver()
    house = House(path, receiver)
    for urgency in (Urgency.CRITICAL, Urgency.PAGE, Urgency.PAGE):
        house.box.tell(Alert("worsened", incident(urgency=urgency)))
    house.said.wait("alert.delivered", 2)
    assert house.stop()
    assert [receiver.got.get_nowait()["urgency"] for _ in range(2)] == ["critical", "page"] and receiver.got.empty()


def test_what_was_confirmed_is_not_told_again_by_the_next_daemon(path):
    for number in (1, 2):
        receiver = Receiver()
        house = House(path, receiver)
        house.box.tell(Alert("opened", incident(1)))
        house.box.tell(Alert("opened", incident(2)))
        house.box.tell(Alert("resolved", incident(number, over=True)))
        house.said.wait("alert.delivered", 3 if number == 1 else 1)
        assert house.stop()
    assert receiver.kinds(1) == ["resolved"] and receiver.got.empty()


def test_an_alert_is_on_disk_before_anyone_tries_to_send_it(path):
    receiver = Receiver()
    receiver.go.clear()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    payload = receiver.got.get(timeout=5)
    rows = house.history.ask(lambda db: db.execute("SELECT incident, kind, payload, done FROM outbox").fetchall(), 5)
    assert rows == [(incident().id, "opened", json.dumps(payload), None)]
    receiver.go.set()
    assert house.stop()


def test_what_a_daemon_could_not_deliver_goes_out_from_the_next_in_order(path):
    down = Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000)
    house = House(path, down)
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.failed", 2)
    house.box.tell(Alert("resolved", incident(over=True)))
    assert house.stop()
    up = Receiver("oncall")
    house = House(path, up, wall=WALL + 60)
    assert up.kinds(2) == ["opened", "resolved"]
    assert house.said.wait("alert.delivered", 2)[0]["tries"] >= 3
    assert house.stop()


def test_a_history_that_is_slow_to_open_does_not_hide_what_is_owed(path, monkeypatch):
    monkeypatch.setattr(ledger_module, "patience_s", 0.05)
    monkeypatch.setattr(outbox_module, "retry_s", 0.01)
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    house.box.tell(Alert("opened", incident(1)))
    house.said.wait("alert.failed")
    assert house.stop()
    opened = threading.Event()
    real = history_module._open
    monkeypatch.setattr(history_module, "_open", lambda path: opened.wait(10) and real(path))
    receiver = Receiver()
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident(2)))        # told although the file is not open yet
    assert receiver.got.get(timeout=5)["incident"] == incident(2).id
    opened.set()
    assert receiver.got.get(timeout=5)["incident"] == incident(1).id
    house.said.wait("alert.delivered", 2)
    assert house.stop() and receiver.got.empty()


def test_resolved_never_overtakes_opened(path):
    receiver = Receiver("oncall", Outcome(False, "HTTP 500"), Outcome(False, "HTTP 500"))
    house = House(path, receiver)
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("resolved", incident(over=True)))
    assert receiver.kinds(4) == ["opened", "opened", "opened", "resolved"]
    house.said.wait("alert.delivered", 2)
    assert house.stop()


def test_a_hung_receiver_delays_no_other_channel_and_no_stop(path):
    hung, well = Receiver("hung"), Receiver("well")
    hung.go.clear()
    house = House(path, hung, well)
    house.box.tell(Alert("opened", incident(1)))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered", 2)
    began = time.monotonic()
    assert not house.stop(0.1)
    assert time.monotonic() - began < 2
    assert [(state.name, state.waiting) for state in house.box.states()] == [("hung", 2), ("well", 0)]
    hung.go.set()


def test_it_gives_up_out_loud_and_for_good(path):
    down = Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000)
    house = House(path, down, patience=replace(QUICK, give_up_s=0.1))
    house.box.tell(Alert("opened", incident()))
    (line,) = house.said.wait("alert.given_up")
    assert line["why"] == "HTTP 503" and line["tries"] > 1 and line["channel"] == "oncall"
    assert house.box.states() == (ChannelState("oncall", 0, None, "HTTP 503"),)
    assert house.stop()
    up = Receiver("oncall")
    house = House(path, up)
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered")
    assert house.stop()
    assert up.got.get_nowait()["incident"] == incident(2).id and up.got.empty()


def test_a_day_spent_without_a_daemon_counts_towards_giving_up(path):
    house = House(path, Receiver("oncall", *[Outcome(False, "HTTP 503")] * 1000))
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.failed")
    assert house.stop()
    house = House(path, Receiver("oncall", Outcome(False, "HTTP 503")), wall=WALL + 86_401)
    house.said.wait("alert.given_up")       # one try, and no more
    assert house.stop()


def test_a_disk_that_takes_nothing_does_not_keep_an_alert_from_being_told_once(tmp_path):
    folder = tmp_path / "logs"
    folder.write_text("in the way")
    receiver = Receiver()
    house = House(folder / "history.db", receiver)
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.delivered")
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(2)))
    house.said.wait("alert.delivered", 2)
    folder.unlink()         # the stop writes down what was confirmed
    assert house.stop()
    assert receiver.kinds(2) == ["opened", "opened"] and receiver.got.empty()
    house = House(folder / "history.db", receiver)     # confirmed late, but confirmed
    house.box.tell(Alert("opened", incident()))
    house.box.tell(Alert("opened", incident(3)))
    house.said.wait("alert.delivered")
    assert house.stop()
    assert receiver.got.get_nowait()["incident"] == incident(3).id and receiver.got.empty()


def test_a_daemon_that_could_not_begin_may_stop_what_it_never_started(tmp_path):
    said, clock = Said(), Clock()
    history = History(tmp_path / "history.db", clock, clock, said)
    parts = (history, Outbox((Receiver(),), Ledger(history), WRITER.payload, clock, clock, said),
             Journal(tmp_path, clock, clock), Store(tmp_path / "memory.json", clock, said))
    assert all(part.stop(0.1) for part in parts)
    assert list(tmp_path.iterdir()) == []


@given(st.integers(1, 500), st.floats(0, 1), st.none() | st.floats(0, 1e6))
def test_delays_grow_stay_bounded_and_honour_the_receiver(attempts, chance, asked_s):
    patience = Patience()
    delay_s = patience.delay_s(attempts, chance, asked_s)
    assert min(patience.most_s, 2.0 * 2 ** (attempts - 1)) / 2 <= delay_s or asked_s
    assert delay_s <= max(patience.most_s, patience.asked_most_s)
    assert delay_s >= min(asked_s or 0, patience.asked_most_s)
    assert patience.delay_s(attempts + 1, chance, asked_s) >= delay_s


# -- the payload

@pytest.mark.parametrize("class_", CATALOG)
@pytest.mark.parametrize("language", Language)
def test_every_class_has_words_in_both_languages_and_fits(class_, language):
    long = replace(incident(), class_=class_, text="x" * 10_000,
                   timeline=tuple(Entry(1.0, "step", "y" * 10_000) for _ in range(300)))
    payload = replace(WRITER, language=language).payload(Alert("opened", long), WALL)
    assert len(json.dumps(payload)) < 32 << 10
    assert all(payload["title"].values())
    assert ("OPENED" in payload["text"]) is (language != "zh") and ("故障" in payload["text"]) is (language != "en")


def test_the_payload_says_what_where_and_what_to_change():
    payload = replace(WRITER, language=Language.EN).payload(Alert("opened", incident()), WALL)
    folder = f"/var/log/llm-watchdog/incidents/{incident().id}"
    expected = {"version": 1, "kind": "opened", "incident": incident().id, "service": "primary", "engine": "primary",
                "class": "oom_runtime", "urgency": "critical", "host": "gpu-1"}
    assert payload | expected == payload
    assert payload["at"] == "2026-11-29T21:53:20.000Z" and payload["folder"] == folder
    assert payload["title"]["en"] == "GPU out of memory while serving"
    assert "max-num-batched-tokens" in payload["advice"][0]
    assert payload["text"].splitlines() == [
        "[OPENED] GPU out of memory while serving: service primary, engine primary, host gpu-1", "CUDA out of memory",
        "- opened oom_runtime: CUDA out of memory", f"Evidence: {folder}"]


# -- the webhook, against real sockets

class Server:
    """An HTTP server: `answer(handler)` writes what it likes."""

    def __init__(self, answer):
        got = self.got = queue.SimpleQueue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.put((self.path, dict(self.headers), json.loads(body)))
                answer(self)

            def log_message(self, *args):
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *args):
                pass            # a client that hangs up is what these tests are about

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self._server.server_port}/{SECRET}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def says(status, body=b"ok", **headers):
    def answer(handler):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
    return answer


def drips(first):
    """One byte each 10 ms for ever: no single socket operation ever times out."""
    def answer(handler):
        handler.wfile.write(first)
        for _ in range(1_000):
            handler.wfile.write(b"x")
            threading.Event().wait(0.01)
    return answer


def hook(server_or_url, timeout_s=5.0, **headers):
    url = server_or_url if isinstance(server_or_url, str) else server_or_url.url
    return Webhook("oncall", url, headers, timeout_s, lambda: WALL)


def test_the_receiver_gets_the_payload_and_our_headers(serve, monkeypatch, tmp_path):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b")
    monkeypatch.setenv("NETRC", str(netrc))
    server = serve(says(204, b""))
    payload = WRITER.payload(Alert("opened", incident()), WALL)
    assert hook(server, Authorization="Bearer s3cret").send(payload) == Outcome(True, "HTTP 204")
    path, headers, body = server.got.get(timeout=5)
    assert path == f"/{SECRET}" and body == payload
    assert headers["Authorization"] == "Bearer s3cret" and headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(("answer", "outcome"), [
    (says(500), Outcome(False, "HTTP 500")),
    (says(429, Retry_After="120"), Outcome(False, "HTTP 429", 120.0)),
    (says(503, Retry_After=formatdate(WALL + 90, usegmt=True)), Outcome(False, "HTTP 503", 90.0)),
    (says(503, Retry_After="Sun, 06 Nov 1994 08:49:37 GMT"), Outcome(False, "HTTP 503", 0.0)),
    (says(503, Retry_After="soon"), Outcome(False, "HTTP 503")),
    (says(302, Location=f"http://127.0.0.1:1/{SECRET}"),
     Outcome(False, "HTTP 302, a redirect: give the final address")),
    (lambda handler: handler.wfile.write(b"no http\r\n\r\n"), Outcome(False, "ConnectionError")),
    (lambda handler: None, Outcome(False, "ConnectionError")),
])
def test_anything_but_2xx_is_a_failure_named_without_the_address(serve, answer, outcome):
    assert hook(serve(answer)).send({}) == outcome


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nX-Slow: "])
def test_a_receiver_that_drips_is_cut_off_at_the_deadline(serve, first):
    began = time.monotonic()
    outcome = hook(serve(drips(first)), 0.3).send({})
    assert time.monotonic() - began < 1.5
    said_yes = first.startswith(b"HTTP/1.1 200 OK")     # cut off in the headers, but its word was given
    assert outcome == (Outcome(True, "HTTP 200") if said_yes else Outcome(False, "no answer within 0.3 s"))


def test_the_deadline_holds_through_a_proxy(serve, monkeypatch):
    proxy = serve(drips(b""))
    monkeypatch.setenv("http_proxy", proxy.url.removesuffix(SECRET))
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    began = time.monotonic()
    assert hook("http://receiver.invalid/" + SECRET, 0.3).send({}) == Outcome(False, "no answer within 0.3 s")
    assert time.monotonic() - began < 1.5
    assert proxy.got.get(timeout=5)[0] == f"http://receiver.invalid/{SECRET}"


def test_a_yes_whose_body_never_ends_is_a_yes(serve):
    began = time.monotonic()
    outcome = hook(serve(drips(b"HTTP/1.1 200 OK\r\n\r\n")), 1.0).send({})
    assert outcome == Outcome(True, "HTTP 200")
    assert time.monotonic() - began < 4


def test_a_receiver_that_says_nothing_is_cut_off_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:        # the kernel accepts, nobody answers
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
        assert hook(url, 0.2).send({}) == Outcome(False, "no answer within 0.2 s")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(webhook_module, "operation_s", 0.1)
            assert hook(url).send({}) == Outcome(False, "ReadTimeout")


def test_an_address_where_nobody_is_says_what_the_kernel_said():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
    assert hook(url).send({}) == Outcome(False, "ConnectionError (Connection refused)")
    outcome = hook("http://no-such-host.invalid/" + SECRET).send({})
    assert outcome.ok is False and outcome.why == "ConnectionError (the name was not resolved)"


@pytest.mark.parametrize("url", [
    "ftp://x/" + SECRET, "nonsense", "http://[::1/" + SECRET, "http://" + "x" * 300 + "/" + SECRET])
def test_an_address_that_is_none_is_a_failure_and_no_crash(url):
    outcome = hook(url).send({})
    assert not outcome.ok and SECRET not in outcome.why


def test_a_test_shows_the_receivers_answer_in_one_line_without_our_secrets(serve):
    def echo(handler):
        says(403, f"no\nentry for {server.url} with tok3n ".encode() + b"\x1b[31m" + b"z" * 100_000)(handler)
    server = serve(echo)
    shown = hook(server, Token="tok3n").test(WRITER.payload(trial(WALL), WALL))
    assert shown.startswith("HTTP 403: no entry for *** with *** [31mzzz") and len(shown) < 600
    assert server.got.get(timeout=5)[2]["kind"] == "test"
    assert hook(serve(says(200, b"ok"))).test({}) == "HTTP 200: ok"


def test_no_secret_reaches_a_log_or_the_journal(path, serve, caplog):
    """Also not through urllib3, whose debug lines hold whole addresses and whose warnings do for a malformed header."""
    caplog.set_level(logging.DEBUG)
    answers = iter([says(500), lambda h: h.wfile.write(b"HTTP/1.1 500 no\r\n: odd\r\nbad header\r\n\r\n"), says(200)])
    house = House(path, hook(serve(lambda handler: next(answers)(handler)), Token="tok3n"))
    house.box.tell(Alert("opened", incident()))
    house.said.wait("alert.delivered")
    assert house.stop()
    everything = caplog.text + repr(house.said.lines) + repr(house.box.states())
    assert len(house.said.of("alert.failed")) == 2
    assert "hunter2" not in everything and "tok3n" not in everything


def test_a_tls_failure_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def refuse():
            peer, _ = listener.accept()
            with peer:
                peer.recv(1000)
                peer.sendall(b"plain text, no TLS\r\n")
        threading.Thread(target=refuse, daemon=True).start()
        outcome = hook(f"https://127.0.0.1:{listener.getsockname()[1]}/{SECRET}").send({})
    assert outcome.why in ("SSLError (WRONG_VERSION_NUMBER)", "SSLError (RECORD_LAYER_FAILURE)")
