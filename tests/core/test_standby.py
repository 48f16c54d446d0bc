from __future__ import annotations

from math import inf

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.failover import Service, Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.memory import Memory
from vllm_watchdog.core.plan import FailoverPlan, Limits, Standby
from vllm_watchdog.core.policy import NAPPING, Phase, State
from vllm_watchdog.core.readings import Health
from vllm_watchdog.core.standby import READY, goes_first, ready, stays
from vllm_watchdog.core.world import Engine, remembered

P1, B1 = mark("primary#1"), mark("backup#1")
CARD = {"gpus": (0,), "share": 0.85, "backup_share": 0.5}
SHARED = {"gpus": (0,), "share": 0.6, "backup_share": 0.3}


def sleeping(**options: object) -> Scene:
    """Asleep since 40.5, the primary serves since 80."""
    scene = Scene(plan(standby=Standby.SLEEPING, **(CARD | options)))
    scene.gpus(0.1, gpu(1), gpu(0, index=1))
    scene.serve("backup", 200)
    scene.now = 40.5
    scene.sleep()
    scene.gpus(41.0, gpu(1), gpu(0, index=1))
    scene.now = 80.0
    scene.serve()
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.ASLEEP}
    return scene


def hot(**options: object) -> Scene:
    scene = Scene(plan(standby=Standby.HOT, **(SHARED | options)))
    scene.gpus(0.1, gpu(1))
    scene.serve()
    scene.gpus(0.2, gpu(61))
    return scene.serve("backup", 200)


def failed_over(scene: Scene, at: float = 100.0) -> Scene:
    """The primary dies, and a sample shows room."""
    scene.crash("primary", at)
    scene.gpus(at + 0.1, gpu(2, (200, "core", B1, 1)), gpu(0, index=1))
    return scene


# -- ready, staying, going first

@pytest.mark.parametrize("phase", Phase)
def test_a_standby_is_ready_when_it_sleeps_or_serves_as_its_mode_says(phase: Phase) -> None:
    assert set(READY) == set(Standby)
    for mode, phases in ((Standby.COLD, set()), (Standby.SLEEPING, {Phase.ASLEEP}), (Standby.HOT, {Phase.SERVING})):
        scene = Scene(plan())
        engine = Engine(scene.engine("backup").plan, State(phase=phase))
        assert ready(Service("primary", "backup", mode), engine) is (phase in phases)


@pytest.mark.parametrize(("mode", "who"), [
    (Standby.COLD, set()), (Standby.SLEEPING, {"backup"}), (Standby.HOT, {"primary", "backup"})])
def test_who_keeps_its_process_when_its_turn_has_ended(mode: Standby, who: set[str]) -> None:
    assert {name for name in ("primary", "backup") if stays(Service("primary", "backup", mode), name)} == who


@pytest.mark.parametrize(("options", "first"), [
    ({}, "backup"), ({"backup_gpus": (1,)}, ""), ({"standby": Standby.COLD}, ""), ({"standby": Standby.HOT}, ""),
    ({"backup": False}, "")])
def test_only_a_sleeper_that_does_not_fit_beside_it_goes_before_the_primary(options: dict[str, object], first: str) -> None:
    scene = Scene(plan(**(CARD | {"standby": Standby.SLEEPING} | options)))
    assert goes_first(scene.world, scene.engine()) == first


def test_nobody_goes_before_the_backup() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING, **CARD))
    assert goes_first(scene.world, scene.engine("backup")) == ""


# -- the first start

def test_the_backup_is_booted_and_put_to_sleep_before_the_primary_starts() -> None:
    scene = sleeping()
    assert [str(command.mark) for command in scene.told if isinstance(command, c.Spawn | c.Sleep)] == [
        "backup#1", "backup#1", "primary#1"]
    assert scene.all(c.Sleep) == [c.Sleep(B1, 120)]
    assert scene.world.services[0].side is Side.PRIMARY and not scene.world.incidents


def test_a_backup_that_boots_for_long_lets_the_primary_wait_without_a_page() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING, **CARD))
    scene.gpus(0.1, gpu(1))
    scene.feed(e.Spawned(0.2, B1, 200))
    for at in range(1, 300):
        scene.at(float(at))
    assert not scene.alerts() and scene.engine().life.deadline == 299.0 + 60
    scene.now = 300.0
    scene.gpus(300.0, gpu(50, (200, "core", B1, 50)))
    scene.ok("backup")
    scene.sleep()
    scene.gpus(301.0, gpu(50, (7, "python", None, 49)))
    scene.at(360.0)
    assert scene.alerts() == [("opened", "vram_held")], "its own wait for room begins when the backup sleeps"


