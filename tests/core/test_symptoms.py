from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.scenes import GIB, gpu, host, mark, metrics, tree

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.symptoms import (
    Change,
    Counter,
    Sighting,
    Watch,
    counted,
    observe,
    of_gpu,
    of_host,
    of_metrics,
    of_tree,
    per_minute,
)

LEVELS = Thresholds(vram_warn=((0, 0.85),), vram_degrade=((0, 0.90),), rss_bytes=8 * GIB)


def seen(value: float, after_s: float = 0) -> Sighting:
    return Sighting("vram_high", "gpu0", value, 0.85, after_s, 0.02, lambda: Text("", ""))


def watched(*values: tuple[float, float], after_s: float = 0) -> tuple[Watch, list[Change | None]]:
    """(at, value) after (at, value), cleared after 120 s of calm."""
    watch, changes = Watch("vram_high", "gpu0"), []
    for at, value in values:
        watch, change = observe(watch, at, seen(value, after_s), 120)
        changes.append(change)
    return watch, changes


def test_a_watch_begins_with_nothing_seen() -> None:
    assert Watch("a", "b") == Watch("a", "b", False, inf, inf, 0.0)


def test_a_value_at_its_threshold_is_over_it() -> None:
    assert watched((0, 0.85))[1] == [Change.RAISED]
    assert watched((0, 0.8499))[1] == [None]


def test_a_symptom_is_raised_once() -> None:
    assert watched((0, 0.9), (1, 0.95), (2, 0.9))[1] == [Change.RAISED, None, None]


def test_a_value_must_stay_over_its_threshold_for_long_enough() -> None:
    assert watched((0, 0.9), (59.9, 0.9), (60, 0.9), after_s=60)[1] == [None, None, Change.RAISED]
    assert watched((0, 0.9), (30, 0.8), (60, 0.9), (119, 0.9), (120, 0.9), after_s=60)[1][-2:] == [None, Change.RAISED]


def test_a_symptom_clears_when_it_was_calm_for_long_enough() -> None:
    assert watched((0, 0.9), (1, 0.8), (120.9, 0.8), (121, 0.8))[1] == [Change.RAISED, None, None, Change.CLEARED]


def test_a_value_that_is_just_below_its_threshold_is_not_calm() -> None:
    assert Change.CLEARED not in watched((0, 0.9), (1, 0.84), (1000, 0.84))[1]
    assert watched((0, 0.9), (1, 0.8299), (121, 0.8299))[1][-1] is Change.CLEARED


def test_calm_that_is_interrupted_begins_anew() -> None:
    changes = watched((0, 0.9), (1, 0.8), (100, 0.84), (101, 0.8), (200, 0.8), (221, 0.8))[1]
    assert changes[1:] == [None, None, None, None, Change.CLEARED]


def test_a_symptom_that_cleared_can_be_raised_again() -> None:
    assert watched((0, 0.9), (1, 0.8), (121, 0.8), (122, 0.9))[1][-1] is Change.RAISED


def test_a_watch_keeps_the_value_and_since_when_it_is_over_or_calm() -> None:
    watch, _ = watched((5, 0.9), (6, 0.91))
    assert (watch.value, watch.above_since, watch.calm_since, watch.raised) == (0.91, 5, inf, True)
    watch, _ = watched((5, 0.5), (6, 0.4))
    assert (watch.value, watch.above_since, watch.calm_since, watch.raised) == (0.4, inf, 5, False)


LEVEL_OF = st.sampled_from([0.5, 0.84, 0.9])        # calm, neither, over


@given(st.lists(st.tuples(st.floats(0.1, 100), LEVEL_OF), max_size=30), st.sampled_from([0.0, 60.0]))
def test_a_watch_at_ease_can_be_forgotten(steps: list[tuple[float, float]], after_s: float) -> None:
    """Whoever keeps it and whoever takes a new one see the same changes; and it is not at ease while it is raised."""
    at, kept, new = 0.0, Watch("vram_high", "gpu0"), Watch("vram_high", "gpu0")
    for pause_s, value in steps:
        at += pause_s
        kept, change = observe(kept, at, seen(value, after_s), 120)
        new, same = observe(Watch("vram_high", "gpu0") if new.at_ease else new, at, seen(value, after_s), 120)
        assert (same, new.raised, new.above_since) == (change, kept.raised, kept.above_since)
        assert new.at_ease is (value < 0.83 and not kept.raised)


# -- what each reading is held against

def test_a_card_is_held_against_both_levels() -> None:
    high, degrade = of_gpu(gpu(88), LEVELS, None)
    assert (high.class_, high.subject, high.value, high.threshold, high.after_s, high.margin) == (
        "vram_high", "gpu0", 0.88, 0.85, 0, 0.02)
    assert high.words().en == "GPU 0: 88.0% of 100.0 GiB in use, threshold 85.0%"
    assert (degrade.class_, degrade.threshold, degrade.after_s) == ("vram_degrade", 0.90, 120)
    assert degrade.words().en == "GPU 0: 88.0% of 100.0 GiB in use, threshold 90.0% for 120 s"


