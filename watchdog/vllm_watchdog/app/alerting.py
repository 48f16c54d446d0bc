"""The outbox of the configuration in force: a new configuration gets a new one, and nothing that is owed is lost."""

from __future__ import annotations

import time

from vllm_watchdog.app import channels
from vllm_watchdog.config import Settings
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.say import Say
from vllm_watchdog.tell.desk import ChannelState
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.outbox import Outbox

LEAVE_S = 5.0       # what is not written down by then goes out with the next alert


class Alerting:
    def __init__(self, settings: Settings, history: History, say: Say) -> None:
        self._history, self._say = history, say
        self._alerts = settings.alerts
        self._outbox = self._made(settings)

    def _made(self, settings: Settings) -> Outbox:
        return Outbox(channels.channels(settings), Ledger(self._history), channels.writer(settings),
                      time.monotonic, time.time, self._say)

    def start(self) -> None:
        self._outbox.start()

    def stop(self, deadline_s: float) -> bool:
        return self._outbox.stop(deadline_s)

    def written(self, deadline_s: float) -> bool:
        return self._outbox.written(deadline_s)

    def tell(self, alert: Alert) -> None:
        self._outbox.tell(alert)

    def states(self) -> tuple[ChannelState, ...]:
        return self._outbox.states()

    def change(self, settings: Settings) -> None:
        """In the thread of whoever asked: it waits for tries that are under way."""
        if settings.alerts == self._alerts:
            return
        old, self._alerts, self._outbox = self._outbox, settings.alerts, self._made(settings)
        old.stop(LEAVE_S)       # what it has not delivered is in the history, where the new one finds it
        self._outbox.start()