@pytest.mark.parametrize("standby", [Standby.COLD, Standby.SLEEPING])
def test_a_primary_that_takes_long_to_leave_is_no_page_and_the_wait_for_memory_begins_then(standby: Standby) -> None:
    cards, limits = (gpu(90, (100, "core", P1, 89)), gpu(0, index=1)), Limits(stop_s=120)
    if standby is Standby.SLEEPING:
        scene = sleeping(limits=limits)
    else:
        scene = Scene(plan(**CARD, limits=limits))
        scene.gpus(0.1, gpu(1), gpu(0, index=1))
        scene.serve()
        scene.now = 80.0
    scene.ask("failover")
    assert scene.phase() is Phase.STOPPING
    for at in range(81, 199):
        scene.gpus(float(at), *cards)
    assert scene.phase() is Phase.STOPPING and not scene.alerts()
    scene.at(200.0)
    scene.crash(at=201.0)
    for at in range(202, 261):
        scene.gpus(float(at), gpu(90, (7, "python", None, 89)), gpu(0, index=1))
    assert not scene.alerts()
    scene.gpus(261.0, gpu(90, (7, "python", None, 89)), gpu(0, index=1))
    assert scene.alerts() == [("opened", "vram_held")]


@pytest.mark.parametrize("how", ["crashes", "does not sleep", "is not answered", "is doomed"])
def test_a_standby_that_fails_does_not_hold_the_primary_up(how: str) -> None:
    """One try: its restarts would cost the service minutes before anything serves."""
    scene = Scene(plan(standby=Standby.SLEEPING, **CARD))
    scene.gpus(0.1, gpu(1))
    scene.serve("backup", 200)
    scene.gpus(30.0, gpu(50, (200, "core", B1, 50)))
    if how == "does not sleep":
        scene.sleep("backup", "/sleep?level=1 answered 500")
        assert scene.phase("backup") is Phase.DUMPING
        assert scene.alerts() == [("opened", "sleep_failed")]
    elif how == "is not answered":
        scene.at(120.0)
        assert scene.phase("backup") is Phase.DOZING
        scene.at(120.1)
        assert scene.engine("backup").why == "it did not fall asleep within 120 s"
    scene.crash("backup", 130.0, *([finding("bad_args")] if how == "is doomed" else []))
    scene.gpus(130.1, gpu(1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.HELD if how == "is doomed" else Phase.STOPPED}
    texts = [entry.text for entry in scene.world.incidents[0].timeline]
    lost = "standby_lost: backup is gone, and primary has the memory: the next failover is a cold start"
    assert (lost in texts) is (how != "is doomed")
    scene.serve()
    scene.at(500.0)
    assert scene.phase("backup") in (Phase.STOPPED, Phase.HELD)


def test_a_sleeper_on_a_card_of_its_own_is_started_beside_the_primary_and_again_when_it_dies() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING, **CARD, backup_gpus=(1,)))
    scene.gpus(0.1, gpu(1), gpu(0, index=1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STARTING}
    scene.serve()
    scene.serve("backup", 200)
    assert scene.phase("backup") is Phase.DOZING
    scene.crash("backup", 50.0)
    scene.gpus(50.1, gpu(80), gpu(0, index=1))
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.STARTING}


def test_a_backup_that_was_adopted_awake_goes_to_sleep() -> None:
    found = (e.Survivor(P1, 100, True, 300.0), e.Survivor(B1, 200, True, 300.0))
    scene = Scene(plan(standby=Standby.SLEEPING, **CARD), survivors=found)
    scene.ok("backup")
    assert scene.only(c.Sleep).mark == B1 and scene.phase("backup") is Phase.DOZING


# -- asleep

def test_a_sleeper_whose_health_is_lost_is_dead_too() -> None:
    scene = sleeping()
    scene.feed(e.Probed(90.0, B1, Health.REFUSED))
    scene.feed(e.Probed(99.9, B1, Health.REFUSED))
    assert scene.phase("backup") is Phase.ASLEEP
    scene.feed(e.Probed(100.0, B1, Health.REFUSED))
    assert scene.phase("backup") is Phase.DUMPING


def test_a_sleeper_is_not_asked_for_tokens() -> None:
    scene = sleeping()
    for at in range(81, 300):
        scene.scrape(float(at), at=float(at))
    assert {ask.mark for ask in scene.all(c.Ask)} <= {P1}


