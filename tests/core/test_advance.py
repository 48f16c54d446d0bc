from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import WALL, Scene, finding, host, mark, metrics, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import HANDLERS, advance
from vllm_watchdog.core.failures import Ended
from vllm_watchdog.core.incidents import Flight, Urgency
from vllm_watchdog.core.plan import Limits, Plan, Standby
from vllm_watchdog.core.policy import Phase, State
from vllm_watchdog.core.readings import Health, Holder, Unknown, Wait

M, OLD, B = mark("primary#1"), mark("primary#0"), mark("backup#1")
MINE, NGINX = Holder(100, "vllm", M), Holder(7, "nginx")
SOLO = plan(backup=False)


def loading() -> Scene:
    scene = Scene(SOLO)
    scene.feed(e.Spawned(0.1, M, 100))
    return scene


def probe(scene: Scene, at: float, health: Health, *owners: Holder) -> None:
    scene.feed(e.Probed(at, M, health, owners))


def dozing() -> Scene:
    scene = Scene(plan(standby=Standby.SLEEPING))
    return scene.serve("backup")


def test_a_sleep_and_a_wake_are_said_with_the_time_they_took() -> None:
    scene = dozing()
    scene.sleep()
    assert scene.said("engine.slept") == [{"engine": "backup#1", "took_s": "0.30"}]
    scene.serve()
    scene.crash()
    assert scene.phase("backup") is Phase.WAKING
    scene.wake()
    assert scene.said("engine.woke") == [{"engine": "backup#1", "took_s": "0.20"}]
    assert ("ready", "backup#1 is awake, after 0.20 s") in [(t.what, t.text) for t in scene.world.incidents[0].timeline]


@pytest.mark.parametrize("kind", [e.Slept, e.Woke])
def test_a_sleep_or_a_wake_that_failed_is_a_failure_and_says_why(kind: type[e.Slept] | type[e.Woke]) -> None:
    scene = dozing()
    scene.feed(kind(5.0, B, "/sleep?level=1 answered 500", 0.1))
    assert scene.phase("backup") is Phase.DUMPING and scene.engine("backup").why == "/sleep?level=1 answered 500"
    assert scene.engine("backup").cause == ("sleep_failed" if kind is e.Slept else "wake_failed")


@pytest.mark.parametrize("event", [e.Slept(5.0, mark("backup#0"), "no", 0.1), e.Woke(5.0, mark("backup#0"), "", 0.1)])
def test_a_nap_of_another_generation_is_history(event: e.Event) -> None:
    scene = dozing()
    scene.feed(event)
    assert scene.phase("backup") is Phase.DOZING


def test_every_event_has_a_handler() -> None:
    kinds = {kind for kind in vars(e).values() if isinstance(kind, type) and issubclass(kind, e.Event)} - {e.Event}
    assert set(HANDLERS) == kinds


def test_the_same_world_and_event_give_the_same_answer() -> None:
    world = Scene(plan()).world
    event = e.Exited(5.0, M, 1)
    assert advance(world, event) == advance(world, event)


@pytest.mark.parametrize("event", [
    e.Spawned(5.0, OLD, 9), e.SpawnFailed(5.0, OLD, "spawn_failed", "x"), e.Exited(5.0, OLD, 1), e.Emptied(5.0, OLD),
    e.MemberDied(5.0, OLD, 9, "VLLM::EngineCore"),
    e.Dumped(5.0, OLD, "x", "y"), e.Probed(5.0, OLD, Health.OK, (NGINX,)), e.Answered(5.0, OLD, False, 1.0),
    e.Scraped(5.0, OLD, metrics(1)), e.Exited(5.0, mark("stranger#1"), 1), e.Exited(5.0, mark("backup#0"), 1),
], ids=lambda event: type(event).__name__)
def test_what_another_generation_did_is_history(event: e.Event) -> None:
    scene = Scene(plan()).serve()
    engines = scene.world.engines
    scene.feed(event)
    assert scene.world.engines == engines


def test_time_alone_changes_nothing_but_the_time() -> None:
    scene = Scene(SOLO).serve()
    world = scene.world
    scene.at(5.0)
    assert (scene.latest, scene.world) == ((), replace(world, at=5.0))


