from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, metrics, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core import follow, incidents
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.memory import Memory
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.world import next_deadline, remembered

M = mark("primary#1")
CARD = {"gpus": (0,), "share": 0.8}


def fails(scene: Scene, *ats: float, engine: str = "primary") -> Scene:
    for at in ats:
        scene.crash(engine, at)
        scene.at(scene.engine(engine).life.deadline if scene.phase(engine) is Phase.BACKOFF else at)
        if scene.phase(engine) is Phase.STARTING:
            scene.serve(engine)
    return scene


def on_backup(**options: object) -> Scene:
    """Failed over at 20 after two failures, and served by the backup since."""
    scene = fails(Scene(plan(**options)).serve(), 10.0, 20.0)
    assert scene.world.services[0].side is Side.BACKUP
    return scene.serve("backup")


# -- the gate

def test_an_engine_waits_for_a_sample_that_was_taken_since() -> None:
    scene = Scene(plan(**CARD), at=5.0)
    assert scene.phase() is Phase.RELEASING
    scene.gpus(5.0, gpu(1))
    assert scene.phase() is Phase.STARTING


def test_a_sample_of_before_does_not_count() -> None:
    scene = Scene(plan(**CARD))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.gpus(9.9, gpu(1))
    scene.crash("primary", 10.0)
    assert scene.phase() is Phase.RELEASING
    scene.gpus(10.1, gpu(1))
    assert scene.phase() is Phase.STARTING


def test_a_sensor_that_says_it_is_blind_is_not_waited_for_but_one_that_said_nothing_yet_is() -> None:
    scene = Scene(plan(**CARD))
    scene.at(1.0)
    assert scene.phase() is Phase.RELEASING
    scene.blind(2.0)
    assert scene.phase() is Phase.STARTING


def test_a_card_without_room_is_looked_at_again_and_again_for_a_minute() -> None:
    scene = Scene(plan(**CARD))
    for tenth in range(1, 700):
        scene.gpus(tenth / 10, gpu(50))
    looks = len(scene.all(c.SampleGpus))
    assert 300 <= looks <= 601
    assert next_deadline(scene.world) == 120.0, "afterwards the schedule does"
    scene.gpus(500.0, gpu(1))
    assert scene.phase() is Phase.STARTING


def test_an_engine_that_loads_on_the_card_is_waited_for_without_a_page_and_then_its_memory_with_one() -> None:
    scene = Scene(Plan((EnginePlan("a", 1, (0,), 0.4), EnginePlan("b", 2, (0,), 0.4), EnginePlan("c", 3, (1,), 0.4))))
    scene.gpus(0.1, gpu(1), gpu(1, index=1))
    assert scene.phases() == {"a": Phase.STARTING, "b": Phase.RELEASING, "c": Phase.STARTING}
    scene.feed(e.Spawned(0.2, mark("a#1"), 100))
    for at in range(1, 500):
        scene.gpus(float(at), gpu(80), gpu(1, index=1))
    assert "b" not in {incident.engine for incident in scene.world.incidents}
    scene.ok("a")
    scene.at(559.0)
    assert [incident.engine for incident in scene.world.incidents if incident.class_ == "vram_held"] == ["b"]
    scene.gpus(560.0, gpu(40), gpu(1, index=1))
    assert scene.phase("b") is Phase.STARTING


def test_nobody_looks_when_nobody_waits() -> None:
    scene = Scene(plan(**CARD))
    scene.gpus(0.05, gpu(1))
    assert scene.world.look_at == inf
    assert next_deadline(scene.world) == 0.05 + 15


def test_a_wait_that_is_given_up_ends_the_looking() -> None:
    scene = Scene(plan(**CARD))
    scene.feed(e.StopAsked(0.05, "x"))
    assert scene.world.look_at == inf and scene.only(c.Quit)


def test_the_backup_waits_until_the_primary_has_left_the_card() -> None:
    scene = Scene(plan(gpus=(0,), share=0.5))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.ask("failover")
    scene.gpus(5.0, gpu(30))
    assert scene.phase("backup") is Phase.RELEASING
    scene.feed(e.Emptied(6.0, M))
    assert scene.phase("backup") is Phase.STARTING


def test_the_backup_on_another_card_does_not_wait() -> None:
    scene = Scene(plan(gpus=(0,), backup_gpus=(1,), share=0.8))
    scene.gpus(0.0, gpu(1), gpu(0, index=1))
    scene.serve()
    scene.ask("failover")
    scene.gpus(0.1, gpu(80), gpu(0, index=1))
    assert scene.phases() == {"primary": Phase.STOPPING, "backup": Phase.STARTING}


# -- alive, busy, wedged