def test_a_sleeper_that_dies_while_the_primary_serves_is_told_and_not_started_beside_it() -> None:
    scene = sleeping()
    scene.crash("backup", 100.0)
    assert scene.phase("backup") is Phase.STOPPED
    entry = next(entry for entry in scene.world.incidents[0].timeline if entry.text.startswith("standby_lost"))
    assert entry.text.endswith("the next failover is a cold start")
    assert scene.world.incidents[0].urgency is Urgency.CRITICAL
    scene.at(500.0)
    assert scene.phase("backup") is Phase.STOPPED


def test_without_a_standby_that_is_ready_the_first_failure_is_answered_by_a_restart() -> None:
    scene = sleeping()
    scene.crash("backup", 100.0)
    failed_over(scene, 200.0)
    assert scene.world.services[0].side is Side.PRIMARY and scene.phase() is Phase.STARTING


# -- its turn

def test_the_first_failure_wakes_the_sleeper_once_the_memory_is_back() -> None:
    scene = sleeping()
    scene.feed(e.Exited(100.0, P1, -9))
    assert scene.said("service.failover")[0]["because"] == "down"
    scene.gpus(100.1, gpu(1))
    assert not scene.all(c.Wake), "the primary is not gone"
    scene.feed(e.Emptied(100.2, P1))
    assert scene.only(c.Wake) == c.Wake(B1, 30)
    scene.now = 100.9
    scene.wake()
    assert scene.phases() == {"primary": Phase.SETTLING, "backup": Phase.SERVING}
    assert scene.engine("backup").pulse.since == 100.9
    scene.feed(e.LogRead(101.0, P1, drained=True))
    assert scene.phase() is Phase.STOPPED, "it comes back when the service is stable, not beside the backup"


@pytest.mark.parametrize("used", [2, 70])
def test_a_sleeper_waits_for_a_sample_that_shows_room_and_what_it_keeps_is_its_own(used: int) -> None:
    scene = sleeping()
    scene.gpus(99.0, gpu(2))
    scene.crash("primary", 100.0)
    assert not scene.all(c.Wake), "a sample of before does not count"
    assert scene.world.look_at == pytest.approx(100.1)
    scene.gpus(100.1, gpu(used + 48, (200, "core", B1, 48), (7, "python", None, used)))
    assert bool(scene.all(c.Wake)) is (used == 2)


def test_a_blind_sensor_is_not_waited_for() -> None:
    scene = sleeping()
    scene.crash("primary", 100.0)
    scene.blind(101.0)
    assert scene.only(c.Wake).mark == B1


def test_engines_whose_cards_are_not_named_need_no_sample() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING))
    scene.serve("backup", 200)
    scene.sleep()
    scene.serve()
    scene.feed(e.Exited(100.0, P1, -9))
    assert not scene.all(c.Wake)
    scene.feed(e.Emptied(100.1, P1))
    assert scene.only(c.Wake).mark == B1


def test_memory_that_does_not_come_back_pages_with_its_holder_once_and_is_waited_for() -> None:
    scene = sleeping()
    scene.crash("primary", 100.0)
    for tenth in range(1001, 1999):
        scene.gpus(tenth / 10, gpu(70 + tenth % 3, (7, "python", None, 69 + tenth % 3), (200, "core", B1, 1)))
        assert bool(scene.world.incidents[0].page) is (tenth >= 1600)
    assert "backup can't be woken: GPU 0 lacks " in scene.world.incidents[0].page
    assert "PID 7 (python)" in scene.world.incidents[0].page
    assert scene.alerts() == [("opened", "unexpected_exit"), ("worsened", "vram_held")]
    assert 300 <= len(scene.all(c.SampleGpus)) <= 610 and scene.world.look_at == inf
    scene.gpus(200.0, gpu(2))
    assert scene.only(c.Wake).mark == B1


def test_a_failover_that_a_human_asked_for_pages_too_and_is_recorded_once() -> None:
    scene = sleeping()
    scene.now = 100.0
    scene.ask("failover")
    scene.crash("primary", 101.0)
    for at in range(102, 220):
        scene.gpus(float(at), gpu(70 + at % 3, (7, "python", None, 69 + at % 3), (200, "core", B1, 1)))
    assert scene.alerts() == [("opened", "vram_held")] and len(scene.all(c.Record)) == 1