def test_a_dump_of_a_running_engine_is_answered_and_the_engine_asked_to_leave() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(5.0, M, (finding("oom_runtime"),)))
    scene.feed(e.Dumped(6.0, M, scene.world.incidents[0].id, "incidents/a"))
    assert scene.only(c.Term).mark == M


def test_a_spawn_is_said_and_its_pid_kept() -> None:
    scene = loading()
    assert (scene.engine().pid, scene.engine().active_at, scene.phase()) == (100, 0.1, Phase.LOADING)
    assert scene.said("engine.spawned") == [{"engine": "primary#1", "pid": "100"}]


def test_a_stranger_on_the_port_is_held_and_named() -> None:
    scene = Scene(SOLO)
    scene.feed(e.SpawnFailed(0.1, M, "port_stranger", "port 8100 is held by PID 7 (nginx)"))
    scene.feed(e.LogRead(0.2, M, drained=True))
    assert scene.phase() is Phase.HELD and scene.world.incidents[0].text == "port 8100 is held by PID 7 (nginx)"
    assert scene.said("engine.spawn_failed") == [
        {"engine": "primary#1", "class_": "port_stranger", "why": "port 8100 is held by PID 7 (nginx)"}]


def test_a_spawn_that_failed_for_another_reason_is_tried_again() -> None:
    scene = Scene(SOLO)
    scene.feed(e.SpawnFailed(0.1, M, "spawn_failed", "too many processes"))
    scene.feed(e.LogRead(0.2, M, drained=True))
    assert scene.phase() is Phase.STARTING and scene.world.incidents[0].class_ == "spawn_failed"


def test_an_exit_is_said_with_its_code_and_phase() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(5.0, M, -9))
    assert scene.said("engine.exited") == [{"engine": "primary#1", "code": "-9", "phase": "serving"}]
    assert scene.engine().exit_code == -9


@pytest.mark.parametrize(("name", "class_"), [
    ("VLLM::EngineCore_DP0", "engine_proc_died"), ("VLLM::Worker_TP1", "worker_died"),
    ("VLLM::APIServer_1", "engine_proc_died"),
])
def test_a_process_that_dies_under_its_server_is_a_failure_at_once(name: str, class_: str) -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.MemberDied(5.0, M, 12, name))
    assert (scene.phase(), scene.engine().cause, scene.alerts()) == (Phase.DUMPING, class_, [("opened", class_)])
    assert scene.engine().why == f"{name} (PID 12) ended while its API server lives"
    assert scene.said("engine.member_died") == [{"engine": "primary#1", "pid": "12", "process": name}]


def test_what_the_log_says_of_a_death_names_it_better() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.MemberDied(5.0, M, 12, "VLLM::EngineCore"))
    scene.crash("primary", 5.2, finding("oom_runtime"))
    assert scene.world.incidents[0].class_ == "oom_runtime"


@pytest.mark.parametrize("phase", Phase)
def test_processes_come_and_go_while_it_loads_moves_or_leaves(phase: Phase) -> None:
    scene = loading()
    scene.world = scene.world.with_engine(replace(scene.engine(), life=State(phase, wanted=True)))
    scene.feed(e.MemberDied(5.0, M, 12, "VLLM::EngineCore"))
    watched = phase in (Phase.SERVING, Phase.SUSPECT, Phase.ASLEEP)
    assert (bool(scene.said("engine.member_died")), scene.engine().cause) == (watched, "engine_proc_died" if watched else "")


def test_a_new_configuration_is_said_and_counts() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Reloaded(5.0, plan(backup=False, limits=Limits(stop_s=7))))
    assert scene.said("daemon.reloaded") == [{}]
    assert scene.engine().plan.limits.stop_s == 7


def test_the_kernels_kills_for_memory_are_the_cause_by_name() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(5.0, M, -9, oom_kills=2))
    incident = scene.world.incidents[0]
    assert (incident.class_, scene.engine().cause) == ("host_oom_kill", "host_oom_kill")
    assert incident.text == "the kernel ended 2 of the processes of primary#1 for memory, says its control group"


def test_the_kernels_kills_do_not_hide_what_explains_more() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(4.0, M, (finding("xid_node"),)))
    scene.feed(e.Exited(5.0, M, -9, oom_kills=1))
    assert scene.engine().cause == "xid_node"


