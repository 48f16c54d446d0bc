from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import Scene, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import Planned, Standby
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.renew import IDLE_S, leak_of
from vllm_watchdog.core.symptoms import Watch
from vllm_watchdog.core.turn import Turn
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import remembered

M = mark("primary#1")


def leaking(class_: str = "rss_leak", subject: str = "primary", planned: Planned = Planned.WHEN_IDLE,
            **more: object) -> Scene:
    the_plan = plan(planned=planned, **more)  # type: ignore[arg-type]
    scene = Scene(the_plan)
    if the_plan.engines[0].gpus:
        scene.gpus(0.0, gpu(1))
    scene.serve()
    leaks(scene, class_, subject)
    return scene


def leaks(scene: Scene, class_: str = "rss_leak", subject: str = "primary") -> None:
    scene.world = replace(scene.world, watches=(*scene.world.watches, Watch(class_, subject, raised=True)))


def scraped(scene: Scene, *ats: float, name: str = "primary", running: float = 0.0) -> None:
    """Tokens flow, so that nobody asks whether it hangs."""
    for at in ats:
        scene.scrape(at, name, at=at, running=running)


def terms(scene: Scene) -> list[c.Term]:
    return scene.all(c.Term)


def test_an_idle_engine_that_leaks_is_restarted_once_uncharged_and_said() -> None:
    scene = leaking(backup=False)
    scraped(scene, 10.0, 69.0)
    assert terms(scene) == []
    scraped(scene, 70.0)
    assert terms(scene) == [c.Term(M)]
    assert scene.said("engine.renewed") == [{"engine": "primary#1", "because": "rss_leak"}]
    scene.feed(e.Exited(71.0, M, 0))
    scene.bury()
    assert scene.engine().mark == mark("primary#2") and scene.phase() is Phase.STARTING
    assert scene.engine().life.failures == () and scene.alerts() == []
    assert scene.world.watches == (), "the leak went with its process"
    assert scene.engine().renewed_at == 70.0 == remembered(scene.world).engines[0].renewed_at


def test_it_is_said_in_the_open_incident() -> None:
    scene = leaking(backup=False)
    turn = Turn(scene.world, 5.0)
    turn.symptom("primary", "rss_leak", Urgency.WARNING, "grows")
    scene.world = turn.world
    scraped(scene, 10.0, 70.0)
    assert ("action", "planned restart of primary#1: rss_leak, and no request runs or waits") in [
        (entry.what, entry.text) for entry in scene.world.incidents[0].timeline]


def test_it_happens_once_a_day_at_most() -> None:
    scene = leaking(backup=False)
    scraped(scene, 10.0, 70.0)
    scene.feed(e.Exited(71.0, M, 0))
    scene.bury()
    scene.serve()
    leaks(scene)
    scraped(scene, 100.0, 200.0, 69.9 + DAY_S)
    assert len(terms(scene)) == 1
    scraped(scene, 70.0 + DAY_S)
    assert len(terms(scene)) == 2


@pytest.mark.parametrize("case", ["off", "busy", "paused", "stopping", "not serving", "no leak", "no gauges"])
def test_an_engine_is_left_alone_otherwise(case: str) -> None:
    scene = leaking(backup=False, planned=Planned.OFF if case == "off" else Planned.WHEN_IDLE)
    if case == "paused":
        scene.ask("pause")
    if case == "stopping":
        scene.feed(e.StopAsked(1.0, "SIGTERM"))
        scene.told.clear()
    if case == "not serving":
        scene.feed(e.Exited(1.0, M, 1))
    if case == "no leak":
        scene.world = replace(scene.world, watches=(Watch("rss_leak", "primary"), Watch("kv_pressure", "primary", True)))
    for at in (10.0, 100.0):
        scene.scrape(at, at=at, running={"busy": 1.0, "no gauges": None}.get(case, 0.0))
    assert terms(scene) == []


def test_a_gap_of_ours_is_no_outage_for_a_while() -> None:
    scene = leaking(backup=False)
    scraped(scene, 10.0, 70.0)
    scene.feed(e.Exited(71.0, M, 0))
    scene.bury()
    scene.feed(e.Spawned(72.0, mark("primary#2"), 101))
    scene.at(600.0)
    assert scene.world.incidents == ()


def test_a_card_that_grows_counts_only_where_nobody_else_is_on_it() -> None:
    alone = leaking("vram_growth", "gpu0", gpus=(0,), share=0.5, backup=False)
    assert leak_of(alone.world, alone.engine()) == "vram_growth"
    alone.gpus(5.0, gpu(60, (7, "notebook", None, 9.0), (100, "core", M, 50.0)))
    assert leak_of(alone.world, alone.engine()) == ""
    alone.blind(6.0)
    assert leak_of(alone.world, alone.engine()) == ""
    assert leak_of(leaking("vram_growth", "gpu1").world, alone.engine()) == ""


def test_a_leak_of_another_engine_is_not_ours() -> None:
    scene = leaking("fd_leak", "backup")
    assert leak_of(scene.world, scene.engine()) == ""
    assert leak_of(scene.world, scene.engine("backup")) == "fd_leak"


# -- beside a hot standby

def test_a_busy_engine_hands_over_to_its_hot_standby_and_is_restarted_when_its_last_request_is_done() -> None:
    scene = leaking(standby=Standby.HOT)
    scraped(scene, 1.0, running=3.0)
    assert scene.world.service("primary").side is Side.PRIMARY, "the standby does not serve yet"
    scene.serve("backup", 200)
    scraped(scene, 10.0, running=3.0)
    assert (scene.world.service("primary").side, terms(scene)) == (Side.BACKUP, [])
    scraped(scene, 80.0, running=1.0)
    assert terms(scene) == []
    scraped(scene, 90.0)
    scraped(scene, 91.0)
    assert terms(scene) == [c.Term(M)]
    assert scene.phase("backup") is not Phase.STOPPING
    scene.feed(e.Exited(92.0, M, 0))
    scene.bury()
    assert scene.phase("primary") is Phase.STARTING


def test_an_engine_that_was_left_is_restarted_a_minute_later_at_the_soonest() -> None:
    scene = leaking(standby=Standby.HOT)
    scene.serve("backup", 200)
    scraped(scene, 1.0)
    left_at = scene.world.service("primary").since
    assert scene.world.service("primary").side is Side.BACKUP
    scraped(scene, left_at + IDLE_S - 0.1)
    assert terms(scene) == []
    scraped(scene, left_at + IDLE_S)
    assert terms(scene) == [c.Term(M)]


def test_a_cold_standby_is_no_reason_to_leave_a_busy_engine() -> None:
    scene = leaking()
    scraped(scene, 10.0, 100.0, running=3.0)
    assert scene.world.service("primary").side is Side.PRIMARY and terms(scene) == []


def test_a_backup_that_leaks_and_is_busy_is_left() -> None:
    scene = leaking(subject="backup", standby=Standby.HOT).serve("backup", 200)
    scene.ask("failover")
    scraped(scene, 10.0, 100.0, name="backup", running=1.0)
    assert scene.world.service("primary").side is Side.BACKUP and terms(scene) == []


def test_an_engine_is_idle_for_a_minute() -> None:
    assert IDLE_S == 60
