from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import WALL, Scene, finding, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core import incidents
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.plan import EnginePlan, Limits, Plan, Standby
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Health
from vllm_watchdog.core.report import report, serving
from vllm_watchdog.core.world import remembered


def survivor(whose: str, pid: int = 100, leader: bool = True, age_s: float = 300.0) -> e.Survivor:
    return e.Survivor(mark(whose), pid, leader, age_s)


def memory(*engines: EngineMemory, boot_id: str = "boot-1", **more: object) -> Memory:
    return Memory(boot_id, engines, **more)


def reborn(scene: Scene, at: float, *survivors: e.Survivor, boot_id: str = "boot-1", wall: float = WALL,
           the_plan: Plan | None = None) -> Scene:
    return Scene(the_plan or scene.world.plan, at, remembered(scene.world), survivors, boot_id, wall)


# -- what runs

def test_a_daemon_killed_during_an_incident_makes_no_gap_of_its_own() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.LogRead(5.0, mark("primary#1"), (finding("shm_stall"),)))
    (left,) = remembered(scene.world).incidents
    after = reborn(scene, 10.0, survivor("primary#1"))
    assert after.world.incidents[0].id == left.id and after.phase() is Phase.SERVING
    assert after.world.incidents[0].down_at is None
    after.ok("primary", 10.5)
    assert (after.world.incidents[0].down_at, after.world.incidents[0].up_at) == (None, None)


def test_an_incident_that_a_clean_stop_left_open_ends_when_the_next_daemon_has_served() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.crash("primary", 5.0)
    scene.feed(e.StopAsked(6.0, "SIGTERM"))
    scene.bury()
    left = remembered(scene.world)
    assert left.incidents[0].wall_resolved is None
    after = Scene(plan(backup=False), 100.0, left)
    assert after.world.incidents[0].down_at == 100.0, "the time while it was stopped is the operator's"
    after.now = 110.0
    after.serve()
    after.at(145.0)
    ended = after.all(c.Record)[-1].incident
    assert (ended.id, ended.down_s) == (left.incidents[0].id, 11.0) and ended.wall_resolved


def test_a_first_start_launches_the_primary() -> None:
    scene = Scene(plan())
    assert scene.only(c.Spawn).mark == mark("primary#1")
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STOPPED}
    assert scene.said("daemon.started") == [{"engines": "2", "survivors": "0", "same_boot": "True"}]


def test_an_engine_that_still_runs_is_adopted_and_not_launched_beside() -> None:
    scene = Scene(plan(), survivors=(survivor("primary#4"),))
    assert scene.only(c.Adopt) == c.Adopt(mark("primary#4"), 100)
    assert not scene.all(c.Spawn) and not scene.all(c.Kill)
    engine = scene.engine()
    assert (engine.phase, engine.generation, engine.pid, engine.spawned_at, engine.pulse.since) == (
        Phase.LOADING, 4, 100, -300.0, 0.0)
    assert scene.said("engine.adopted") == [{"engine": "primary#4", "pid": "100", "then": "kept"}]


def test_an_adopted_engine_may_load_for_what_is_left_of_its_time() -> None:
    limits = Limits(load_s=1000, suspect_s=60)
    young = Scene(plan(limits=limits), 50.0, None, (survivor("primary#1", age_s=300.0),))
    assert young.engine().life.deadline == 750.0
    old = Scene(plan(limits=limits), 50.0, None, (survivor("primary#1", age_s=1e6),))
    assert old.engine().life.deadline == 110.0, "a busy server may need a moment to answer"


def test_what_served_under_the_last_daemon_keeps_the_route_until_it_is_proved_not_to_serve() -> None:
    after = reborn(Scene(plan()).serve(), 50.0, survivor("primary#1"))
    service = after.world.services[0]
    assert (after.engine().phase, serving(after.world, service)) == (Phase.SERVING, "primary")
    after.feed(e.Exited(50.5, mark("primary#1"), 0))
    assert serving(after.world, service) is None


def test_what_served_keeps_the_route_however_often_the_daemon_is_killed_and_if_it_is_missed_that_is_told() -> None:
    scene = Scene(plan()).serve()
    for at in (50.0, 50.3, 50.6):
        scene = reborn(scene, at, survivor("primary#1"))
        assert serving(scene.world, scene.world.services[0]) == "primary"
    assert [incident.class_ for incident in reborn(scene, 50.9).world.incidents] == ["unexpected_exit"]


