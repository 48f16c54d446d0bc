"""How long the clients of one service waited while no engine served, for the daemon's incident.  Pure."""

from __future__ import annotations

from statistics import median
from typing import Any

kept = 10_000           # waits of one hold whose median is exact; of more, the first ones
settle_s = 1.0          # after an engine came: most of those that waited have begun by then


class Waits:
    """`up_at`: when an engine came last; who began to wait after that waits for room, not for an engine."""

    def __init__(self) -> None:
        self.up_at = float("-inf")
        self._forget()

    def _forget(self) -> None:
        self._waits: list[float] = []
        self._requests = self._failed = self._replayed = 0
        self._longest_s = 0.0

    def answered(self, since: float, at: float, replayed: bool) -> None:
        """A request that arrived then, and had to wait, begins to be answered."""
        self._requests += 1
        self._replayed += replayed
        self._longest_s = max(self._longest_s, at - since)
        if len(self._waits) < kept:
            self._waits.append(at - since)

    def failed(self) -> None:
        """One that waited gets no answer: it was refused, or its client left."""
        self._failed += 1

    def told(self, service: str, at: float) -> dict[str, Any] | None:
        """The message for the daemon, once a hold has ended and settled; None: there is nothing to tell."""
        if not (self._requests or self._failed) or at - self.up_at < settle_s:
            return None
        message = {
            "verb": "waited", "service": service, "requests": self._requests, "failed": self._failed,
            "replayed": self._replayed, "longest_s": round(self._longest_s, 3),
            "median_s": round(median(self._waits), 3) if self._waits else 0.0,
        }
        self._forget()
        return message
