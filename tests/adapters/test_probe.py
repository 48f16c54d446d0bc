"""ProbeSense against real sockets: every answer a server can give, and every way not to give one."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from vllm_watchdog.core.events import Answered, Probed, Scraped
from vllm_watchdog.core.readings import Health, Mark, Metrics, Progress, Unknown
from vllm_watchdog.exchange import Exchange, RefusedError, SilentError, TooLongError
from vllm_watchdog.sense.metrics import parse
from vllm_watchdog.sense.probe import BODY_CAP, ProbeSense

MARK = Mark("primary", 3)
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Server:
    """Answers each request with bytes, or lets `reply` do as it likes with the connection."""

    reply: Callable[[bytes, socket.socket], bytes | None]
    seen: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                while request := whole(connection):
                    self.seen.append(request)
                    answer = self.reply(request, connection)
                    if answer is None:
                        return
                    connection.sendall(answer)
            except OSError:
                return


def whole(connection: socket.socket) -> bytes:
    """One request, head and body."""
    request = b""
    while part := connection.recv(65536):
        request += part
        head, end, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if end and len(body) >= (int(length[1]) if length else 0):
            return request
    return b""


@contextmanager
def server(reply: Callable[[bytes, socket.socket], bytes | None]) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Server(reply, port=listener.getsockname()[1])
        thread = threading.Thread(target=one.serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield one
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


def answer(status: int, body: bytes = b"") -> Callable[[bytes, socket.socket], bytes]:
    return lambda *_: b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


def drip(_: bytes, connection: socket.socket) -> None:
    """A byte each 20 ms, in the head of the answer, for ever."""
    with pytest.raises(OSError):
        for byte in b"HTTP/1.1 200 OK\r\n" + b"x-slow: yes\r\n" * 1000:
            connection.sendall(bytes((byte,)))
            time.sleep(0.02)


def say_nothing(_: bytes, connection: socket.socket) -> None:
    connection.recv(1)


@dataclass
class Launch:
    port: int
    name: str = "primary"
    host: str = "0.0.0.0"
    model: str = "qwen"
    api_key: Any = None


class Secret:
    def get_secret_value(self) -> str:
        return "s3cret"


class Desk:
    """A ProbeSense and what it posted."""

    def __init__(self, port: int, timeout_s: float = 2.0, api_key: Any = None) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        launch: Any = Launch(port, api_key=api_key)
        self.sense = ProbeSense(launch, self.events.put, time.monotonic, "none", timeout_s)
        self.sense.start()

    def wake(self) -> Probed:
        self.sense.wake(MARK)
        event = self.events.get(timeout=5)
        assert isinstance(event, Probed)
        assert event.mark == MARK
        return event

    def scraped(self) -> Scraped:
        event = self.events.get(timeout=5)
        assert isinstance(event, Scraped)
        return event

    def ask(self, deadline_s: float = 2.0) -> Answered:
        self.sense.ask(MARK, deadline_s)
        event = self.events.get(timeout=5)
        assert isinstance(event, Answered)
        return event


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(*args: Any, **kwargs: Any) -> Desk:
        made.append(Desk(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.sense.stop(5)
        assert not one.sense._thread.is_alive()


@pytest.mark.parametrize(
    ("status", "health"),
    [(200, Health.OK), (500, Health.DEAD), (503, Health.DEAD), (404, Health.ODD), (301, Health.ODD)],
)
def test_the_status_of_health_is_named(desk: Any, status: int, health: Health) -> None:
    with server(answer(status)) as one:
        assert desk(one.port).wake().health is health


def test_nobody_listening_is_refused(desk: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert desk(port).wake() == Probed(pytest.approx(time.monotonic(), abs=5), MARK, Health.REFUSED)


def test_a_port_that_is_bound_but_not_listening_is_refused(desk: Any) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert desk(bound.getsockname()[1]).wake().health is Health.REFUSED


@pytest.mark.parametrize("behaviour", [drip, say_nothing])
def test_a_server_that_drips_or_says_nothing_holds_no_longer_than_the_deadline(desk: Any, behaviour: Any) -> None:
    with server(behaviour) as one:
        began = time.monotonic()
        assert desk(one.port, timeout_s=0.3).wake().health is Health.SILENT
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "reply", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", b"\x00\x01 not http\r\n\r\n"]
)
def test_an_answer_that_is_not_whole_is_silence(desk: Any, reply: bytes) -> None:
    def cut(_: bytes, connection: socket.socket) -> None:
        connection.sendall(reply)

    with server(cut) as one:
        assert desk(one.port).wake().health is Health.SILENT


def test_an_endless_body_is_cut_at_the_cap() -> None:
    def endless(_: bytes, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with server(endless) as one, pytest.raises(TooLongError, match="more than 1 MiB"):
        Exchange("127.0.0.1", one.port).ask("GET", "/metrics", 5, 1 << 20)


def test_the_connection_is_kept_and_a_closed_one_is_no_failure(desk: Any) -> None:
    with server(answer(404)) as one:
        probes = desk(one.port)
        assert [probes.wake().health for _ in range(3)] == [Health.ODD] * 3
        assert one.connections == 1

    def once(_: bytes, connection: socket.socket) -> bytes | None:
        if one.connections == 1 and len(one.seen) == 2:
            return None     # closes the kept connection with a request under way
        return OK

    with server(once) as one:
        exchange = Exchange("127.0.0.1", one.port)
        assert [exchange.ask("GET", "/health", 2, 100)[0] for _ in range(2)] == [200, 200]
        assert exchange.connects == one.connections == 2


def test_a_fresh_connection_that_is_closed_is_not_tried_twice() -> None:
    with server(lambda *_: None) as one, pytest.raises(SilentError):
        Exchange("127.0.0.1", one.port).ask("GET", "/health", 2, 100)
    assert len(one.seen) == 1


def test_who_listens_is_told_with_a_good_answer(desk: Any) -> None:
    with server(answer(200)) as one:
        probes = desk(one.port)
        (owner,) = probes.wake().owners
        assert owner.pid == os.getpid()
        assert owner.mark is None


def test_who_listens_is_looked_up_once_a_connection(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr("vllm_watchdog.proc.listeners", lambda port, *_: looks.append(port) or ())
    with server(answer(200)) as one:
        probes = desk(one.port)
        for _ in range(3):
            probes.wake()
            probes.scraped()
        assert looks == [one.port]


def test_no_metrics_are_asked_of_a_server_that_is_not_well(desk: Any) -> None:
    with server(answer(503)) as one:
        probes = desk(one.port)
        probes.wake()
        probes.wake()
        assert all(b"/metrics" not in request for request in one.seen)


def pages(page: Callable[[bytes, socket.socket], bytes | None]) -> Callable[[bytes, socket.socket], bytes | None]:
    return lambda request, connection: page(request, connection) if b"/metrics" in request else OK


def test_metrics_follow_a_good_answer(desk: Any) -> None:
    with server(pages(answer(200, b'vllm:prompt_tokens_total{engine="0"} 7.0\n'))) as one:
        probes = desk(one.port)
        probes.wake()
        assert probes.scraped().metrics == Metrics(Progress(7.0, None, None, None))


def test_metrics_that_can_not_be_had_are_unknown_with_a_reason_and_since_when(desk: Any) -> None:
    with server(pages(answer(404))) as one:
        probes = desk(one.port)
        readings = []
        for _ in range(2):
            probes.wake()
            readings.append(probes.scraped().metrics)
        assert readings[0] == readings[1]
        assert isinstance(readings[0], Unknown)
        assert readings[0].why == "/metrics answered 404"


def test_metrics_that_never_end_are_unknown(desk: Any) -> None:
    with server(pages(answer(200, b"x" * (BODY_CAP + 1)))) as one:
        probes = desk(one.port)
        probes.wake()
        reading = probes.scraped().metrics
        assert isinstance(reading, Unknown)
        assert reading.why == "/metrics: more than 4 MiB"


# -- one token

def test_a_token_is_an_answer_and_the_key_goes_with_the_question(desk: Any) -> None:
    with server(answer(200, b'{"choices": [{"text": "b"}]}')) as one:
        event = desk(one.port, api_key=Secret()).ask()
        assert event.answer is True
        assert 0 <= event.took_s < 2
        (request,) = one.seen
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.1")
        assert b"Authorization: Bearer s3cret" in head
        assert body == b'{"model": "qwen", "prompt": "a", "max_tokens": 1, "temperature": 0}'


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_error_is_no_token(desk: Any, status: int) -> None:
    with server(answer(status)) as one:
        assert desk(one.port).ask().answer is False


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 503])
def test_an_answer_that_proves_only_the_api_server_is_unknown(desk: Any, status: int) -> None:
    with server(answer(status)) as one:
        reading = desk(one.port).ask().answer
        assert isinstance(reading, Unknown)
        assert reading.why == f"/v1/completions answered {status}"


@pytest.mark.parametrize("behaviour", [drip, say_nothing])
def test_a_token_that_does_not_come_in_time_is_a_no(desk: Any, behaviour: Any) -> None:
    with server(behaviour) as one:
        event = desk(one.port).ask(0.3)
        assert event.answer is False
        assert 0.25 < event.took_s < 1.0


def test_a_refused_question_is_a_no(desk: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert desk(port).ask().answer is False


def test_never_two_questions_of_one_generation_at_once(desk: Any) -> None:
    with server(say_nothing) as one:
        probes = desk(one.port)
        for _ in range(5):
            probes.sense.ask(MARK, 0.3)
        probes.sense.ask(Mark("primary", 4), 0.3)
        assert {probes.events.get(timeout=5).mark for _ in range(2)} == {MARK, Mark("primary", 4)}
        assert len(one.seen) == 2
        assert probes.ask(0.1).answer is False      # and the next may go out


def test_health_is_probed_while_a_token_is_awaited(desk: Any) -> None:
    with server(lambda request, link: OK if b"/health" in request else say_nothing(request, link)) as one:
        probes = desk(one.port, timeout_s=0.3)
        probes.sense.ask(MARK, 5)
        assert probes.wake().health is Health.OK


# -- the page

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="a } b"} 3.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 4.0
vllm:num_preemptions_created{engine="0"} 1.7e9
vllm:prompt_tokens_total{engine="0"} 1.5e6
vllm:prompt_tokens_total{engine="1"} 10.0
vllm:generation_tokens_total{engine="0"} 20.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 3.0
vllm:iteration_tokens_total_count{engine="0"} 30.0
vllm:iteration_tokens_total_sum{engine="0"} 99.0
vllm:request_success_total{engine="0",finished_reason="stop"} 5.0
vllm:request_success_total{engine="0",finished_reason="length"} 6.0"""