def hanging(**options: object) -> Scene:
    """Quiet from 20 on: asked at 10, not answered in ten seconds."""
    scene = Scene(plan(backup=False, **options)).serve()
    scene.scrape(1, at=1.0)
    scene.at(10.0)
    assert scene.only(c.Ask) == c.Ask(M, 10)
    scene.feed(e.Answered(20.0, M, False, 10.0))
    return scene


def test_a_quiet_engine_is_suspected_and_after_its_patience_condemned() -> None:
    scene = hanging()
    assert scene.phase() is Phase.SUSPECT
    scene.at(79.9)
    assert scene.phase() is Phase.SUSPECT
    scene.at(80.0)
    assert scene.phase() is Phase.DUMPING


@pytest.mark.parametrize("tokens", [True, False])
def test_a_suspect_that_answers_or_whose_counters_move_serves_again(tokens: bool) -> None:
    scene = hanging()
    scene.feed(e.Scraped(30.0, M, metrics(2)) if tokens else e.Answered(30.0, M, True, 1.0))
    assert scene.phase() is Phase.SERVING


def test_tokens_that_come_with_the_deadline_save_the_engine() -> None:
    """The loop may be late: what is known at the deadline counts, not what was known when it was set."""
    scene = hanging()
    scene.scrape(2, at=500.0)
    assert scene.phase() is Phase.SERVING


def test_a_suspect_that_nothing_can_be_proved_of_stays_suspect() -> None:
    scene = hanging()
    scene.feed(e.Answered(30.0, M, Unknown(30.0, "401"), 0.1))
    assert scene.phase() is Phase.SUSPECT
    scene.at(80.0)
    assert scene.phase() is Phase.DUMPING


def test_an_engine_that_no_probe_can_prove_is_never_suspected() -> None:
    scene = Scene(plan(backup=False)).serve()
    for at in range(10, 500, 10):
        scene.at(float(at))
        if scene.engine().pulse.asked_at is not None:
            scene.feed(e.Answered(at + 0.1, M, Unknown(at, "404"), 0.1))
    assert scene.phase() is Phase.SERVING
    assert [said["why"] for said in scene.said("probe.proves_nothing")] == ["404"]


def test_a_refused_probe_is_asked_again_in_ten_seconds_and_not_at_once() -> None:
    scene = Scene(plan(backup=False)).serve()
    for second in range(1, 60):
        scene.at(float(second))
        if scene.engine().pulse.asked_at is not None:
            scene.feed(e.Answered(second + 0.001, M, False, 0.001))
    assert len(scene.all(c.Ask)) == 5


def test_without_counters_patience_is_five_minutes() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.scrape(None, at=1.0)
    scene.at(10.0)
    scene.feed(e.Answered(20.0, M, False, 10.0))
    scene.at(249.9)
    assert scene.phase() is Phase.SERVING
    scene.at(250.0)
    assert scene.phase() is Phase.SUSPECT
    scene.at(310.0)
    assert scene.phase() is Phase.DUMPING


def test_only_an_engine_that_serves_is_asked_for_tokens() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.1, M, 100))
    for at in (50.0, 100.0):
        scene.at(at)
    assert not scene.all(c.Ask)
    scene.ok()
    scene.at(109.9)
    assert not scene.all(c.Ask)
    scene.at(110.0)
    assert len(scene.all(c.Ask)) == 1


def test_one_turn_carries_a_failure_through_to_the_next_start() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.Exited(5.0, M, 1))
    scene.feed(e.Emptied(5.0, M))
    scene.feed(e.LogRead(5.0, M, drained=True))
    assert [said["now"] for said in scene.said("engine.phase")][-4:] == ["settling", "backoff", "releasing", "starting"]


def test_a_late_tick_does_not_run_through_phases_whose_time_has_not_begun() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.LogRead(5.0, M, (finding("oom_runtime"),)))
    scene.at(9999.0)
    assert scene.phase() is Phase.STOPPING and scene.engine().life.deadline == 9999.0 + 2


def test_the_bound_on_rounds_only_puts_off_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ROUNDS", 1)
    scene = Scene(plan(backup=False)).serve()
    scene.crash("primary", 5.0)
    for _ in range(3):
        scene.at(5.0)
    assert scene.phase() is Phase.STARTING


# -- failover

def test_the_second_failure_within_the_window_goes_to_the_backup() -> None:
    scene = fails(Scene(plan()).serve(), 10.0)
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.STOPPED}
    scene.feed(e.Exited(20.0, mark("primary#2"), 1))
    assert scene.phases() == {"primary": Phase.KILLING, "backup": Phase.RELEASING}
    assert scene.said("service.failover") == [
        {"service": "primary", "leaving": "primary", "to": "backup", "because": "failures"}]


