"""Apprise in its child process, against real sockets that answer, refuse, drip, or are none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from email import message_from_string
from email.header import decode_header, make_header
from pathlib import Path

import pytest
from tests.fakes.house import WRITER
from tests.fakes.receivers import Server, says
from tests.fakes.tell import WALL, incident

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.procfs import pids, title
from vllm_watchdog.tell import apprise_channel
from vllm_watchdog.tell.apprise_channel import AppriseChannel
from vllm_watchdog.tell.channel import Outcome
from vllm_watchdog.tell.manners import Manners

SECRET = "hunter2hunter2"
PAYLOAD = WRITER.payload(Alert("opened", incident()), WALL)


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1], channel(f"json://user:{SECRET}@127.0.0.1:{servers[-1].port}/{SECRET}")

    yield start
    for server in servers:
        server.close()


def channel(url, timeout_s=20.0):
    return AppriseChannel("oncall", url, Manners(together=True), timeout_s, lambda: WALL)


def test_a_message_goes_through_apprise_and_names_us(serve):
    server, told = serve(says(200))
    assert told.send(PAYLOAD) == Outcome(True, "HTTP 200")
    _, headers, body = server.got.get(timeout=5)
    assert headers["User-Agent"] == "llm-watchdog"
    assert body["title"] == PAYLOAD["headline"] and body["type"] == "failure"
    assert "Cause: oom_runtime: CUDA out of memory\n" in body["message"]


def test_a_no_is_named_with_what_the_receiver_asked_and_without_secrets(serve):
    _, told = serve(says(429, f"slow down, {SECRET}".encode(), Retry_After="120"))
    outcome, shown = told.test(PAYLOAD)
    assert outcome == Outcome(False, "HTTP 429", 120.0)
    assert "error=429" in shown and "slow down" in shown and SECRET not in shown


@pytest.mark.slow
def test_a_receiver_that_drips_is_cut_off_with_the_child(serve, monkeypatch):
    def drips(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
        for _ in range(3_000):
            handler.wfile.write(b"x")
            time.sleep(0.01)

    monkeypatch.setattr(apprise_channel, "START_S", 2.0)
    server, _ = serve(drips)
    began = time.monotonic()
    outcome = channel(f"json://127.0.0.1:{server.port}/{SECRET}", 0.5).send(PAYLOAD)
    assert outcome == Outcome(False, "no answer within 0.5 s")
    assert time.monotonic() - began < 10
    assert not [pid for pid in pids() if "apprise_child" in title(pid) and parent(pid) == os.getpid()]


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_mail_server_that_is_not_there_is_named_without_the_password():
    outcome, shown = channel(f"mailto://user:{SECRET}@127.0.0.1:1/?to=a@example.com&from=b@example.com").test(PAYLOAD)
    assert outcome == Outcome(False, "Socket Exception: [Errno 111] Connection refused")
    assert outcome.why in shown and SECRET not in shown


class Post:
    """An SMTP server for one mail, which it keeps; it wants to know who sends."""

    def __init__(self, accepts=True):
        self.mail, self.accepts = "", accepts
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with self.listener:
            peer, _ = self.listener.accept()
        with peer, peer.makefile("rwb", buffering=0) as line:
            line.write(b"220 here\r\n")
            while said := line.readline().decode().upper():
                if said.startswith("EHLO"):
                    line.write(b"250-here\r\n250-SMTPUTF8\r\n250 AUTH PLAIN\r\n")
                elif said.startswith("AUTH"):
                    line.write(b"235 hello\r\n" if self.accepts else f"535 no, {SECRET} is wrong\r\n".encode())
                elif said.startswith("DATA"):
                    line.write(b"354 go on\r\n")
                    while (text := line.readline().decode()) != ".\r\n":
                        self.mail += text
                    line.write(b"250 taken\r\n")
                elif said.startswith("QUIT"):
                    line.write(b"221 bye\r\n")
                    return
                else:
                    line.write(b"250 ok\r\n")


def mail_to(port):
    return channel(f"mailto://user:{SECRET}@127.0.0.1:{port}/?to=a@example.com&from=b@example.com&mode=insecure")


def test_a_mail_is_taken_with_its_title_and_text():
    post = Post()
    outcome, _ = mail_to(post.port).test(PAYLOAD)
    assert outcome == Outcome(True, "taken")
    mail = message_from_string(post.mail)
    assert str(make_header(decode_header(mail["Subject"]))) == PAYLOAD["headline"] and mail["To"] == "a@example.com"
    parts = [part.get_payload(decode=True).decode() for part in mail.walk() if not part.is_multipart()]
    assert "Cause: oom_runtime: CUDA out of memory" in parts[0].replace("<br/>", "\n")


def test_a_mail_server_that_refuses_the_password_is_told_without_it():
    outcome, shown = mail_to(Post(accepts=False).port).test(PAYLOAD)
    assert not outcome.ok and "535" in outcome.why and SECRET not in outcome.why + shown


def test_an_address_that_apprise_does_not_know_says_so_before_anything_is_sent():
    told = channel(f"nosuchthing://{SECRET}")
    assert told.send(PAYLOAD) == Outcome(False, "Apprise does not know this address")
    assert told.unusable() == "Apprise does not know this address, see https://appriseit.com/services"


def test_an_address_that_apprise_knows_is_usable():
    assert channel("mailtos://user:pass@example.com").unusable() == ""


def test_an_apprise_that_dies_or_talks_nonsense_is_a_failure_and_no_crash(monkeypatch):
    monkeypatch.setattr(apprise_channel, "CHILD", ("/bin/sh", "-c", "exit 3"))
    assert channel("json://x").send(PAYLOAD) == Outcome(False, "Apprise failed (exit code 3)")
    monkeypatch.setattr(apprise_channel, "CHILD", ("/no/such/program",))
    assert channel("json://x").send(PAYLOAD) == Outcome(False, "Apprise can't be started (No such file or directory)")


def test_a_child_ends_with_its_parent():
    with socket.create_server(("127.0.0.1", 0)) as listener:        # accepts, and never answers
        code = f"""
from vllm_watchdog.tell.apprise_channel import AppriseChannel
from vllm_watchdog.tell.manners import Manners
AppriseChannel("x", "json://127.0.0.1:{listener.getsockname()[1]}/", Manners(), 100.0).send(
    {{"kind": "opened", "urgency": "page", "headline": "h", "lines": []}})"""
        daemon = subprocess.Popen([sys.executable, "-c", code])
        listener.settimeout(30)
        peer, _ = listener.accept()
        with peer:
            daemon.kill()
            daemon.wait(10)
            peer.settimeout(30)
            while peer.recv(4096):      # what it had sent already; then the end of its connection
                pass


@pytest.mark.slow
def test_a_child_ends_itself_at_its_limit():
    child = subprocess.Popen(apprise_channel.CHILD, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"json://127.0.0.1:{listener.getsockname()[1]}/"
        question = {"url": url, "title": "t", "body": "b", "kind": "test", "limit_s": 1.0}
        with child.stdin as pipe:
            pipe.write(json.dumps(question).encode())
        assert child.wait(30) == -signal.SIGALRM