def test_kills_for_memory_after_our_own_stop_are_no_failure() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(4.0, "SIGTERM"))
    scene.feed(e.Exited(5.0, M, -9, oom_kills=1))
    assert not scene.world.incidents


def test_emptiness_is_said_with_the_orphans_that_were_ended() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(5.0, M, -9))
    scene.feed(e.Emptied(5.1, M, (Holder(12, "VLLM::EngineCore", M),)))
    assert scene.said("engine.emptied") == [{"engine": "primary#1", "killed": "PID 12 (VLLM::EngineCore), ours: primary#1"}]


def test_a_clock_that_was_stepped_is_said_and_dates_what_follows() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.ClockSet(5.0, WALL - 3600.0))
    assert scene.said("clock.stepped") == [{"by_s": "-3600.0"}]
    scene.crash("primary", 10.0)
    assert scene.world.incidents[0].wall_opened == WALL - 3600.0 + 10.0


def test_a_stop_asks_every_engine_to_leave() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    assert scene.only(c.Term).mark == M and scene.world.stopping
    assert scene.said("daemon.stopping") == [{"by": "SIGTERM"}]
    assert scene.world.strays_until == 35.0


def test_a_stop_of_no_engine_is_a_stop() -> None:
    scene = Scene(Plan())
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    assert scene.only(c.Quit)


# -- evidence

def test_a_finished_bundle_is_kept_with_its_incident() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 5.0)
    incident = scene.world.incidents[0].id
    scene.feed(e.Dumped(6.0, M, incident, "incidents/a", ("stacks", "ps")))
    assert scene.world.incidents[0].evidence == ("incidents/a",)
    assert scene.world.incidents[0].timeline[-1].text == "incidents/a; without stacks; without ps"
    assert scene.said("evidence.done") == [{"incident": incident, "folder": "incidents/a", "missing": "stacks, ps"}]


def test_a_bundle_of_no_open_incident_is_only_said() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 5.0)
    scene.feed(e.Dumped(6.0, None, "snapshot", "incidents/b"))
    assert scene.world.incidents[0].evidence == () and scene.said("evidence.done")


# -- what the gateway tells of a death

CUT = e.InFlight(1, 100_000, 2.5, True, "0123456789abcdef", 38_000, "cut")
QUEUED = e.InFlight(2, 500, 0.1, False, "f" * 16, 100, "replayed")
TOLD = ("requests in flight on primary#1: 2, of them already answering: 1; the longest 100000 bytes (about 38000 tokens), "
        "2.5 s old, answering, cut off, content 0123456789ab")
FLIGHT = Flight("primary#1", 2, 1, (CUT, QUEUED))


def test_requests_that_were_in_flight_are_told_in_the_open_incident() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(5.0, M, (finding("oom_runtime"),)))
    scene.feed(e.Casualties(5.1, M, 2, (QUEUED, CUT)))
    last = scene.world.incidents[0].timeline[-1]
    assert (last.what, last.text) == ("in flight", TOLD)
    assert scene.world.incidents[0].flights == (FLIGHT,)
    assert scene.said("gateway.casualties") == [{"engine": "primary#1", "text": TOLD}]


def test_requests_that_were_in_flight_are_kept_until_there_is_an_incident() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Casualties(5.1, M, 2, (QUEUED, CUT)))
    assert not scene.world.incidents and scene.engine().in_flight == FLIGHT
    scene.crash("primary", 5.2)
    assert TOLD in [entry.text for entry in scene.world.incidents[0].timeline]
    assert scene.world.incidents[0].flights == (FLIGHT,) and scene.engine().in_flight is None


def test_of_the_requests_of_a_death_the_largest_three_are_kept() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Casualties(5.1, M, 9, tuple(replace(QUEUED, id=size, bytes=size) for size in (1, 5, 3, 4))))
    assert [request.bytes for request in scene.engine().in_flight.largest] == [5, 4, 3]


def test_a_death_without_requests_is_told_as_a_number() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Casualties(5.1, M, 0))
    scene.feed(e.Casualties(5.1, mark("primary#9"), 7))
    assert scene.engine().in_flight == Flight("primary#1", 0, 0)


