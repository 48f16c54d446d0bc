"""Which request may have killed the engine, and what becomes of each that was there.  Pure; time is an argument.

Suspicion goes by phase and size.  Whose answer had begun was past prefill and is no suspect.  Of the others:

- the longest, from `suspect_tokens` up, is the prime suspect: it goes to no other engine, and neither does its content;
- the rest are innocent and go on at once;
- of those that had been at a death before (and no prime suspect explains this one): a single one is refused, for two
  engines have ended and it is all that they had in common; several go on one at a time, so that the next death, if there
  is one, has a single one to name.

So a poisonous prompt costs one engine when it is long, two when it is alone, and three at worst.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, auto

ENTRY_LIMIT = 1024
BYTES_PER_TOKEN = 4     # of English text with the usual tokenizers; other languages have fewer tokens a byte


class Verdict(StrEnum):
    INNOCENT = auto()
    ALONE = auto()      # may go on, but not beside another of its kind
    SUSPECT = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Present:
    """A request at an engine's death whose answer had not begun.  `deaths`: how many it was at before this one."""

    id: int
    digest: str
    tokens: int
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """Content that is refused.  `hits`: how often it came again."""

    digest: str
    why: Verdict
    tokens: int
    since: float
    hits: int = 0


def tokens_of(size: int) -> int:
    """An estimate from the body's bytes, for comparing prompts."""
    return size // BYTES_PER_TOKEN


class Quarantine:
    """Content is refused for `refuse_s`; the oldest is forgotten when there are more than ENTRY_LIMIT."""

    def __init__(self, suspect_tokens: int, refuse_s: float) -> None:
        self.suspect_tokens, self.refuse_s = suspect_tokens, refuse_s
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def refused(self, digest: str, at: float) -> Entry | None:
        """Counts the hit."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if at - entry.since >= self.refuse_s:
            del self._entries[digest]
            return None
        self._entries[digest] = entry = replace(entry, hits=entry.hits + 1)
        return entry

    def judge(self, present: Sequence[Present], at: float) -> dict[int, Verdict]:
        """One death, and everyone who was there: a verdict for each id.  Remembers what is refused."""
        verdicts = dict.fromkeys((one.id for one in present), Verdict.INNOCENT)
        long = [one for one in present if one.tokens >= self.suspect_tokens]
        if long:
            prime = max(long, key=lambda one: one.tokens)
            verdicts |= {one.id: Verdict.SUSPECT for one in present if one.digest == prime.digest}
            self._remember(prime, Verdict.SUSPECT, at)
        again = [one for one in present if one.deaths and verdicts[one.id] is Verdict.INNOCENT]
        if len(again) == 1 and not long:
            verdicts[again[0].id] = Verdict.REFUSED
            self._remember(again[0], Verdict.REFUSED, at)
        else:
            verdicts |= {one.id: Verdict.ALONE for one in again}
        return verdicts

    def entries(self, at: float) -> tuple[Entry, ...]:
        self._expire(at)
        return tuple(self._entries.values())

    def clear(self, digest: str | None = None) -> int:
        """Forgets one, or all; how many that were."""
        found = [each for each in self._entries if digest in (None, each)]
        for each in found:
            del self._entries[each]
        return len(found)

    def _remember(self, one: Present, why: Verdict, at: float) -> None:
        self._entries.pop(one.digest, None)
        self._entries[one.digest] = Entry(one.digest, why, one.tokens, at)
        self._expire(at)
        while len(self._entries) > ENTRY_LIMIT:
            self._entries.popitem(last=False)

    def _expire(self, at: float) -> None:
        for entry in list(self._entries.values()):
            if at - entry.since < self.refuse_s:
                break       # the rest is younger
            del self._entries[entry.digest]