def test_a_failover_for_failures_names_the_one_before_though_its_incident_is_over() -> None:
    scene = fails(Scene(plan()).serve(), 10.0)
    scene.at(99.0)
    assert not scene.world.incidents
    scene.feed(e.LogRead(100.0, mark("primary#2"), (finding("oom_runtime"),)))
    (entry,) = (entry for entry in scene.world.incidents[0].timeline if entry.what == "failover")
    facts = dict(entry.facts)
    assert (facts["times"], facts["window"], facts["before_at"]) == ("2", "60 min", "11:06:50Z")
    assert facts["before"] == scene.world.failed[0][2]


def test_without_an_earlier_failure_that_is_known_only_the_number_is_told() -> None:
    scene = Scene(plan(failover=FailoverPlan(after_failures=0))).serve()
    scene.feed(e.LogRead(10.0, mark("primary#1"), (finding("cuda_fault"),)))
    (entry,) = (entry for entry in scene.world.incidents[0].timeline if entry.what == "failover")
    assert dict(entry.facts)["times"] == "1" and "before" not in dict(entry.facts)


def test_failures_that_are_older_than_the_window_do_not_count() -> None:
    limits = Limits(window_s=100)
    assert fails(Scene(plan(limits=limits)).serve(), 10.0, 110.0).world.services[0].side is Side.PRIMARY
    assert fails(Scene(plan(limits=limits)).serve(), 10.0, 109.9).world.services[0].side is Side.BACKUP


def test_a_budget_that_was_spent_before_the_window_keeps_nobody_from_coming_back() -> None:
    for second, spent in ((110.0, False), (109.9, True)):
        the_plan = plan(limits=Limits(window_s=100, budget=1), failover=FailoverPlan(after_failures=9))
        scene = fails(Scene(the_plan).serve(), 10.0, second)
        assert (scene.world.services[0].side is Side.BACKUP) is spent, second


def test_ooms_that_are_older_than_the_window_do_not_count() -> None:
    for second, side in ((110.0, Side.PRIMARY), (109.9, Side.BACKUP)):
        scene = Scene(plan(limits=Limits(window_s=100), failover=FailoverPlan(after_failures=9))).serve()
        scene.feed(e.LogRead(10.0, M, (finding("oom_runtime"),)))
        scene.crash("primary", 10.1)
        scene.serve()
        scene.feed(e.LogRead(second, mark("primary#2"), (finding("oom_runtime"),)))
        assert scene.world.services[0].side is side, second


def test_a_failed_over_service_comes_back_when_stable_and_idle() -> None:
    scene = on_backup()
    for at in range(21, 619):
        scene.scrape(1, "backup", at=float(at), running=0.0, waiting=0.0)
    assert scene.world.services[0].side is Side.BACKUP
    scene.scrape(1, "backup", at=620.0, running=0.0, waiting=0.0)
    assert scene.world.services[0].side is Side.PRIMARY
    assert scene.said("service.failback")[0]["because"] == "stable"
    assert scene.phases() == {"primary": Phase.RELEASING, "backup": Phase.STOPPING}


def test_after_a_failback_it_does_not_leave_again_for_failures_of_before() -> None:
    scene = on_backup()
    scene.scrape(1, "backup", at=605.0, running=0.0, waiting=0.0)
    scene.at(620.0)
    scene.crash("backup", 621.0)
    scene.serve()
    scene.at(700.0)
    assert scene.world.services[0].side is Side.PRIMARY
    scene.crash("primary", 800.0)
    scene.at(scene.engine().life.deadline)
    scene.serve()
    assert scene.world.services[0].side is Side.PRIMARY, "one failure is answered by a restart"
    scene.crash("primary", 900.0)
    assert scene.world.services[0].side is Side.BACKUP


@pytest.mark.parametrize("gauges", [{"running": 1.0}, {"waiting": 1.0}, {"running": None}, {"waiting": None}])
def test_it_does_not_come_back_while_busy_or_while_nobody_can_tell(gauges: dict[str, float | None]) -> None:
    scene = on_backup()
    for at in range(21, 900):
        scene.scrape(1, "backup", at=float(at), **({"running": 0.0, "waiting": 0.0} | gauges))
    assert scene.world.services[0].side is Side.BACKUP


def test_it_does_not_come_back_while_metrics_are_unknown() -> None:
    scene = on_backup()
    scene.at(5000.0)
    assert scene.world.services[0].side is Side.BACKUP