def test_a_handover_does_not_begin_the_time_of_an_engine_anew() -> None:
    before = Scene(plan())
    before.serve()
    was = before.engine()
    after = reborn(before, 50.0, survivor("primary#1", age_s=50.0))
    assert (after.engine().since, after.engine().ready_at) == (was.since, was.ready_at)
    after.ok("primary", 50.5)
    assert (after.engine().since, after.engine().ready_at) == (was.since, was.ready_at)
    assert not after.said("engine.ready") and not after.said("engine.phase")
    assert after.said("engine.adopted")[0]["then"] == "kept"


def test_an_adopted_engine_that_serves_no_more_is_found_out() -> None:
    after = reborn(Scene(plan(backup=False)).serve(), 50.0, survivor("primary#1"))
    for at in (51.0, 51.0 + after.engine().plan.limits.dead_s):
        after.feed(e.Probed(at, mark("primary#1"), Health.REFUSED))
    assert after.phase() is Phase.DUMPING and after.engine().cause == "api_unreachable"


def test_the_restarts_of_the_last_day_are_remembered_even_over_a_reboot() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.crash("primary", 10.0)
    after = reborn(scene, 3.0, boot_id="boot-2", wall=WALL + 60.0)
    assert report(after.world)["restarts_24h"] == 1
    assert remembered(after.world).restarts == remembered(scene.world).restarts == (WALL + 10.0,)
    assert reborn(scene, 3.0, boot_id="boot-2", wall=WALL + 2 * 86_400.0).world.restarts == ()
    many = replace(scene.world, restarts=tuple(float(at) for at in range(501)))
    assert remembered(many).restarts[0] == WALL + 1.0, "it is bounded"


def test_a_suspect_keeps_the_route_over_a_killed_daemon() -> None:
    scene = Scene(plan()).serve()
    engine = scene.engine()
    scene.world = scene.world.with_engine(replace(engine, life=replace(engine.life, phase=Phase.SUSPECT)))
    after = reborn(scene, 50.0, survivor("primary#1"))
    assert serving(after.world, after.world.services[0]) == "primary"


def test_what_was_loading_under_the_last_daemon_has_no_route_yet() -> None:
    after = reborn(Scene(plan()), 50.0, survivor("primary#1"))
    assert (after.engine().phase, serving(after.world, after.world.services[0])) == (Phase.LOADING, None)


def test_the_next_launch_after_an_adoption_has_a_number_of_its_own_and_is_a_restart() -> None:
    scene = Scene(plan(), survivors=(survivor("primary#4"),))
    assert scene.world.restarts == ()
    scene.ok()
    scene.crash("primary", 10.0)
    assert scene.only(c.Spawn).mark == mark("primary#5")
    assert scene.world.restarts == (10.0,)


def test_an_engine_that_is_not_meant_to_serve_is_stopped() -> None:
    scene = Scene(plan(), survivors=(survivor("primary#4"), survivor("backup#2", 200)))
    assert scene.phases() == {"primary": Phase.LOADING, "backup": Phase.STOPPING}
    assert scene.only(c.Term).mark == mark("backup#2")
    assert [said["then"] for said in scene.said("engine.adopted")] == ["kept", "stopped"]


def test_a_service_whose_backup_alone_runs_stays_with_it() -> None:
    scene = Scene(plan(), 5.0, None, (survivor("backup#2", 200),))
    assert scene.world.services[0].side is Side.BACKUP
    assert scene.phases() == {"primary": Phase.STOPPED, "backup": Phase.LOADING}


def test_a_service_that_was_on_its_backup_stays_there_even_if_only_the_primary_runs() -> None:
    """Killed in the middle of a failover: what was begun is finished."""
    known = memory(services=(ServiceMemory("primary", on_backup=True, turned_at=3.0),))
    scene = Scene(plan(), 5.0, known, (survivor("primary#2"),))
    assert scene.world.services[0].turned_at == 3.0
    assert scene.phases() == {"primary": Phase.STOPPING, "backup": Phase.RELEASING}


