"""How many requests an engine gets at a time by what it shows: fewer when it preempts or answers late.  Pure.

Additive increase, multiplicative decrease: each window with trouble takes `cut` of what is there, each one without gives
one more, if it is wanted.  Never under an eighth of what was there when it began; over all of that, the limit is gone.
"""

from __future__ import annotations

from statistics import quantiles

window_s = 5.0          # a cut must show before the next one: first tokens of what came before it are late still
cut = 0.7
least_share = 1 / 8
preempted_most = 1      # in a window: one can happen to a healthy engine whose cache is well used
answers_least = 5       # fewer say nothing of how late answers are
answers_kept = 1000


class Throttle:
    """`first_token_s`: what 90 % of the short prompts are to have their first token within; None: that is not looked at."""

    def __init__(self, first_token_s: float | None = None) -> None:
        self.limit: int | None = None       # None: as many as come
        self.why = ""
        self._first_token_s = first_token_s
        self._began_with = 0
        self._ends_at: float | None = None
        self._first_s: list[float] = []
        self._most = 0
        self._preempted: int | None = None      # not known
        self._preempted_before = 0

    def first_token(self, after_s: float) -> None:
        """Of a short prompt, since it was sent."""
        if self._first_token_s is not None and len(self._first_s) < answers_kept:
            self._first_s.append(after_s)

    def preempted(self, count: int) -> None:
        """So many requests since the engine's start."""
        if self._preempted is None:
            self._preempted_before = count
        self._preempted = count

    def observe(self, requests: int, at: float) -> bool:
        """So many are there now.  Whether the limit has changed: at most once a window."""
        self._most = max(self._most, requests)
        if self._ends_at is None:
            self._ends_at = at + window_s
        if at < self._ends_at:
            return False
        before, trouble, most = self.limit, self._trouble(), self._most
        self._ends_at = at + window_s
        self._first_s, self._most = [], requests
        self._preempted_before = self._preempted or 0
        if trouble and most > 1:
            self._cut(most)
            self.why = trouble
        elif self.limit is not None and most >= self.limit:
            self.limit += 1
            if self.limit > self._began_with:
                self.limit = None
        return self.limit != before

    def _cut(self, most: int) -> None:
        if self.limit is None:
            self._began_with = most
        self.limit = max(1, int(self._began_with * least_share), int(min(most, self.limit or most) * cut))

    def _trouble(self) -> str:
        preempted = (self._preempted or 0) - self._preempted_before
        if preempted > preempted_most:
            return f"{preempted} requests were preempted within {window_s:.0f} s"
        if self._first_token_s is not None and len(self._first_s) >= answers_least:
            late_s = quantiles(self._first_s, n=10)[-1]
            if late_s > self._first_token_s:
                return f"first tokens took {late_s:.1f} s, {self._first_token_s:g} s are wanted"
        return ""
