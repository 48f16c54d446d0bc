"""The gateway beside its daemon: follows its word, outlives it, tells it of the dead, ends as asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.harness import STARTED, Backend, Bench, request, route, run, running, until
from tests.gateway.test_failover import hang

from vllm_watchdog.app.gateway_link import GatewayLink
from vllm_watchdog.gateway import follow
from vllm_watchdog.gateway.report import casualties


class Daemon:
    """The daemon's control socket, as far as the gateway uses it."""

    def __init__(self, path: Path) -> None:
        self.path, self.said, self.listeners = path, list[dict[str, Any]](), set[asyncio.StreamWriter]()
        self.document: dict[str, Any] = {}
        self.waiting = set[asyncio.StreamWriter]()
        self.answer: dict[str, Any] | None = {"ok": True}       # None: it hangs

    async def start(self) -> Daemon:
        self.path.unlink(missing_ok=True)
        self.server = await asyncio.start_unix_server(self._serve, self.path)
        STARTED.append(self)        # a test that fails must not leave it open: the loop would never close
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        self.said.append(asked)
        if asked["verb"] == "route":
            self.listeners.add(writer)
            self._send(writer)
        elif self.answer is not None:
            writer.write(json.dumps(self.answer).encode() + b"\n")
            writer.close()
        else:
            self.waiting.add(writer)

    def _send(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\n" + json.dumps(self.document).encode() + b"\n")

    def tell(self, document: dict[str, Any]) -> None:
        self.document = document
        for writer in self.listeners:
            self._send(writer)

    def die(self) -> None:
        self.server.close()
        for writer in self.listeners | self.waiting:
            writer.transport.abort()
        self.listeners.clear()


def serving(bench: Bench) -> str:
    return str(next(iter(bench.gateway.dispatcher.lines.values())))


def test_the_route_is_followed_within_50_ms_with_and_without_the_daemon() -> None:
    async def work() -> None:
        async with running() as bench:
            loop = asyncio.get_running_loop()
            target = {"engine": "a", "host": "127.0.0.1", "port": 9}
            bench.serve({**target, "generation": 1})
            daemon = Daemon(bench.gateway.plan.control)
            daemon.document = route({**target, "generation": 2})
            await daemon.start()
            await until(lambda: serving(bench) == "a:2", "the daemon is heard", 3)
            at = loop.time()
            daemon.tell(route({**target, "generation": 3}))
            await until(lambda: serving(bench) == "a:3", "followed")
            assert loop.time() - at < 0.05
            daemon.die()
            await asyncio.sleep(0.02)
            assert serving(bench) == "a:3", "the last word holds"
            at = loop.time()
            draft = bench.folder / "draft"
            draft.write_text(json.dumps(route({**target, "generation": 4})))
            draft.replace(bench.gateway.plan.route_file)
            await until(lambda: serving(bench) == "a:4", "followed without the daemon")
            assert loop.time() - at < 0.1  # 50 ms, and this machine's noise
            daemon.document = route(None, why="starting")
            await daemon.start()
            await until(lambda: serving(bench) == "starting", "the daemon's next life is heard", 3)
            daemon.die()

    run(work())


def test_a_word_that_can_not_be_read_changes_nothing_and_is_said_once() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            for _ in range(3):
                bench.gateway.plan.route_file.write_text('{"version": 9, "services": 5}')
                os.utime(bench.gateway.plan.route_file, ns=(0, os.urandom(3)[0]))
                bench.gateway.follow.read_file()
            assert (await bench.complete()).status == 200
            assert [fields["why"] for name, fields in bench.said if name == "gateway.route_unreadable"] == [
                f"{bench.gateway.plan.route_file}: services: '5', expected list"
            ]

    run(work())


def test_the_daemon_is_told_how_busy_it_is_while_it_listens() -> None:
    async def work() -> None:
        backend = await Backend().start()
        link = GatewayLink({}, (), lambda _: None, lambda _: None)
        async with running() as bench:
            daemon = await Daemon(bench.gateway.plan.control).start()
            daemon.tell(route(backend.serving(5)))
            await until(lambda: serving(bench) == "a:5", "the daemon is heard", 3)
            client = await bench.connect()

            def told() -> list[Any]:
                return [each for each in daemon.said if each["verb"] == "load" and each["connections"] == 1]

            await until(lambda: bool(told()), "the daemon is told", 5)
            link.take(told()[-1])       # the daemon's own reading of it
            report = link.report()
            assert report and report["services"] == [{
                "service": "primary", "waiting": 0, "waiting_long": 0, "engine": "a", "requests": 0, "max_concurrent": None,
                "prompt_tokens": 0, "max_tokens": None, "throttled": None, "breaker": "closed"}]
            client.close()
            daemon.die()

    run(work())


def test_a_daemon_that_hangs_is_told_nothing_more_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "tell_s", 0.1)

    async def work() -> None:
        async with running() as bench:
            daemon = await Daemon(bench.gateway.plan.control).start()
            daemon.tell(route(None))
            heard = bench.gateway.follow
            await until(lambda: heard.listens, "the daemon is heard", 3)
            daemon.answer = None
            assert heard.tell({"verb": "load"})
            await until(lambda: not heard.listens, "its silence is noticed", 3)
            assert heard.connected
            daemon.tell(route(None))
            await until(lambda: heard.listens, "its word is noticed", 3)
            daemon.die()

    run(work())


