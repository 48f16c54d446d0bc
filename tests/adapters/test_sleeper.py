"""Sleep and wake over real sockets: what is asked, what counts as done, and for how long it may take."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from pydantic import SecretStr
from tests.adapters.test_probe import Server, answer, drip, say_nothing, server

from vllm_watchdog.act.sleeper import BODY_CAP, Sleeper
from vllm_watchdog.core.commands import Sleep, Wake
from vllm_watchdog.core.events import Event, Slept, Woke
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.launch import Launch

B1 = Mark("backup", 1)
OK = answer(200, b"")


def launch(port: int, host: str = "127.0.0.1", api_key: str | None = None) -> Launch:
    return Launch("backup", ("vllm",), (), Path("/"), host, port, ("qwen", "other"), SecretStr(api_key) if api_key else None,
                  Path("/tmp/x.log"))


def do(order: Sleep | Wake, port: int, **options: Any) -> Slept | Woke:
    posted: Queue[Event] = Queue()
    Sleeper(launch(port, **options), posted.put, time.monotonic).do(order)
    event = posted.get(timeout=5)
    assert isinstance(event, Slept | Woke) and posted.empty()
    return event


def asked(one: Server) -> list[str]:
    return [request.split(b" HTTP", 1)[0].decode() for request in one.seen]


@contextmanager
def by_path(**replies: Callable[[bytes, socket.socket], bytes | None]) -> Iterator[Server]:
    """`wake_up=answer(500)`: every other path is answered with 200."""
    def reply(request: bytes, connection: socket.socket) -> bytes | None:
        path = request.split(b" ")[1].decode().strip("/").partition("?")[0].rpartition("/")[2]
        return replies.get(path, OK)(request, connection)

    with server(reply) as one:
        yield one


def test_a_sleep_is_of_level_one_and_done_when_the_engine_says_so() -> None:
    with by_path() as one:
        event = do(Sleep(B1, 2.0), one.port)
        assert asked(one) == ["POST /sleep?level=1&mode=wait"]
    assert isinstance(event, Slept) and (event.mark, event.why) == (B1, "") and 0 <= event.took_s < 2


def test_a_wake_is_done_when_a_token_has_come() -> None:
    with by_path() as one:
        event = do(Wake(B1, 2.0), one.port)
        assert asked(one) == ["POST /wake_up", "POST /v1/completions"]
        assert one.seen[1].endswith(b'{"model": "qwen", "prompt": "a", "max_tokens": 1, "temperature": 0}')
        assert b"Content-Type: application/json" in one.seen[1]
    assert isinstance(event, Woke) and (event.mark, event.why) == (B1, "")


@pytest.mark.parametrize(("order", "path", "why"), [
    (Sleep(B1, 2.0), "sleep", "/sleep?level=1&mode=wait answered 500"), (Wake(B1, 2.0), "wake_up", "/wake_up answered 500"),
    (Wake(B1, 2.0), "completions", "/v1/completions answered 500")])
def test_any_other_answer_than_200_is_told_and_nothing_more_is_asked(order: Sleep | Wake, path: str, why: str) -> None:
    with by_path(**{path: answer(500, b"CUDA Error")}) as one:
        assert do(order, one.port).why == why
        assert asked(one)[-1].split("?")[0].endswith(path)


@pytest.mark.parametrize("behaviour", [drip, say_nothing])
@pytest.mark.parametrize(("order", "path"), [
    (Sleep(B1, 0.3), "sleep"), (Wake(B1, 0.3), "wake_up"), (Wake(B1, 0.3), "completions")])
def test_an_engine_that_drips_or_says_nothing_holds_an_order_no_longer_than_its_deadline(
        order: Sleep | Wake, path: str, behaviour: Any) -> None:
    """Both parts of a wake share one deadline."""
    with by_path(**{path: behaviour}) as one:
        event = do(order, one.port)
    assert event.why.endswith(": no whole answer in time") and 0.25 < event.took_s < 1.0


def test_an_engine_that_is_gone_is_told_as_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert do(Sleep(B1, 1.0), port).why == "/sleep?level=1&mode=wait: connection refused"
    assert do(Wake(B1, 1.0), port).why == "/wake_up: connection refused"


def test_an_answer_that_is_cut_or_endless_is_no_answer() -> None:
    with by_path(sleep=lambda *_: b"HTTP/1.1 200 OK\r\ncontent-le") as one:
        assert do(Sleep(B1, 0.3), one.port).why.startswith("/sleep?level=1&mode=wait: ")

    def endless(_: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (BODY_CAP + 9))

    with by_path(sleep=endless) as one:
        assert do(Sleep(B1, 2.0), one.port).why == "/sleep?level=1&mode=wait: more than 1 MiB"


def test_the_key_goes_with_every_order_and_into_no_reason() -> None:
    with by_path(completions=answer(401)) as one:
        event = do(Wake(B1, 2.0), one.port, api_key="s3cret")
        assert all(b"Authorization: Bearer s3cret" in request for request in one.seen)
    assert event.why == "/v1/completions answered 401" and "s3cret" not in repr(event)


def test_an_engine_on_the_ipv6_loopback_is_reached() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        port = probe.getsockname()[1]
    assert do(Sleep(B1, 1.0), port, host="::1").why == "/sleep?level=1&mode=wait: connection refused"


def test_whoever_gives_an_order_is_not_held_up() -> None:
    posted: Queue[Event] = Queue()
    with by_path(sleep=say_nothing) as one:
        began = time.monotonic()
        Sleeper(launch(one.port), posted.put, time.monotonic).do(Sleep(B1, 0.3))
        assert time.monotonic() - began < 0.2
        posted.get(timeout=5)
