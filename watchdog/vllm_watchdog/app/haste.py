"""From an engine's death to its successor's start, whoever only writes things down waits.

One thread of Python runs at a time: journal, state and history together took as much of it in these milliseconds as all
that the successor waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

HASTE_S = 0.05      # and no longer: most starts do not follow at once, and what happened is to be on disk soon


class Haste:
    """Anybody may call any of it; only `give_way` waits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._over, self._until = threading.Event(), 0.0
        self._over.set()

    def begin(self) -> None:
        self._until = self._clock() + HASTE_S
        self._over.clear()

    def end(self) -> None:
        self._over.set()

    def give_way(self) -> None:
        """Returns when it is over, after HASTE_S at most; at once where nothing is to be hurried."""
        if not self._over.is_set():
            self._over.wait(max(0.0, self._until - self._clock()))
