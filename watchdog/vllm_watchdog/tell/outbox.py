"""Alerts on their way: told at least once for each (channel, incident, kind), and not again once a receiver said yes.

A clerk thread writes each alert down before anyone tries to send it, then hands it to the desk of each channel that wants
to hear of it.  The loop calls only `tell`, which never waits.  What is undelivered when the daemon stops goes out from
the next one.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm_watchdog.core.commands import Alert
from vllm_watchdog.say import Say
from vllm_watchdog.tell.backlog import Backlog, ended
from vllm_watchdog.tell.channel import Channel
from vllm_watchdog.tell.desk import ChannelState, Desk, Patience
from vllm_watchdog.tell.ledger import Ledger, Letter
from vllm_watchdog.tell.owed import untellable
from vllm_watchdog.tell.payload import key

alerts_waiting = 1_000      # to be written down
idle_s = 60.0
retry_s = 1.0               # to learn what the last daemon owed


class Writer(Protocol):
    """Makes the JSON of an alert, told at an epoch second, and of several."""

    def payload(self, alert: Alert, wall: float) -> Mapping[str, Any]: ...
    def group(self, payloads: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]: ...


class Outbox:
    """`clock` is monotonic; `chance` gives 0..1."""

    def __init__(self, channels: tuple[Channel, ...], ledger: Ledger, writer: Writer,
                 clock: Callable[[], float], wall: Callable[[], float], say: Say, *,
                 patience: Patience | None = None, chance: Callable[[], float] = random.random) -> None:
        self._ledger, self._writer, self._wall, self._say = ledger, writer, wall, say
        self._alerts: Backlog[Alert] = Backlog(alerts_waiting)
        self._desks = tuple(
            Desk(channel, ledger, writer.group, clock, wall, say, patience or Patience(), chance) for channel in channels)
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

    def written(self, deadline_s: float) -> bool:
        """Waits until all that was told is written down.  False: not within `deadline_s`."""
        return self._alerts.settled(deadline_s)

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
                self._recall(names)
                left = self._tellable(owed)
                self._hand_out(tuple(letter for letter in left if (letter.channel, letter.key) not in told))
            alerts, _ = self._alerts.take(retry_s if owed is None else idle_s)
            letters = tuple(letter for alert in alerts for letter in self._letters(alert))
            if letters:
                self._hand_out(self._ledger.add(letters))
            if owed is None:
                told += [(letter.channel, letter.key) for letter in letters]

    def _recall(self, names: tuple[str, ...]) -> None:
        """What the desks show of before."""
        delivered = self._ledger.delivered(names)
        for desk in self._desks:
            if desk.name in delivered:
                desk.delivered(delivered[desk.name])

    def _tellable(self, letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
        """What of an earlier daemon's letters can be told; the others are said, and are not owed any more."""
        bad = {letter: why for letter in letters if (why := untellable(letter.payload))}
        for letter, why in bad.items():
            self._say("alert.given_up", channel=letter.channel, incident=letter.incident, kind=letter.kind, why=why,
                      tries=letter.attempts)
        if bad:
            self._ledger.close(tuple(bad), "untellable")
        return tuple(letter for letter in letters if letter not in bad)

    def _letters(self, alert: Alert) -> tuple[Letter, ...]:
        """One for each channel that wants to hear of so urgent an incident, as it never becomes less urgent again."""
        wall = self._wall()
        names = [desk.name for desk in self._desks if alert.incident.urgency.rank >= desk.manners.least.rank]
        payload = json.dumps(self._writer.payload(alert, wall)) if names else ""
        return tuple(Letter(name, alert.incident.id, key(alert), wall, payload) for name in names)

    def _hand_out(self, letters: tuple[Letter, ...]) -> None:
        for desk in self._desks:
            desk.add(tuple(letter for letter in letters if letter.channel == desk.name))
