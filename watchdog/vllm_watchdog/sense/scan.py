"""Finds in blocks of bytes the few lines that can matter, so that the core need not read the rest.

A prefilter and never a judge: it hands out every line that holds a literal of the catalogue, the few lines that complete
a headline, and of the lines that only say "still serving" (access log, flowing tokens) the first after each of those,
which is all that changes the reader's state.  So reading through it gives the verdict of reading every line (a property
test holds it to that).
One hyperscan database a process; no I/O, blocks on nothing, and leaves Python's lock to others while it searches.  A line
keeps at most `LINE_BYTES`, the rest is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import hyperscan

from vllm_watchdog.core import loading
from vllm_watchdog.core.kernel import KERNEL_NEEDLES
from vllm_watchdog.core.markers import IDLE_STATS_NEEDLES, MARKER_NEEDLES, STATS_NEEDLE, stats_of
from vllm_watchdog.core.records import LINE_LIMIT, Kind, parse
from vllm_watchdog.core.signatures import ROWS
from vllm_watchdog.core.validation import HEADLINE, lines_after

LINE_BYTES = 4 * LINE_LIMIT     # UTF-8 needs at most four bytes a character
BLOCK_BYTES = 256 * 1024
# A JSON line may spell a letter as an escape, or hold colours; such a line is always looked at.
JSON_ESCAPES = ("\\/", "\\u001b", "\\u001B", *(f"\\u00{digit}" for digit in range(2, 8)))

_HEADLINE = HEADLINE.encode("ascii")
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def needles() -> tuple[str, ...]:
    """Every literal that makes a line a candidate."""
    catalogue = (needle for row in ROWS for needle in row.needles)
    markers = (*MARKER_NEEDLES, *IDLE_STATS_NEEDLES, *loading.NEEDLES)
    return tuple(sorted({*catalogue, *markers, *KERNEL_NEEDLES, *JSON_ESCAPES}))


@cache
def database() -> Any:
    """All needles, compiled; 0.1 MB, built in 8 ms."""
    words = [each.encode("ascii") for each in needles()]
    made = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
    made.compile(expressions=words, ids=range(len(words)), flags=[0] * len(words), literal=True)
    return made


class Search:
    """Where needles end.  What it needs to search is its own, so each thread has another one."""

    def __init__(self) -> None:
        self._database = database()
        self._scratch = hyperscan.Scratch(self._database)

    def __call__(self, data: bytes) -> list[int]:
        """The offset of each needle's last byte, in order."""
        found: list[int] = []
        self._database.scan(data, _note, context=found, scratch=self._scratch)
        found.sort()
        return found


def _note(_number: int, _start: int, end: int, _flags: int, found: list[int]) -> None:
    found.append(end - 1)


def _is_access(text: str) -> bool:
    return parse(text)[0].kind is Kind.ACCESS


def _is_progress(text: str) -> bool:
    return any((stats := stats_of(record)) and stats.tokens_per_s > 0 for record in parse(text))


_AMBIENT: tuple[tuple[bytes, Callable[[str], bool]], ...] = (
    (b" HTTP/1.", _is_access), (STATS_NEEDLE.encode("ascii"), _is_progress),
)


class Scanner:
    """Cuts a stream of bytes into lines and yields (line number from 1, text) of the candidates, in order."""

    def __init__(self) -> None:
        self.lines = 0              # whole lines seen
        self.dropped_bytes = 0      # beyond LINE_BYTES of a line
        self._tail = b""
        self._more = 0              # lines to come that belong to a headline
        self._due = _AMBIENT        # kinds of ambient line not yet seen since the last candidate
        self._search = Search()

    def feed(self, block: bytes) -> Iterator[tuple[int, str]]:
        """The candidates that this block completes; a partial last line waits for the next block."""
        cut = block.rfind(b"\n") + 1
        if not cut:
            self._keep(block)
            return
        first = block.find(b"\n") + 1
        self._keep(block[:first])
        opening, self._tail = self._tail, b""
        yield from self._scan(opening if opening.endswith(b"\n") else opening + b"\n")
        yield from self._scan(block[first:cut])
        self._keep(block[cut:])

    def finish(self) -> Iterator[tuple[int, str]]:
        """The last line, if the text does not end with a newline."""
        tail, self._tail = self._tail, b""
        if tail:
            yield from self._scan(tail + b"\n")

    def _keep(self, piece: bytes) -> None:
        room = LINE_BYTES - len(self._tail)
        self.dropped_bytes += max(0, len(piece) - room)
        self._tail += piece[:room]

    def _scan(self, whole: bytes) -> Iterator[tuple[int, str]]:
        """Candidates of whole lines."""
        if b"\x1b" not in whole:
            yield from self._number(whole, self._candidates(whole))
            return
        plain = _ANSI.sub(b"", whole)
        coloured = whole.split(b"\n")   # colours hold no newline, so the lines correspond
        before = self.lines
        for number, _ in self._number(plain, self._candidates(plain)):
            yield number, _text(coloured[number - before - 1])

    def _number(self, whole: bytes, found: Iterable[tuple[int, int]]) -> Iterator[tuple[int, str]]:
        number, counted = self.lines, 0
        for start, end in found:
            number += whole.count(b"\n", counted, start)
            counted = start
            yield number + 1, _text(whole[start:end])
        self.lines = number + whole.count(b"\n", counted)

    def _candidates(self, whole: bytes) -> Iterator[tuple[int, int]]:
        """Start and end of each line to look at; every line of `whole` ends with a newline."""
        position, size = 0, len(whole)
        for hit in (*self._search(whole), size):
            while self._more and position < size:
                end = whole.find(b"\n", position)
                yield position, end
                position = self._looked_at(whole, position, end)
            if hit < position:
                continue
            start = whole.rfind(b"\n", position, hit) + 1 or position
            yield from self._ambient(whole, position, start)
            if hit < size:
                end = whole.find(b"\n", hit)
                yield start, end
                position = self._looked_at(whole, start, end)

    def _looked_at(self, whole: bytes, start: int, end: int) -> int:
        """Where the next line begins."""
        self._due = _AMBIENT
        self._more = self._after(whole[start:end])
        return end + 1

    def _after(self, line: bytes) -> int:
        return (lines_after(_text(line)) if _HEADLINE in line else 0) or max(0, self._more - 1)

    def _ambient(self, whole: bytes, start: int, end: int) -> list[tuple[int, int]]:
        """The first access line and the first line of flowing tokens since the last candidate."""
        found, due = [], []
        for needle, holds in self._due:
            if span := _first(whole, start, end, needle, holds):
                found.append(span)
            else:
                due.append((needle, holds))
        self._due = tuple(due)
        return sorted(found)


def _first(whole: bytes, start: int, end: int, needle: bytes, holds: Callable[[str], bool]) -> tuple[int, int] | None:
    at = whole.find(needle, start, end)
    while at >= 0:
        opens = whole.rfind(b"\n", start, at) + 1 or start
        closes = whole.find(b"\n", at)
        if holds(_text(whole[opens:closes])):
            return opens, closes
        at = whole.find(needle, closes, end)
    return None


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace")