def test_a_service_whose_backup_is_configured_no_more_goes_back_to_its_primary() -> None:
    known = memory(services=(ServiceMemory("primary", on_backup=True, turned_at=3.0),))
    scene = Scene(plan(backup=False), 5.0, known)
    assert scene.world.services[0].side is Side.PRIMARY and scene.phase() is Phase.STARTING


def test_orphans_are_killed_before_anything_starts() -> None:
    scene = Scene(plan(), survivors=(survivor("primary#4", leader=False),))
    assert scene.only(c.Kill).mark == mark("primary#4")
    assert scene.world.strays == (mark("primary#4"),) and scene.phase() is Phase.RELEASING
    assert scene.said("engine.stray") == [
        {"engine": "primary#4", "action": "killed: no leader, or an older generation"}]
    scene.feed(e.Emptied(1.0, mark("primary#4")))
    assert scene.only(c.Spawn).mark == mark("primary#5")


def test_every_older_generation_is_killed_also_of_engines_that_are_configured_no_more() -> None:
    found = (survivor("primary#4"), survivor("primary#3"), survivor("gone#9"), survivor("backup#1", leader=False))
    scene = Scene(plan(), survivors=found)
    assert [kill.mark for kill in scene.all(c.Kill)] == [mark("backup#1"), mark("gone#9"), mark("primary#3")]
    assert scene.only(c.Adopt).mark == mark("primary#4")


def test_a_leader_older_than_the_newest_launch_is_not_adopted() -> None:
    """Its events would be taken for history: it would serve unwatched, and never be stopped."""
    scene = Scene(plan(), 5.0, memory(EngineMemory("primary", 5, True)), (survivor("primary#4"),))
    assert not scene.all(c.Adopt) and scene.only(c.Kill).mark == mark("primary#4")
    scene.feed(e.Emptied(6.0, mark("primary#4")))
    assert scene.only(c.Spawn).mark == mark("primary#6")


def test_a_stray_blocks_only_who_may_share_its_card() -> None:
    engines = (EnginePlan("one", 1, (0,)), EnginePlan("two", 2, (1,)))
    scene = Scene(Plan(engines), survivors=(survivor("one#1", leader=False),))
    scene.gpus(0.1, gpu(0), gpu(0, index=1))
    assert scene.phases() == {"one": Phase.RELEASING, "two": Phase.STARTING}


def test_a_stray_that_does_not_go_is_named_to_a_human() -> None:
    scene = Scene(plan(), survivors=(survivor("primary#4", leader=False),))
    scene.at(60.0)
    assert scene.alerts() == [("opened", "vram_held")]
    assert scene.world.incidents[0].text == "primary can't be started: primary#4 is not gone yet"


# -- a standby that sleeps, or may

SLEEPING = plan(gpus=(0,), share=0.85, backup_share=0.5, standby=Standby.SLEEPING)
HOT = plan(gpus=(0,), share=0.6, backup_share=0.3, standby=Standby.HOT)


@pytest.mark.parametrize("on_backup", [True, False])
def test_a_sleeper_is_put_to_sleep_again_since_it_may_have_been_on_its_way_back(on_backup: bool) -> None:
    known = memory(EngineMemory("backup", 2, True, asleep=True), services=(ServiceMemory("primary", on_backup, 3.0),))
    scene = Scene(SLEEPING, 5.0, known, (survivor("primary#1"), survivor("backup#2", 200)))
    assert scene.phase("backup") is Phase.DOZING and scene.only(c.Sleep).mark == mark("backup#2")
    scene.sleep()
    assert scene.phase("backup") is Phase.ASLEEP
    assert scene.phase() is (Phase.STOPPING if on_backup else Phase.LOADING)


@pytest.mark.parametrize("on_backup", [True, False])
def test_a_standby_that_did_not_sleep_is_adopted_like_any_engine(on_backup: bool) -> None:
    """It may be loading, which a wake would end; or serve, so busy that a wake's token is late."""
    known = memory(EngineMemory("backup", 2, True), services=(ServiceMemory("primary", on_backup, 3.0),))
    scene = Scene(SLEEPING, 5.0, known, (survivor("backup#2", 200), survivor("primary#1")))
    assert scene.phase("backup") is Phase.LOADING
    scene.ok("backup")
    assert scene.phase("backup") is (Phase.SERVING if on_backup else Phase.DOZING)
    assert not scene.all(c.Wake)


