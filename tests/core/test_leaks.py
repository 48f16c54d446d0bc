from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import GIB, gpu, host, mark

from vllm_watchdog.core.leaks import (
    Growth,
    Trends,
    fed_by_card,
    fed_by_tree,
    fresh,
    judged,
    of_card,
    of_tree,
    role,
    sightings,
)
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.readings import Host, Process, Tree, Unknown
from vllm_watchdog.core.symptoms import Sighting
from vllm_watchdog.core.trend import Trend, fed

MIB = 2**20
DAY = 86400
API, CORE = 100, 101


def tree(api_mib: float, core_mib: float = 0, api_fds: int | None = 20, core_fds: int | None = 30,
         limit: int | None = 1024) -> Tree:
    return Tree(mark("e#1"), (
        Process(API, "vllm", int(api_mib * MIB), None, 1.0, 8, api_fds, limit),
        Process(CORE, "VLLM::EngineCore", int(core_mib * MIB), None, 1.0, 8, core_fds, limit),
    ))


def grown(minutes: int, api: float = 0, core: float = 0, files: float = 0) -> tuple[Trends, Tree]:
    """MiB, MiB and files a minute."""
    trends: Trends = ()
    seen = tree(0)
    for tick in range(minutes * 6 + 1):
        seen = tree(1000 + api * tick / 6, 5000 + core * tick / 6, core_fds=30 + int(files * tick / 6))
        trends = fed_by_tree(trends, tick * 10.0, seen)
    return trends, seen


def whole(trends: Trends, seen: Tree, the_host: Host | Unknown | None = None, within_s: float = DAY) -> dict[str, Growth]:
    return {growth.what: growth for growth in of_tree(trends, seen, the_host or host(), within_s)}


# -- trends

def test_each_process_and_all_together_are_followed() -> None:
    trends, _ = grown(1)
    assert sorted(dict(trends)) == ["fds/100", "fds/101", "rss", "rss/100", "rss/101"]


def test_what_is_not_told_is_not_followed_and_what_has_left_is_dropped() -> None:
    trends = fed_by_tree((), 0.0, tree(1, api_fds=None))
    assert "fds/100" not in dict(trends)
    trends = fed_by_card(trends, 0.0, gpu(5))
    only = Tree(mark("e#1"), tree(1).processes[1:])
    assert sorted(dict(fed_by_tree(trends, 10.0, only))) == ["fds/101", "rss", "rss/101", "vram/0"]


def test_between_two_values_nothing_is_touched() -> None:
    trends, seen = grown(1)
    assert fed_by_tree(trends, 69.9, seen) is trends


def test_a_judgement_is_due_once_a_minute() -> None:
    before = fed_by_tree((), 0.0, tree(1))
    assert fresh((), before, "rss")
    assert not fresh(before, fed_by_tree(before, 50.0, tree(1)), "rss")
    assert fresh(before, fed_by_tree(before, 60.0, tree(1)), "rss")
    assert fresh((), fed_by_card((), 0.0, gpu(5)), "vram/0") and not fresh((), (), "rss")


# -- judgements

def test_a_leak_names_its_process_its_rate_and_when_the_limit_is_met() -> None:
    growth = whole(*grown(60, core=300, api=2))["rss"]
    assert growth.leaks and growth.per_min == pytest.approx(302, rel=0.01)
    assert growth.who == "EngineCore (PID 101)"
    assert growth.eta_s == pytest.approx(32 * 1024 / 302 * 60, rel=0.02)
    assert growth.words.en == "302 MiB a minute: the host's 64.0 GiB are reached in about 109 min"
    assert whole(*grown(60, core=2, api=100))["rss"].who == "API server (PID 100)"


def test_growth_that_would_not_meet_its_limit_in_time_is_shown_and_no_leak() -> None:
    growth = whole(*grown(60, core=2))["rss"]
    assert not growth.leaks and growth.per_min == pytest.approx(2, rel=0.01)
    assert growth.words.en.endswith("reached in about 11 days")


def test_what_does_not_grow_meets_no_limit_and_names_nobody() -> None:
    growth = whole(*grown(60))["rss"]
    assert (growth.leaks, growth.eta_s, growth.who) == (False, inf, "")


def test_little_is_no_judgement() -> None:
    assert whole(*grown(10, core=100)) == {}
    assert judged("rss", "", Trend(), "x", 1.0, DAY) is None


def test_a_tighter_cgroup_is_the_limit() -> None:
    tight = replace(host(), cgroup_total=40 * GIB, cgroup_available=10 * GIB)
    growth = whole(*grown(60, core=100), tight)["rss"]
    assert growth.limit.en == "the cgroup's 40.0 GiB are" and growth.left == 10 * GIB
    wide = replace(host(), cgroup_total=90 * GIB, cgroup_available=80 * GIB)
    assert whole(*grown(60, core=100), wide)["rss"].limit.en == "the host's 64.0 GiB are"


def test_without_a_host_there_is_no_limit_to_meet() -> None:
    assert "rss" not in whole(*grown(60, core=100), Unknown(0.0, "no /proc"))


def test_a_process_that_came_lately_is_not_blamed() -> None:
    trends, seen = grown(60, core=100)
    late = replace(seen, processes=(*seen.processes, Process(102, "VLLM::Worker_TP0", GIB, None, 1.0, 8, 5, 1024)))
    assert whole(trends, late)["rss"].who == "EngineCore (PID 101)"


def test_a_limit_that_is_met_already_is_met_now() -> None:
    trends, _ = grown(60, core=100)
    growth = judged("rss", "", dict(trends)["rss"], "x", -5.0, DAY)
    assert growth is not None and growth.left == 1.0 and growth.leaks


