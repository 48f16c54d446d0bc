"""The rules that need no socket: framing, heads, the route, the quarantine, the report."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.framing import Chunked, FramingError, Length, Unchunked, UntilClose
from vllm_watchdog.gateway.heads import (
    HEAD_LIMIT,
    BadHeadError,
    encode_request,
    encode_response,
    parse_request,
    parse_response,
    path_of,
)
from vllm_watchdog.gateway.incoming import BadBodyError, Body, cut_head
from vllm_watchdog.gateway.last_words import Answer, kept_limit
from vllm_watchdog.gateway.quarantine import ENTRY_LIMIT, Present, Quarantine, Verdict, tokens_of
from vllm_watchdog.gateway.report import Casualty, Load, Metrics, casualties
from vllm_watchdog.gateway.routes import Kind, Route, RouteError, Service, Target, kind_of, model_of, parse_route
from vllm_watchdog.gateway.waits import Waits, kept

# -- framing


def chunked(parts: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    return (
        b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts if part)
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


@given(
    st.lists(st.binary(min_size=1, max_size=400), max_size=6),
    st.sampled_from([b"", b";a=b", b" ; q"]),
    st.sampled_from([b"", b"T: 1\r\n", b"A: b\r\nC: d\r\n"]),
    st.binary(max_size=20),
    st.data(),
)
def test_chunks_end_where_they_end_however_they_are_cut(
    parts: list[bytes], extension: bytes, trailers: bytes, rest: bytes, data: st.DataObject
) -> None:
    body = chunked(parts, extension, trailers)
    stream, at, payload, counter = body + rest, 0, list[bytes](), Chunked()
    while True:
        step = data.draw(st.integers(1, 500))
        piece = stream[at : at + step]
        end = counter.feed(piece, payload)
        if end >= 0:
            assert at + end == len(body)
            break
        at += len(piece)
        assert at < len(body), "it ended, and nobody noticed"
    assert b"".join(payload) == b"".join(parts)


@pytest.mark.parametrize(
    "bad",
    [
        b"x\r\n",
        b"0x5\r\n",
        b"+5\r\nabcde\r\n0\r\n\r\n",
        b"-1\r\n",
        b"5\nhello",
        b"1_0\r\n",
        b" 5\r\n",
        b"fffffffffffffffff\r\n",
        b"3\r\nabcXX",
        b"3\r\nabc\n0\r\n",
        b"5;" + b"x" * 300,
        b"\r\n",
        b"0\r\nT: " + b"t" * 9000,
    ],
)
def test_what_could_be_read_as_other_chunks_is_refused(bad: bytes) -> None:
    with pytest.raises(FramingError):
        Chunked().feed(bad)
    split = Chunked()
    with pytest.raises(FramingError):
        for byte in bad:
            split.feed(bytes([byte]))


def test_something_may_be_put_in_only_between_chunks() -> None:
    counter = Chunked()
    seen = [counter.feed(bytes([byte])) is not None and counter.insertable for byte in b"3\r\nabc\r\n4"]
    assert seen == [False, False, False, False, False, False, False, True, False]


def test_a_body_of_known_length_ends_after_it() -> None:
    body = Length(5)
    assert (body.feed(b"abc"), body.feed(b"defgh")) == (-1, 2)
    assert UntilClose().feed(b"x" * 100) == -1


def test_an_old_client_is_given_what_the_chunks_carry() -> None:
    got: list[bytes] = []
    write = Unchunked(got.append)
    for byte in chunked([b"abc", b"de"]):
        write(bytes([byte]))
    assert b"".join(got) == b"abcde"


# -- heads


def test_a_client_can_hide_neither_host_nor_length_behind_connection() -> None:
    head = parse_request(
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nX-Mine: 1\r\nConnection: content-length, host, x-mine\r\n\r\n"
    )
    assert encode_request(head, None) == b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n"


def test_heads_that_differ_in_their_length_only_keep_their_own_length() -> None:
    for length in (3, 40, 3, 0):
        head = parse_request(b"POST /v1/x HTTP/1.1\r\nHost: x\r\ncontent-length:%d\r\nA: b\r\n\r\n" % length)
        assert head.length == length
        assert encode_request(head, b"") == b"POST /v1/x HTTP/1.1\r\nHost: x\r\nA: b\r\nContent-Length: %d\r\n\r\n" % length


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 3\r\nContent-Length: 3",
        "Content-Length: 3\r\ncontent-length:  5",
        "Content-Length: 3\r\nContent-Length : 5",
        "Content-Length:  3\r\nContent-Length: 5",
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Content-Length: 3, 3",
        "Content-Length: +3",
        "Content-Length: 99999999999999999999",
        "A: b\nContent-Length: 3",
        "Content-Length: 3\n",
    ],
)
def test_a_length_that_could_be_read_in_two_ways_is_refused(lines: str) -> None:
    with pytest.raises(BadHeadError):
        parse_request(f"POST / HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n".encode())


@pytest.mark.parametrize(
    ("version", "connection", "stays"),
    [
        ("1.1", "", True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive", True),
        ("1.1", "x, CLOSE", False),
        ("1.0", "", False),
        ("1.0", "keep-alive", True),
        ("1.0", "close", False),
    ],
)
def test_whether_a_connection_stays_follows_version_and_wish(version: str, connection: str, stays: bool) -> None:
    line = f"Connection: {connection}\r\n" if connection else ""
    assert parse_request(f"GET / HTTP/{version}\r\nHost: x\r\n{line}\r\n".encode()).keep_alive is stays


def test_a_path_is_what_the_engine_will_make_of_it() -> None:
    assert path_of(b"/v1/%63ompletions?model=x%20") == "/v1/completions"
    assert path_of(b"http://host:1/v1/completions?x") == "/v1/completions"
    assert path_of(b"*") == "*"


def test_a_response_head_goes_on_unchanged_where_it_may() -> None:
    raw = b"HTTP/1.1 200 Very OK\r\nx-B:1\r\ncontent-length: 3\r\n\r\n"
    assert encode_response(parse_response(raw), http11=True, keep_alive=True) == raw
    closed = encode_response(parse_response(raw), http11=True, keep_alive=False)
    assert closed == b"HTTP/1.1 200 Very OK\r\nx-B: 1\r\ncontent-length: 3\r\nConnection: close\r\n\r\n"
    with pytest.raises(BadHeadError):
        parse_response(b"HTTP/2.0 200 OK\r\n\r\n")


# -- a request on its way in


def test_a_head_is_cut_off_when_it_is_whole() -> None:
    whole = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
    for end in range(len(whole)):
        assert cut_head(whole[:end]) is None
    found = cut_head(whole + b"GET /y")
    assert found is not None and (found[0].path, found[1]) == ("/x", b"GET /y")


@pytest.mark.parametrize(("noise", "status"), [(b"\x16\x03\x01", 400), (b"get / ", 400), (b"G" * (HEAD_LIMIT + 1), 431)])
def test_what_can_not_become_a_head_is_refused_at_once(noise: bytes, status: int) -> None:
    with pytest.raises(BadHeadError) as bad:
        cut_head(noise)
    assert bad.value.refusal.status == status


def test_a_body_is_bounded_and_its_framing_checked() -> None:
    body = Body(Chunked(), 10)
    assert body.keep(b"3\r\nabc\r\n") == -1
    assert body.keep(b"0\r\n\r\nrest") == 5
    assert body.whole() == b"abc"
    with pytest.raises(BadBodyError) as bad:
        Body(Chunked(), 10).count(b"what?\r\n")
    assert bad.value.refusal.status == 400
    large = Body(Length(1 << 20), 10)
    assert large.count(b"x" * (HEAD_LIMIT + 10)) == -1
    with pytest.raises(BadBodyError) as bad:
        large.count(b"x")
    assert bad.value.refusal.status == 413


def test_a_doubted_answer_is_kept_up_to_a_limit_and_given_once() -> None:
    answer = Answer()
    assert answer.keep(b"a" * kept_limit)
    assert not answer.keep(b"b")
    assert (len(answer.kept()), answer.kept()) == (kept_limit + 1, b"")


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'data: {"error": 1}\n\n', True),
        (b'1a\r\ndata:{"error":1}\n\n', True),
        (b'1a\r\nevent: error\ndata: {"error":1}\n\n', True),
        (b'data: {"id": "error"}\n\n', False),
    ],
)
def test_an_error_event_is_known_in_a_stream_only(data: bytes, error: bool) -> None:
    answer = Answer()
    assert not answer.is_error_event(data)
    answer.head = parse_response(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    assert answer.is_error_event(data) is error


# -- the route


DOCUMENT = {
    "version": 3,
    "services": [
        {
            "name": "primary",
            "models": ["m"],
            "serving": {"engine": "backup", "generation": 2, "host": "127.0.0.1", "port": 8101},
            "max_concurrent": 4,
            "why": "the primary restarts",
            "later": "keys are ignored",
        },
        {"name": "other", "models": ["n"], "serving": None, "max_concurrent": None},
    ],
}


def test_a_route_is_read_whole() -> None:
    route = parse_route(DOCUMENT)
    assert route == Route(
        3,
        (
            Service("primary", ("m",), Target("backup", 2, "127.0.0.1", 8101), 4, "the primary restarts"),
            Service("other", ("n",)),
        ),
    )
    assert (route.pick("n"), route.pick("else"), Route().pick("m")) == (route.services[1], route.services[0], None)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("version",), "3", "version"),
        (("services",), None, "services"),
        (("services", 0), 5, "services[0]"),
        (("services", 0, "name"), None, "services[0].name"),
        (("services", 0, "models"), "m", "services[0].models"),
        (("services", 0, "serving"), [], "services[0].serving"),
        (("services", 0, "serving", "port"), 0, "services[0].serving.port"),
        (("services", 0, "serving", "port"), True, "services[0].serving.port"),
        (("services", 1, "name"), "primary", "services"),
    ],
)
def test_a_route_that_can_not_be_read_says_where(path: tuple[str | int, ...], value: object, where: str) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(RouteError, match=where.replace("[", r"\[").replace("]", r"\]")):
        parse_route(document)


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"model": "a", "prompt": "x"}, "a"),
        ({"prompt": '"model": "b"', "model": "a"}, "a"),
        ({"prompt": "x"}, None),
        ({"metadata": {"model": "b"}, "model": "a"}, "a"),
        ({"model": 5}, None),
        ({"model": 'a"b'}, 'a"b'),
        ({"model": "mödel"}, "mödel"),
    ],
)
def test_a_prompt_can_not_pretend_to_be_the_model(body: dict[str, object], model: str | None) -> None:
    assert model_of(json.dumps(body).encode()) == model
    assert model_of(json.dumps(body, ensure_ascii=False).encode()) == model


def test_what_is_no_json_names_no_model() -> None:
    assert model_of(b"") is None
    assert model_of(b'{"model": "a", "model": "b"') is None


def test_only_what_is_known_to_be_safe_is_repeated() -> None:
    assert kind_of(b"POST", "/v1/chat/completions") is Kind.GENERATION
    assert kind_of(b"POST", "/tokenize") is Kind.READ
    assert kind_of(b"GET", "/anything") is Kind.READ
    for method, path in (
        (b"POST", "/v1/load_lora_adapter"),
        (b"PUT", "/v1/completions"),
        (b"POST", "/sleep"),
        (b"DELETE", "/x"),
    ):
        assert kind_of(method, path) is Kind.OTHER


# -- the quarantine


def present(id_: int, tokens: int, deaths: int = 0, digest: str = "") -> Present:
    return Present(id_, digest or f"digest-{id_}", tokens, deaths)


def test_the_longest_prompt_over_the_limit_is_the_suspect() -> None:
    quarantine = Quarantine(1000, 3600.0)
    verdicts = quarantine.judge(
        [present(1, 50), present(2, 5000), present(3, 4000), present(4, 5000, digest="digest-2")], 10.0
    )
    assert verdicts == {1: Verdict.INNOCENT, 2: Verdict.SUSPECT, 3: Verdict.INNOCENT, 4: Verdict.SUSPECT}
    assert quarantine.refused("digest-2", 10.0 + 3599) is not None
    assert quarantine.refused("digest-2", 10.0 + 3600) is None
    assert quarantine.refused("digest-3", 11.0) is None


def test_small_requests_are_innocent() -> None:
    quarantine = Quarantine(1000, 3600.0)
    assert set(quarantine.judge([present(n, 999) for n in range(100)], 0.0).values()) == {Verdict.INNOCENT}
    assert len(quarantine) == 0
    assert quarantine.judge([], 0.0) == {}


def test_what_two_deaths_have_in_common_is_refused() -> None:
    quarantine = Quarantine(1000, 3600.0)
    assert quarantine.judge([present(1, 5), present(2, 5, deaths=1)], 0.0) == {1: Verdict.INNOCENT, 2: Verdict.REFUSED}
    assert quarantine.refused("digest-2", 1.0) is not None


def test_several_that_were_at_two_deaths_go_on_one_at_a_time() -> None:
    quarantine = Quarantine(1000, 3600.0)
    verdicts = quarantine.judge([present(1, 5), present(2, 5, 1), present(3, 5, 1)], 0.0)
    assert verdicts == {1: Verdict.INNOCENT, 2: Verdict.ALONE, 3: Verdict.ALONE}
    assert quarantine.judge([present(4, 5), present(2, 5, 2)], 1.0)[2] is Verdict.REFUSED


def test_a_long_prompt_takes_the_blame_off_the_small() -> None:
    quarantine = Quarantine(1000, 3600.0)
    assert quarantine.judge([present(1, 5000), present(2, 5, 1)], 0.0) == {1: Verdict.SUSPECT, 2: Verdict.ALONE}


def test_the_quarantine_is_bounded_shown_and_cleared() -> None:
    quarantine = Quarantine(1, 100.0)
    for n in range(ENTRY_LIMIT + 5):
        quarantine.judge([present(n, 10)], float(n) / 1000)
    assert len(quarantine) == ENTRY_LIMIT
    assert quarantine.refused("digest-0", 2.0) is None
    assert quarantine.refused("digest-10", 2.0) is not None
    entry = next(entry for entry in quarantine.entries(2.0) if entry.digest == "digest-10")
    assert (entry.hits, entry.tokens, entry.why) == (1, 10, Verdict.SUSPECT)
    assert quarantine.clear("digest-10") == 1
    assert quarantine.clear("digest-10") == 0
    assert quarantine.clear() == ENTRY_LIMIT - 1
    assert quarantine.entries(200.0) == ()


# -- the report


def test_a_report_of_a_death_is_bounded_and_names_the_suspects_first() -> None:
    all_ = [Casualty(n, n, 0.1, False, "h", tokens_of(n), "suspect" if n == 3 else "held") for n in range(200)]
    message = casualties(Target("primary", 7, "h", 1), all_)
    assert (message["verb"], message["engine"], message["generation"], message["in_flight"]) == (
        "casualties",
        "primary",
        7,
        200,
    )
    assert [one["id"] for one in message["requests"][:3]] == [3, 199, 198]
    assert len(message["requests"]) == 64
    assert len(json.dumps(message)) < 32 << 10, "half of what the daemon reads"
    assert set(message["requests"][0]) == {"id", "bytes", "age_s", "begun", "hash", "tokens_estimated", "verdict"}


def test_waits_are_told_once_when_they_have_settled() -> None:
    waits = Waits()
    assert waits.told("s", 100.0) is None
    waits.answered(10.0, 58.2, replayed=True)
    waits.answered(12.0, 58.0, replayed=False)
    waits.failed()
    waits.up_at = 57.9
    assert waits.told("s", 58.5) is None
    assert waits.told("s", 59.0) == {"verb": "waited", "service": "s", "requests": 2, "failed": 1, "replayed": 1,
                                     "longest_s": 48.2, "median_s": 47.1}
    assert waits.told("s", 99.0) is None


def test_waits_that_all_failed_have_no_median_and_of_many_the_first_are_kept() -> None:
    waits = Waits()
    waits.failed()
    assert waits.told("s", 1.0)["median_s"] == 0.0
    for number in range(kept + 10):
        waits.answered(0.0, float(number), replayed=False)
    told = waits.told("s", 1.0)
    assert (told["requests"], told["longest_s"], told["median_s"]) == (kept + 10, kept + 9, (kept - 1) / 2)


def test_metrics_have_few_labels_whatever_an_engine_says() -> None:
    metrics = Metrics()
    for status in range(100, 1000):
        metrics.began(status, None)
    metrics.refused(errors.SUSPECT)
    for gap_s in (0.01, 0.2, 100.0):
        metrics.began(200, gap_s)
    text = metrics.render({"holding": 3}, {"waiting": [('{kind="long"}', 2)]})
    assert text.count("responses_total{") < 80
    assert 'refused_total{code="prompt_quarantined"} 1' in text
    assert 'gap_seconds_bucket{le="0.25"} 2' in text
    assert 'gap_seconds_bucket{le="+Inf"} 3' in text
    assert "llm_watchdog_gateway_holding 3\n" in text
    assert 'llm_watchdog_gateway_waiting{kind="long"} 2\n' in text


def test_every_refusal_is_in_openais_form() -> None:
    for name in dir(errors):
        refusal = getattr(errors, name)
        if isinstance(refusal, errors.Refusal):
            head, _, body = errors.response(refusal, keep_alive=False).partition(b"\r\n\r\n")
            error = json.loads(body)["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (b"Retry-After" in head) == (refusal.retry_after_s is not None) == (refusal.status in (429, 503))


# -- how busy it is


def test_how_busy_it_is_is_told_when_it_changed_and_now_and_then() -> None:
    client, operator = SimpleNamespace(private=False), SimpleNamespace(private=True)
    gate: Any = SimpleNamespace(connections=[operator], quarantine=Quarantine(600, 60), lines={})
    load = Load()
    first = load.told(gate, 100.0, 1)
    assert first == {"verb": "load", "connections": 0, "quarantined": 0, "services": []}
    gate.connections.append(client)
    assert load.told(gate, 101.9, 1) is None, "so soon"
    busy = load.told(gate, 102.0, 1)
    assert first and busy == first | {"connections": 1}
    assert load.told(gate, 106.9, 1) is None, "nothing has changed"
    assert load.told(gate, 107.0, 1) == busy
    assert load.told(gate, 107.1, 2) == busy, "the next daemon knows nothing"
    assert load.told(gate, 107.2, 2) is None
    load.forget()
    assert load.told(gate, 107.3, 2) == busy, "it was dropped"