def test_a_generation_that_is_newer_than_what_is_remembered_of_the_sleeper_does_not_sleep() -> None:
    known = memory(EngineMemory("backup", 2, True, asleep=True))
    scene = Scene(SLEEPING, 5.0, known, (survivor("backup#3", 200), survivor("primary#1")))
    assert scene.phase("backup") is Phase.LOADING and not scene.all(c.Sleep)


def test_a_sleeper_that_is_configured_to_sleep_no_more_is_started_anew() -> None:
    """Nobody would wake it."""
    known = memory(EngineMemory("backup", 2, True, asleep=True), services=(ServiceMemory("primary", True, 3.0),))
    scene = Scene(plan(), 5.0, known, (survivor("backup#2", 200),))
    assert scene.phase("backup") is Phase.STOPPING and not scene.all(c.Sleep)
    scene.crash("backup", 6.0)
    assert scene.only(c.Spawn).mark == mark("backup#3")


def test_both_engines_of_a_hot_pair_are_kept() -> None:
    scene = Scene(HOT, survivors=(survivor("primary#1"), survivor("backup#1", 200)))
    assert scene.phases() == {"primary": Phase.LOADING, "backup": Phase.LOADING}
    assert [said["then"] for said in scene.said("engine.adopted")] == ["kept", "kept"]


# -- what is remembered

def test_failures_are_remembered_within_one_boot_of_the_host() -> None:
    known = memory(EngineMemory("primary", 3, True, (1.0, 2.0)))
    assert Scene(plan(), 5.0, known).engine().life.failures == (1.0, 2.0)
    assert Scene(plan(), 5.0, known, boot_id="boot-2").engine().life.failures == ()


def test_generations_only_ever_grow() -> None:
    known = memory(EngineMemory("primary", 3, True), boot_id="boot-0")
    assert Scene(plan(), 5.0, known).only(c.Spawn).mark == mark("primary#4")
    assert Scene(plan(), 5.0, known, (survivor("primary#7", leader=False),)).engine().generation == 7


def test_a_first_start_of_a_daemon_is_no_restart() -> None:
    scene = Scene(plan(), 5.0, memory(EngineMemory("primary", 3, False)))
    assert scene.only(c.Spawn).mark == mark("primary#4") and scene.world.restarts == ()


def test_a_held_engine_stays_held_until_the_host_reboots() -> None:
    known = memory(EngineMemory("primary", 3, True, (1.0,), "bad_args", "unrecognized arguments"))
    scene = Scene(plan(backup=False), 5.0, known)
    engine = scene.engine()
    assert (engine.phase, engine.life.doom, engine.cause, engine.why, engine.life.wanted) == (
        Phase.HELD, "bad_args", "bad_args", "unrecognized arguments", False)
    assert Scene(plan(backup=False), 5.0, known, boot_id="boot-2").phase() is Phase.STARTING


def test_a_held_primary_leaves_the_service_to_its_backup() -> None:
    known = memory(EngineMemory("primary", 3, True, (1.0,), "bad_args", "why"))
    assert Scene(plan(), 5.0, known).phases() == {"primary": Phase.HELD, "backup": Phase.STARTING}


def test_a_daemon_that_died_before_it_could_hold_an_engine_holds_it_now() -> None:
    known = memory(EngineMemory("primary", 3, True, (1.0, 2.0, 3.0)))
    scene = Scene(plan(backup=False, limits=Limits(budget=2)), 5.0, known)
    assert scene.phase() is Phase.HELD and not scene.all(c.Spawn)
    assert scene.alerts() == [("opened", "budget_spent")]


def test_failures_of_before_a_failback_do_not_send_the_service_away_again() -> None:
    known = memory(EngineMemory("primary", 3, True, (100.0, 200.0)), services=(ServiceMemory("primary", False, 900.0),))
    scene = Scene(plan(), 1000.0, known, (survivor("primary#3"),))
    assert scene.phases() == {"primary": Phase.LOADING, "backup": Phase.STOPPED}


def test_the_failure_that_changed_sides_has_had_its_answer() -> None:
    known = memory(EngineMemory("primary", 3, True, (100.0, 200.0)), services=(ServiceMemory("primary", False, 200.0),))
    scene = Scene(plan(), 1000.0, known, (survivor("primary#3"),))
    scene.ok()
    scene.crash("primary", 1001.0)
    assert scene.phase("backup") is Phase.STOPPED


