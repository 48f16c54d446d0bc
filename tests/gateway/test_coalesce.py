"""Merged streams: any client that appends what it gets ends with the same, however the bytes were cut."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_watchdog.gateway.coalesce import EVENT_LIMIT, LARGEST, Coalescer

BASE: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"
TEXT_KEYS = ("content", "reasoning", "reasoning_content")


def event(chunk: object, ascii_: bool = False) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":"), ensure_ascii=ascii_).encode("utf-8", "surrogatepass")


def chat(delta: object, index: int = 0, finish: str | None = None, logprobs: object = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    return BASE | {"choices": [choice]} | more


def say(text: str, **more: Any) -> bytes:
    return event(chat({"content": text}, **more))


def complete(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return event(BASE | {"object": "text_completion", "choices": [choice], "usage": None})


def argue(text: str, call: int = 0) -> bytes:
    return event(chat({"tool_calls": [{"index": call, "function": {"arguments": text}}]}))


def merged(stream: bytes, limit: int = 10_000, step: int = 7) -> list[bytes]:
    """The events of what a client gets."""
    coalescer = Coalescer(limit)
    out = b"".join(coalescer.feed(stream[at:at + step]) for at in range(0, len(stream), step)) + coalescer.end()
    return [piece + b"\n\n" for piece in out.split(b"\n\n")[:-1]]


def test_the_first_text_goes_at_once_and_the_rest_in_portions() -> None:
    stream = event(chat({"role": "assistant", "content": ""})) + b"".join(map(say, "abcdefgh")) + DONE
    assert merged(stream, limit=3) == [
        event(chat({"role": "assistant", "content": ""})), say("a"), say("bcd"), say("efg"), say("h"), DONE]


@pytest.mark.parametrize("made", [say, complete, argue, lambda text: event(chat({"reasoning": text}))])
def test_every_kind_of_text_is_merged(made: Any) -> None:
    assert merged(made("a") + made('b"\\') + made("ü\n") + made("")) == [made("a"), made('b"\\ü\n')]


OTHER = [
    event(chat({"role": "assistant"})), event(chat({"content": "x"}, finish="stop")), complete("x", "length"), DONE,
    event(chat({"content": "x"}, logprobs={"content": []})), event(chat({"content": "x"}, usage={"total_tokens": 5})),
    event(chat({"content": "x", "role": "assistant"})), event(BASE | {"choices": [], "usage": {"total_tokens": 5}}),
    event(BASE | {"choices": [chat({"content": "a"})["choices"][0], chat({"content": "b"}, 1)["choices"][0]]}),
    event(chat({"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]})),
    event(chat({"content": "x"}) | {"object": "other"}), event(chat({"content": "x"}) | {"obfuscation": "z"}),
    event(chat({"content": ["x"]})), event(chat({"content": None})), event({"error": {"message": "x"}}), b": ping\n\n",
    b"event: response.output_text.delta\ndata: {\"delta\":\"x\"}\n\n", b"data: {\"content\":\"x\"\n\n", b"data: 5\n\n",
    b'data: {"choices":[{"index":0,"delta":{"content":"x"}}],"choices":[]}\n\n', b"\ndata: x\n\n", b"\n\n",
    event(chat({"content": "\ud83d"}), ascii_=True), event(chat({"content": "x" * LARGEST})),
    event(chat({"content": "\ud83d"})), event(chat({"token_ids": [1], "content": "x"}))]


@pytest.mark.parametrize("other", OTHER)
def test_what_is_not_understood_goes_through_untouched_and_in_its_place(other: bytes) -> None:
    stream = say("a") + say("b") + say("c") + other + say("d") + say("e")
    assert b"".join(merged(stream)) == say("a") + say("bc") + other + say("de")
    assert b"".join(merged(other + other)) == other + other


def test_a_stream_of_another_form_goes_through_as_it_comes() -> None:
    coalescer = Coalescer(100)
    other = b'data: {"a":1}\r\n\r\n'
    assert coalescer.feed(say("a") + say("b") + other) == say("a") + say("b") + other
    assert coalescer.feed(say("c") + b"data") == say("c") + b"data", "and stays so"
    assert not coalescer.pending
    long = Coalescer(100)
    start = b"data: " + b"x" * EVENT_LIMIT
    assert long.feed(start) == start


def test_what_is_kept_is_given_when_asked_for_and_half_an_event_only_at_the_end() -> None:
    coalescer = Coalescer(100)
    assert coalescer.feed(say("a") + say("b") + say("c")[:20]) == say("a")
    assert coalescer.pending
    assert (coalescer.flush(), coalescer.flush(), coalescer.pending) == (say("b"), b"", False)
    assert coalescer.feed(say("c")[20:] + b"data: ha") == b""
    assert coalescer.end() == say("c") + b"data: ha"


def test_an_event_that_only_looks_like_the_one_before_is_none() -> None:
    made = Coalescer(1000)
    made.feed(say("a"))
    before, after = made._before, made._after
    overlapping = before[:-1] + after + b"\n\n"     # begins and ends like it, and is shorter than both
    assert b"".join(merged(say("a") + say("b") + overlapping)) == say("a") + say("b") + overlapping


# -- any stream

TEXT = st.text(max_size=6) | st.sampled_from(['"', "\\", "\\u0041", '"content":"x"', "\n\n", "é", "😀", "data: [DONE]"])
DELTAS = st.one_of(
    st.builds(lambda text: {"content": text}, TEXT),
    st.builds(lambda key, text: {key: text}, st.sampled_from(TEXT_KEYS), TEXT),
    st.builds(lambda call, text: {"tool_calls": [{"index": call, "function": {"arguments": text}}]}, st.sampled_from([0, 1]),
              TEXT))
EVENTS = st.one_of(
    st.builds(lambda delta, index: event(chat(delta, index), ascii_=index == 2), DELTAS, st.sampled_from([0, 0, 1, 2])),
    st.builds(complete, TEXT), st.builds(lambda text: say(text, finish="stop"), TEXT),
    st.builds(lambda text: say(text, logprobs={"content": [{"token": text}]}), TEXT), st.sampled_from(OTHER))


def seen(stream: bytes) -> list[object]:
    """What a client makes of it: texts of one kind in a row appended, and everything else as it came."""
    items: list[Any] = []
    for piece in stream.split(b"\n\n"):
        place, text = _text(piece)
        if place is not None and items and isinstance(items[-1], list) and items[-1][0] == place:
            items[-1][1] += text
        else:
            items.append(piece if place is None else [place, text])
    return items


def _text(piece: bytes) -> tuple[object, str]:
    try:
        chunk = json.loads(piece.removeprefix(b"data: "))
        (choice,) = chunk["choices"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None, ""
    if chunk.get("usage") or choice.get("finish_reason") or choice.get("logprobs"):
        return None, ""     # it says more than text
    at = choice if "text" in choice else choice["delta"]
    if "tool_calls" in at and "id" not in at["tool_calls"][0]:
        at = at["tool_calls"][0]["function"]
    for key in ("text", *TEXT_KEYS, "arguments"):
        if isinstance(at.get(key), str):
            text, at[key] = at[key], ""
            return chunk, text
    return None, ""


SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=12), st.integers(1, 20), SIZES, st.integers(1, 4))
def test_a_client_ends_with_the_same_however_the_bytes_are_cut(
        events: list[bytes], limit: int, sizes: list[int], every: int) -> None:
    stream, coalescer, out, at = b"".join(events), Coalescer(limit), b"", 0
    for number, size in enumerate(cycle(sizes)):
        if at >= len(stream):
            break
        out += coalescer.feed(stream[at:at + size])
        at += size
        assert coalescer._chars < limit
        if number % every == 0:
            out += coalescer.flush()        # the time is over
            assert not coalescer.pending
    out += coalescer.end()
    assert seen(out) == seen(stream)
    assert out.count(b"\n\n") <= stream.count(b"\n\n")


NOISE = st.sampled_from([b"data: {", b'"', b"content", b":", b"}", b"\n", b"\n\n", b"\r", b"x", *OTHER[:3]])


@settings(max_examples=40)
@given(st.lists(NOISE, max_size=20), st.integers(1, 9))
def test_noise_goes_through(parts: list[bytes], step: int) -> None:
    stream = b"".join(parts)
    coalescer = Coalescer(5)
    out = b"".join(coalescer.feed(stream[at:at + step]) for at in range(0, len(stream), step)) + coalescer.end()
    assert out == stream
