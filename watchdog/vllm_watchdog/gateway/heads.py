"""Heads of requests and responses: parsed by httptools, checked, stripped of what is meant for one hop only.  Pure.

Whatever could be read in two ways (two lengths, a length and chunks, folded lines, bare line feeds, a chunked HTTP/1.0)
is refused; httptools (llhttp) refuses most of it itself.  RFC 9110 7.6.1, RFC 9112 3.2 and 6.  The heads of one client
differ in their length at most, and an engine's by the second, so what was parsed is kept for a while.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import httptools

from vllm_watchdog.gateway.errors import BAD_REQUEST, BAD_UPSTREAM, EXPECTATION, NOT_IMPLEMENTED, VERSION, Refusal

HEAD_LIMIT = 64 << 10
END = b"\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SWITCHING = 101
CACHED = 256        # heads, parsed, of each direction
CACHED_LIMIT = 4 << 10      # bytes of one

HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})
NEVER_NAMED = frozenset({b"host", b"content-length"})   # a client must not hide a length from the engine
NOT_SENT_ON = HOP_BY_HOP | {b"expect", b"content-length"}       # we answer the one, and write the other again
LENGTH = re.compile(rb"\r\nContent-Length: ?([0-9]{1,18})(?=\r\n)", re.IGNORECASE)
USUAL: tuple[list[bytes], ...] = ([], [b"keep-alive"], [b"close"])       # members of Connection
NOTED = HOP_BY_HOP | NEVER_NAMED | {b"expect", b"x-no-replay", b"content-type"}
BODILESS = frozenset({204, 304})

Pairs = tuple[tuple[bytes, bytes], ...]


class BadHeadError(Exception):
    """The head is refused; `refusal` says how."""

    def __init__(self, refusal: Refusal, why: str = "") -> None:
        self.refusal = refusal.because(why)
        super().__init__(self.refusal.message)


class RequestHead(NamedTuple):
    """`path`: decoded, without query.  `onward`: for the engine, still without its length and its end.  `length` None: no
    Content-Length."""

    method: bytes
    path: str
    http11: bool
    onward: bytes
    keep_alive: bool
    chunked: bool
    expects: bool
    upgrade: bytes | None
    no_replay: bool
    length: int | None


class ResponseHead(NamedTuple):
    """`raw`: as it came.  `as_is`: it may go to an HTTP/1.1 client unchanged."""

    raw: bytes
    status: int
    pairs: Pairs
    keep_alive: bool
    length: int | None
    chunked: bool
    event_stream: bool
    as_is: bool

    @property
    def bodiless(self) -> bool:
        return self.status in BODILESS or self.status < 200 or (self.length == 0 and not self.chunked)


NO_ANSWER = ResponseHead(b"", 0, (), False, 0, False, False, False)     # yet


class _Reader:
    """What httptools calls back."""

    __slots__ = ("lines", "noted", "url")

    def __init__(self) -> None:
        self.url = b""
        self.lines: list[tuple[bytes, bytes, bytes]] = []       # key (lower case), name, value
        self.noted: dict[bytes, list[bytes]] = {}

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.lower()
        if key in NOTED:
            self.noted.setdefault(key, []).append(value)
        self.lines.append((key, name, value))

    def tokens(self, key: bytes) -> list[bytes]:
        """The lower-case members of a list header."""
        values = self.noted.get(key)
        return [token.strip().lower() for token in b",".join(values).split(b",")] if values else []

    def first(self, key: bytes) -> bytes | None:
        values = self.noted.get(key)
        return values[0] if values else None

    def pairs(self, dropped: frozenset[bytes]) -> Pairs:
        return tuple([(name, value) for key, name, value in self.lines if key not in dropped])


def parse_request(raw: bytes) -> RequestHead:
    """`raw`: a head with its empty line.  Raises BadHeadError."""
    found = LENGTH.search(raw)
    if found is None or len(raw) > CACHED_LIMIT:
        return _parse_request(raw)
    # Any other length in it, however it is written, is a second one to the parser, and refused.
    head = _known_request(b"%b0%b" % (raw[: found.start(1)], raw[found.end(1) :]))
    return RequestHead(*head[:-1], int(found[1]))


def _parse_request(raw: bytes) -> RequestHead:
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass        # the head is whole, and nothing that follows it was given to this parser
    except httptools.HttpParserInvalidMethodError:
        raise BadHeadError(NOT_IMPLEMENTED, "the method is not known") from None
    except httptools.HttpParserError as error:
        raise BadHeadError(BAD_REQUEST, str(error)) from None
    version = parser.get_http_version()
    if version not in ("1.1", "1.0"):
        raise BadHeadError(VERSION)
    return _request(reader, parser.get_method(), version == "1.1")


_known_request = lru_cache(CACHED)(_parse_request)


def _request(reader: _Reader, method: bytes, http11: bool) -> RequestHead:
    connection = reader.tokens(b"connection")
    chunked = _request_chunked(reader, http11)
    length = reader.first(b"content-length")
    expect = reader.first(b"expect")
    if method == b"CONNECT":
        raise BadHeadError(NOT_IMPLEMENTED, "CONNECT")
    if len(reader.noted.get(b"host", ())) != 1 and http11:
        raise BadHeadError(BAD_REQUEST, "expected one Host header")
    if expect is not None and expect.lower() != b"100-continue":
        raise BadHeadError(EXPECTATION)
    upgrade = reader.first(b"upgrade") if b"upgrade" in connection and http11 else None
    pairs = reader.pairs(NOT_SENT_ON if connection in USUAL else _dropped(connection) | NOT_SENT_ON)
    lines = [b"%b %b HTTP/1.1" % (method, reader.url), *map(b"%b: %b".__mod__, pairs)]
    if upgrade:
        lines.append(b"Connection: Upgrade\r\nUpgrade: " + upgrade)
    return RequestHead(
        method, path_of(reader.url), http11, b"\r\n".join([*lines, b""]),
        b"close" not in connection and (http11 or b"keep-alive" in connection),
        chunked, expect is not None and http11, upgrade, b"x-no-replay" in reader.noted,
        int(length) if length is not None else None,
    )


def _request_chunked(reader: _Reader, http11: bool) -> bool:
    codings = reader.tokens(b"transfer-encoding")
    if codings and not http11:
        raise BadHeadError(BAD_REQUEST, "Transfer-Encoding in HTTP/1.0")
    if codings and codings != [b"chunked"]:
        raise BadHeadError(NOT_IMPLEMENTED, "a transfer coding other than chunked")
    return bool(codings)


def _dropped(connection: list[bytes]) -> frozenset[bytes]:
    """The one hop's headers, and those that Connection names."""
    return HOP_BY_HOP if connection in USUAL else HOP_BY_HOP | (set(connection) - NEVER_NAMED)