def test_a_card_without_a_level_is_only_shown() -> None:
    assert list(of_gpu(gpu(99, index=1), LEVELS, None)) == []


def test_growth_is_held_against_the_level_after_warm_up() -> None:
    (growth,) = of_gpu(gpu(66, index=1), LEVELS, 60 * GIB)
    assert (growth.class_, growth.subject, growth.threshold, growth.after_s, growth.margin) == (
        "vram_growth", "gpu1", 0.05, 60, 0.02)
    assert growth.value == pytest.approx(0.06)
    assert growth.words().en == "GPU 1: 66.0% of 100.0 GiB in use, 6.0% of the card more than after warm-up"
    (told,) = of_gpu(gpu(66, index=1), LEVELS, 60 * GIB, "5 MiB a minute")
    assert told.words().en == growth.words().en + "; it grows by 5 MiB a minute"


def test_a_disk_is_low_when_less_is_free_than_wanted() -> None:
    (enough,), (low,) = of_host(host(2.001), Thresholds()), of_host(host(1.999), Thresholds())
    assert enough.value < enough.threshold and low.value > low.threshold
    assert (low.class_, low.subject, low.after_s) == ("disk_low", "host", 0)
    assert low.margin == pytest.approx(0.2 * GIB)
    assert low.words().en == "2.0 GiB left on the log disk, wanted 2.0"


def test_a_full_kv_cache_counts_only_while_requests_wait() -> None:
    (idle,), (busy,) = (
        of_metrics("e", metrics(kv=0.97, waiting=waiting), LEVELS, None) for waiting in (0.0, 3.0))
    assert (idle.value, busy.value) == (0.0, 0.97)
    assert (busy.class_, busy.subject, busy.threshold, busy.after_s, busy.margin) == ("kv_pressure", "e", 0.95, 120, 0.02)
    assert busy.words().en == "KV cache 97% full, 3 waiting"
    (unknown,) = of_metrics("e", metrics(kv=0.97, waiting=None), LEVELS, None)
    assert unknown.value == 0.0 and unknown.words().en == "KV cache 97% full, 0 waiting"


def test_an_engine_that_tells_no_kv_use_has_none_to_watch() -> None:
    assert list(of_metrics("e", metrics(kv=None), LEVELS, None)) == []


def test_resident_memory_is_held_against_its_level() -> None:
    (high,) = of_tree(tree(mark("e#1"), 9), LEVELS)
    assert (high.class_, high.subject, high.value, high.threshold, high.after_s) == ("rss_high", "e", 9 * GIB, 8 * GIB, 0)
    assert high.margin == pytest.approx(0.16 * GIB)
    assert high.words().en == "9.0 GiB resident, threshold 8.0"


def test_memory_without_a_threshold_is_only_shown() -> None:
    assert list(of_tree(tree(mark("e#1"), 9), Thresholds())) == []


def test_preemptions_are_held_against_their_rate() -> None:
    _, seen_now = of_metrics("e", metrics(), LEVELS, 12.0)
    assert (seen_now.class_, seen_now.subject, seen_now.value, seen_now.threshold, seen_now.after_s) == (
        "preemptions", "e", 12.0, 10, 300)
    assert seen_now.margin == pytest.approx(2)
    assert seen_now.words().en == "12 requests a minute are preempted, threshold 10 for 300 s"


# -- a counter's rate

def counting(*points: tuple[float, float | None]) -> float | None:
    counter = Counter()
    for at, count in points:
        counter = counted(counter, at, count)
    return per_minute(counter)


def test_a_rate_is_unknown_until_half_a_minute_is_known() -> None:
    assert counting() is None and counting((0, 5)) is None
    assert counting((0, 5), (29, 9)) is None
    assert counting((0, 5), (30, 9)) == 8


def test_a_rate_is_of_the_last_minute() -> None:
    assert counting(*((at, min(at, 60.0)) for at in range(0, 121, 10))) == 0
    assert counting(*((at, max(at - 60.0, 0)) for at in range(0, 121, 10))) == 60


def test_a_point_is_kept_for_a_whole_minute() -> None:
    assert counted(Counter(((0.0, 1.0),)), 60.0, 2.0).points == ((0.0, 1.0), (60.0, 2.0))
    assert counted(Counter(((0.0, 1.0),)), 60.1, 2.0).points == ((60.1, 2.0),)


def test_a_count_that_is_not_told_or_comes_too_soon_changes_nothing() -> None:
    assert counting((0, 5), (30, None), (40, 9)) == 6
    assert counting((0, 5), (9.9, 500), (40, 9)) == 6


def test_a_count_that_fell_begins_anew() -> None:
    assert counting((0, 500), (40, 3), (50, 4)) is None
    assert counting((0, 500), (40, 3), (70, 4)) == 2