def test_a_change_of_sides_before_a_reboot_is_no_instant_of_this_boot() -> None:
    known = memory(boot_id="boot-0", services=(ServiceMemory("primary", on_backup=True, turned_at=9e6),))
    scene = Scene(plan(), 5.0, known)
    assert (scene.world.services[0].turned_at, scene.world.services[0].side) == (-inf, Side.BACKUP)


def test_how_long_failback_waits_outlives_the_daemon_but_not_the_host() -> None:
    service = ServiceMemory("primary", on_backup=True, turned_at=3.0, patience=4.0)
    assert Scene(plan(), 5.0, memory(services=(service,))).world.services[0].patience == 4.0
    assert Scene(plan(), 5.0, memory(services=(service,), boot_id="boot-0")).world.services[0].patience == 1.0


LOWERED = Lowering(16, 100.0, "vram_degrade of gpu0", patience=2.0)


@pytest.mark.parametrize(("changes", "lowered"), [
    ({}, LOWERED), ({"on_backup": True}, Lowering()), ({"boot_id": "boot-0"}, Lowering()),
])
def test_a_primary_stays_lowered_over_a_change_of_daemons(changes: dict[str, object], lowered: Lowering) -> None:
    service = ServiceMemory("primary", bool(changes.pop("on_backup", False)), 3.0, lowering=LOWERED)
    scene = Scene(plan(), 500.0, memory(services=(service,), **changes))
    found = scene.world.services[0].lowering
    assert replace(found, calm_since=inf) == lowered


def test_a_new_daemon_waits_until_it_has_seen_calm_for_itself() -> None:
    known = memory(EngineMemory("primary", 3, True), services=(ServiceMemory("primary", False, 3.0, lowering=LOWERED),))
    scene = Scene(plan(), 500.0, known, (survivor("primary#3"),))
    scene.ok()
    scene.at(739.9)
    assert scene.world.services[0].lowering.to == 16
    scene.at(740.0)
    assert scene.world.services[0].lowering.to is None and scene.said("service.restored")[0]["after_s"] == "640"


def test_a_pause_outlives_the_daemon_and_nothing_is_started_under_it() -> None:
    scene = Scene(plan(), 5.0, memory(paused=True))
    assert scene.world.paused and scene.phases() == {"primary": Phase.STOPPED, "backup": Phase.STOPPED}
    scene.ask("resume")
    assert scene.phase() is Phase.STARTING


def test_a_pause_does_not_keep_an_engine_from_being_adopted() -> None:
    scene = Scene(plan(), 5.0, memory(paused=True), (survivor("primary#3"),))
    scene.ok()
    assert scene.phase() is Phase.SERVING


# -- open incidents

def open_incident(service: str = "primary", engine: str = "primary") -> incidents.Incident:
    return incidents.opened(service, engine, 1, "oom_runtime", Urgency.CRITICAL, "why", 100.0, WALL + 100.0)


def test_an_open_incident_is_taken_over_and_ends_with_the_new_daemon() -> None:
    scene = Scene(plan(), 200.0, memory(incidents=(open_incident(),)), (survivor("primary#1"),))
    assert scene.world.incidents[0].id == open_incident().id
    scene.ok()
    scene.at(230.0)
    assert scene.alerts() == [("opened", "oom_runtime"), ("resolved", "oom_runtime")]


def test_that_an_incident_opened_is_owed_again_by_the_next_daemon_but_is_no_news() -> None:
    scene = Scene(plan(), 200.0, memory(incidents=(open_incident(),)), (survivor("primary#1"),))
    assert [(alert.kind, alert.again) for alert in scene.all(c.Alert)] == [("opened", True)]


def test_an_incident_that_got_worse_while_no_watchdog_ran_is_told_as_worse() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.LogRead(10.0, mark("primary#1"), (finding("shm_stall"),)))
    after = reborn(scene, 20.0)
    assert [(alert.kind, alert.again, alert.incident.class_) for alert in after.all(c.Alert)] == [
        ("opened", True, "unexpected_exit"), ("worsened", False, "unexpected_exit")]


