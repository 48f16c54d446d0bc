from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import Scene, mark, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.incidents import Urgency, opened
from vllm_watchdog.core.plan import EnginePlan, Plan
from vllm_watchdog.core.policy import Phase, State
from vllm_watchdog.core.world import Engine, World, due_at, next_deadline, remembered, routed

WORLD = Scene(plan(gpus=(0,))).world


def test_an_engine_is_found_by_its_name() -> None:
    assert WORLD.engine("backup").plan.port == 8101
    with pytest.raises(KeyError):
        WORLD.engine("nobody")


def test_a_service_is_found_by_any_of_its_engines() -> None:
    assert WORLD.service("backup") is WORLD.service("primary")
    with pytest.raises(KeyError):
        WORLD.service("nobody")


def test_an_engine_bears_its_mark_and_its_blame() -> None:
    engine = Engine(EnginePlan("e", 1), generation=3)
    assert (engine.mark, engine.blame) == (mark("e#3"), "unexpected_exit")
    assert replace(engine, cause="oom_runtime").blame == "oom_runtime"


def test_a_card_is_its_wanted_engines_or_else_its_firsts() -> None:
    assert WORLD.engine_on(0) == WORLD.engine("primary")
    backup = replace(WORLD.engine("backup"), life=State(wanted=True))
    primary = replace(WORLD.engine("primary"), life=State())
    assert WORLD.with_engine(backup).with_engine(primary).engine_on(0) == backup
    assert replace(WORLD, engines=(primary,)).engine_on(0) == primary
    assert WORLD.engine_on(5) is None


def test_a_service_has_one_open_incident() -> None:
    one, other = (opened("primary", "primary", 1, class_, Urgency.WARNING, "", 0.0, 0.0) for class_ in ("a", "b"))
    host = opened("host", "host", 0, "c", Urgency.WARNING, "", 0.0, 0.0)
    world = WORLD.with_incident(one).with_incident(host).with_incident(other)
    assert world.incidents == (host, other)
    assert world.incident("primary") == other and world.incident("nobody") is None


def test_a_changed_service_takes_the_place_of_the_old_one() -> None:
    scene = Scene(Plan((EnginePlan("a", 1), EnginePlan("b", 2))))
    changed = replace(scene.world.service("a"), since=5.0)
    assert [service.since for service in scene.world.with_service(changed).services] == [5.0, 0.0]


def test_what_it_holds_already_makes_no_new_world() -> None:
    assert WORLD.with_engine(WORLD.engine("backup")) is WORLD
    assert WORLD.with_service(WORLD.service("primary")) is WORLD


@pytest.mark.parametrize("phase", Phase)
def test_the_route_leads_to_what_serves_or_is_only_suspected_and_that_is_remembered(phase: Phase) -> None:
    engine = replace(WORLD.engine("primary"), life=State(phase=phase))
    there = phase in (Phase.SERVING, Phase.SUSPECT)
    for each in (engine, replace(engine, ready_at=5.0)):
        assert routed(each) is there
        assert remembered(replace(WORLD, engines=(each,))).engines[0].served is there


@pytest.mark.parametrize("phase", Phase)
def test_pause_suspends_the_deadlines_of_automatic_actions_only(phase: Phase) -> None:
    engine = replace(WORLD.engine("primary"), life=State(phase=phase, deadline=7.0))
    assert due_at(WORLD, engine) == 7.0
    suspended = phase in (Phase.LOADING, Phase.SUSPECT, Phase.DOZING, Phase.WAKING, Phase.BACKOFF)
    assert due_at(replace(WORLD, paused=True), engine) == (inf if suspended else 7.0)


def test_the_next_deadline_is_the_nearest_of_all() -> None:
    at_rest = tuple(replace(engine, life=State()) for engine in WORLD.engines)
    world = replace(WORLD, engines=at_rest, look_at=inf)
    assert next_deadline(world) == inf
    assert next_deadline(replace(world, look_at=3.0)) == 3.0
    late, soon = (replace(at_rest[i], life=State(Phase.STOPPING, deadline=9.0 - i)) for i in (0, 1))
    assert next_deadline(replace(world, engines=(late, soon))) == 8.0
    strays = replace(world, strays=(mark("x#1"),), strays_until=5.0, at=4.0)
    assert next_deadline(strays) == 5.0
    assert next_deadline(replace(strays, at=5.0)) == inf
    assert next_deadline(replace(strays, strays=())) == inf


@pytest.mark.parametrize("phase", Phase)
def test_everything_is_at_rest_when_nothing_more_can_be_done(phase: Phase) -> None:
    world = replace(WORLD, engines=(Engine(EnginePlan("e", 1), State(phase=phase)), Engine(EnginePlan("f", 2))))
    assert world.all_at_rest is (phase in (Phase.STOPPED, Phase.HELD, Phase.WEDGED))
    assert not replace(world, strays=(mark("x#1"),)).all_at_rest


def test_strays_are_waited_for_until_their_time_is_over() -> None:
    world = replace(World(), strays=(mark("x#1"),), strays_until=5.0)
    assert not replace(world, at=4.9).all_at_rest
    assert replace(world, at=5.0).all_at_rest


def test_a_world_is_remembered_for_the_next_daemon() -> None:
    memory = remembered(replace(WORLD, paused=True))
    assert (memory.boot_id, memory.paused, memory.incidents) == ("boot-1", True, ())
    assert [(engine.name, engine.generation) for engine in memory.engines] == [("primary", 0), ("backup", 0)]
    assert [(service.name, service.on_backup) for service in memory.services] == [("primary", False)]


@pytest.mark.parametrize("phase", Phase)
def test_who_sleeps_or_is_on_its_way_there_or_back_is_remembered(phase: Phase) -> None:
    world = replace(WORLD, engines=(replace(WORLD.engine("primary"), life=State(phase=phase)),))
    assert remembered(world).engines[0].asleep is (phase in (Phase.DOZING, Phase.ASLEEP, Phase.WAKING))


def test_a_world_is_only_ever_replaced() -> None:
    before = Scene(plan()).world
    scene = Scene(plan())
    scene.feed(e.Exited(5.0, mark("primary#1"), 1))
    assert Scene(plan()).world == before
