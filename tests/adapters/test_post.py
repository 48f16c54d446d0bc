"""The HTTP of a channel, against real sockets that answer, refuse, hang, drip and lie."""

from __future__ import annotations

import logging
import socket
import threading
import time
from email.utils import formatdate

import pytest
from tests.fakes.house import WRITER, House
from tests.fakes.receivers import Server, says
from tests.fakes.tell import WALL, incident

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.tell import post as post_module
from vllm_watchdog.tell.channel import HttpChannel, Outcome, parts
from vllm_watchdog.tell.machine import WebhookForm
from vllm_watchdog.tell.manners import Manners
from vllm_watchdog.tell.payload import trial

SECRET = "T00/hunter2"


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def drips(first):
    """One byte each 10 ms for ever: no single socket operation ever times out."""
    def answer(handler):
        handler.wfile.write(first)
        for _ in range(1_000):
            handler.wfile.write(b"x")
            threading.Event().wait(0.01)
    return answer


def hook(server_or_url, timeout_s=5.0, secret="", **headers):
    url = server_or_url if isinstance(server_or_url, str) else server_or_url.url
    secrets = (*parts(url), secret, *headers.values())
    return HttpChannel("oncall", WebhookForm(url, headers, secret), secrets, Manners(), timeout_s, lambda: WALL)


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
    (says(413), Outcome(False, "HTTP 413", refused=True)),
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
            patch.setattr(post_module, "operation_s", 0.1)
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
    outcome, shown = hook(server, Token="tok3n").test(WRITER.payload(trial(WALL), WALL))
    assert outcome == Outcome(False, "HTTP 403")
    assert shown.startswith("no entry for *** with *** [31mzzz") and len(shown) == 500
    assert server.got.get(timeout=5)[2]["kind"] == "test"
    assert hook(serve(says(200, b"ok"))).test({}) == (Outcome(True, "HTTP 200"), "ok")


def test_no_secret_reaches_a_log_or_the_journal(tmp_path, serve, caplog):
    """Also not through urllib3, whose debug lines hold whole addresses and whose warnings do for a malformed header."""
    caplog.set_level(logging.DEBUG)
    answers = iter([says(500), lambda h: h.wfile.write(b"HTTP/1.1 500 no\r\n: odd\r\nbad header\r\n\r\n"), says(200)])
    house = House(tmp_path / "history.db", hook(serve(lambda handler: next(answers)(handler)), Token="tok3n"))
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
