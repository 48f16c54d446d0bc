"""Alive, busy or wedged: judged by tokens, never by `/health` or the level of a gauge, which lie both ways.

1. alive while the progress counters move, or the KV cache's use changes: a long prefill moves no counter until it
   ends (seen on 0.32: 4,000 tokens in 16-token steps), and starves the probe, but fills the cache step by step;
2. when they stand still, a one-token completion is asked for: answered, alive;
3. unanswered while the counters move again: busy (a full queue), never restarted;
4. unanswered and frozen: quiet; the policy's patience decides when quiet is wedged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf

from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.readings import Metrics, Progress, Unknown

Seen = tuple[Progress | None, float | None]     # counters, KV use


class Life(StrEnum):
    ALIVE = auto()
    BUSY = auto()       # the probe waits in a queue that moves
    QUIET = auto()      # nothing moves, nothing answers
    BLIND = auto()      # nothing answers, and this engine publishes no counters that could tell busy from hung


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known of one generation's tokens.  Instants are monotonic seconds."""

    since: float = 0.0                  # when we began to look
    seen: Seen | None = None            # at the last scrape that told
    counted: bool = False               # the last scrape published counters
    moved_at: float = -inf              # they last moved
    asked_at: float | None = None       # a probe is out
    tried_at: float = -inf              # a probe was last sent
    answered_at: float = -inf           # a probe was last answered
    missed_at: float | None = None      # when the first unanswered probe since the counters moved was sent
    unprovable: str = ""                # why a probe can't prove anything here (no such endpoint, no key)

    @property
    def sign_at(self) -> float:
        """The last proof of life."""
        return max(self.since, self.moved_at, self.answered_at)


def scraped(pulse: Pulse, at: float, metrics: Metrics | Unknown) -> Pulse:
    """A scrape that failed leaves all as it was: nothing moved."""
    if isinstance(metrics, Unknown):
        return pulse
    seen = (metrics.progress, metrics.kv_usage)
    moved = pulse.seen is not None and seen != pulse.seen
    return replace(pulse, counted=metrics.progress is not None, seen=seen, moved_at=at if moved else pulse.moved_at)


def due(pulse: Pulse, at: float, limits: Limits) -> bool:
    """Is it time to ask for a token?  Never two at once, and a refusal is not asked again at once: it is a request, too."""
    return pulse.asked_at is None and at - max(pulse.sign_at, pulse.tried_at) >= limits.still_s


def asked(pulse: Pulse, at: float) -> Pulse:
    return replace(pulse, asked_at=at, tried_at=at)


def answered(pulse: Pulse, at: float, answer: bool | Unknown) -> Pulse:
    """A probe that could prove nothing counts as neither: it is thrown away, and said; what was missed stays missed."""
    if isinstance(answer, Unknown):
        return replace(pulse, asked_at=None, unprovable=answer.why)
    if answer:
        return replace(pulse, asked_at=None, answered_at=at, missed_at=None, unprovable="")
    still_missing = pulse.missed_at is not None and pulse.missed_at > pulse.moved_at
    return replace(pulse, asked_at=None, missed_at=pulse.missed_at if still_missing else pulse.asked_at)


def judge(pulse: Pulse) -> Life:
    if pulse.missed_at is None:
        return Life.ALIVE
    if pulse.moved_at >= pulse.missed_at:
        return Life.BUSY
    return Life.QUIET if pulse.counted else Life.BLIND