def test_it_does_not_come_back_to_a_primary_whose_budget_is_spent() -> None:
    limits = Limits(budget=1)
    scene = fails(Scene(plan(limits=limits)).serve(), 10.0, 20.0)
    scene.serve("backup")
    for at in range(21, 900):
        scene.scrape(1, "backup", at=float(at))
    assert scene.world.services[0].side is Side.BACKUP


def test_it_comes_back_to_a_primary_that_has_a_try_left() -> None:
    scene = fails(Scene(plan(limits=Limits(budget=2))).serve(), 10.0, 20.0)
    scene.serve("backup")
    for at in range(21, 900):
        scene.scrape(1, "backup", at=float(at))
    assert scene.world.services[0].side is Side.PRIMARY


def test_a_held_primary_is_left_for_the_backup_and_a_held_backup_for_the_primary() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 1.0, finding("bad_args"))
    assert scene.said("service.failover")[0]["because"] == "held"
    scene.feed(e.Spawned(1.0, mark("backup#1"), 200))
    scene.crash("backup", 2.0, finding("bad_args"))
    assert scene.phases() == {"primary": Phase.HELD, "backup": Phase.HELD}


def test_a_held_backup_sends_the_service_back_to_a_primary_that_may_still_be_tried() -> None:
    scene = on_backup()
    scene.crash("backup", 30.0, finding("bad_args"))
    assert scene.world.services[0].side is Side.PRIMARY and scene.phase() is Phase.STARTING
    assert scene.said("service.failback")[0]["because"] == "backup_held"


@pytest.mark.parametrize("class_", ["cuda_hw", "cuda_init", "xid_reset", "xid_node"])
@pytest.mark.parametrize(("backup_gpus", "tried"), [((0,), False), ((1,), True)])
def test_the_backup_is_not_tried_on_the_card_that_was_lost(class_: str, backup_gpus: tuple[int, ...], tried: bool) -> None:
    scene = Scene(plan(gpus=(0,), backup_gpus=backup_gpus, share=0.8))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    scene.crash("primary", 10.0, finding(class_))
    scene.gpus(10.1, gpu(1), gpu(1, index=1))
    assert scene.phases() == {"primary": Phase.HELD, "backup": Phase.STARTING if tried else Phase.STOPPED}


def test_the_backup_is_tried_on_the_card_where_the_primary_could_not_be_configured() -> None:
    scene = Scene(plan(**CARD))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.crash("primary", 10.0, finding("bad_args"))
    scene.gpus(10.1, gpu(1))
    assert scene.phase("backup") is Phase.STARTING


@pytest.mark.parametrize(("backup_gpus", "tried"), [((0,), False), ((1,), True)])
def test_an_unkillable_primary_keeps_its_card(backup_gpus: tuple[int, ...], tried: bool) -> None:
    scene = Scene(plan(gpus=(0,), backup_gpus=backup_gpus, share=0.8))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    scene.feed(e.Exited(10.0, M, None))
    scene.at(40.0)
    assert scene.phase() is Phase.WEDGED
    scene.gpus(40.1, gpu(1), gpu(1, index=1))
    assert (scene.phase("backup") is Phase.STARTING) is tried


DEGRADE = Thresholds(vram_degrade=((0, 0.9), (1, 0.9)), degrade_after_s=120)


def test_a_card_that_stays_full_sends_the_service_to_its_backup() -> None:
    scene = Scene(plan(**CARD, thresholds=DEGRADE))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    for second in range(10, 130):
        scene.gpus(float(second), gpu(95))
    assert scene.world.services[0].side is Side.PRIMARY
    scene.gpus(130.0, gpu(95))
    assert scene.said("service.failover")[0]["because"] == "degraded"


def test_a_full_card_of_the_backup_is_no_reason_to_go_there() -> None:
    scene = Scene(plan(gpus=(0,), backup_gpus=(1,), share=0.8, thresholds=DEGRADE))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    for second in range(10, 300):
        scene.gpus(float(second), gpu(1), gpu(95, index=1))
    assert scene.world.services[0].side is Side.PRIMARY


def test_another_symptom_of_the_card_is_no_reason_to_leave() -> None:
    scene = Scene(plan(**CARD, thresholds=Thresholds(vram_warn=((0, 0.8),))))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.gpus(10.0, gpu(95))
    scene.at(500.0)
    assert scene.world.services[0].side is Side.PRIMARY


@pytest.mark.parametrize("verb", ["pause", "stop"])
def test_a_pause_and_a_stop_are_not_answered_by_a_failover(verb: str) -> None:
    scene = fails(Scene(plan()).serve(), 10.0)
    if verb == "pause":
        scene.ask("pause")
    else:
        scene.feed(e.StopAsked(15.0, "SIGTERM"))
    scene.crash("primary", 20.0)
    scene.at(100.0)
    assert scene.world.services[0].side is Side.PRIMARY
    assert scene.phase("backup") is Phase.STOPPED


