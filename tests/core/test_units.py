from __future__ import annotations

from vllm_watchdog.core.units import GIB, MIB, iso, stamp, utc

WALL = 1_795_963_317.1239       # 2026-11-29 14:41:57 UTC


def test_an_instant_is_utc_in_each_form() -> None:
    assert (iso(WALL), utc(WALL), stamp(WALL)) == (
        "2026-11-29T14:41:57.123Z", "2026-11-29 14:41:57Z", "20261129T144157Z")


def test_sizes_are_binary() -> None:
    assert (MIB, GIB) == (2**20, 2**30)
