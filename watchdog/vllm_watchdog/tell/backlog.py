"""A bounded queue between whoever must not wait and the one thread that may.

`put` never waits for room: when the queue is full the item is lost, and counted.  `take` hands over everything that
waits, and how many were lost *after* it, so that a reader of what was written knows where the gap is.
The lock is held for a few list operations, never over I/O.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Item = TypeVar("Item")

idle_s = 60.0   # no wait is for ever, and an idle thread that wakes once a minute costs nothing


def ended(thread: threading.Thread, deadline_s: float) -> bool:
    """Waits for a thread to end.  One that never started has: a daemon that could not begin stops what it has."""
    if thread.ident is not None:
        thread.join(deadline_s)
    return not thread.is_alive()


class Backlog(Generic[Item]):
    """Holds at most `limit` items; any number of threads put, one thread takes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: list[Item] = []
        self._lost = 0
        self._taken = False             # the taker is at work on what it took
        self._closed = False
        self._changed, self._hurry = threading.Condition(), threading.Event()

    def put(self, item: Item, at_once: bool = True) -> bool:
        """False: there was no room (or the queue is closed) and the item is lost.  `at_once`: the taker gathers no more."""
        with self._changed:
            if self._closed or len(self._items) >= self._limit:
                self._lost += 1
                return False
            self._items.append(item)
            if at_once:
                self._hurry.set()
            if len(self._items) == 1:
                self._changed.notify_all()
            return True

    def take(self, wait_s: float = idle_s, gather_s: float = 0.0) -> tuple[list[Item], int]:
        """Everything that waits, and how many were lost behind it; empty after `wait_s` or when closed.

        What comes within `gather_s` of the first item, up to one that is to go at once, is handed over with it.
        """
        with self._changed:
            self._taken = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._items or self._closed, wait_s)
        if gather_s:
            self._hurry.wait(gather_s)
        with self._changed:
            items, self._items = self._items, []
            if not self._closed:
                self._hurry.clear()
            lost, self._lost = self._lost, 0
            self._taken = bool(items or lost)
            return items, lost

    def close(self) -> None:
        """What waits is still handed out; nothing more gets in."""
        with self._changed:
            self._closed = True
            self._hurry.set()
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """Closed, and everything handed out."""
        with self._changed:
            return self._closed and not self._items

    @property
    def closed(self) -> bool:
        with self._changed:
            return self._closed

    @property
    def waiting(self) -> int:
        """What was put and has not been dealt with; what was taken together counts as one."""
        with self._changed:
            return len(self._items) + self._taken

    def settled(self, deadline_s: float) -> bool:
        """Waits until all that was put has been dealt with.  False: not within `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._items or self._taken), deadline_s)
