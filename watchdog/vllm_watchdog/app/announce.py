"""What systemd is told: READY once, one line of status, more time while a start or a stop goes on.

Called from the loop, with every world; sends at most a few datagrams and never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from vllm_watchdog.core.policy import AT_REST, Phase
from vllm_watchdog.core.report import headline, serving
from vllm_watchdog.core.world import World
from vllm_watchdog.tell.systemd import Notifier

Ready = Literal["watching", "serving"]
GIVEN_UP = AT_REST | {Phase.WEDGED}
EXTEND_S = 30.0     # a daemon that hangs while it starts or stops is ended this much later
AGAIN_S = 10.0


class Announcer:
    def __init__(self, notifier: Notifier, ready: Ready, clock: Callable[[], float]) -> None:
        self._notifier, self._when, self._clock = notifier, ready, clock
        self._ready = self._stopping = False
        self._status = ""
        self._extended_at = float("-inf")

    def publish(self, world: World) -> None:
        status = headline(world)
        if not self._ready and not world.stopping and self._is_ready(world):
            self._ready = True
            self._notifier.ready(status)
        elif world.stopping and not self._stopping:
            self._stopping = True
            self._notifier.stopping(status)
        elif status != self._status:
            self._notifier.status(status)
        self._status = status
        if (world.stopping or not self._ready) and self._clock() - self._extended_at >= AGAIN_S:
            self._extended_at = self._clock()
            self._notifier.extend(EXTEND_S)

    def leave(self, world: World) -> None:
        """The last word: everything is stopped, or engines are left to the next daemon."""
        self._notifier.stopping("stopped" if world.stopping else f"left to the next daemon: {headline(world)}")

    def _is_ready(self, world: World) -> bool:
        """A service that is given up will not serve by waiting: its page and `status` say why."""
        if self._when == "watching":
            return True
        return all(serving(world, service) or world.engine(service.wanted).phase in GIVEN_UP for service in world.services)

    def reloading(self) -> None:
        """From any thread.  A start that still waits has not been told to be over, so nothing is told to begin again."""
        if self._ready:
            self._notifier.reloading()

    def reloaded(self) -> None:
        if self._ready:
            self._notifier.ready(self._status)
