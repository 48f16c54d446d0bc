from __future__ import annotations

from dataclasses import replace

from tests.core.scenes import Scene, mark, plan

from vllm_watchdog.core.plan import EnginePlan, Plan, Thresholds
from vllm_watchdog.core.repeats import before, crash_loop, failed, oom_rate, restarted
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import World

WORLD = Scene(plan()).world


def at(world: World, instant: float) -> World:
    return replace(world, at=instant)


def test_restarts_are_kept_for_a_day() -> None:
    world = restarted(at(restarted(at(WORLD, 5.0)), 10.0))
    assert world.restarts == (5.0, 10.0)
    assert restarted(at(world, DAY_S + 5.0)).restarts == (10.0, DAY_S + 5.0)


def test_a_generation_fails_once_and_is_kept_for_a_day() -> None:
    world = failed(at(failed(at(WORLD, 5.0), mark("primary#1"), "engine_dead_v1"), 6.0), mark("primary#1"), "oom_runtime")
    assert world.failed == ((mark("primary#1"), 5.0, "oom_runtime"),), "known better by now"
    world = failed(at(world, DAY_S + 6.0), mark("backup#1"), "oom_runtime")
    assert world.failed == ((mark("backup#1"), DAY_S + 6.0, "oom_runtime"),)


def test_more_failures_of_one_engine_than_allowed_are_a_loop() -> None:
    world = replace(WORLD, plan=replace(WORLD.plan, thresholds=Thresholds(crash_loop=2)))
    for generation in (1, 2):
        world = failed(failed(world, mark(f"primary#{generation}"), "x"), mark(f"backup#{generation}"), "x")
    assert crash_loop(world, "primary") is None
    world = failed(world, mark("primary#3"), "x")
    told = crash_loop(world, "primary")
    assert told and told.en == "primary failed 3 times within a day; a restart does not cure it"
    assert crash_loop(world, "backup") is None


def test_ooms_of_all_engines_of_a_service_count_for_five_minutes() -> None:
    engines = (EnginePlan("a", 1), EnginePlan("b", 2, backup_for="a"), EnginePlan("c", 3))
    world = at(Scene(Plan(engines, Thresholds(oom_rate=2))).world, 400.0)
    for name, ooms in (("a", (100.0, 101.0)), ("b", (300.0,)), ("c", (399.0, 399.5))):
        world = world.with_engine(replace(world.engine(name), ooms=ooms))
    assert oom_rate(world, "a") is None, "the first is five minutes ago"
    told = oom_rate(at(world, 399.9), "a")
    assert told and told.en == "out of memory 3 times within 300 s"
    assert oom_rate(world, "c") is None


def test_the_time_before_is_the_last_failure_of_an_earlier_generation() -> None:
    world = failed(at(WORLD, 5.0), mark("primary#1"), "oom_runtime")
    world = failed(failed(at(world, 8.0), mark("backup#4"), "cuda_fault"), mark("primary#2"), "engine_hang")
    assert before(world, mark("primary#2"), 0.0) == (5.0, "oom_runtime")
    assert before(world, mark("primary#3"), 0.0) == (8.0, "engine_hang")
    assert before(world, mark("primary#2"), 5.0) is None
