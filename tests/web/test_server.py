from __future__ import annotations

import asyncio
import json
import socket
import time

import psutil
import pytest
from tests.web.site import BEARER, Site, story

from vllm_watchdog.web import server, stream


def listen(site: Site) -> socket.socket:
    link = site.connect()
    link.sendall(b"GET /api/v1/events HTTP/1.0\r\nHost: localhost\r\n\r\n")       # 1.0: no chunks in between
    return link


def hung_up(link: socket.socket) -> bool:
    try:
        return not link.recv(100)
    except ConnectionError:
        return True


def read_until(link: socket.socket, wanted: bytes, within_s: float = 10.0) -> bytes:
    data, end = b"", time.monotonic() + within_s
    while wanted not in data and time.monotonic() < end:
        part = link.recv(1 << 16)
        if not part:
            break
        data += part
    assert wanted in data, data[-300:]
    return data


# -- who may ask

@pytest.mark.parametrize("host", [
    "localhost", "localhost:80", "127.0.0.1", "127.0.0.1:9178", "[::1]:9178", "10.1.2.3", "LOCALHOST"])
def test_our_names_and_every_address_are_answered(site: Site, host: str) -> None:
    assert site.get("/readyz", {"Host": host}).status == 200


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:9178", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1"])
def test_a_foreign_name_is_dns_rebinding(site: Site, host: str) -> None:
    for path in ("/", "/api/v1/status", "/nothing"):
        assert site.get(path, {"Host": host}).status == 421
    assert site.post("/api/v1/pause", BEARER | {"Host": host}).status == 421 and not site.asked


@pytest.mark.parametrize("headers", [
    {"Origin": "https://evil.example"}, {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}])
def test_a_page_of_another_site_can_not_operate_even_with_the_token(site: Site, headers: dict[str, str]) -> None:
    assert site.post("/api/v1/pause", BEARER | headers).status == 403 and not site.asked


def test_our_own_page_can(site: Site) -> None:
    own = {"Origin": f"http://127.0.0.1:{site.port}", "Sec-Fetch-Site": "same-origin"}
    assert site.post("/api/v1/pause", BEARER | own).status == 200


def test_no_site_is_ever_told_that_it_may(site: Site) -> None:
    preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = site.get("/api/v1/pause", preflight, "OPTIONS")
    assert answer.status in (403, 405)
    for path in ("/", "/api/v1/status", "/nothing"):
        headers = site.get(path).headers
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert headers["X-Content-Type-Options"] == "nosniff" and "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/api/v1/status", 405),
                                                       ("POST", "/", 405), ("GET", "/api/v1/pause", 405)])
def test_every_error_is_a_problem(site: Site, method: str, path: str, status: int) -> None:
    answer = site.get(path, method=method)
    assert answer.status == status and answer.problem
    assert status != 405 or answer.headers["Allow"]


# -- the stream

def test_a_stream_begins_with_the_report_and_goes_on_with_what_changes(site: Site) -> None:
    with listen(site) as link:
        data = read_until(link, b"\n\nevent: report")
        site.document = site.document | {"health": "down"}
        site.web.changed()
        site.web.said({"say": "engine.phase", "engine": "p#1", "was": "dead", "now": "held", "because": "exit"})
        data = read_until(link, b'"health": "down"')
        if b"event: said" not in data:
            data += read_until(link, b"event: said")
        lines = [json.loads(part.partition(b"data: ")[2]) for part in data.split(b"\n\n") if part.startswith(b"event: said")]
        assert [(line["say"], line["words"]["en"], line["words"]["zh"]) for line in lines] == [
            ("engine.phase", "p#1: dead -> held (exit)", "p#1：dead → held（exit）")]


def test_reports_are_not_told_more_often_than_anybody_can_read(site: Site) -> None:
    with listen(site) as link:
        read_until(link, b"event: report")
        end, told = time.monotonic() + 1.0, 0
        link.settimeout(0.05)
        while time.monotonic() < end:
            site.web.changed()
            try:
                told += link.recv(1 << 20).count(b"event: report")
            except TimeoutError:
                continue
        assert 1 <= told <= 5


