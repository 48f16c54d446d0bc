"""Who waits for an engine, and whose turn it is: bounded in number, bytes and time, fair, and nobody starves.  Pure.

Long requests and short ones take turns, and within each so do the API keys: whoever has had the least, in tokens, goes
first; of one key, who came first.  Whose turn it is may not be passed by others while only others are in its way; what
its own kind or key keeps back lets the rest pass.  Where there is no room to wait, the newest of whoever waits most makes
it for who waits less.

Those that must go alone (two engines have ended under them) are first, and keep nobody waiting; so are those that take no
seat.  What has been sent once
and comes back was admitted before, so it goes to the front of its key's and fits always.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, nlargest
from typing import Generic, TypeVar

from vllm_watchdog.gateway.seats import Block, Claim

T = TypeVar("T", bound=Hashable)
K = TypeVar("K", bound=Hashable)

KEYS_LIMIT = 1000       # keys that wait with a turn of their own; further ones share one
REST = "rest"
OLDEST_EVERY = 50       # turns: one goes to who has waited longest, or a stream of new keys could keep others back for ever
ANSWER_TOKENS = 256     # what a request costs beside its prompt: few answers are free


class Turns(Generic[K]):
    """How much each has had, in virtual time.  Who comes anew begins at the present: an idle past earns nothing."""

    def __init__(self) -> None:
        self._now = 0.0
        self._had: dict[K, float] = {}

    def of(self, who: K) -> float:
        return self._had.get(who, self._now)

    def join(self, who: K) -> None:
        self._had[who] = max(self.of(who), self._now)
        if len(self._had) > 2 * KEYS_LIMIT:     # who is dropped had hardly more than the rest
            self._had = dict(nlargest(KEYS_LIMIT, self._had.items(), key=lambda one: one[1]))

    def charge(self, who: K, cost: float) -> None:
        """It goes (or, negative, comes back)."""
        had = self.of(who)
        self._had[who] = had + cost
        if cost > 0:
            self._now = max(self._now, had)


@dataclass(slots=True, eq=False)
class Flow(Generic[T]):
    """The short or the long ones of one key, first in first out."""

    key: str
    lane: Lane[T]
    items: OrderedDict[T, Entry[T]] = field(default_factory=OrderedDict)
    bytes: int = 0

    @property
    def first(self) -> Entry[T]:
        return next(iter(self.items.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    claim: Claim
    since: float
    number: int         # in the order of arrival; what came back is negative, the first of it the least
    flow: Flow[T]


class Lane(Generic[T]):
    """One kind: the long ones, the short ones, those that go alone, or reads."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.flows: dict[str, Flow[T]] = {}
        self.turns: Turns[str] = Turns()
        self.taken = 0

    def flow(self, key: str) -> Flow[T]:
        name = key if key in self.flows or len(self.flows) < KEYS_LIMIT else REST
        if name not in self.flows:
            self.flows[name] = Flow(name, self)
            self.turns.join(name)
        return self.flows[name]

    def next(self, blocked: Callable[[Claim], Block | None]) -> tuple[T | None, Block | None]:
        """Whose turn it is, of those whose key may have one more, and what else is in its way."""
        by_age = self.taken % OLDEST_EVERY == OLDEST_EVERY - 1
        heads = [(0.0 if by_age else self.turns.of(name), flow.first.number, flow) for name, flow in self.flows.items()]
        heapify(heads)
        while heads:
            flow = heappop(heads)[2]
            if (block := blocked(flow.first.claim)) is not Block.KEY:
                return next(iter(flow.items)), block
        return None, Block.KIND