def test_a_sample_of_the_very_instant_of_the_failover_counts() -> None:
    scene = sleeping()
    scene.now = 100.0
    scene.ask("failover")
    scene.gpus(100.0, gpu(2))
    scene.crash("primary", 101.0)
    assert scene.all(c.Wake) == [c.Wake(B1, 30)]


def test_orphans_of_the_primary_are_waited_for_also_where_no_sample_can_tell() -> None:
    found = (e.Survivor(P1, 100, False, 300.0), e.Survivor(B1, 200, True, 300.0))
    scene = Scene(plan(standby=Standby.SLEEPING), survivors=found)
    scene.ok("backup")
    assert scene.phase("backup") is Phase.SERVING and scene.world.services[0].side is Side.BACKUP

    before = sleeping()
    after = Scene(before.world.plan, 90.0, remembered(before.world), found)
    after.sleep()
    after.blind(90.1)
    assert after.phase("backup") is Phase.ASLEEP
    after.feed(e.Emptied(90.2, P1))
    assert after.only(c.Wake).mark == B1


@pytest.mark.parametrize("how", ["fails", "is not answered", "dies"])
def test_a_wake_that_fails_becomes_a_cold_start(how: str) -> None:
    scene = failed_over(sleeping())
    assert scene.phase("backup") is Phase.WAKING
    if how == "fails":
        scene.wake("backup", "/v1/completions answered 500")
        assert (scene.engine("backup").cause, scene.engine("backup").why) == ("wake_failed", "/v1/completions answered 500")
        assert scene.phase("backup") is Phase.DUMPING
    elif how == "is not answered":
        scene.at(130.1)
        assert scene.engine("backup").why == "it was not awake, with a token, within 30 s"
        assert scene.phase("backup") is Phase.DUMPING
    scene.crash("backup", 131.0)
    scene.gpus(131.1, gpu(1))
    assert scene.only(c.Spawn).mark == mark("backup#2")
    scene.serve("backup", 201)
    assert scene.phase("backup") is Phase.SERVING and not scene.all(c.Sleep)[1:], "its turn goes on"


def test_a_word_about_another_generation_is_history() -> None:
    scene = sleeping()
    for event in (e.Slept(90.0, mark("backup#0"), "no", 1.0), e.Woke(90.0, mark("backup#0"), "no", 1.0)):
        scene.feed(event)
    assert scene.phase("backup") is Phase.ASLEEP and not scene.world.incidents


# -- back again

def test_failback_puts_the_backup_to_sleep_before_the_primary_starts() -> None:
    scene = failed_over(sleeping())
    scene.wake()
    for at in range(101, 702):
        scene.scrape(1, "backup", at=float(at))
    assert scene.said("service.failback")[0]["because"] == "stable"
    assert scene.phases() == {"primary": Phase.RELEASING, "backup": Phase.DOZING}
    scene.gpus(701.5, gpu(50, (200, "core", B1, 50)))
    scene.sleep()
    assert scene.phase() is Phase.RELEASING
    scene.gpus(702.0, gpu(2, (200, "core", B1, 1)))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.ASLEEP}
    assert not scene.all(c.Term)


