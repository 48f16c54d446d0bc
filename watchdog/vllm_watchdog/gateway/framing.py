"""Where a body ends.  Counts; changes and keeps nothing.  Pure.

`feed(data)` returns -1 while all of `data` belongs to the body, else the offset in it at which the body ended.
`insertable`: whether something may be put in here without breaking the framing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

CRLF = b"\r\n"
LINE_LIMIT = 256            # of a chunk-size line with its extensions
TRAILER_LIMIT = 8 << 10
NEXT = re.compile(rb"\r\n([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?\r\n")    # ends one chunk and begins the next
UNFINISHED = re.compile(rb"(?:\r|\r\n[0-9A-Fa-f]{0,15}(?:[ \t]*(?:;[^\r\n]*)?)\r?)?")


class FramingError(Exception):
    """The peer's chunks are not chunks."""


class Framing(Protocol):
    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int: ...

    @property
    def insertable(self) -> bool: ...


class Chunked:
    """RFC 9112, 7.1, strictly.  The line end before the first size line is imagined, so that all of them look alike."""

    __slots__ = ("_left", "_tail")

    def __init__(self) -> None:
        self._left, self._tail = 0, CRLF

    @property
    def insertable(self) -> bool:
        """Between two chunks."""
        return self._tail == CRLF

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        """`payload`: gets the bytes that the chunks carry.  Raises FramingError."""
        shift = len(self._tail)
        if shift:
            data = self._tail + data
        at, size = self._left, len(data)
        if payload is not None and at:
            payload.append(data[:at])
        while at < size:
            found = NEXT.match(data, at)
            if found is None:
                return self._keep(data, at)
            start = found.end()
            length = int(found[1], 16)
            if not length:
                return self._last(data, at, start, shift)
            at = start + length
            if payload is not None:
                payload.append(data[start:at])
        self._left, self._tail = at - size, b""
        return -1

    def _keep(self, data: bytes, at: int) -> int:
        tail = data[at:]
        if tail != CRLF and (len(tail) > LINE_LIMIT or not UNFINISHED.fullmatch(tail)):
            raise FramingError("a chunk's size line was expected")
        self._left, self._tail = 0, tail
        return -1

    def _last(self, data: bytes, at: int, start: int, shift: int) -> int:
        """The last chunk, and perhaps trailers."""
        end = data.find(b"\r\n\r\n", start - 2)
        if end >= 0:
            return end + 4 - shift
        if len(data) - start > TRAILER_LIMIT:
            raise FramingError("trailers without an end")
        self._left, self._tail = 0, data[at:]
        return -1


class Unchunked:
    """Writes what the chunks carry, for a client of HTTP/1.0, which knows no chunks."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._chunks = write, Chunked()

    def __call__(self, data: bytes) -> None:
        payload: list[bytes] = []
        self._chunks.feed(data, payload)
        self._write(b"".join(payload))


class Length:
    """A body of `left` bytes."""

    __slots__ = ("_left",)
    insertable = False

    def __init__(self, left: int) -> None:
        self._left = left

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        left = self._left
        self._left = left - len(data)
        if payload is not None:
            payload.append(data[:left])
        return -1 if self._left > 0 else left


class UntilClose:
    """All that comes until the peer closes: old servers, and tunnels."""

    __slots__ = ()
    insertable = True

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int:
        if payload is not None:
            payload.append(data)
        return -1