def test_after_a_reboot_an_incident_is_dated_by_the_wall_clock() -> None:
    """Monotonic instants of the boot before would lie days in the future."""
    late = replace(open_incident(), opened_at=9e6, touched_at=9e6,
                   timeline=(incidents.Entry(9e6, "opened"), incidents.Entry(9e6 + 7, "action")))
    scene = Scene(plan(), 60.0, memory(boot_id="boot-0", incidents=(late,)), wall=WALL + 1000.0)
    taken = scene.world.incidents[0]
    assert (taken.opened_at, taken.touched_at) == (-900.0, 60.0)
    assert [entry.at for entry in taken.timeline[:2]] == [-900.0, -893.0]
    scene.serve()
    scene.at(90.0)
    assert not scene.world.incidents


def test_an_incident_of_a_service_that_is_configured_no_more_is_closed() -> None:
    known = memory(incidents=(open_incident("gone", "gone"), open_incident("host", "host"), open_incident()))
    scene = Scene(plan(), 110.0, known)
    assert sorted(incident.service for incident in scene.world.incidents) == ["host", "primary"]
    (closed,) = [alert.incident for alert in scene.all(c.Alert) if alert.kind == "resolved"]
    assert closed.service == "gone" and closed.timeline[-1].text == "gone is not configured any more"
    assert scene.said("incident.resolved") == [{"incident": closed.id}]


def test_an_incident_of_an_engine_that_is_configured_no_more_still_takes_its_evidence() -> None:
    scene = Scene(plan(backup=False), 200.0, memory(incidents=(open_incident("primary", "backup"),)))
    scene.feed(e.Dumped(201.0, None, open_incident().id.replace("primary", "backup"), "folder"))
    assert scene.world.incidents[0].evidence == ("folder",)


def one_step(scene: Scene, emptied: set[str], crash: bool) -> None:
    """The next thing that happens to the engine of a service: it starts, gets ready, crashes, is gone."""
    at, wanted = scene.now + 1, scene.world.services[0].wanted
    whose, phase = scene.engine(wanted).mark, scene.phase(wanted)
    dying = [engine for engine in scene.world.engines if engine.phase in (Phase.KILLING, Phase.STOPPING)]
    if dying:
        emptied.add(str(dying[0].mark))
        scene.feed(e.Emptied(at, dying[0].mark))
        scene.feed(e.LogRead(at, dying[0].mark, drained=True))
    elif phase is Phase.STARTING:
        scene.feed(e.Spawned(at, whose, 100))
    elif phase is Phase.LOADING:
        scene.ok(wanted, at)
    elif phase is Phase.SERVING and crash:
        scene.feed(e.Exited(at, whose, 1))
    else:
        scene.at(at)


@pytest.mark.parametrize("steps", range(14))
@pytest.mark.parametrize("orphans", [True, False])
def test_a_daemon_killed_at_any_moment_is_followed_by_one_that_ends_with_one_engine_serving(
        steps: int, orphans: bool) -> None:
    """A start, a crash, a restart, a crash, a failover: the daemon dies after so many steps of it."""
    scene, emptied = Scene(plan()), set[str]()
    for _ in range(steps):
        one_step(scene, emptied, crash=scene.world.services[0].side is Side.PRIMARY)
    dying = {str(engine.mark) for engine in scene.world.engines if engine.phase is Phase.KILLING}
    gone = emptied if orphans else emptied | dying
    left = [str(spawn.mark) for spawn in scene.all(c.Spawn) if str(spawn.mark) not in gone]
    after = reborn(scene, scene.now + 1, *(survivor(whose, leader=whose not in dying) for whose in left))
    for whose in after.world.strays:
        after.feed(e.Emptied(after.now, whose))
    for _ in range(8):
        one_step(after, emptied, crash=False)
    assert sorted(after.phases().values()) == [Phase.SERVING, Phase.STOPPED]


def test_findings_of_before_do_not_name_the_failures_of_an_adopted_engine() -> None:
    scene = Scene(plan(backup=False))
    scene.serve()
    scene.crash("primary", 10.0, finding("oom_runtime"))
    scene.serve()
    after = reborn(scene, 20.0, survivor("primary#2"))
    assert (after.engine().cause, after.engine().why) == ("", "")


# -- what happened meanwhile

