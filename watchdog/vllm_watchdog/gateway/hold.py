"""The queue of requests that wait for an engine: first in, first out, bounded in number, bytes and time.  Pure.

Two lanes: those that must go alone (two engines have ended under them) don't keep the others waiting.  What has been
sent once and comes back was admitted before, so it goes to the front and fits always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Entry:
    size: int
    since: float


class Hold(Generic[T]):
    """`limit` requests of together `limit_bytes`, each for at most `limit_s` at a time."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float) -> None:
        self.limit, self.limit_bytes, self.limit_s = limit, limit_bytes, limit_s
        self.waiting, self.bytes = 0, 0
        self._lanes: dict[bool, OrderedDict[T, Entry]] = {False: OrderedDict(), True: OrderedDict()}

    def __len__(self) -> int:
        return self.waiting

    def __iter__(self) -> Iterator[T]:
        yield from self._lanes[True]
        yield from self._lanes[False]

    def put(self, item: T, size: int, at: float) -> bool:
        """At the end; False: it is full."""
        if self.waiting >= self.limit or self.bytes + size > self.limit_bytes or self.limit_s <= 0:
            return False
        self._lanes[False][item] = Entry(size, at)
        self._count(1, size)
        return True

    def put_back(self, items: Iterable[tuple[T, int, bool]], at: float) -> None:
        """At the front, in the order given: item, size, whether it must go alone."""
        for item, size, alone in reversed(list(items)):
            lane = self._lanes[alone]
            lane[item] = Entry(size, at)
            lane.move_to_end(item, last=False)
            self._count(1, size)

    def take(self, alone: bool) -> T | None:
        """The next; `alone`: one that must go alone may go now, and is first."""
        for lane in (self._lanes[True], self._lanes[False]) if alone else (self._lanes[False],):
            if lane:
                item, entry = lane.popitem(last=False)
                self._count(-1, -entry.size)
                return item
        return None

    def remove(self, item: T) -> bool:
        for lane in self._lanes.values():
            if entry := lane.pop(item, None):
                self._count(-1, -entry.size)
                return True
        return False

    def expire(self, at: float) -> tuple[T, ...]:
        """Those that have waited too long; they wait no more."""
        late = tuple(
            item for lane in self._lanes.values() for item, entry in lane.items() if at - entry.since >= self.limit_s
        )
        for item in late:
            self.remove(item)
        return late

    def _count(self, items: int, size: int) -> None:
        self.waiting += items
        self.bytes += size
