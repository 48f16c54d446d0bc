from __future__ import annotations

from math import inf

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.failover import PLANNED_S
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.memory import EngineMemory, Memory
from vllm_watchdog.core.plan import FailoverPlan, Standby, Thresholds
from vllm_watchdog.core.policy import Phase

LEVELS = Thresholds(vram_degrade=((0, 0.9),), degrade_after_s=1, engine_down_s=30)


def serving(**more: object) -> Scene:
    return Scene(plan(**more)).serve()  # type: ignore[arg-type]


def down(scene: Scene) -> list[str]:
    return [said["text"] for said in scene.said("symptom.raised") if said["symptom"] == "engine_down"]


def raised(scene: Scene) -> bool:
    return any(watch.class_ == "engine_down" and watch.raised for watch in scene.world.watches)


def test_a_first_start_is_no_outage_however_long_it_takes() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.0, mark("primary#1"), 100))
    for at in (31.0, 600.0, 3000.0):
        scene.at(at)
    assert scene.world.watches == () and scene.world.incidents == ()
    scene.ok(at=3001.0)
    assert scene.world.service("primary").excused_until == -inf


def test_a_first_start_that_fails_is_an_outage() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.0, mark("primary#1"), 100))
    scene.crash("primary", 10.0)
    scene.feed(e.Spawned(10.0, mark("primary#2"), 101))
    scene.at(39.9)
    assert down(scene) == []
    scene.at(40.0)
    assert down(scene) == ["no engine has served primary for 30 s: primary is loading"]


def test_a_gap_of_half_a_minute_is_critical_and_over_when_an_engine_serves() -> None:
    scene = serving(backup=False)
    scene.crash("primary", 100.0)
    scene.feed(e.Spawned(101.0, mark("primary#2"), 101))
    scene.at(129.9)
    assert not raised(scene)
    scene.at(130.0)
    assert raised(scene) and scene.world.incidents[0].urgency is Urgency.CRITICAL
    scene.ok(at=150.0)
    assert not raised(scene)
    scene.at(179.9)
    assert scene.world.incidents
    scene.at(180.0)
    assert not scene.world.incidents, "it ends as soon as the engine has served for confirm_s"


def test_a_service_that_is_degraded_and_has_nobody_becomes_critical() -> None:
    """Its VRAM drove it to a cold backup: nothing failed, and nobody serves while that one loads."""
    scene = Scene(plan(gpus=(0,), share=0.8, thresholds=LEVELS))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.gpus(10.0, gpu(95))
    scene.gpus(12.0, gpu(95))
    assert scene.phase("primary") is Phase.STOPPING
    scene.at(41.0)
    assert scene.world.incidents[0].urgency is Urgency.WARNING
    scene.at(42.0)
    assert scene.world.incidents[0].urgency is Urgency.CRITICAL and raised(scene)
    assert "engine_down" not in [dump.reason for dump in scene.all(c.Dump)], "what led to it has its evidence"


def test_what_an_operator_asked_for_is_no_outage_until_it_fails() -> None:
    scene = serving(backup=False)
    scene.now = 100.0
    assert scene.ask("restart", "primary").ok
    scene.feed(e.Exited(101.0, mark("primary#1"), 0))
    scene.bury()
    scene.feed(e.Spawned(102.0, mark("primary#2"), 101))
    scene.at(2000.0)
    assert not raised(scene)
    scene.crash("primary", 2100.0)
    scene.at(2130.0)
    assert raised(scene)


def test_an_operators_failover_is_no_outage() -> None:
    scene = serving()
    scene.now = 100.0
    assert scene.ask("failover").ok
    scene.feed(e.Exited(101.0, mark("primary#1"), 0))
    scene.bury("primary")
    scene.feed(e.Spawned(102.0, mark("backup#1"), 101))
    scene.at(1000.0)
    assert not raised(scene) and scene.phase("backup") is Phase.LOADING


def test_a_planned_failback_is_an_outage_when_it_takes_too_long() -> None:
    scene = serving(failover=FailoverPlan(after_failures=0))
    scene.crash("primary", 10.0, finding("oom_runtime"))
    scene.serve("backup", 200)
    scene.scrape(1, "backup", at=20.0)
    scene.scrape(2, "backup", at=700.0)
    assert scene.world.service("primary").excused_until == 700.0 + PLANNED_S
    scene.feed(e.Exited(701.0, mark("backup#1"), 0))
    scene.bury("backup")
    scene.feed(e.Spawned(701.0, mark("primary#2"), 101))
    for at in (1299.0, 1300.0, 1329.0):
        scene.at(at)
        assert not raised(scene)
    scene.at(1330.0)
    assert raised(scene)


def test_a_hot_pair_has_no_gap() -> None:
    scene = serving(standby=Standby.HOT).serve("backup", 200)
    scene.crash("primary", 10.0)
    scene.at(60.0)
    assert scene.world.service("primary").wanted == "backup" and not raised(scene)


def test_a_stop_is_no_outage() -> None:
    scene = serving(backup=False)
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    scene.at(50.0)
    assert not raised(scene)


@pytest.mark.parametrize("served", [True, False])
def test_what_served_under_the_last_daemon_and_does_not_any_more_is_an_outage(served: bool) -> None:
    memory = Memory("boot-1", (EngineMemory("primary", 1, wanted=True, served=served),))
    scene = Scene(plan(), memory=memory, survivors=(e.Survivor(mark("primary#1"), 100, leader=True, age_s=500.0),))
    assert scene.phase() is Phase.LOADING
    scene.at(0.0)
    scene.at(30.0)
    assert raised(scene) is served
