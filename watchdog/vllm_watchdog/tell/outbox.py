"""Alerts on their way: told at least once for each (channel, incident, kind), and not again once a receiver said yes.

A clerk thread writes each alert down before anyone tries to send it; each channel has a thread of its own, so a hung
receiver holds up nobody else.  Alerts of one incident leave in their order.  What fails is tried again with
exponential backoff and jitter, or when the receiver asked for it, for `give_up_s`; then that is said.
The loop calls only `tell`, which never waits.  What is undelivered when the daemon stops goes out from the next one.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.tell.backlog import Backlog, ended
from vllm_watchdog.tell.files import Say
from vllm_watchdog.tell.ledger import Ledger, Letter

alerts_waiting = 1_000      # to be written down
letters_waiting = 1_000     # to be sent, a channel
idle_s = 60.0
retry_s = 1.0               # to learn what the last daemon owed


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one try.  `why`: a status or the name of an error, never an address or a header."""

    ok: bool
    why: str
    retry_after_s: float | None = None


class Channel(Protocol):
    @property
    def name(self) -> str: ...
    def send(self, payload: Mapping[str, Any]) -> Outcome:
        """One try, over within a deadline of the channel's own.  Errors of the world are outcomes."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    first_s: float = 2.0
    most_s: float = 900.0
    asked_most_s: float = 3600.0        # a receiver's Retry-After is honoured up to this
    give_up_s: float = 86_400.0

    def delay_s(self, attempts: int, chance: float, asked_s: float | None) -> float:
        """After the `attempts`-th failure; `chance` 0..1 spreads hosts that fail together over half of it."""
        backoff_s = min(self.most_s, self.first_s * 2.0 ** min(attempts - 1, 30))
        return max(backoff_s * (0.5 + chance / 2), min(asked_s or 0.0, self.asked_most_s))


@dataclass(frozen=True, slots=True)
class ChannelState:
    """How a channel fares, for the status report; `delivered_wall` epoch seconds; `failing` is empty when it works."""

    name: str
    waiting: int
    delivered_wall: float | None
    failing: str


class Outbox:
    """`payload` makes the JSON of an alert, told at an epoch second; `clock` is monotonic; `chance` gives 0..1."""

    def __init__(self, channels: tuple[Channel, ...], ledger: Ledger,
                 payload: Callable[[Alert, float], Mapping[str, Any]],
                 clock: Callable[[], float], wall: Callable[[], float], say: Say, *,
                 patience: Patience | None = None, chance: Callable[[], float] = random.random) -> None:
        self._ledger, self._payload, self._wall, self._say = ledger, payload, wall, say
        self._alerts: Backlog[Alert] = Backlog(alerts_waiting)
        self._desks = tuple(
            _Desk(channel, ledger, clock, wall, say, patience or Patience(), chance) for channel in channels)
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)

    def start(self) -> None:
        self._thread.start()
        for desk in self._desks:
            desk.start()

    def stop(self, deadline_s: float) -> bool:
        """Writes down what was told.  False: that, or a try under way, was not over within `deadline_s`."""
        end = time.monotonic() + deadline_s
        self._alerts.close()
        for desk in self._desks:
            desk.close()
        threads = [self._thread, *(desk.thread for desk in self._desks)]
        return all(ended(thread, max(0.0, end - time.monotonic())) for thread in threads)

    def tell(self, alert: Alert) -> None:
        if not self._alerts.put(alert):
            self._say("alert.lost", incident=alert.incident.id, kind=alert.kind, why="too many wait to be written down")

    def states(self) -> tuple[ChannelState, ...]:
        return tuple(desk.state() for desk in self._desks)

    def _run(self) -> None:
        names = tuple(desk.name for desk in self._desks)
        told: list[tuple[str, tuple[str, str]]] = []    # by this daemon, before it knew what the last one owed
        owed = None
        while not self._alerts.over:
            if owed is None and (owed := self._ledger.undelivered(names)) is not None:
                self._hand_out(tuple(letter for letter in owed if (letter.channel, letter.key) not in told))
            alerts, _ = self._alerts.take(retry_s if owed is None else idle_s)
            letters = tuple(self._letter(alert, name) for alert in alerts for name in names)
            if letters:
                self._hand_out(self._ledger.add(letters))
            if owed is None:
                told += [(letter.channel, letter.key) for letter in letters]

    def _letter(self, alert: Alert, channel: str) -> Letter:
        """An incident may worsen twice, and the second time is the page: its urgency is part of what is told once."""
        kind = f"worsened-{alert.incident.urgency}" if alert.kind == "worsened" else alert.kind
        wall = self._wall()
        return Letter(channel, alert.incident.id, kind, wall, json.dumps(self._payload(alert, wall)))

    def _hand_out(self, letters: tuple[Letter, ...]) -> None:
        for desk in self._desks:
            desk.add(tuple(letter for letter in letters if letter.channel == desk.name))


@dataclass(frozen=True, slots=True)
class _Waiting:
    letter: Letter
    due_at: float
    give_up_at: float


class _Desk:
    """One channel: its letters, and the thread that sends them one after another."""

    def __init__(self, channel: Channel, ledger: Ledger, clock: Callable[[], float], wall: Callable[[], float],
                 say: Say, patience: Patience, chance: Callable[[], float]) -> None:
        self.name = channel.name
        self._channel, self._ledger, self._clock, self._wall, self._say = channel, ledger, clock, wall, say
        self._patience, self._chance = patience, chance
        self._waiting: dict[tuple[str, str], _Waiting] = {}     # by (incident, kind), in the order of telling
        self._unconfirmed: dict[tuple[str, str], tuple[Letter, str]] = {}   # over, but not yet written down
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

    def add(self, letters: tuple[Letter, ...]) -> None:
        now, wall = self._clock(), self._wall()
        with self._changed:
            for letter in letters:
                if len(self._waiting) >= letters_waiting:
                    self._say("alert.lost", channel=self.name, incident=letter.incident, kind=letter.kind,
                              why="too many wait for this channel; a restart of the daemon sends it")
                elif letter.key not in self._waiting and letter.key not in self._unconfirmed:
                    age_s = max(0.0, wall - letter.wall)        # a wall clock set back must not make it younger
                    self._waiting[letter.key] = _Waiting(letter, now, now + self._patience.give_up_s - age_s)
            self._changed.notify_all()

    def _run(self) -> None:
        while letter := self._next():
            self._came(letter, self._channel.send(json.loads(letter.payload)))
            self._confirm()
        self._confirm()

    def _next(self) -> Letter | None:
        """Waits for the first letter that is due.  None: the desk closes."""
        with self._changed:
            while not self._closed:
                first = self._first()
                now = self._clock()
                if first and first.due_at <= now:
                    return first.letter
                self._changed.wait(min(idle_s, first.due_at - now) if first else idle_s)
            return None

    def _first(self) -> _Waiting | None:
        """The one due soonest; of each incident only its oldest: nobody wants "resolved" before "opened"."""
        heads: dict[str, _Waiting] = {}
        for waiting in self._waiting.values():
            heads.setdefault(waiting.letter.incident, waiting)
        return min(heads.values(), key=lambda waiting: waiting.due_at, default=None)

    def _came(self, letter: Letter, outcome: Outcome) -> None:
        """One try is over.  Only this thread removes letters, so the letter still waits here."""
        now, attempts = self._clock(), letter.attempts + 1
        waiting = self._waiting[letter.key]
        about: dict[str, str | float] = {"channel": self.name, "incident": letter.incident, "kind": letter.kind,
                                         "why": outcome.why, "tries": attempts}
        if outcome.ok:
            self._over(letter, "delivered")
            self._say("alert.delivered", **about)
        elif now >= waiting.give_up_at:
            self._over(letter, "given up")
            self._say("alert.given_up", **about, after_s=self._patience.give_up_s)
        else:
            wait_s = self._patience.delay_s(attempts, self._chance(), outcome.retry_after_s)
            tried = replace(letter, attempts=attempts)
            with self._changed:
                self._waiting[letter.key] = replace(waiting, letter=tried, due_at=now + wait_s)
            self._ledger.tried(tried)
            self._say("alert.failed", **about, again_in_s=round(wait_s, 1))
        self._state = replace(
            self._state, failing="" if outcome.ok else outcome.why,
            delivered_wall=self._wall() if outcome.ok else self._state.delivered_wall)

    def _over(self, letter: Letter, how: str) -> None:
        with self._changed:
            del self._waiting[letter.key]
            self._unconfirmed[letter.key] = letter, how
        self._confirm()

    def _confirm(self) -> None:
        """Writes down what is over: until that is on disk, a daemon that dies would tell it again."""
        for key, (letter, how) in list(self._unconfirmed.items()):
            if not self._ledger.close(letter, how):
                return          # the disk is full, say: again after the next try, and at the end
            with self._changed:
                del self._unconfirmed[key]
