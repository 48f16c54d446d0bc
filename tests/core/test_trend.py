from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest

from vllm_watchdog.core.trend import AHEAD, ENOUGH, FEED_S, KEPT, STEPS_S, Rise, Trend, Window, fed, minutes, rises

GIB = 1024.0        # figures are MiB here
HOUR, DAY = 3600, 86400


def follow(figure: Callable[[float], float], until: float) -> Trend:
    trend = Trend()
    for tick in range(int(until / FEED_S)):
        trend = fed(trend, tick * FEED_S, figure(tick * FEED_S))
    return trend


def line(per_s: float) -> Callable[[float], float]:
    return lambda at: 1000 + per_s * at


# -- what is kept

def test_a_slot_keeps_its_lowest_value() -> None:
    trend = Trend()
    for at, value in ((0, 5.0), (10, 3.0), (20, 4.0), (60, 9.0)):
        trend = fed(trend, at, value)
    assert trend.windows[0].points == ((0, 3.0), (1, 9.0))
    assert trend.windows[1].points == ((0, 3.0),)
    assert minutes(trend) == 1 and minutes(Trend()) == -1


def test_a_value_that_comes_too_soon_is_not_taken() -> None:
    trend = fed(Trend(), 0, 5.0)
    assert fed(trend, FEED_S - 0.1, 1.0) is trend
    assert fed(trend, FEED_S, 1.0).windows[0].points == ((0, 1.0),)


def test_a_window_is_bounded() -> None:
    assert (KEPT, ENOUGH, STEPS_S) == (30, 20, (60.0, 240.0, 720.0))
    trend = follow(line(1), DAY)
    assert [len(window.points) for window in trend.windows] == [KEPT + 1] * 3


def test_a_day_costs_as_little_as_an_hour() -> None:
    """Compared within one run: a judgement after a day costs what one after seven hours costs."""
    costs = []
    for hours in (7, 24):
        trend = follow(line(1), hours * HOUR)
        best = math.inf
        for _ in range(5):
            began = time.perf_counter()
            rises(trend, 1e6)
            best = min(best, time.perf_counter() - began)
        costs.append(best)
    assert costs[1] < costs[0] * 3


# -- slopes

def test_little_says_nothing() -> None:
    assert rises(follow(line(1), ENOUGH * 60), 1e9) == ()
    (rise,) = rises(follow(line(1), ENOUGH * 60 + 60), 1e9)
    assert rise == Rise(pytest.approx(1.0), pytest.approx(1.0), ENOUGH * 60)


def test_each_window_that_knows_enough_has_its_say() -> None:
    assert [rise.seen_s for rise in rises(follow(line(1), 7 * HOUR), 1e9)] == [1800, 7200, 21600]


def test_a_flat_figure_does_not_rise() -> None:
    assert set(rises(follow(line(0), 3 * HOUR), 1e9)) == {Rise(0.0, 0.0, 1800), Rise(0.0, 0.0, 7200)}


def test_a_falling_figure_is_not_sure_to_rise() -> None:
    assert all(rise.slope < 0 and rise.sure == 0 for rise in rises(follow(line(-0.01), 3 * HOUR), 1e9))


def test_spikes_do_not_turn_the_slope() -> None:
    (rise,) = rises(follow(lambda at: 1000 + 0.1 * at + (500 if at % 600 < 200 else 0), HOUR), 1e9)
    assert rise.slope == pytest.approx(0.1, rel=0.05)


def test_a_figure_with_gaps_keeps_its_slope() -> None:
    """No sample for a while: slots are instants, not counts."""
    trend = Trend()
    for tick in range(0, 3 * HOUR, 10):
        if not HOUR < tick < HOUR + 1200:
            trend = fed(trend, tick, 1000 + 0.5 * tick)
    assert [round(rise.slope, 3) for rise in rises(trend, 1e9)] == [0.5, 0.5]


def window(*values: float) -> Trend:
    points = tuple((slot, value) for slot, value in enumerate((*values, 0.0)))
    return Trend(0.0, (Window(60.0, points),))


def test_every_third_of_a_window_must_rise() -> None:
    late = window(*[0.0] * 16, *[float(n) for n in range(14)])
    early = window(*[float(n) for n in range(14)], *[13.0] * 16)
    assert [rises(trend, 10)[0].sure for trend in (late, early)] == [0.0, 0.0]
    assert all(rises(trend, 10)[0].slope > 0 for trend in (late, early))


