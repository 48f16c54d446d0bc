from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core import excerpts as x

from vllm_watchdog.core.records import LINE_LIMIT, Stream
from vllm_watchdog.core.signatures import ROWS
from vllm_watchdog.core.verdict import Reader, Verdict
from vllm_watchdog.sense.scan import LINE_BYTES, Scanner, needles

CORPUS = sorted((Path(__file__).parents[1] / "fixtures" / "logs").glob("*.log"))


def scanned(data: bytes, size: int, stream: Stream | None = None) -> tuple[Verdict, int]:
    scanner, reader, looked_at = Scanner(), Reader(stream), 0
    for start in range(0, len(data), size):
        for number, text in scanner.feed(data[start : start + size]):
            reader.feed(text, number)
            looked_at += 1
    for number, text in scanner.finish():
        reader.feed(text, number)
        looked_at += 1
    return reader.verdict(), looked_at


def read_whole(data: bytes, stream: Stream | None = None) -> Verdict:
    reader = Reader(stream)
    for line in data.split(b"\n"):
        reader.feed(line.decode("utf-8", "replace"))
    return reader.verdict()


EXCERPTS = [text for _, _, _, text in x.FAILURES + x.KERNEL] + [text for _, text in x.BENIGN]
LINES = sorted({line for text in EXCERPTS for line in text.split("\n")})
NOISE = [
    "",
    "plain",
    x.OK,
    x.v8("Added request chatcmpl-1.", "async_llm.py:252", "INFO"),
    x.stats(1.0, 9.0, 3, 0),
    'prompt with HTTP/1.1" inside',
    "INFO 05-06 02:29:07 [logger.py:1] Avg generation throughput: none",
    "\x1b[31mred\x1b[0m",
    '{"levelname": "ERROR", "name": "vllm.v1.engine.core", "message": "\\u0045ngineCore encountered a fatal error."}',
    "\rbar 10% [00:00<00:00, 1it/s]",
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(LINES + NOISE * 20), max_size=60),
    st.integers(1, 3000),
    st.sampled_from([None, *Stream]),
    st.booleans(),
)
def test_scanning_gives_the_verdict_of_reading_every_line(
    lines: list[str], size: int, stream: Stream | None, colour: bool
) -> None:
    data = "\n".join(map(x.coloured, lines) if colour else lines).encode()
    assert scanned(data, size, stream)[0] == read_whole(data, stream)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.sampled_from([each.encode() for each in LINES])), max_size=25),
    st.integers(1, 500),
)
def test_invalid_bytes_and_cuts_anywhere_change_nothing(pieces: list[bytes], size: int) -> None:
    data = b"\n".join(pieces)
    assert scanned(data, size)[0] == read_whole(data)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_the_recorded_excerpts_scan_alike(path: Path) -> None:
    data = path.read_bytes()
    assert scanned(data, 100)[0] == scanned(data, 1 << 20)[0] == read_whole(data)


def test_every_literal_of_the_catalogue_is_looked_for() -> None:
    assert {needle for each in ROWS for needle in each.needles} <= set(needles())


def test_a_benign_log_is_hardly_looked_at() -> None:
    quiet = (x.OK + "\n" + x.v8("Received request cmpl-1: prompt: 'hi'", "logger.py:39", "INFO") + "\n") * 5000
    verdict, looked_at = scanned(quiet.encode(), 64 * 1024)
    assert verdict.class_ == "none" and looked_at <= 2


def test_lines_are_numbered_as_an_editor_does() -> None:
    data = ("plain\n" * 999 + x.v33(x.HEAD) + "\n" + "plain\n" * 5).encode()
    scanner = Scanner()
    assert [number for number, _ in scanner.feed(data)] == [1000]
    assert scanner.lines == 1005


def test_an_endless_line_is_cut_and_counted() -> None:
    scanner = Scanner()
    for _ in range(40):
        assert list(scanner.feed(b"x" * (LINE_LIMIT // 4))) == []
    assert scanner.dropped_bytes == 40 * (LINE_LIMIT // 4) - LINE_BYTES
    assert len(scanner._tail) == LINE_BYTES
    assert [text for _, text in scanner.feed(b"\n" + x.v33(x.HEAD).encode() + b"\n")] == [x.v33(x.HEAD)]


def test_a_last_line_without_a_newline_is_read_at_the_end() -> None:
    scanner = Scanner()
    assert list(scanner.feed(x.v33(x.HEAD).encode())) == []
    assert len(list(scanner.finish())) == 1
    assert list(scanner.finish()) == []


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_the_lines_that_complete_a_headline_are_candidates_wherever_a_block_ends(size: int) -> None:
    text = b"idle\npydantic_core.ValidationError: 1 validation error for CacheConfig\nblock_size\n  wrong\nc\nd\nidle\n"
    scanner = Scanner()
    found = [number for at in range(0, len(text), size) for number, _ in scanner.feed(text[at : at + size])]
    assert found == [2, 3, 4, 5, 6]
