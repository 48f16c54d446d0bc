"""Does a figure only ever grow, and how fast?

A trend keeps the *lowest* value of each slot of time: what a burst of requests takes comes back, what stays is the
floor.  Three windows see a fast leak within half an hour and a slow one within hours; each keeps KEPT points, so that a
judgement costs the same for ever (435 pairs a window).

A rise is believed only where every third of the window rises, and only as far ahead as AHEAD times as long as it was
seen; one that slows down is followed to where it would end.  So a warm-up that levels off, a sawtooth, or a level that
stepped up once is no leak, and a steady one is found when a fifth of its way to the limit is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import median

from vllm_watchdog.core.changed import replace

KEPT = 30                           # points a window
ENOUGH = 20                         # fewer say nothing
STEPS_S = (60.0, 240.0, 720.0)      # seconds a point: windows of half an hour, two hours, six hours
FEED_S = 10.0                       # a value in this long is enough for the lowest of a minute
AHEAD = 4.0                         # with six hours seen a leak is told a day ahead


@dataclass(frozen=True, slots=True)
class Window:
    """(slot, lowest value in it), oldest first; the last slot is not over yet."""

    step_s: float
    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Trend:
    fed_at: float = -inf
    windows: tuple[Window, ...] = tuple(Window(step_s) for step_s in STEPS_S)


@dataclass(frozen=True, slots=True)
class Rise:
    """Units a second, over `seen_s` seconds: `slope` as measured, `sure` what every third of the window bears out."""

    slope: float
    sure: float
    seen_s: float


def fed(trend: Trend, at: float, value: float) -> Trend:
    if at - trend.fed_at < FEED_S:
        return trend
    return Trend(at, tuple(_with(window, at, value) for window in trend.windows))


def _with(window: Window, at: float, value: float) -> Window:
    slot = int(at // window.step_s)
    if not window.points or window.points[-1][0] != slot:
        return replace(window, points=(*window.points, (slot, value))[-KEPT - 1:])
    if value >= window.points[-1][1]:
        return window
    return replace(window, points=(*window.points[:-1], (slot, value)))


def minutes(trend: Trend) -> int:
    """Changes whenever a judgement could: once a minute."""
    points = trend.windows[0].points
    return points[-1][0] if points else -1


def rises(trend: Trend, left: float) -> tuple[Rise, ...]:
    """One of each window that knows enough, the shortest first.  `left`: how much further it may grow."""
    return tuple(_rise(window, left) for window in trend.windows if len(window.points) > ENOUGH)


def _rise(window: Window, left: float) -> Rise:
    points = window.points[:-1]
    seen_s = (points[-1][0] - points[0][0] + 1) * window.step_s
    if len({value for _, value in points}) == 1:
        return Rise(0.0, 0.0, seen_s)
    slope = median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)) / window.step_s
    return Rise(slope, _sure([value for _, value in points], window.step_s, slope, left), seen_s)


def _sure(values: list[float], step_s: float, slope: float, left: float) -> float:
    third = len(values) // 3
    first, middle, last = (min(values[len(values) - n * third:][:third]) for n in (3, 2, 1))
    before, now = middle - first, last - middle
    if min(before, now) <= 0:
        return 0.0
    slowing = now / before
    if slowing < 1 and now * slowing / (1 - slowing) < left:
        return 0.0                  # each third adds so much less than the one before that the limit is never met
    return max(0.0, min(slope, before / (third * step_s), now / (third * step_s)))
