"""Is an engine worth asking, although it lives?  The circuit breaker of one life of one engine.  Pure.

Closed: all may go.  Open: `failures` different requests in a row have failed there (5xx, no connection, no answer), so
nobody goes for a while.  Half open: one may go, and its end decides.  Each failed trial doubles the while, up to a limit.
Different ones, because one client that repeats what no engine can answer says nothing about the engine.
"""

from __future__ import annotations

from enum import StrEnum

failures = 5
open_s, open_max_s = 1.0, 30.0      # half of the default hold_s: what waits sees at least one trial


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._wait_s = open_s
        self._until: float | None = None    # None: closed
        self._trial: int | None = None      # who is there to try it

    def state(self, at: float) -> State:
        if self._until is None:
            return State.CLOSED
        return State.OPEN if at < self._until else State.HALF_OPEN

    def allows(self, at: float) -> bool:
        return self._until is None or (at >= self._until and self._trial is None)

    def went(self, who: int) -> None:
        """One that was allowed is on its way."""
        if self._until is not None:
            self._trial = who

    def withdrew(self, who: int) -> None:
        """It is there no more.  Without a word on the engine, if nothing else was told: its client has left."""
        if self._trial == who:
            self._trial = None

    def answered(self) -> bool:
        """It works.  Whether that closes it."""
        closes = self._until is not None
        self._failed.clear()
        self._until, self._wait_s, self._trial = None, open_s, None
        return closes

    def failed(self, who: int, digest: str, at: float) -> bool:
        """A request failed.  Whether that opens it, or keeps it open."""
        if self._until is not None:
            if self._trial != who:
                return False        # it was under way before
            self._wait_s, self._trial = min(self._wait_s * 2, open_max_s), None
        else:
            self._failed.add(digest)
            if len(self._failed) < failures:
                return False
        self._until = at + self._wait_s
        return True