def test_what_clients_waited_is_told_in_the_open_incident_and_else_only_said() -> None:
    wait = Wait(42, 48.2, 47.0, failed=1, replayed=40)
    scene = Scene(SOLO).serve()
    scene.feed(e.Waited(4.0, "primary", wait))
    assert not scene.world.incidents and scene.said("gateway.waited")[0]["text"].startswith("42 requests that waited")
    scene.crash("primary", 5.0)
    scene.feed(e.Waited(60.0, "primary", wait))
    assert scene.world.incidents[0].waits == (wait,)
    assert "waited" in [entry.what for entry in scene.world.incidents[0].timeline]
    scene.feed(e.Waited(61.0, "nobody", wait))


def test_a_drills_word_is_told_in_its_own_incident_and_has_no_other_effect() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 5.0)
    before = scene.world
    (incident,) = before.incidents
    scene.feed(e.Drilled(6.0, incident.id, "engine-core-kill"))
    (told,) = scene.world.incidents
    assert told.timeline[-1].what == "drill" and told.timeline[-1].text == "engine-core-kill"
    assert scene.world.engines == before.engines and told.urgency is incident.urgency
    scene.feed(e.Drilled(7.0, "another", "engine-core-kill"))
    assert scene.world.incidents == (told,)
    assert [line["incident"] for line in scene.said("drill")] == [incident.id, "another"]


def test_an_exit_is_kept_with_whose_doing_it_was() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(5.0, M, -9))
    assert scene.engine().ended == Ended("primary#1", -9, ours=False)
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    scene.feed(e.Exited(6.0, M, 0))
    assert scene.engine().ended == Ended("primary#1", 0, ours=True)


def test_a_sound_engine_that_is_stopped_has_no_end_in_the_incident() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 5.0)
    scene.serve()
    scene.ask("restart", "primary")
    scene.feed(e.Exited(6.0, scene.engine().mark, 0))
    assert scene.engine().ended == Ended("primary#2", 0, ours=True)
    assert [each.ended for each in scene.world.incidents[0].failures] == [Ended("primary#1", 1, ours=False)]


def test_a_clean_stop_leaves_an_open_incident_open_and_says_so() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 5.0)
    scene.feed(e.StopAsked(9.0, "SIGTERM"))
    (left,) = scene.world.incidents
    assert (left.wall_resolved, left.down_at, left.down_s) == (None, None, 4.0)
    assert "left" in [entry.what for entry in left.timeline]


# -- readiness

def test_an_engine_is_ready_when_its_own_process_answers() -> None:
    scene = loading()
    probe(scene, 30.1, Health.OK, MINE)
    engine = scene.engine()
    assert (engine.phase, engine.ready_at, engine.pulse.since, engine.health) == (Phase.SERVING, 30.1, 30.1, Health.OK)
    assert scene.said("engine.ready") == [{"engine": "primary#1", "after_s": "30.1"}]


def test_a_child_of_ours_may_own_the_port() -> None:
    scene = loading()
    probe(scene, 30.0, Health.OK, Holder(150, "worker", M))
    assert scene.phase() is Phase.SERVING


def test_an_answer_whose_owner_nobody_knows_is_not_readiness() -> None:
    scene = loading()
    probe(scene, 30.0, Health.OK)
    assert scene.phase() is Phase.LOADING


@pytest.mark.parametrize(("owner", "name"), [
    (NGINX, "PID 7 (nginx)"), (Holder(99, "vllm", OLD), "PID 99 (vllm), ours: primary#0"),
    (Holder(0, ""), "a process we may not look at")])
def test_a_stranger_who_answers_is_named_and_the_engine_held(owner: Holder, name: str) -> None:
    scene = loading()
    probe(scene, 30.0, Health.OK, MINE, owner)
    assert scene.phase() is Phase.DUMPING and scene.engine().life.doom == "port_stranger"
    assert scene.engine().why == f"port 8100 is served by {name}, not by primary#1"


def test_a_stranger_beside_an_engine_that_serves_is_told_and_nothing_stopped() -> None:
    scene = Scene(SOLO).serve()
    probe(scene, 30.0, Health.OK, MINE, NGINX)
    assert scene.phase() is Phase.SERVING
    incident = scene.world.incidents[0]
    assert (incident.class_, incident.urgency) == ("port_stranger", Urgency.CRITICAL)
    assert incident.text == "port 8100 is shared with PID 7 (nginx): it takes part of the requests"