# -- fewer requests first

FEWER = {**CARD, "thresholds": DEGRADE, "seqs": 64, "backup_seqs": 16}
TO_16 = "the gateway lets 16 requests through at a time, because: vram_degrade of gpu0"


def lowerable(**options: object) -> Scene:
    scene = Scene(plan(**FEWER | options))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    if scene.phases().get("backup") is Phase.STARTING:
        scene.serve("backup")
    return scene


def fill(scene: Scene, first: int, last: int, gib: float = 95.0) -> Scene:
    for second in range(first, last + 1):
        scene.gpus(float(second), gpu(gib))
    return scene


def to(scene: Scene) -> int | None:
    return scene.world.services[0].lowering.to


def timeline(scene: Scene) -> list[tuple[str, str]]:
    return [(entry.what, entry.text) for entry in scene.world.incidents[0].timeline]


def test_a_card_over_its_limit_lowers_the_service_and_restarts_nothing() -> None:
    scene = fill(lowerable(), 10, 129)
    assert to(scene) is None
    fill(scene, 130, 200)
    assert to(scene) == 16 and scene.phases() == {"primary": Phase.SERVING, "backup": Phase.STOPPED}
    assert scene.said("service.lowered") == [{"service": "primary", "to": "16", "because": "vram_degrade of gpu0"}]
    assert ("lowered", TO_16) in timeline(scene)
    assert not scene.all(c.Term) and len(scene.all(c.Spawn)) == 1 and scene.alerts() == [("opened", "vram_degrade")]


def test_it_recovers_by_itself_and_then_the_incident_ends() -> None:
    scene = fill(fill(lowerable(), 10, 200), 201, 320, 50.0)
    assert to(scene) == 16
    fill(scene, 321, 321, 50.0)
    assert to(scene) is None and scene.world.services[0].side is Side.PRIMARY
    assert scene.said("service.restored") == [{"service": "primary", "after_s": "191"}]
    assert timeline(scene)[-1] == ("cleared", "lowering, after 191 s: the gateway lets through what comes")
    scene.at(350.9)
    assert scene.world.incidents
    scene.at(351.0)
    assert not scene.world.incidents


def test_a_card_that_stays_over_its_limit_for_as_long_again_sends_the_service_to_its_backup() -> None:
    scene = fill(lowerable(), 10, 249)
    assert scene.world.services[0].side is Side.PRIMARY
    fill(scene, 250, 250)
    assert scene.said("service.failover")[0]["because"] == "degraded"
    assert to(scene) is None, "the backup takes no more of itself"
    assert not scene.said("service.restored")


def test_a_failure_while_lowered_is_answered_by_a_restart_as_any_other() -> None:
    scene = fill(lowerable(), 10, 200)
    scene.crash("primary", 200.5)
    fill(scene, 201, 201, 1.0)
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STOPPED} and to(scene) == 16
    scene.serve()
    fill(scene, 202, 321, 80.0)
    assert to(scene) is None


def test_a_full_kv_cache_lowers_and_never_fails_over() -> None:
    scene = lowerable()
    for at in range(10, 3000, 10):
        scene.feed(e.Scraped(float(at), M, metrics(float(at), 16.0, 5.0, 0.99)))
    assert to(scene) == 16 and scene.world.services[0].side is Side.PRIMARY
    assert scene.said("service.lowered") == [{"service": "primary", "to": "16", "because": "kv_pressure of primary"}]


def test_an_incident_stays_open_while_a_service_is_lowered() -> None:
    scene = lowerable()
    for first in (10, 260):         # lowered at 130, restored at 260; lowered at 390, for twice as long
        for at in range(first, first + 130, 10):
            scene.feed(e.Scraped(float(at), M, metrics(float(at), 64.0, 5.0, 0.99)))
        for at in range(first + 130, first + 260, 10):
            scene.feed(e.Scraped(float(at), M, metrics(float(at), 16.0, 0.0, 0.99)))
    assert not any(watch.raised for watch in scene.world.watches) and to(scene) == 16
    scene.at(600.0)
    assert len(scene.world.incidents) == 1


def test_a_second_service_on_the_card_is_lowered_too_and_has_an_incident_of_its_own() -> None:
    pairs = [(EnginePlan(name, port, (0,), 0.4, max_seqs=64),
              EnginePlan(f"{name}-backup", port + 1, (0,), 0.4, name, max_seqs=16)) for name, port in (("a", 1), ("b", 3))]
    scene = Scene(Plan((*pairs[0], *pairs[1]), DEGRADE))
    scene.gpus(0.0, gpu(1))
    scene.serve("a")
    scene.gpus(0.5, gpu(41))
    scene.serve("b")
    fill(scene, 10, 130)
    assert [service.lowering.to for service in scene.world.services] == [16, 16]
    assert {incident.service: incident.urgency for incident in scene.world.incidents} == {
        "a": Urgency.WARNING, "b": Urgency.WARNING}