def test_a_rise_that_slows_down_is_followed_to_its_end() -> None:
    """10 in the second third, 5 in the last: 5 more are to come."""
    slowing = window(*(n * 1.0 for n in range(10)), *(10 + n * 0.5 for n in range(10)), *(15 + n * 0.25 for n in range(10)))
    assert rises(slowing, 5.1)[0].sure == 0
    assert rises(slowing, 4.9)[0].sure == pytest.approx(5 / 600)


# -- leaks, and what only looks like one

def sure_within(trend: Trend, left: float) -> Rise | None:
    """As it is judged: the longest window whose rise would take what is left within AHEAD times its length, or a day."""
    believed = [rise for rise in rises(trend, left) if rise.sure * min(DAY, AHEAD * rise.seen_s) >= left]
    return believed[-1] if believed else None


def first(figure: Callable[[float], float], room: float, hours: float) -> tuple[float, float, float] | None:
    """The instant of the first verdict, its estimate of when the room is used up, and the truth; in seconds."""
    trend, began, last = Trend(), figure(0), -1
    for tick in range(int(hours * HOUR / FEED_S)):
        at = tick * FEED_S
        trend = fed(trend, at, figure(at))
        left = room - (figure(at) - began)
        if minutes(trend) != last and left > 0 and (rise := sure_within(trend, left)):
            return at, left / rise.slope, left
        last = minutes(trend)
    return None


def noise(size: float, seed: int = 1) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: abs(draw.gauss(0, size))


@pytest.mark.parametrize("shape", ["busy", "sawtooth", "slow sawtooth", "warm-up", "slow warm-up", "cache", "day", "steps"])
def test_a_healthy_day_is_no_leak(shape: str) -> None:
    """On a host with 32 GiB to spare; sizes as engines of 20 to 30 GiB show them."""
    jitter = noise(200)
    figures: dict[str, Callable[[float], float]] = {
        "busy": lambda at: (5 * GIB if at % 5400 < 2400 else 0),                # bursts of requests
        "sawtooth": lambda at: 2 * GIB * (at % 1200) / 1200,                    # an allocator that trims now and then
        "slow sawtooth": lambda at: 3 * GIB * (at % (4 * HOUR)) / (4 * HOUR),
        "warm-up": lambda at: 6 * GIB * (1 - math.exp(-at / 1800)),
        "slow warm-up": lambda at: 6 * GIB * (1 - math.exp(-at / (4 * HOUR))),  # a cache of preprocessed images fills
        "cache": lambda at: 8 * GIB * (at % (2 * HOUR) > HOUR),                 # mapped files come and go
        "day": lambda at: 2 * GIB * (1 - math.cos(at * math.tau / DAY)),
        "steps": lambda at: 4 * GIB * int(at / (6 * HOUR)),                     # a new batch size is captured
    }
    assert first(lambda at: 20 * GIB + figures[shape](at) + jitter(), 32 * GIB, 24) is None


@pytest.mark.parametrize(("room", "hours"), [(32, 2), (32, 8), (64, 24), (400, 12)])
@pytest.mark.parametrize("flat_h", [0, 7])
@pytest.mark.parametrize("jitter", [20, 300])
def test_a_leak_is_found_before_half_of_the_room_is_gone_and_its_end_is_foretold(
    room: float, hours: float, flat_h: float, jitter: float
) -> None:
    per_s, shake = room * GIB / (hours * HOUR), noise(jitter)
    found = first(lambda at: 20 * GIB + max(0.0, at - flat_h * HOUR) * per_s + shake(), room * GIB, flat_h + hours)
    assert found is not None
    at, eta_s, left = found
    assert at - flat_h * HOUR < hours * HOUR / 2
    assert eta_s == pytest.approx(left / per_s, rel=0.2)


def test_a_leak_in_steps_is_found() -> None:
    """200 MiB every five minutes."""
    found = first(lambda at: 20 * GIB + 200 * int(at / 300), 32 * GIB, 14)
    assert found is not None
    assert found[1] == pytest.approx(found[2] / (200 / 300), rel=0.2)


def test_a_leak_under_load_that_comes_and_goes_is_found() -> None:
    busy, per_s = noise(300, 3), 64 * GIB / (10 * HOUR)
    found = first(lambda at: 20 * GIB + per_s * at + (3 * GIB if at % 900 < 400 else 0) + busy(), 64 * GIB, 10)
    assert found is not None
    assert found[0] < 5 * HOUR and found[1] == pytest.approx(found[2] / per_s, rel=0.2)
