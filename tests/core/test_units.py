from __future__ import annotations

from vllm_watchdog.core.units import DAY_S, GIB, MIB, duration, gib, iso, outlook, stamp, time_of_day, utc

WALL = 1_795_963_317.1239       # 2026-11-29 14:41:57 UTC


def test_an_instant_is_utc_in_each_form() -> None:
    assert (iso(WALL), utc(WALL), stamp(WALL)) == (
        "2026-11-29T14:41:57.123Z", "2026-11-29 14:41:57Z", "20261129T144157Z")


def test_sizes_are_binary() -> None:
    assert (MIB, GIB) == (2**20, 2**30)
    assert [gib(1.25 * GIB), gib(GIB / 2)] == ["1.2 GiB", "512 MiB"]


def test_spans_are_told_in_their_own_size() -> None:
    assert [duration(s) for s in (0.25, 48.2, 600, 9000)] == ["0.2 s", "48.2 s", "10 min", "2.5 h"]


def test_what_is_estimated_is_told_in_round_figures() -> None:
    assert [outlook(s) for s in (60, 6540, 7200, 2 * DAY_S - 1, 2 * DAY_S)] == ["1 min", "109 min", "2 h", "48 h", "2 days"]


def test_the_time_of_day_is_told_in_utc() -> None:
    assert time_of_day(1_795_000_000.0) == "11:06:40Z"