@pytest.mark.parametrize("options", [{"backup": False}, {"backup_seqs": None}, {"backup_seqs": 64}])
def test_without_a_smaller_number_nothing_is_lowered(options: dict[str, object]) -> None:
    scene = fill(lowerable(**options), 10, 130)
    assert to(scene) is None and not scene.said("service.lowered")
    assert (scene.world.services[0].side is Side.BACKUP) is ("backup" not in options), "as if there were no lowering"


def test_a_primary_that_does_not_serve_is_not_lowered_but_left_as_ever() -> None:
    scene = Scene(plan(**FEWER))
    scene.gpus(0.0, gpu(1))
    scene.feed(e.Spawned(0.0, M, 100))
    fill(scene, 10, 130)
    assert scene.said("service.failover")[0]["because"] == "degraded" and not scene.said("service.lowered")


def test_a_service_on_its_backup_is_not_lowered() -> None:
    scene = lowerable(backup_gpus=(1,))
    scene.ask("failover")
    scene.gpus(0.2, gpu(80), gpu(1, index=1))
    scene.serve("backup")
    fill(scene, 10, 200)
    assert scene.phase("backup") is Phase.SERVING and to(scene) is None


@pytest.mark.parametrize("verb", ["pause", "stop"])
def test_a_pause_and_a_stop_lower_nothing(verb: str) -> None:
    scene = lowerable()
    if verb == "pause":
        scene.ask("pause")
    else:
        scene.feed(e.StopAsked(5.0, "SIGTERM"))
    fill(scene, 10, 300)
    assert to(scene) is None


def test_what_is_lowered_when_a_pause_begins_stays_so() -> None:
    scene = fill(lowerable(), 10, 130)
    scene.ask("pause")
    fill(scene, 131, 500, 50.0)
    assert to(scene) == 16
    scene.ask("resume")
    assert to(scene) is None


def test_a_hot_primary_that_stays_full_is_started_anew_beside_its_backup() -> None:
    """Only its end frees the memory; before, it kept its card full for ever, and there was no failback to it."""
    scene = lowerable(backup_gpus=(1,), standby=Standby.HOT)
    fill(scene, 10, 250)
    assert scene.said("service.failover")[0]["because"] == "degraded"
    assert scene.phases() == {"primary": Phase.STOPPING, "backup": Phase.SERVING}
    scene.crash("primary", 251.0)
    scene.gpus(252.0, gpu(1), gpu(80, index=1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.SERVING}


def test_an_operators_failover_of_a_hot_pair_stops_nobody() -> None:
    scene = lowerable(backup_gpus=(1,), standby=Standby.HOT)
    fill(scene, 10, 130)
    scene.ask("failover")
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.SERVING} and to(scene) is None


# -- a standby, or both at once

PAIR = {"gpus": (0,), "share": 0.4}      # of one card: both fit


@pytest.mark.parametrize("busy", [0.0, 9.0])
def test_where_both_fit_the_primary_serves_beside_the_backup_before_the_backup_is_stopped(busy: float) -> None:
    scene = Scene(plan(**PAIR, failover=FailoverPlan(after_failures=0)))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    scene.crash("primary", 20.0)
    scene.gpus(20.1, gpu(1))
    scene.serve("backup")
    for at in range(21, 621):
        scene.scrape(float(at), "backup", at=float(at), running=busy)
        assert scene.phases() == {"primary": Phase.STOPPED, "backup": Phase.SERVING}
    scene.scrape(621.0, "backup", at=621.0, running=busy)
    assert scene.phases() == {"primary": Phase.RELEASING, "backup": Phase.SERVING}
    scene.gpus(621.1, gpu(41))
    scene.serve()
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.STOPPING}
    assert scene.said("service.failback")[0]["because"] == "stable"


def test_a_suspect_is_not_down_before_it_is_condemned() -> None:
    scene = Scene(plan(standby=Standby.HOT))
    scene.serve()
    scene.serve("backup")
    scene.crash("primary", 1.0)
    assert scene.world.services[0].side is Side.BACKUP
    scene.serve()
    scene.ask("failback")
    scene.scrape(1, at=2.0)
    scene.at(12.0)
    scene.feed(e.Answered(22.0, mark("primary#2"), False, 10.0))
    assert scene.phase() is Phase.SUSPECT and scene.world.services[0].side is Side.PRIMARY
    scene.at(82.0)
    assert scene.phase() is Phase.DUMPING and scene.world.services[0].side is Side.BACKUP