def test_what_a_daemon_does_not_take_is_said_once() -> None:
    async def work() -> None:
        async with running() as bench:
            daemon = await Daemon(bench.gateway.plan.control).start()
            daemon.answer = {"ok": False, "text": "verb 'load' is not known"}
            daemon.tell(route(None))
            heard = bench.gateway.follow
            await until(lambda: heard.listens, "the daemon is heard", 3)
            for _ in range(3):
                assert heard.tell({"verb": "load"})
            await until(lambda: len([each for each in daemon.said if each["verb"] == "load"]) >= 3, "it is told", 3)
            await until(lambda: not heard._telling, "it has answered", 3)
            assert [fields for name, fields in bench.said if name == "gateway.untold"] == [
                {"what": "load", "why": "verb 'load' is not known"}]
            daemon.die()

    run(work())


def test_the_daemon_is_told_who_was_there_and_nobody_waits_for_it() -> None:
    async def work() -> None:
        backend = await Backend(hang, "a").start()
        async with running() as bench:
            deaths = bench.gateway.dispatcher.deaths
            deaths._report = lambda target, all_: bench.gateway.follow.tell(casualties(target, all_))
            daemon = await Daemon(bench.gateway.plan.control).start()
            daemon.tell(route(backend.serving(5)))
            await until(lambda: serving(bench) == "a:5", "the daemon is heard", 3)
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b'{"prompt":"a secret"}'))
            await until(lambda: backend.asked, "the engine has it")
            backend.die()
            def deaths_told() -> list[Any]:
                return [message for message in daemon.said if message["verb"] == "casualties"]

            await until(lambda: bool(deaths_told()), "the daemon is told")
            (told,) = deaths_told()
            assert (told["engine"], told["generation"], len(told["requests"])) == ("a", 5, 1)
            assert "secret" not in json.dumps(told)
            daemon.die()
            client.close()

    run(work())


def start(folder: Path, port: int, **more: Any) -> subprocess.Popen[bytes]:
    code = (
        "import sys, json\nfrom pathlib import Path\nfrom vllm_watchdog.gateway.app import run\n"
        "from vllm_watchdog.gateway_plan import GatewayPlan\nmore = json.loads(sys.argv[3])\n"
        "folder = Path(sys.argv[1])\n"
        "plan = GatewayPlan('127.0.0.1', int(sys.argv[2]), folder / 'c.sock', folder / 'route.json',"
        " folder / 'admin.sock', **more)\nsys.exit(run(plan))"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, str(folder), str(port), json.dumps(more)], stderr=subprocess.PIPE
    )


def test_the_process_serves_drains_and_exits_0(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "route.json").write_text(json.dumps(route(None, why="starting")))
    gateway = start(tmp_path, port, drain_s=5, hold_s=0.2)
    assert gateway.stderr is not None
    said = b""
    while b"gateway.ready" not in said:
        line = gateway.stderr.readline()
        assert line, said
        said += line
    gateway.send_signal(signal.SIGHUP)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        assert json.load(answer)["services"]["primary"]["state"] == "holding"
    taken = start(tmp_path, port)
    assert taken.wait(10) == 1
    assert b"address already in use" in (taken.stderr.read() if taken.stderr else b"").lower()
    with socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(request("POST", "/v1/completions", b"{}"))
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5)  # after the held one
        gateway.send_signal(signal.SIGTERM)
        held.settimeout(5)
        assert held.recv(1000).startswith(b"HTTP/1.1 503 "), "held requests end in order, too"
    assert gateway.wait(10) == 0
    rest = gateway.stderr.read()
    assert b"Traceback" not in said + rest
    assert b"gateway.drained left=0" in rest
    assert not (tmp_path / "admin.sock").exists()
    for each in (gateway, taken):
        each.stderr.close()  # type: ignore[union-attr]