def test_what_died_while_no_watchdog_ran_is_an_outage_all_the_same() -> None:
    after = reborn(Scene(plan()).serve(), 50.0)
    assert after.only(c.Spawn).mark == mark("primary#2")
    assert [(incident.class_, incident.text) for incident in after.world.incidents] == [
        ("unexpected_exit", "primary#1 ended while no watchdog ran")]
    assert after.only(c.Alert).kind == "opened"
    assert [(each.mark, each.text) for each in after.world.incidents[0].failures] == [
        ("primary#1", "primary#1 ended while no watchdog ran")]
    assert not after.world.incidents[0].unserved


@pytest.mark.parametrize("late", [False, True])
def test_the_log_says_why_an_engine_ended_while_no_watchdog_ran(late: bool) -> None:
    served = Scene(plan(backup=False, gpus=(0,), share=0.8))
    served.gpus(0.1, gpu(1))
    served.serve()
    after = reborn(served, 50.0)
    assert after.only(c.Drain).mark == mark("primary#1")
    if late:
        after.gpus(50.1, gpu(1))
        assert after.only(c.Spawn).mark == mark("primary#2"), "it does not wait for the log"
    after.feed(e.LogRead(50.2, mark("primary#1"), (finding("engine_dead_v1"), finding("oom_runtime", "no 352 MiB")), True))
    (incident,) = after.world.incidents
    assert (incident.class_, incident.text) == ("oom_runtime", "no 352 MiB")
    assert [(each.mark, each.class_, each.text) for each in incident.failures] == [
        ("primary#1", "oom_runtime", "no 352 MiB")]
    assert {line.class_ for line in incident.findings} == {"engine_dead_v1", "oom_runtime"}
    assert after.alerts() == [("opened", "unexpected_exit")], "told once, and not again for its name"
    assert after.phase() is (Phase.STARTING if late else Phase.RELEASING) and not after.engine().life.charged


def test_a_late_line_of_a_generation_that_we_stopped_names_nothing() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.Asked(10.0, 1, "restart", "primary", ""))
    scene.bury()
    assert scene.engine().generation == 2
    scene.feed(e.LogRead(10.2, mark("primary#1"), (finding("oom_runtime"),), True))
    assert not scene.world.incidents


def test_what_failed_and_had_no_incident_yet_when_the_daemon_died_is_missed_too() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.Exited(10.0, scene.engine().mark, 0))
    assert scene.phase() is Phase.KILLING and not scene.world.incidents     # its log is read before it is named
    assert [incident.class_ for incident in reborn(scene, 11.0).world.incidents] == ["unexpected_exit"]
    scene.bury()
    (told,) = scene.world.incidents
    assert [(incident.id, incident.class_) for incident in reborn(scene, 12.0).world.incidents] == [(told.id, told.class_)]


def test_what_was_replaced_before_its_end_was_told_is_told_by_the_next_daemon() -> None:
    """A successor is started first and written down after; a daemon that is killed between leaves no other trace."""
    after = reborn(Scene(plan(backup=False)).serve(), 50.0, survivor("primary#2"))
    (incident,) = after.world.incidents
    assert (incident.class_, incident.text, incident.generation) == (
        "unexpected_exit", "primary#1 ended while no watchdog ran", 1)
    (failure,) = incident.failures
    assert (failure.mark, failure.words.zh) == ("primary#1", "primary#1 在没有 watchdog 运行时结束")
    assert (after.phase(), after.engine().cause) == (Phase.LOADING, ""), "the successor is not to blame"
    assert after.only(c.Alert).kind == "opened"
    again = reborn(after, 51.0, survivor("primary#2"))
    assert [(each.id, len(each.failures)) for each in again.world.incidents] == [(incident.id, 1)]
    told = replace(remembered(Scene(plan(backup=False)).serve().world), incidents=(incident,))
    known = Scene(plan(backup=False), 52.0, told, (survivor("primary#2"),))
    assert [len(each.failures) for each in known.world.incidents] == [1]


def test_what_had_not_served_yet_ended_unmissed() -> None:
    assert not reborn(Scene(plan()), 50.0).world.incidents


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
def test_after_a_stop_or_a_reboot_nobody_is_missed(boot_id: str) -> None:
    scene = Scene(plan()).serve()
    if boot_id == "boot-1":
        scene.feed(e.StopAsked(40.0, "SIGTERM"))
    assert not reborn(scene, 50.0, boot_id=boot_id).world.incidents