class Queue(Generic[T]):
    """`limit` requests of together `limit_bytes`, each for at most `limit_s` at a time.  `long_share`: what the long ones
    get while the short ones have all that they could use, too."""

    def __init__(self, limit: int, limit_bytes: int, limit_s: float, long_share: float = 0.5) -> None:
        self.limit, self.limit_bytes, self.limit_s = limit, limit_bytes, limit_s
        self.bytes = 0
        self._entries: dict[T, Entry[T]] = {}       # in the order in which they expire
        self._reads, self._alone = Lane[T](), Lane[T]()
        self._long, self._short = Lane[T](long_share), Lane[T](1 - long_share)
        self._turns: Turns[Lane[T]] = Turns()
        self._came = self._back = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def depths(self) -> dict[str, int]:
        """How many wait of each kind."""
        lanes = {"read": self._reads, "alone": self._alone, "long": self._long, "short": self._short}
        return {name: sum(len(flow.items) for flow in lane.flows.values()) for name, lane in lanes.items()}

    def put(self, item: T, claim: Claim, at: float) -> tuple[T, ...]:
        """At its key's end.  Who finds no room and waits no more: nobody, `item` itself, or others that were here."""
        if self.limit_s <= 0:
            return (item,)
        gone = self._displaced(claim)
        if gone is None:
            return (item,)
        for each in gone:
            self.remove(each)
        self._came += 1
        self._add(item, claim, at, self._lane(claim), self._came)
        return gone

    def put_back(self, items: Iterable[tuple[T, Claim, bool]], at: float) -> None:
        """At the front, in the order given: item, claim, whether it must go alone."""
        for item, claim, alone in reversed(list(items)):
            lane = self._lane(claim, alone)
            self._back -= 1
            flow = self._add(item, claim, at, lane, self._back)
            flow.items.move_to_end(item, last=False)
            self._charge(flow, -_cost(claim))

    def take(self, blocked: Callable[[Claim], Block | None], alone: bool) -> T | None:
        """The next, if anybody may go; `alone`: one that must go alone may go now."""
        for lane in (self._reads, self._alone) if alone else (self._reads,):
            item, block = lane.next(blocked)
            if item is not None and block is None:
                return self._take(item)
        for lane in sorted((self._short, self._long), key=self._turns.of):
            item, block = lane.next(blocked)
            if block is Block.ALL:
                return None
            if item is not None and block is None:
                return self._take(item)
        return None

    def remove(self, item: T) -> bool:
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        flow = entry.flow
        del flow.items[item]
        flow.bytes -= entry.claim.size
        self.bytes -= entry.claim.size
        if not flow.items:
            del flow.lane.flows[flow.key]
        return True

    def expire(self, at: float) -> tuple[T, ...]:
        """Those that have waited too long; they wait no more."""
        late = []
        for item, entry in self._entries.items():
            if at - entry.since < self.limit_s:
                break       # the rest came later
            late.append(item)
        for item in late:
            self.remove(item)
        return tuple(late)

    def _lane(self, claim: Claim, alone: bool = False) -> Lane[T]:
        if not claim.seat:
            return self._reads
        lane = self._alone if alone else self._long if claim.long else self._short
        if not lane.flows:
            self._turns.join(lane)
        return lane

    def _add(self, item: T, claim: Claim, at: float, lane: Lane[T], number: int) -> Flow[T]:
        flow = lane.flow(claim.key)
        self._entries[item] = flow.items[item] = Entry(claim, at, number, flow)
        flow.bytes += claim.size
        self.bytes += claim.size
        return flow

    def _take(self, item: T) -> T:
        entry = self._entries[item]
        self._charge(entry.flow, _cost(entry.claim))
        entry.flow.lane.taken += 1
        self.remove(item)
        return item

    def _charge(self, flow: Flow[T], cost: float) -> None:
        flow.lane.turns.charge(flow.key, cost)
        if flow.lane in (self._short, self._long):
            self._turns.charge(flow.lane, cost / flow.lane.weight)

    def _displaced(self, claim: Claim) -> tuple[T, ...] | None:
        """Who makes room for it.  None: nobody has more here than its own key then would."""
        number, size = len(self._entries) + 1 - self.limit, self.bytes + claim.size - self.limit_bytes
        if number <= 0 and size <= 0:
            return ()
        flows = [flow for lane in (self._reads, self._short, self._long) for flow in lane.flows.values()]
        most = max(flows, key=self._share, default=None)
        own = self._lane(claim).flows.get(claim.key)
        if most is None or most is own:
            return None
        gone: list[T] = []
        for item, entry in reversed(most.items.items()):
            if (number <= 0 and size <= 0) or entry.number < 0:
                break
            gone.append(item)
            number, size = number - 1, size - entry.claim.size
        kept = (len(most.items) - len(gone), most.bytes - sum(most.items[each].claim.size for each in gone))
        asked = (len(own.items) + 1, own.bytes + claim.size) if own is not None else (1, claim.size)
        enough = number <= 0 and size <= 0 and self._share_of(*asked) <= self._share_of(*kept)
        return tuple(gone) if enough else None

    def _share(self, flow: Flow[T]) -> float:
        return self._share_of(len(flow.items), flow.bytes)

    def _share_of(self, number: int, size: int) -> float:
        return max(number / self.limit, size / self.limit_bytes)


def _cost(claim: Claim) -> float:
    return claim.tokens + ANSWER_TOKENS if claim.seat else 0.0