def test_a_backup_that_does_not_go_to_sleep_at_failback_is_lost_and_the_primary_starts() -> None:
    scene = failed_over(sleeping())
    scene.wake()
    scene.ask("failback")
    scene.gpus(101.0, gpu(50, (200, "core", B1, 50)))
    scene.sleep("backup", "no answer")
    scene.crash("backup", 102.0)
    scene.gpus(102.1, gpu(1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STOPPED}


def test_a_cold_start_that_waits_for_room_is_given_up_at_failback() -> None:
    scene = failed_over(sleeping())
    scene.crash("backup", 101.0)
    assert scene.phase("backup") is Phase.RELEASING
    scene.ask("failback")
    assert scene.phases() == {"primary": Phase.RELEASING, "backup": Phase.STOPPED}


# -- hot

def test_a_hot_pair_of_one_card_loads_one_after_the_other() -> None:
    scene = Scene(plan(standby=Standby.HOT, **SHARED))
    scene.gpus(0.1, gpu(1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.RELEASING}
    assert hot().phases() == {"primary": Phase.SERVING, "backup": Phase.SERVING}


def test_a_hot_pair_of_two_cards_loads_together() -> None:
    scene = Scene(plan(standby=Standby.HOT, **SHARED, backup_gpus=(1,)))
    scene.gpus(0.1, gpu(1), gpu(0, index=1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STARTING}


def test_the_route_changes_in_the_turn_in_which_the_primary_dies_and_the_primary_restarts_beside() -> None:
    scene = hot()
    scene.feed(e.Exited(100.0, P1, -9))
    assert scene.world.services[0].wanted == "backup"
    scene.bury()
    scene.gpus(100.1, gpu(31))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.SERVING}


@pytest.mark.parametrize("gauges", [{"running": 0.0}, {"running": 5.0}])
def test_a_hot_pair_fails_back_stable_or_busy_and_stops_nothing(gauges: dict[str, float]) -> None:
    scene = hot()
    scene.crash("primary", 100.0)
    scene.gpus(100.1, gpu(31))
    scene.serve()
    for at in range(101, 700):
        scene.scrape(float(at), "backup", at=float(at), **gauges)
        scene.scrape(float(at), at=float(at))
    assert scene.world.services[0].side is Side.BACKUP
    scene.at(700.0)
    assert scene.world.services[0].side is Side.PRIMARY and not scene.all(c.Term)
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.SERVING}


def test_a_hot_primary_that_was_held_is_left_alone() -> None:
    scene = hot(limits=Limits(budget=0))
    scene.crash("primary", 100.0)
    assert scene.phases() == {"primary": Phase.HELD, "backup": Phase.SERVING}
    scene.at(5000.0)
    assert scene.phase() is Phase.HELD and scene.world.services[0].side is Side.BACKUP


def test_after_a_daemons_restart_on_the_backups_side_a_hot_primary_is_started_beside_it() -> None:
    scene = Scene(plan(standby=Standby.HOT, **SHARED), survivors=(e.Survivor(B1, 200, True, 300.0),))
    scene.gpus(0.1, gpu(31))
    assert scene.phases() == {"primary": Phase.RELEASING, "backup": Phase.LOADING}
    scene.ok("backup")
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.SERVING}


def test_a_hot_backup_that_fails_beside_a_primary_that_serves_sends_it_back() -> None:
    scene = hot(failover=FailoverPlan(stable_s=9999))
    scene.crash("primary", 100.0)
    scene.gpus(100.1, gpu(31))
    scene.serve()
    scene.feed(e.Exited(200.0, B1, -9))
    assert scene.world.services[0].wanted == "primary"
    assert scene.said("service.failback")[0]["because"] == "down"


# -- pause

def test_under_pause_a_human_can_turn_the_service_to_the_sleeper_and_back() -> None:
    scene = sleeping()
    scene.ask("pause")
    scene.ask("failover")
    scene.crash("primary", 100.0)
    scene.gpus(100.1, gpu(2, (200, "core", B1, 1)))
    scene.wake()
    assert scene.phase("backup") is Phase.SERVING
    scene.ask("failback")
    scene.gpus(100.2, gpu(50, (200, "core", B1, 50)))
    scene.sleep()
    scene.gpus(101.0, gpu(2, (200, "core", B1, 1)))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.ASLEEP}


@pytest.mark.parametrize("mode", [Standby.SLEEPING, Standby.HOT])
def test_under_pause_no_standby_is_started_and_none_given_up(mode: Standby) -> None:
    scene = Scene(plan(standby=mode, **CARD), memory=Memory("boot-1", paused=True))
    scene.gpus(1.0, gpu(1))
    assert scene.phases() == {"primary": Phase.STOPPED, "backup": Phase.STOPPED}
    scene.ask("resume")
    assert scene.phase("primary" if mode is Standby.HOT else "backup") is Phase.STARTING
    if mode is Standby.SLEEPING:
        scene = sleeping()
        scene.ask("pause")
        scene.crash("backup", 100.0)
        assert scene.phase("backup") is Phase.BACKOFF
        scene.ask("resume")
        assert scene.phase("backup") is Phase.STOPPED


@pytest.mark.parametrize(("phase", "told"), [
    (Phase.DOZING, "sleep_failed: it did not"), (Phase.WAKING, "wake_failed: it was")])
def test_under_pause_a_sleep_or_a_wake_that_fails_is_told_and_not_judged(phase: Phase, told: str) -> None:
    dozing = Scene(plan(standby=Standby.SLEEPING)).serve("backup", 200)
    scene = failed_over(sleeping()) if phase is Phase.WAKING else dozing
    assert scene.phase("backup") is phase and phase in NAPPING
    scene.ask("pause")
    scene.at(1000.0)
    assert scene.phase("backup") is phase
    assert any(entry.text.removeprefix("opened ").startswith(told) for entry in scene.world.incidents[0].timeline)
    scene.ask("resume")
    assert scene.phase("backup") is Phase.DUMPING