def path_of(target: bytes) -> str:
    """`/v1/%63ompletions?x` -> `/v1/completions`; an absolute target's path."""
    path = target.partition(b"?")[0]
    if path[:1] != b"/" and b"://" in path:
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return (unquote_to_bytes(path) if b"%" in path else path).decode("latin-1")


def encode_request(head: RequestHead, body: bytes | None) -> bytes:
    """For the engine.  `body`: the whole of it, None where it is streamed on in the client's framing."""
    length = len(body) if head.chunked and body is not None else head.length
    if length is not None:
        return b"%bContent-Length: %d\r\n\r\n" % (head.onward, length)
    return head.onward + (b"Transfer-Encoding: chunked\r\n\r\n" if head.chunked else b"\r\n")


def header(head: RequestHead, name: bytes) -> bytes | None:
    """The first value of one that goes to the engine.  `name`: in lower case."""
    for line in head.onward.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None


@lru_cache(CACHED)
def parse_response(raw: bytes) -> ResponseHead:
    """Under load an engine's heads differ by the second at most.  Raises BadHeadError."""
    reader = _Reader()
    parser = httptools.HttpResponseParser(reader)
    try:
        parser.feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError as error:
        raise BadHeadError(BAD_UPSTREAM, str(error)) from None
    version, codings, status = parser.get_http_version(), reader.tokens(b"transfer-encoding"), parser.get_status_code()
    if version not in ("1.1", "1.0") or status < 100 or codings not in ([], [b"chunked"]):
        raise BadHeadError(BAD_UPSTREAM, "its version, status or transfer coding is unknown")
    connection, length = reader.tokens(b"connection"), reader.first(b"content-length")
    http11 = version == "1.1"
    return ResponseHead(
        raw, status, reader.pairs(_dropped(connection)),
        b"close" not in connection and (http11 or b"keep-alive" in connection),
        int(length) if length is not None else None, bool(codings),
        (reader.first(b"content-type") or b"").lower().startswith(b"text/event-stream"),
        http11 and not connection and reader.noted.keys().isdisjoint({b"keep-alive", b"upgrade", b"proxy-connection"}),
    )


def encode_response(head: ResponseHead, http11: bool, keep_alive: bool) -> bytes:
    """For the client: `http11` is its version; `keep_alive`: its connection stays open after this response."""
    if (head.as_is and http11 and keep_alive) or head.status == SWITCHING:
        return head.raw
    start = b"HTTP/1.1" + head.raw[8:head.raw.index(b"\r\n")]
    lines = [start, *map(b"%b: %b".__mod__, head.pairs)]
    if head.chunked and http11:
        lines.append(b"Transfer-Encoding: chunked")
    if not keep_alive or not http11:
        lines.append(b"Connection: keep-alive" if keep_alive else b"Connection: close")
    return b"\r\n".join(lines) + END