def test_the_engine_of_a_hot_pair_that_leaves_is_not_stopped() -> None:
    scene = Scene(plan(standby=Standby.HOT)).serve().serve("backup")
    scene.ask("failover")
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.SERVING}


def test_a_stop_is_a_stop_for_a_standby_too() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING)).serve("backup")
    scene.sleep()
    scene.serve()
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    assert scene.phases() == {"primary": Phase.STOPPING, "backup": Phase.STOPPING}
    scene.crash("primary", 11.0)
    scene.crash("backup", 11.0)
    assert scene.only(c.Quit) and not scene.all(c.Wake)


# -- recovery

def test_a_lost_log_is_told_until_the_generation_ends_also_by_the_next_daemon() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.0, mark("primary#1"), 100, "/logs/primary.log: No space left on device"))
    scene.ok()
    scene.at(1000.0)
    assert [incident.class_ for incident in scene.world.incidents] == ["log_lost"]
    lives = e.Survivor(mark("primary#1"), 100, True, 1000.0)
    scene = Scene(plan(backup=False), 1000.0, remembered(scene.world), (lives,))
    scene.ok()
    scene.at(2000.0)
    assert [incident.class_ for incident in scene.world.incidents] == ["log_lost"]
    scene.ask("restart", "primary")
    scene.crash()
    scene.serve()
    scene.at(2031.0)
    assert not scene.world.incidents


def test_a_lost_log_of_one_service_is_nothing_to_another() -> None:
    scene = Scene(Plan((EnginePlan("a", 1), EnginePlan("b", 2))))
    scene.feed(e.Spawned(0.0, mark("a#1"), 100, "/logs/a.log: No space left on device"))
    scene.ok("a")
    scene.serve("b", 200)
    scene.crash("b", 1.0)
    scene.serve("b", 201)
    scene.at(100.0)
    assert [incident.service for incident in scene.world.incidents] == ["a"]


def test_an_incident_ends_when_its_service_has_served_for_half_a_minute() -> None:
    scene = Scene(plan()).serve()
    scene.crash("primary", 10.0)
    scene.now = 40.0
    scene.serve()
    scene.at(69.9)
    assert scene.world.incidents
    scene.at(70.0)
    assert scene.said("incident.resolved") == [{"incident": "20261118T110650Z-primary-unexpected_exit"}]


def test_a_further_symptom_puts_the_end_off() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.LogRead(10.0, M, (finding("shm_stall"),)))
    scene.feed(e.LogRead(30.0, M, (finding("shm_stall"),)))
    scene.at(59.9)
    assert scene.world.incidents
    scene.at(60.0)
    assert not scene.world.incidents


LAST_WORDS = (finding("engine_dead_v1"), finding("worker_died"))


def worker_killed(scene: Scene) -> Scene:
    """A worker of the primary is killed at 10, and the hot backup serves at once."""
    scene.serve().serve("backup", 200)
    scene.feed(e.MemberDied(10.0, M, 102, "VLLM::Worker_TP1"))
    assert scene.world.services[0].side is Side.BACKUP
    return scene


def test_an_incident_stays_open_while_the_engine_that_failed_still_leaves() -> None:
    scene = worker_killed(Scene(plan(standby=Standby.HOT)))
    scene.at(20.0)              # its evidence was not ready
    scene.at(22.0)              # it did not leave when it was asked
    assert scene.phase() is Phase.KILLING
    scene.at(45.0)
    scene.feed(e.LogRead(46.0, M, LAST_WORDS))
    scene.feed(e.Exited(47.0, M, -9))
    scene.bury("primary", finding("nccl_timeout"))
    scene.now = 48.0
    scene.serve()
    scene.at(76.9)
    assert len(scene.world.incidents) == 1
    scene.at(77.0)
    assert scene.alerts() == [("opened", "worker_died"), ("resolved", "nccl_timeout")]


def test_an_incident_ends_as_soon_as_an_engine_that_failed_is_gone_with_nothing_more_to_say() -> None:
    scene = worker_killed(Scene(plan(standby=Standby.HOT, confirm_s=1.0)))
    scene.at(12.0)
    assert scene.world.incidents
    scene.feed(e.Exited(13.0, M, -9))
    scene.bury()
    assert scene.alerts()[-1][0] == "resolved"


def test_an_incident_of_a_held_service_stays_open() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 1.0, finding("bad_args"))
    scene.at(99999.0)
    assert len(scene.world.incidents) == 1