def test_an_engine_that_serves_is_not_ready_a_second_time() -> None:
    scene = loading()
    probe(scene, 30.0, Health.OK, MINE)
    probe(scene, 31.0, Health.OK, MINE)
    assert len(scene.said("engine.ready")) == 1 and scene.engine().ready_at == 30.0


@pytest.mark.parametrize("health", [Health.REFUSED, Health.DEAD, Health.SILENT, Health.ODD])
def test_while_loading_no_answer_is_wrong(health: Health) -> None:
    scene = loading()
    for second in range(1, 300):
        probe(scene, float(second), health)
    assert scene.phase() is Phase.LOADING and not scene.world.incidents


@pytest.mark.parametrize("health", [Health.REFUSED, Health.DEAD])
def test_an_api_that_is_down_for_ten_seconds_is_dead(health: Health) -> None:
    scene = Scene(SOLO).serve()
    probe(scene, 5.0, health)
    probe(scene, 14.9, health)
    assert scene.phase() is Phase.SERVING
    probe(scene, 15.0, health)
    assert scene.phase() is Phase.DUMPING
    assert (scene.engine().cause, scene.engine().why) == ("api_unreachable", f"/health {health} for 10 s")


@pytest.mark.parametrize("health", [Health.SILENT, Health.ODD, Health.OK])
def test_any_other_answer_begins_the_ten_seconds_anew(health: Health) -> None:
    scene = Scene(SOLO).serve()
    probe(scene, 5.0, Health.DEAD)
    probe(scene, 10.0, health, MINE)
    probe(scene, 16.0, Health.DEAD)
    assert scene.phase() is Phase.SERVING and scene.engine().ill_since == 16.0


def test_a_silent_api_is_the_hang_verdicts_business() -> None:
    scene = Scene(SOLO).serve()
    for second in range(100):
        probe(scene, float(second), Health.SILENT)
    assert scene.phase() is Phase.SERVING


def test_before_the_process_is_there_nobody_can_be_unreachable() -> None:
    scene = Scene(plan(backup=False, limits=Limits(spawn_s=60)))
    for second in range(1, 50):
        probe(scene, float(second), Health.REFUSED)
    assert scene.phase() is Phase.STARTING and not scene.world.incidents


def test_the_answers_of_an_engine_that_is_being_stopped_do_not_matter() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(5.0, "x"))
    probe(scene, 20.0, Health.DEAD)
    assert scene.engine().health is Health.OK


# -- tokens

def test_why_a_probe_proves_nothing_is_said_once() -> None:
    scene = Scene(SOLO).serve()
    for at, answer in ((1.0, Unknown(1.0, "404")), (2.0, Unknown(2.0, "404")), (3.0, Unknown(3.0, "401")), (4.0, True)):
        scene.feed(e.Answered(at, M, answer, 0.1))
    assert [said["why"] for said in scene.said("probe.proves_nothing")] == ["404", "401"]


def test_a_scrape_is_kept_and_moves_the_pulse() -> None:
    scene = Scene(SOLO).serve()
    scene.scrape(1, at=1.0)
    scene.scrape(2, at=2.0)
    assert scene.engine().metrics == metrics(2) and scene.engine().pulse.moved_at == 2.0
    scene.feed(e.Scraped(3.0, M, Unknown(3.0, "refused")))
    assert scene.engine().metrics == Unknown(3.0, "refused") and scene.engine().pulse.moved_at == 2.0


def test_an_engine_that_runs_without_a_log_is_told() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.1, scene.engine().mark, 100, "/logs/primary.log: No space left on device"))
    assert scene.phase() is Phase.LOADING
    assert scene.alerts() == [("opened", "log_lost")]
    assert scene.world.incidents[0].text == (
        "primary#1 runs without a log, its output is lost: /logs/primary.log: No space left on device")


def test_a_bundle_that_was_not_written_has_no_folder() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.HostSampled(1.0, host(1)))
    incident = scene.world.incidents[0].id
    scene.feed(e.Dumped(2.0, None, incident, "", ("everything: 0.40 GiB free on the log disk",)))
    assert scene.world.incidents[0].evidence == ()
    assert scene.world.incidents[0].timeline[-1].text == "none; without everything: 0.40 GiB free on the log disk"