def test_the_longest_window_that_proves_a_leak_tells_when() -> None:
    """Three hours that rise: the two-hour window speaks, though the half-hour one shows a leak, too."""
    trend = Trend()
    for tick in range(3 * 360):
        trend = fed(trend, tick * 10.0, tick * 10.0)
    growth = judged("rss", "", trend, "x", 20_000.0, DAY)
    assert growth is not None and growth.leaks and growth.needed == pytest.approx(20_000 / (4 * 7200))


def test_a_leak_that_only_the_short_window_proves_is_told_by_it() -> None:
    trend = Trend()
    for tick in range(4 * 360):
        trend = fed(trend, tick * 10.0, max(0.0, tick * 10.0 - 3.5 * 3600))
    growth = judged("rss", "", trend, "x", 3000.0, DAY)
    assert growth is not None and growth.leaks and growth.slope == pytest.approx(1.0)


def test_a_leak_can_be_left_untold() -> None:
    assert whole(*grown(60, core=100), within_s=0)["rss"].needed == inf


def test_files_are_those_of_the_process_that_is_nearest_to_its_limit() -> None:
    assert [growth.what for growth in of_tree(*grown(60, files=8), host(), DAY)] == ["rss", "fds"]
    growth = whole(*grown(60, files=8))["fds"]
    assert growth.who == "EngineCore (PID 101)" and growth.leaks
    assert growth.per_min == pytest.approx(8, rel=0.01)
    assert growth.limit.en == "its limit of 1024 is" and growth.left == 1024 - 30 - 480
    assert growth.words.en == "8 files a minute: its limit of 1024 is reached in about 64 min"


def test_files_without_a_count_or_a_limit_are_not_judged() -> None:
    trends, _ = grown(60, files=5)
    assert "fds" not in whole(trends, tree(1, limit=None))
    assert "fds" not in whole(trends, tree(1, api_fds=None, core_fds=None))


def test_a_card_is_judged_like_memory() -> None:
    trends: Trends = ()
    assert list(of_card(trends, gpu(5), DAY)) == []
    for tick in range(361):
        trends = fed_by_card(trends, tick * 10.0, gpu(50 + tick / 360))
    (growth,) = of_card(trends, gpu(51), DAY)
    assert growth.what == "vram/0" and growth.per_min == pytest.approx(1024 / 60, rel=0.01)
    assert growth.words.en == "17.1 MiB a minute: the card's 100.0 GiB are reached in about 2 days"


def test_spans_are_told_as_people_say_them() -> None:
    one = Growth("rss", "", "x is", 0, 1.0, 0, 1)
    told = [replace(one, left=float(left)).words.en.rpartition("about ")[2] for left in (60, 7140, 7200, 172_799, 172_800)]
    assert told == ["1 min", "119 min", "2 h", "48 h", "2 days"]


def test_processes_are_named_as_operators_know_them() -> None:
    first, second = tree(1).processes
    assert (role(0, first), role(1, second)) == ("API server (PID 100)", "EngineCore (PID 101)")
    assert role(1, first) == "vllm (PID 100)"
    assert role(0, replace(first, name="VLLM::ApiServer_0")) == "ApiServer_0 (PID 100)"


# -- thresholds

def held(growth: Growth, thresholds: Thresholds | None = None) -> list[Sighting]:
    return list(sightings("e", (growth,), thresholds or Thresholds()))


RSS = Growth("rss", "EngineCore (PID 101)", "the host's 64.0 GiB are", 32.0 * GIB, 2.0 * MIB, 1.9 * MIB, 1.0 * MIB)


def test_a_leak_is_held_against_the_slope_that_meets_the_limit() -> None:
    (seen,) = held(RSS)
    assert (seen.class_, seen.subject, seen.value, seen.threshold) == ("rss_leak", "e", pytest.approx(114), 60)
    assert (seen.after_s, seen.clear_after_s, seen.margin) == (300, 3600, 12)
    assert seen.words().en == ("resident memory grows by 120 MiB a minute: the host's 64.0 GiB are reached in about 5 h, "
                         "most of it EngineCore (PID 101)")
    assert "most of it" not in held(replace(RSS, who=""))[0].words().en


def test_an_operators_own_limit_counts_where_it_says_more() -> None:
    (seen,) = held(RSS, Thresholds(rss_slope_mib_per_min=50))
    assert (seen.value, seen.threshold) == (120, 50)
    (seen,) = held(RSS, Thresholds(rss_slope_mib_per_min=500))
    assert seen.threshold == 60


def test_a_leak_that_shall_not_be_told_is_held_against_nothing() -> None:
    assert held(replace(RSS, needed=inf)) == []
    assert held(replace(RSS, needed=inf), Thresholds(rss_slope_mib_per_min=50))[0].threshold == 50


def test_files_are_held_against_the_slope_that_meets_their_limit() -> None:
    files = Growth("fds", "EngineCore (PID 101)", "its limit of 1024 is", 700, 0.1, 0.1, 0.05)
    (seen,) = held(files)
    assert (seen.class_, seen.value, seen.threshold) == ("fd_leak", 6, 3)
    assert (seen.after_s, seen.clear_after_s, seen.margin) == (300, 3600, pytest.approx(0.6))
    assert seen.words().en.startswith("open files of EngineCore (PID 101) grow by 6 files a minute: its limit of 1024 is")
    assert held(replace(files, needed=inf)) == []
    assert held(replace(files, what="vram/0")) == []
