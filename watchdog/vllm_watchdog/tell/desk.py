"""One channel: what waits for it, and the thread that sends it, so that a hung receiver holds up nobody else.

What fails is tried again with exponential backoff and jitter for `give_up_s`; then that is said.  When the receiver asked
to wait, the whole channel does.  What goes when, and what goes together, is `manners.choice`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.say import Say
from vllm_watchdog.tell.channel import Channel, Outcome
from vllm_watchdog.tell.ledger import Ledger, Letter
from vllm_watchdog.tell.manners import HOUR_S, Limits, Waiting, choice, slept_through

letters_waiting = 1_000     # to be sent, a channel
idle_s = 60.0

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Patience:
    first_s: float = 2.0
    most_s: float = 900.0
    asked_most_s: float = 3600.0        # a receiver's Retry-After is honoured up to this
    give_up_s: float = 86_400.0

    def delay_s(self, attempts: int, chance: float, asked_s: float | None) -> float:
        """After the `attempts`-th failure; `chance` 0..1 spreads hosts that fail together over half of it."""
        backoff_s = min(self.most_s, self.first_s * 2.0 ** min(attempts - 1, 30))
        return max(backoff_s * (0.5 + chance / 2), self.asked_s(asked_s))

    def asked_s(self, asked_s: float | None) -> float:
        return min(asked_s or 0.0, self.asked_most_s)


@dataclass(frozen=True, slots=True)
class ChannelState:
    """How a channel fares, for the status report; `*_wall` epoch seconds; `failing` is empty when it works."""

    name: str
    waiting: int
    delivered_wall: float | None
    failing: str
    failing_since_wall: float | None = None


class Desk:
    """`group` makes one payload of several.  Only the desk's own thread takes letters away."""

    def __init__(self, channel: Channel, ledger: Ledger,
                 group: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]], clock: Callable[[], float],
                 wall: Callable[[], float], say: Say, patience: Patience, chance: Callable[[], float]) -> None:
        self.name, self.manners = channel.name, channel.manners
        self._channel, self._ledger, self._group = channel, ledger, group
        self._clock, self._wall, self._say = clock, wall, say
        self._patience, self._chance = patience, chance
        self._letters: dict[Key, Letter] = {}
        self._waiting: dict[Key, Waiting] = {}                      # of the same letters, in the order of telling
        self._unconfirmed: dict[Key, tuple[Letter, str]] = {}       # over, but not yet written down
        self._asked_until = -inf
        self._sent: deque[float] = deque()                          # messages of the last hour
        self._changed = threading.Condition()
        self._closed = False
        self._state = ChannelState(self.name, 0, None, "")
        self.thread = threading.Thread(target=self._run, name=f"alert-{self.name}", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def state(self) -> ChannelState:
        with self._changed:
            return replace(self._state, waiting=len(self._waiting))

    def delivered(self, wall: float) -> None:
        """By an earlier daemon, last."""
        with self._changed:
            self._state = replace(self._state, delivered_wall=self._state.delivered_wall or wall)

    def add(self, letters: tuple[Letter, ...]) -> None:
        now, wall = self._clock(), self._wall()
        with self._changed:
            for letter in letters:
                if len(self._waiting) >= letters_waiting:
                    self._say("alert.lost", channel=self.name, incident=letter.incident, kind=letter.kind,
                              why="too many wait for this channel; a restart of the daemon sends it")
                elif letter.key not in self._waiting and letter.key not in self._unconfirmed:
                    self._letters[letter.key] = letter
                    self._waiting[letter.key] = self._queued(letter, now, wall)
            self._changed.notify_all()

    def _queued(self, letter: Letter, now: float, wall: float) -> Waiting:
        age_s = max(0.0, wall - letter.wall)        # a wall clock set back must not make it younger
        gather_s = self.manners.gather_s if self.manners.together and not letter.attempts else 0.0
        return Waiting(letter.incident, letter.kind, Urgency(json.loads(letter.payload)["urgency"]), now + gather_s,
                       now + self._patience.give_up_s - age_s, letter.attempts)

    def _run(self) -> None:
        if why := self._channel.unusable():
            self._say("alert.unusable", channel=self.name, why=why)     # now, not at the first alert
            with self._changed:
                self._state = replace(self._state, failing=why, failing_since_wall=self._wall())
        while letters := self._next():
            payloads = [json.loads(letter.payload) for letter in letters]
            self._came(letters, self._channel.send(self._group(payloads) if len(payloads) > 1 else payloads[0]))
            self._confirm()
        self._confirm()

    def _next(self) -> tuple[Letter, ...]:
        """Waits for what may go as the next message.  Empty: the desk closes."""
        while not self._closed:
            with self._changed:
                now, quiet_s = self._clock(), self.manners.quiet_s(self._wall(), time.localtime)
                slept = slept_through(tuple(self._waiting.values())) if quiet_s else ()
                self._finish(tuple(waiting.key for waiting in slept), "quiet")
                limits = Limits(quiet_s, self._asked_until, self._full_until(now))
                chosen, at = choice(tuple(self._waiting.values()), now, limits, self.manners)
                if chosen and not self._closed:
                    return tuple(self._letters[waiting.key] for waiting in chosen)
                if not (slept or self._closed):
                    self._changed.wait(min(idle_s, max(at - now, 0.0)))
            if slept:
                self._confirm()
        return ()

    def _full_until(self, now: float) -> float:
        while self._sent and self._sent[0] <= now - HOUR_S:
            self._sent.popleft()
        most = self.manners.most_per_hour
        return self._sent[-most] + HOUR_S if most and len(self._sent) >= most else -inf

    def _came(self, letters: tuple[Letter, ...], outcome: Outcome) -> None:
        """One try is over."""
        now = self._clock()
        tried = tuple(replace(letter, attempts=letter.attempts + 1) for letter in letters)
        over = tuple(each for each in tried if outcome.ok or now >= self._waiting[each.key].give_up_at)
        wait_s = self._patience.delay_s(tried[0].attempts, self._chance(), outcome.retry_after_s)
        with self._changed:
            self._letters.update((letter.key, letter) for letter in tried)
            self._finish(tuple(letter.key for letter in over), "delivered" if outcome.ok else "given up")
            for letter in tried:
                if letter.key in self._waiting:
                    self._waiting[letter.key] = replace(
                        self._waiting[letter.key], attempts=letter.attempts, due_at=now + wait_s,
                        alone=outcome.refused or self._waiting[letter.key].alone)
            self._sent += [now] if outcome.ok else []
            self._asked_until = now + self._patience.asked_s(outcome.retry_after_s)
            since = self._state.failing_since_wall or self._wall()
            self._state = replace(
                self._state, failing="" if outcome.ok else outcome.why, failing_since_wall=None if outcome.ok else since,
                delivered_wall=self._wall() if outcome.ok else self._state.delivered_wall)
        if not outcome.ok:
            self._ledger.tried(tuple(letter for letter in tried if letter not in over))
        for letter in tried:
            self._tell(letter, outcome, letter in over, wait_s)

    def _tell(self, letter: Letter, outcome: Outcome, over: bool, wait_s: float) -> None:
        about: dict[str, str | float] = {"channel": self.name, "incident": letter.incident, "kind": letter.kind,
                                         "why": outcome.why, "tries": letter.attempts}
        if outcome.ok:
            self._say("alert.delivered", **about)
        elif over:
            self._say("alert.given_up", **about, after_s=self._patience.give_up_s)
        else:
            self._say("alert.failed", **about, again_in_s=round(wait_s, 1))

    def _finish(self, keys: tuple[Key, ...], how: str) -> None:
        """They wait no more.  The caller holds the lock; `_confirm` writes it down."""
        for key in keys:
            del self._waiting[key]
            letter = self._letters.pop(key)
            self._unconfirmed[key] = replace(letter, wall=self._wall()) if how == "delivered" else letter, how

    def _confirm(self) -> None:
        """Writes down what is over: until that is on disk, a daemon that dies would tell it again."""
        with self._changed:
            ended = tuple(self._unconfirmed.values())
        for how in dict.fromkeys(how for _, how in ended):
            letters = tuple(letter for letter, its in ended if its == how)
            if not self._ledger.close(letters, how):
                return          # the disk is full, say: again after the next try, and at the end
            with self._changed:
                for letter in letters:
                    del self._unconfirmed[letter.key]
