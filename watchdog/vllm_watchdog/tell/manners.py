"""How a channel wants to be told: from which severity, when, how often, and whether several alerts go as one.  Pure.

`choice` picks what goes now.  Nothing that calls for a human waits for an hour to be over, and nothing that is critical
for the morning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from time import struct_time

from vllm_watchdog.core.incidents import Urgency

HOUR_S, DAY_MIN = 3600.0, 24 * 60
GROUP_MOST = 20         # incidents in one message: what fits into the smallest of them


@dataclass(frozen=True, slots=True)
class Hours:
    """A part of each day, in minutes of local time; it may run over midnight."""

    begin_min: int
    end_min: int

    def left_s(self, now: struct_time) -> float:
        """Until they end; 0 outside of them."""
        minute = now.tm_hour * 60 + now.tm_min
        length, into = (self.end_min - self.begin_min) % DAY_MIN, (minute - self.begin_min) % DAY_MIN
        return (length - into) * 60.0 - now.tm_sec if into < length else 0.0


@dataclass(frozen=True, slots=True)
class Manners:
    """`together`: people get what comes within `gather_s` as one message; programs get every alert by itself."""

    least: Urgency = Urgency.WARNING
    quiet: Hours | None = None
    most_per_hour: int = 0          # messages; 0: no limit
    together: bool = False
    gather_s: float = 2.0

    def quiet_s(self, wall: float, local: Callable[[float], struct_time]) -> float:
        return self.quiet.left_s(local(wall)) if self.quiet else 0.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """One alert that waits for its channel.  `alone`: the receiver refused it, so it holds up no other."""

    incident: str
    kind: str
    urgency: Urgency
    due_at: float
    give_up_at: float
    attempts: int = 0
    alone: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.incident, self.kind


@dataclass(frozen=True, slots=True)
class Limits:
    """What holds the whole channel now: `quiet_s` left of its quiet hours, instants when it may speak again."""

    quiet_s: float = 0.0
    asked_until: float = -inf       # the receiver's Retry-After
    full_until: float = -inf        # its messages of an hour are spent


@dataclass(frozen=True, slots=True)
class _File:
    """What waits of one incident, oldest first."""

    letters: tuple[Waiting, ...]

    @property
    def urgency(self) -> Urgency:
        return max((letter.urgency for letter in self.letters), key=lambda urgency: urgency.rank)

    @property
    def alone(self) -> bool:
        return any(letter.alone for letter in self.letters)

    def due_at(self, now: float, limits: Limits) -> float:
        quiet = now + limits.quiet_s if limits.quiet_s and self.urgency is Urgency.WARNING else -inf
        return max(self.letters[0].due_at, limits.asked_until, quiet)


def choice(waiting: Sequence[Waiting], now: float, limits: Limits, manners: Manners) -> tuple[tuple[Waiting, ...], float]:
    """What goes now as one message, and when to look again if nothing does.

    Of each incident the oldest goes first: nobody wants "resolved" before "opened".
    """
    files = sorted(_files(waiting), key=lambda file: file.due_at(now, limits))
    if not files:
        return (), inf
    ready = [file for file in files if file.due_at(now, limits) <= now]
    if not ready:
        return (), files[0].due_at(now, limits)
    if not manners.together:
        return ready[0].letters[:1], now
    if now < limits.full_until and all(file.urgency is not Urgency.PAGE for file in ready):
        return (), limits.full_until
    if ready[0].alone:
        return ready[0].letters[:1], now
    fresh = [file for file in files[len(ready):] if not file.letters[0].attempts
             and file.due_at(now, limits) <= now + manners.gather_s]
    company = [file for file in (*ready, *fresh) if not file.alone][:GROUP_MOST]
    return tuple(letter for file in company for letter in file.letters), now


def slept_through(waiting: Sequence[Waiting]) -> tuple[Waiting, ...]:
    """Warnings that opened and ended while they waited for the morning: nobody need hear of them."""
    over = (file for file in _files(waiting) if file.urgency is Urgency.WARNING and file.letters[-1].kind == "resolved")
    return tuple(letter for file in over if file.letters[0].kind == "opened" and not file.letters[0].attempts
                 for letter in file.letters)


def _files(waiting: Sequence[Waiting]) -> list[_File]:
    by: dict[str, list[Waiting]] = {}
    for letter in waiting:
        by.setdefault(letter.incident, []).append(letter)
    return [_File(tuple(letters)) for letters in by.values()]
