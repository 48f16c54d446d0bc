"""How fast a service's requests end, and so how long one that finds no room had better wait.  Pure."""

from __future__ import annotations

from math import ceil

window_s = 10.0
unknown_s = 5           # nothing has ended lately
least_s, most_s = 1, 60


class Pace:
    """Counts over the window before this one and this one so far."""

    def __init__(self) -> None:
        self._since = float("-inf")
        self._before, self._now = 0, 0

    def ended(self, at: float) -> None:
        self._roll(at)
        self._now += 1

    def retry_after_s(self, ahead: int, at: float) -> int:
        """Until so many have gone, in whole seconds."""
        self._roll(at)
        passed_s = at - self._since
        ended = self._before * (1 - passed_s / window_s) + self._now     # within the last `window_s`, about
        if ended < 1:
            return unknown_s
        return min(most_s, max(least_s, ceil((ahead + 1) * window_s / ended)))

    def _roll(self, at: float) -> None:
        passed_s = at - self._since
        if passed_s >= window_s:
            self._before = self._now if passed_s < 2 * window_s else 0
            self._since, self._now = at if passed_s >= 2 * window_s else self._since + window_s, 0