def test_a_silent_stream_still_beats(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_S", 0.05)
    with listen(site) as link:
        read_until(link, b": nothing new")


def test_a_reader_that_is_too_far_behind_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CALM_S", 0.3)
    with listen(site) as link:
        read_until(link, b"event: report")
        for number in range(stream.LINES + 50):
            site.web.said({"say": "x", "number": number})
        while part := link.recv(1 << 16):
            assert b"event: said" not in part
    assert site.get("/readyz").status == 200


def test_a_reader_is_told_the_newest_report_though_nobody_looked_while_it_changed() -> None:
    count = iter(range(10))
    hub = stream.Hub(lambda: {"number": next(count)})
    for number in (0, 1):
        assert not hub.watched
        with hub.reader() as reader:
            assert hub.watched
            assert f'"number": {number}'.encode() in (asyncio.run(hub.next(reader)) or b"")


def test_what_waits_for_one_reader_is_bounded() -> None:
    hub = stream.Hub(dict)
    with hub.reader() as reader:
        for number in range(stream.LINES * 3):
            hub.said({"say": "x", "number": number})
        assert len(reader.lines) == stream.LINES + 1
        assert asyncio.run(hub.next(reader)) is None, "it has missed lines: it is cut off"


def test_a_reader_that_takes_nothing_is_cut_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_watchdog.web.api.WRITE_S", 0.2)
    monkeypatch.setattr(stream, "CALM_S", 0.0)
    site.document = site.document | {"padding": "x" * (8 << 20)}
    with listen(site) as link:
        link.recv(100)
        end = time.monotonic() + 10
        while site.web._hub._readers and time.monotonic() < end:
            site.web.changed()
            time.sleep(0.02)
        assert not site.web._hub._readers


def test_too_many_streams_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "READERS", 2)
    links = [listen(site) for _ in range(2)]
    for link in links:
        read_until(link, b"event: report")
    refused = site.get("/api/v1/events")
    assert refused.status == 503 and refused.headers["Retry-After"] == "10"
    for link in links:
        link.close()
    end = time.monotonic() + 10
    while site.web._hub.full and time.monotonic() < end:
        site.web.changed()
        time.sleep(0.02)
    assert not site.web._hub.full


def test_a_stop_ends_the_streams(site: Site) -> None:
    with listen(site) as link:
        read_until(link, b"event: report")
        site.web.stop(5)
        while link.recv(1 << 16):
            pass


# -- limits

def test_a_connection_too_many_is_closed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    links = [site.connect() for _ in range(2)]
    for link in links:
        link.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in link.recv(1000)
    with site.connect() as more:
        more.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert hung_up(more)
    for link in links:
        link.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_request_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    site = Site(tmp_path, story().document())
    with site.connect() as link:
        link.sendall(sent)
        assert hung_up(link)
    site.web.stop(5)


def test_an_answer_that_nobody_reads_is_not_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_S", 1.0)
    site.document = site.document | {"padding": "x" * (16 << 20)}
    with site.connect() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        own, end = link.getsockname()[1], time.monotonic() + 10

        def served() -> bool:
            return any(seen.status == "ESTABLISHED" and seen.laddr[1] == site.port and seen.raddr[1] == own
                       for seen in psutil.Process().net_connections("tcp") if seen.raddr)

        for wanted in (True, False):
            while served() is not wanted and time.monotonic() < end:
                time.sleep(0.02)
            assert served() is wanted


def test_long_lines_are_refused(site: Site) -> None:
    assert site.get("/" + "x" * 9000).status == 400
    assert site.get("/", {"X": "x" * 9000}).status == 400


# -- its life

def test_a_port_that_is_taken_is_said_and_nothing_else_happens(site: Site, tmp_path) -> None:
    second = server.Web("127.0.0.1", site.port, "", site.web._sources, site.said)
    second.start()
    (said,) = site.said.of("web.no_page")
    assert said == {"listen": f"127.0.0.1:{site.port}", "why": "Address already in use"}
    second.changed()
    second.said({"say": "x"})
    second.stop(5)
    assert site.get("/readyz").status == 200


def test_a_page_that_was_never_started_can_be_stopped(site: Site) -> None:
    never = server.Web("127.0.0.1", 1, "", site.web._sources, site.said)
    never.changed()
    never.stop(1)


def test_where_it_listens_is_said(site: Site) -> None:
    assert site.said.of("web.listening") == [{"url": f"http://127.0.0.1:{site.port}/"}]