def test_an_incident_stays_open_while_a_symptom_of_it_is_left() -> None:
    scene = Scene(plan(**CARD, thresholds=Thresholds(vram_warn=((0, 0.8),))))
    scene.gpus(0.0, gpu(1))
    scene.serve()
    for at in range(10, 8000, 60):
        scene.gpus(float(at), gpu(95))
    assert scene.alerts() == [("opened", "vram_high")]


def test_an_incident_of_one_service_does_not_wait_for_another() -> None:
    scene = Scene(Plan((EnginePlan("a", 1, (0,)), EnginePlan("b", 2, (1,)))))
    scene.gpus(0.0, gpu(0), gpu(0, index=1))
    scene.serve("a")
    scene.serve("b")
    scene.crash("a", 10.0)
    scene.crash("b", 10.0)
    assert len(scene.world.incidents) == 2
    scene.gpus(10.1, gpu(0), gpu(0, index=1))
    scene.serve("a")
    scene.at(41.0)
    assert [incident.service for incident in scene.world.incidents] == ["b"]


def test_an_incident_that_ended_in_this_turn_does_not_end_again() -> None:
    old = incidents.opened("gone", "gone", 1, "oom_runtime", Urgency.CRITICAL, "why", 0.0, 0.0)
    scene = Scene(plan(), 500.0, Memory("boot-1", incidents=(old,)))
    assert len(scene.said("incident.resolved")) == 1


def test_an_incident_of_the_host_needs_no_service() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.KernelRead(1.0, (finding("xid_other"),)))
    assert scene.world.incidents[0].service == "host"
    scene.at(30.9)
    assert scene.world.incidents
    scene.at(31.0)
    assert not scene.world.incidents


# -- the end

def test_a_stop_ends_when_everything_is_at_rest() -> None:
    scene = Scene(plan()).serve()
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    scene.crash("primary", 11.0)
    assert scene.only(c.Quit) == c.Quit()


def test_a_stop_of_what_was_never_started_ends_at_once() -> None:
    scene = Scene(plan(**CARD))
    scene.feed(e.StopAsked(0.1, "SIGTERM"))
    assert scene.only(c.Quit)


def test_nobody_leaves_who_was_not_asked() -> None:
    scene = Scene(replace(plan(), engines=()))
    scene.at(5.0)
    assert not scene.all(c.Quit)


def test_a_stop_waits_for_strays_but_not_for_ever() -> None:
    found = (e.Survivor(mark("primary#1"), 100, leader=False, age_s=5.0),)
    scene = Scene(plan(), survivors=found)
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    assert next_deadline(scene.world) == 40.0 and not scene.all(c.Quit)
    scene.at(40.0)
    assert scene.all(c.Quit) and next_deadline(scene.world) == inf


def test_a_stop_ends_with_the_last_stray() -> None:
    found = (e.Survivor(mark("primary#1"), 100, leader=False, age_s=5.0),)
    scene = Scene(plan(), survivors=found)
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    scene.feed(e.Emptied(11.0, mark("primary#1")))
    assert scene.only(c.Quit)


def test_a_held_service_asks_for_its_human_again_and_wakes_the_loop_for_it() -> None:
    scene = Scene(replace(plan(backup=False, limits=Limits(budget=0)), remind_s=600.0)).serve()
    scene.crash("primary", 10.0)
    assert scene.phase() is Phase.HELD
    assert next_deadline(scene.world) == 610.0
    scene.at(609.0)
    assert [kind for kind, _ in scene.alerts()] == ["opened"]
    scene.at(610.0)
    assert [kind for kind, _ in scene.alerts()] == ["opened", "reminder"]
    assert scene.only(c.Record).incident.reminders == 1 and next_deadline(scene.world) == 1210.0


# -- the time without an engine

def test_an_incident_of_an_adopted_engine_has_no_gap_while_it_is_looked_for() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.LogRead(5.0, mark("primary#1"), (finding("shm_stall"),)))
    after = Scene(plan(backup=False), 10.0, remembered(scene.world), (e.Survivor(mark("primary#1"), 100, True, 5.0),))
    assert after.world.incidents[0].down_at is None
    after.crash("primary", 11.0)
    assert after.world.incidents[0].down_at == 11.0


def test_an_adopted_engine_that_still_loads_neither_begins_nor_ends_a_gap() -> None:
    scene = Scene(plan()).serve()
    scene.crash("primary", 10.0)
    scene.feed(e.Spawned(11.0, scene.engine().mark, 100))
    after = Scene(plan(), 20.0, remembered(scene.world), (e.Survivor(scene.engine().mark, 100, True, 9.0),))
    assert (after.phase(), after.engine().adopted, after.world.incidents[0].down_at) == (Phase.LOADING, True, 10.0)
