"""Server-sent events: the report when it changed, and the journal's lines, also in words, as they happen.

For one asyncio thread.
A reader that is too slow is cut off: it comes back by itself and is told the newest report first, so it misses nothing that
matters.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from vllm_watchdog.core.journal_phrases import worded

READERS = 32
LATEST = 30             # lines that a new reader is told first
LINES = 200             # that one reader may be behind
CALM_S = 0.25           # at most one report in this long
HEARTBEAT_S = 15.0


class Reader:
    def __init__(self) -> None:
        self.lines: deque[bytes] = deque(maxlen=LINES + 1)      # it is cut off for the one too many
        self.version = -1
        self.woken = asyncio.Event()


class Hub:
    """`report` makes the newest report."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        self._report = report
        self._readers: set[Reader] = set()
        self._version = 0
        self._latest: deque[bytes] = deque(maxlen=LATEST)
        self._encoded: tuple[int, bytes] = (-1, b"")
        self.closed = False

    @property
    def watched(self) -> bool:
        return bool(self._readers)

    @property
    def full(self) -> bool:
        return len(self._readers) >= READERS

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        reader = Reader()
        self._version += 1      # while nobody looked nobody counted
        reader.lines.extend(self._latest)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def changed(self) -> None:
        self._version += 1
        self._wake()

    def said(self, line: dict[str, Any]) -> None:
        words = worded(line.get("say", ""), line)
        data = event("said", line | ({"words": asdict(words)} if words else {}))
        self._latest.append(data)
        for reader in self._readers:
            reader.lines.append(data)
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    async def next(self, reader: Reader) -> bytes | None:
        """What to send now, a heartbeat where there was nothing for long.  None: the stream is over."""
        if reader.version >= 0:
            await asyncio.sleep(CALM_S)
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                while not (reader.lines or reader.version < self._version or self.closed):
                    reader.woken.clear()
                    await reader.woken.wait()
        except TimeoutError:
            return b": nothing new\n\n"
        if self.closed or len(reader.lines) > LINES:
            return None
        parts = list(reader.lines)
        reader.lines.clear()
        if reader.version < self._version:
            reader.version = self._version
            parts.append(self._now())
        return b"".join(parts)

    def _now(self) -> bytes:
        if self._encoded[0] != self._version:
            self._encoded = (self._version, event("report", self._report()))
        return self._encoded[1]

    def _wake(self) -> None:
        for reader in self._readers:
            reader.woken.set()


def event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, ensure_ascii=False, default=str)}\n\n".encode()
