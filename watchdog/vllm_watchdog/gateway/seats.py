"""What an engine has of requests at once, and whether one more may join them.  Pure.

Long requests together take at most a share of the seats and of the tokens, so that short ones never wait for a long one
to end; one long one may always go where none is, and a request that is larger than all that there is, where nobody is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class Claim(NamedTuple):
    """What a request asks for: `tokens` of an engine's memory for its prompt, `size` bytes of ours while it waits.

    `key`: whose it is.  `seat` False: it is none of the engine's work, and needs no room there.
    """

    size: int
    tokens: int = 0
    key: str = ""
    long: bool = False
    seat: bool = True


NO_SEAT = Claim(0, seat=False)


class Block(Enum):
    """What keeps a request from going."""

    KEY = auto()        # its own key has as many there as it may
    KIND = auto()       # the long ones there
    ALL = auto()        # whoever is there


@dataclass(frozen=True, slots=True)
class Limits:
    """At once, at one engine; None: no limit.  `long_share`: of requests and tokens, for the long ones together.
    `free`: tokens that one more long one finds."""

    requests: int | None = None
    tokens: int | None = None
    key_requests: int | None = None
    long_share: float = 0.5
    free: int | None = None


NO_LIMITS = Limits()


class Seats:
    """Who is there, by what they claimed."""

    def __init__(self) -> None:
        self.requests = self.tokens = self.long_requests = self.long_tokens = 0
        self.keys: dict[str, int] = {}

    def enter(self, claim: Claim) -> None:
        if claim.seat:
            self._count(claim, 1)

    def leave(self, claim: Claim) -> None:
        if claim.seat:
            self._count(claim, -1)

    def _count(self, claim: Claim, sign: int) -> None:
        _, tokens, key, long, _ = claim
        self.requests += sign
        self.tokens += sign * tokens
        if long:
            self.long_requests += sign
            self.long_tokens += sign * tokens
        count = self.keys.get(key, 0) + sign
        if count:
            self.keys[key] = count
        else:
            del self.keys[key]

    def blocked(self, claim: Claim, limits: Limits) -> Block | None:
        """None: it may go."""
        if not claim.seat or limits is NO_LIMITS:
            return None
        if limits.key_requests is not None and self.keys.get(claim.key, 0) >= limits.key_requests:
            return Block.KEY
        if claim.long and self.long_requests and self._long_ones_have_theirs(claim, limits):
            return Block.KIND
        if claim.long and self.requests and limits.free is not None and claim.tokens > limits.free:
            return Block.KIND
        if limits.requests is not None and self.requests >= limits.requests:
            return Block.ALL
        if limits.tokens is not None and self.requests and self.tokens + claim.tokens > limits.tokens:
            return Block.ALL
        return None

    def short_of_memory(self, claim: Claim, limits: Limits) -> bool:
        """Is it tokens that keep it from going, not the number of requests?"""
        room = (limits.tokens - self.tokens if limits.tokens is not None else None, limits.free if claim.long else None)
        return bool(self.requests) and any(each is not None and claim.tokens > each for each in room)

    def _long_ones_have_theirs(self, claim: Claim, limits: Limits) -> bool:
        share, requests, tokens = limits.long_share, limits.requests, limits.tokens
        if requests is not None and self.long_requests >= max(1, int(requests * share)):
            return True
        return tokens is not None and self.long_tokens + claim.tokens > tokens * share