def test_series_are_summed_over_engines_and_reasons_and_the_fullest_cache_counts() -> None:
    assert parse(PAGE) == Metrics(Progress(1500010.0, 20.0, 30.0, 11.0), 5.0, 0.0, 0.75, 4.0)


def test_an_aborted_request_is_no_progress_of_the_engine() -> None:
    aborted = b'\nvllm:request_success_total{engine="0",finished_reason="abort"} 7.0'
    assert parse(PAGE + aborted) == parse(PAGE)


def test_without_log_stats_there_is_no_progress_rather_than_zero() -> None:
    assert parse(b"python_info 1.0\nprocess_start_time_seconds 2\n") == Metrics(None)


def test_names_of_old_versions_and_series_without_labels_are_read() -> None:
    assert parse(b"vllm:gpu_cache_usage_perc 0.5\nvllm:prompt_tokens_total 3\n") == Metrics(
        Progress(3.0, None, None, None), kv_usage=0.5
    )


@pytest.mark.parametrize("value", [b"NaN", b"", b"abc", b"+Inf"])
def test_a_value_that_is_no_number_is_not_there(value: bytes) -> None:
    assert parse(b"vllm:num_requests_running " + value + b"\n") == Metrics(None)


def test_a_name_quoted_by_a_label_counts_for_nothing() -> None:
    assert parse(b'x{model_name="vllm:num_requests_running 7"} 1\n') == Metrics(None)


def test_refusal_is_told_from_silence() -> None:
    with pytest.raises(RefusedError):
        Exchange("127.0.0.1", 1).ask("GET", "/health", 1, 100)


def test_a_sense_that_was_never_started_can_be_stopped() -> None:
    launch: Any = Launch(1)
    ProbeSense(launch, print, time.monotonic, "none", 1).stop(1)
