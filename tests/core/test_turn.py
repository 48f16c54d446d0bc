from __future__ import annotations

from math import inf

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.failures import Ended
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.policy import Phase, Sign, State
from vllm_watchdog.core.readings import Holder, Unknown
from vllm_watchdog.core.turn import HOST, LEAVE_S, LOOK_S, Turn
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import World

M = mark("primary#1")
SOLO = plan(backup=False)


def timeline(scene: Scene) -> list[tuple[str, str]]:
    return [(entry.what, entry.text) for entry in scene.world.incidents[0].timeline]


# -- decisions become commands

def test_a_new_launch_knows_nothing_of_the_one_before_but_its_ooms() -> None:
    scene = Scene(SOLO).serve()
    scene.scrape(5)
    scene.feed(e.LogRead(10.0, M, (finding("oom_runtime"),)))
    scene.crash("primary", 11.0)
    engine = scene.engine()
    assert (engine.mark, engine.phase, engine.spawned_at, engine.since, engine.active_at, engine.pulse.since) == (
        mark("primary#2"), Phase.STARTING, 11.0, 11.0, 11.0, 11.0)
    assert (engine.pid, engine.ready_at, engine.cause, engine.dumped, engine.bundles, engine.exit_code, engine.tree) == (
        0, inf, "", False, 0, None, None)
    assert isinstance(engine.metrics, Unknown) and engine.ooms == (10.0,)


def test_restarts_are_counted_for_a_day() -> None:
    scene = Scene(plan(backup=False, limits=Limits(window_s=10))).serve()
    for at in (100.0, 200.0, DAY_S + 200.0, DAY_S + 250.0):
        scene.crash("primary", at)
        scene.at(at)
        scene.serve()
    assert scene.world.restarts == (DAY_S + 200.0, DAY_S + 250.0), "the edge of the day is gone, too"


def test_a_stop_that_is_not_obeyed_becomes_a_kill_and_both_are_deeds() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(1.0, M, (finding("oom_runtime"),)))
    scene.at(scene.engine().life.deadline)
    assert ("stopped", "primary#1") in timeline(scene)
    scene.at(scene.engine().life.deadline)
    assert ("killed", "primary#1") in timeline(scene)


def test_what_a_phase_became_is_said_and_noted_but_not_what_stayed() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 10.0)
    assert scene.said("engine.phase")[-1] == {
        "engine": "primary#1", "was": "releasing", "now": "starting", "because": "clear"}
    assert ("started", "starting primary#2") in timeline(scene)
    before = len(scene.said("engine.phase"))
    scene.feed(e.Spawned(10.1, mark("primary#2"), 9))
    scene.feed(e.Spawned(10.2, mark("primary#2"), 9))
    assert len(scene.said("engine.phase")) == before + 1
    assert scene.engine().since == 10.1


def test_nothing_is_said_about_what_is_not_there() -> None:
    turn = Turn(World(), 0.0)
    turn.say("x", a="", b=None, c=0, d="y")
    assert turn.flush() == (c.Say("x", (("c", "0"), ("d", "y"))),)


@pytest.mark.parametrize(("to", "cause", "why"), [
    ("starting", "spawn_failed", "it was not started within 15 s"),
    ("loading", "load_timeout", "not ready after 3600 s"),
])
def test_a_phase_that_lasted_too_long_says_so(to: str, cause: str, why: str) -> None:
    scene = Scene(SOLO)
    if to == "loading":
        scene.feed(e.Spawned(0.0, M, 100))
    scene.at(scene.engine().life.deadline)
    assert (scene.engine().cause, scene.engine().why) == (cause, why)


def test_a_hang_says_how_long_no_token_came() -> None:
    scene = Scene(SOLO).serve()
    scene.scrape(1, at=1.0)
    scene.scrape(2, at=5.0)
    scene.scrape(2, at=15.0)
    scene.feed(e.Answered(25.0, M, False, 10.0))
    scene.at(85.0)
    assert scene.engine().cause == "engine_hang"
    assert scene.engine().why == (
        "no token for 80 s: the counters stand still and a one-token request is not answered")


def test_a_cause_that_the_log_named_is_not_replaced_by_a_timeout() -> None:
    scene = Scene(SOLO)
    scene.feed(e.SpawnFailed(1.0, M, "spawn_failed", "No such file"))
    scene.at(6.0)
    assert scene.world.incidents[0].text == "No such file"


@pytest.mark.parametrize(("phase", "cause", "why"), [
    (Phase.DOZING, "sleep_failed", "it did not fall asleep within 9 s"),
    (Phase.WAKING, "wake_failed", "it was not awake, with a token, within 7 s"),
])
def test_a_sleep_and_a_wake_that_take_too_long_say_so(phase: Phase, cause: str, why: str) -> None:
    turn = Turn(Scene(plan(limits=Limits(sleep_s=9, wake_s=7))).serve().world, 5.0)
    turn.change("primary", life=State(phase, wanted=True, deadline=5.0))
    turn.sign("primary", Sign.TIMEOUT)
    assert (turn.world.engine("primary").cause, turn.world.engine("primary").why) == (cause, why)


def test_a_sleep_and_a_wake_are_ordered_with_their_time() -> None:
    turn = Turn(Scene(plan(limits=Limits(sleep_s=9, wake_s=7))).serve().world, 5.0)
    for sign in (Sign.REST, Sign.SLEPT, Sign.ROUSE):
        turn.sign("primary", sign)
    assert [it for it in turn.flush() if not isinstance(it, c.Say)] == [c.Sleep(M, 9), c.Wake(M, 7)]


def test_a_look_that_is_due_already_is_not_asked_for_again() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    turn.look_soon()
    assert turn.world.look_at == 5.0 + LOOK_S and turn.commands == [c.SampleGpus()]
    for at, looks in ((5.05, 0), (5.0 + LOOK_S, 1)):
        later = Turn(turn.world, at)
        later.look_soon()
        assert len(later.commands) == looks, at


# -- evidence

def test_a_condemned_engine_is_dumped_with_stacks_and_only_once() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(10.0, M, (finding("oom_runtime"),)))
    dump = scene.only(c.Dump)
    assert dump == c.Dump(scene.world.incidents[0].id, M, "oom_runtime", stacks=True, deadline_s=10)
    scene.crash("primary", 11.0)
    assert len(scene.all(c.Dump)) == 1


def test_a_failure_that_left_no_time_for_a_dump_leaves_a_snapshot_behind() -> None:
    scene = Scene(plan(backup=False, limits=Limits(dump_s=7))).serve()
    scene.crash("primary", 10.0)
    assert scene.only(c.Dump) == c.Dump(scene.world.incidents[0].id, M, "unexpected_exit", stacks=False, deadline_s=7)


def test_a_planned_stop_leaves_none() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    scene.crash("primary", 11.0)
    assert not scene.all(c.Dump) and not scene.all(c.Alert)


def test_a_kill_waits_for_every_bundle_that_was_asked_for() -> None:
    """The answer to a snapshot must not pass for the answer to the dump before the kill."""
    scene = Scene(SOLO).serve()
    scene.snapshot()
    scene.feed(e.LogRead(1.0, M, (finding("oom_runtime"),)))
    assert scene.engine().bundles == 2
    scene.feed(e.Dumped(2.0, M, "x", "folder"))
    assert scene.phase() is Phase.DUMPING
    scene.feed(e.Dumped(3.0, M, "y", "folder"))
    assert scene.phase() is Phase.STOPPING
    scene.feed(e.Dumped(4.0, M, "z", "folder"))
    assert scene.engine().bundles == 0


def test_a_server_whose_core_died_is_left_a_second_to_leave_by_itself() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.MemberDied(1.0, M, 12, "VLLM::EngineCore"))
    scene.feed(e.Dumped(1.1, M, scene.world.incidents[0].id, "x"))
    assert (scene.phase(), scene.all(c.Term)) == (Phase.DUMPING, [])
    scene.at(1.0 + LEAVE_S)
    assert (scene.phase(), scene.only(c.Term).mark) == (Phase.STOPPING, M)
    scene.feed(e.Exited(2.0, M, 0))
    scene.bury()
    assert scene.serve("primary", 101).engine().generation == 2
    scene.feed(e.LogRead(2.0, mark("primary#2"), (finding("oom_runtime"),)))
    scene.feed(e.Dumped(2.1, mark("primary#2"), scene.world.incidents[0].id, "x"))
    assert scene.phase() is Phase.STOPPING, "another generation knows nothing of it"


def test_a_bundle_that_comes_after_that_second_holds_nothing_up() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.MemberDied(1.0, M, 12, "VLLM::EngineCore"))
    scene.feed(e.Dumped(1.0 + LEAVE_S, M, scene.world.incidents[0].id, "x"))
    assert scene.phase() is Phase.STOPPING


def test_a_bundle_that_comes_when_it_has_left_changes_nothing() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.MemberDied(1.0, M, 12, "VLLM::EngineCore"))
    scene.feed(e.Exited(1.1, M, 0))
    deadline = scene.engine().life.deadline
    scene.feed(e.Dumped(1.2, M, scene.world.incidents[0].id, "x"))
    assert (scene.phase(), scene.engine().life.deadline) == (Phase.KILLING, deadline)


def test_a_bundle_that_never_comes_holds_the_kill_up_for_ten_seconds_at_most() -> None:
    scene = Scene(SOLO).serve()
    scene.snapshot()
    scene.feed(e.LogRead(1.0, M, (finding("oom_runtime"),)))
    scene.at(11.0)
    assert scene.phase() is Phase.STOPPING


# -- pages

def test_a_page_says_how_many_failures_of_what_in_how_long() -> None:
    scene = Scene(plan(backup=False, limits=Limits(budget=0))).serve()
    scene.crash("primary", 10.0, finding("oom_runtime", "CUDA out of memory"))
    assert timeline(scene)[-1] == ("symptom", (
        "budget_spent: primary is held: 1 failures within 3600 s, 0 are allowed; the last was oom_runtime"))
    assert scene.world.incidents[0].urgency is Urgency.PAGE


def test_a_page_says_why_another_try_would_fail() -> None:
    scene = Scene(SOLO)
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 10.0, finding("bad_args", "unrecognized arguments: --swap-space"))
    assert timeline(scene)[-1] == ("symptom", (
        "bad_args: primary is held: another try would fail alike (unrecognized arguments: --swap-space)"))


def test_a_page_says_who_is_in_the_way() -> None:
    the_plan = plan(gpus=(0,), share=0.5, limits=Limits(release_s=20, stop_s=5, kill_s=5))
    found = (e.Survivor(mark("primary#1"), 100, leader=True, age_s=5.0),
             e.Survivor(mark("gone#2"), 300, leader=False, age_s=5.0))
    scene = Scene(the_plan, survivors=found)
    scene.ok()
    scene.ask("failover")
    scene.gpus(1.0, gpu(70, (7, "python", None, 70)))
    scene.at(5.0)
    scene.at(10.0)
    assert scene.phase() is Phase.WEDGED, "it leaves no more, so the wait has begun"
    scene.at(30.0)
    incident = scene.world.incidents[0]
    assert incident.urgency is Urgency.PAGE
    (need,) = (need for need in incident.needs if need.engine == "backup")
    assert need.class_ == "vram_held"
    assert need.en == ("backup can't be started: primary still has processes; gone#2 is not gone yet; "
                       "GPU 0 lacks 21.0 GiB, held by PID 7 (python) 70.0 GiB")


def test_a_page_says_that_no_sample_has_come() -> None:
    scene = Scene(plan(gpus=(0,)))
    scene.at(60.0)
    assert scene.world.incidents[0].text == "primary can't be started: no GPU sample has come"


def test_a_page_about_an_unkillable_engine_names_its_pid() -> None:
    scene = Scene(SOLO).serve(pid=4711)
    scene.feed(e.Exited(10.0, M, None))
    scene.at(40.0)
    assert scene.phase() is Phase.WEDGED
    assert scene.world.incidents[0].text == (
        "primary#1 survived SIGKILL for 30 s (PID 4711); no second engine is started on its GPUs; "
        "the driver or a reboot must free them")


# -- failures and whose they are

def test_a_failure_without_a_word_is_told_by_its_exit_code() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 10.0)
    assert (scene.world.incidents[0].class_, scene.world.incidents[0].text) == (
        "unexpected_exit", "it exited with code 1")


def test_a_failure_of_an_adopted_engine_may_have_no_exit_code() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, None))
    scene.bury()
    assert "it was an earlier daemon's child" in scene.world.incidents[0].text


def test_an_exit_that_nothing_explains_is_proved_by_the_end_of_its_log() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, 127))
    scene.feed(e.Emptied(10.0, M))
    scene.feed(e.LogRead(10.0, M, (), True, ("a first line", "sh: vllm: not found")))
    incident = scene.world.incidents[0]
    assert incident.text == "it exited with code 127; its log ends in: sh: vllm: not found"
    assert [each.text for each in incident.findings] == ["a first line", "sh: vllm: not found"]


@pytest.mark.parametrize("code", [126, 127])
def test_a_command_that_a_shell_can_not_run_is_held_after_one_try(code: int) -> None:
    scene = Scene(SOLO)
    scene.feed(e.Spawned(0.5, M, 100))
    scene.feed(e.Exited(1.0, M, code))
    scene.feed(e.Emptied(1.0, M))
    scene.feed(e.LogRead(1.0, M, (), True, ("sh: vllm: not found",)))
    incident = scene.world.incidents[0]
    assert (scene.phase(), scene.engine().life.doom, incident.class_) == (Phase.HELD, "spawn_failed", "spawn_failed")
    assert incident.text == f"it exited with code {code}; its log ends in: sh: vllm: not found"
    assert [each.text for each in incident.findings] == ["sh: vllm: not found"]


def test_an_exit_that_its_log_explains_needs_no_last_words() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, 1))
    scene.feed(e.Emptied(10.0, M))
    scene.feed(e.LogRead(10.0, M, (finding("oom_runtime", "out of memory"),), True, ("the end",)))
    incident = scene.world.incidents[0]
    assert incident.text == "out of memory" and [each.text for each in incident.findings] == ["out of memory"]


def test_exit_code_zero_is_a_code() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, 0))
    scene.bury()
    assert scene.world.incidents[0].text == "it exited with code 0"


def test_a_signal_that_nobody_of_us_sent_is_told_as_one() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, -9))
    scene.bury()
    assert scene.world.incidents[0].text == "it was ended by signal 9, which we did not send"
    assert (scene.engine().cause, scene.engine().generation) == ("", 2)


def test_what_holds_an_engine_is_the_cause_from_then_on() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, -9))
    scene.bury()
    mark = scene.engine().mark
    scene.feed(e.Spawned(10.5, mark, 300))
    scene.feed(e.LogRead(11.0, mark, (finding("bad_args", "unrecognized arguments: --x"),)))
    scene.feed(e.Exited(11.1, mark, 2))
    scene.bury()
    assert (scene.world.incidents[0].class_, scene.world.incidents[0].page) == (
        "bad_args", "primary is held: another try would fail alike (unrecognized arguments: --x)")


def test_the_most_specific_failure_of_a_generation_is_its_cause() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(10.0, M, (finding("engine_dead_v1", "dead"),)))
    scene.feed(e.LogRead(10.1, M, (finding("oom_runtime", "oom"),)))
    scene.feed(e.LogRead(10.2, M, (finding("engine_dead_v1", "dead again"),)))
    assert (scene.engine().cause, scene.engine().why) == ("oom_runtime", "oom")
    assert [proof.text for proof in scene.world.incidents[0].findings] == ["dead", "oom", "dead again"]


def test_what_follows_our_own_stop_is_no_symptom() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.StopAsked(10.0, "SIGTERM"))
    scene.feed(e.LogRead(10.1, M, (finding("engine_dead_v1"), finding("shm_stall"))))
    assert scene.world.incidents == () and scene.engine().cause == ""


@pytest.mark.parametrize("phase", ["backoff", "releasing", "held", "stopped"])
def test_a_word_about_a_dead_generation_comes_too_late(phase: str) -> None:
    limits = Limits(budget=0 if phase == "held" else 5)
    scene = Scene(plan(backup=False, gpus=(0,), share=0.5, limits=limits))
    scene.gpus(0.0, gpu(0))
    scene.serve()
    scene.crash("primary", 1.0)
    if phase == "backoff":
        scene.gpus(1.1, gpu(0))
        scene.serve()
        scene.crash("primary", 2.0)
    if phase == "stopped":
        scene.feed(e.StopAsked(3.0, "x"))
    assert scene.phase() == phase
    before = scene.world.incidents
    scene.feed(e.LogRead(3.1, scene.engine().mark, (finding("bad_args"),)))
    assert scene.world.incidents == before and scene.engine().life.doom == ""


def test_an_oom_is_counted_once_a_generation_and_forgotten_after_the_window() -> None:
    scene = Scene(plan(backup=False, limits=Limits(window_s=100))).serve()
    scene.feed(e.LogRead(10.0, M, (finding("oom_runtime"), finding("oom_runtime"))))
    scene.feed(e.LogRead(10.5, M, (finding("oom_runtime"),)))
    assert scene.engine().ooms == (10.0,)
    scene.crash("primary", 11.0)
    scene.serve()
    scene.feed(e.LogRead(110.0, mark("primary#2"), (finding("oom_runtime"),)))
    assert scene.engine().ooms == (110.0,), "the edge of the window is out of it"


def test_an_oom_in_the_very_instant_of_the_start_is_this_generations() -> None:
    scene = Scene(SOLO)
    scene.feed(e.Spawned(0.0, M, 100))
    scene.feed(e.LogRead(0.0, M, (finding("startup_oom"),)))
    scene.feed(e.LogRead(0.0, M, (finding("startup_oom"),)))
    assert scene.engine().ooms == (0.0,)


def test_what_the_gateway_said_of_a_death_is_told_once_there_is_an_incident() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Casualties(9.0, M, 3))
    scene.crash("primary", 10.0)
    assert timeline(scene).count(("in flight", "requests in flight on primary#1: 3, of them already answering: 0")) == 1


# -- pause

def paused() -> Scene:
    scene = Scene(SOLO).serve()
    scene.ask("pause")
    return scene


def test_under_pause_a_failure_is_told_once_and_left_alone() -> None:
    scene = paused()
    for at in (10.0, 11.0, 12.0):
        scene.feed(e.LogRead(at, M, (finding("engine_dead_v1"),)))
    assert scene.phase() is Phase.SERVING and not scene.all(c.Dump)
    assert scene.alerts() == [("opened", "engine_dead_v1")]
    assert [text for what, text in timeline(scene) if what == "paused"] == [
        "primary is left alone: automatic actions are paused"]
    assert scene.engine().life.charged and len(scene.engine().life.failures) == 1


def test_a_condition_under_pause_is_not_charged_because_it_will_be_seen_again() -> None:
    from vllm_watchdog.core.readings import Health

    scene = paused()
    for second in range(1, 200):
        scene.feed(e.Probed(float(second), M, Health.DEAD))
    assert scene.alerts() == [("opened", "api_unreachable")] and not scene.engine().life.charged
    assert len(timeline(scene)) < 12, "one line a minute"
    assert len(scene.all(c.Record)) < 12, "nor a record a second"
    assert scene.world.incidents[0].touched_at == 199.0


def test_under_pause_a_hang_is_told_too() -> None:
    scene = paused()
    scene.scrape(1, at=1.0)
    scene.at(10.0)
    scene.feed(e.Answered(20.0, M, False, 10.0))
    assert scene.phase() is Phase.SUSPECT
    scene.at(79.9)
    assert scene.alerts() == []
    scene.at(80.0)
    assert scene.alerts() == [("opened", "engine_hang")] and scene.phase() is Phase.SUSPECT
    assert scene.ask("resume").ok
    assert scene.phase() is Phase.DUMPING


def test_under_pause_a_restart_waits_without_a_word() -> None:
    scene = paused()
    scene.crash("primary", 10.0)
    told = len(scene.all(c.Alert))
    scene.at(500.0)
    assert scene.phase() is Phase.BACKOFF and len(scene.all(c.Alert)) == told


def test_a_fault_under_pause_of_an_engine_that_is_stopping_goes_its_way() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(5.0, M, (finding("oom_runtime"),)))
    scene.ask("pause")
    scene.feed(e.LogRead(6.0, M, (finding("bad_args"),)))
    assert scene.engine().life.doom == "bad_args"


# -- what a turn leaves behind

def test_an_incident_is_recorded_when_it_changed_and_not_when_it_was_only_touched() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 10.0)
    records = len(scene.all(c.Record))
    scene.at(11.0)
    assert len(scene.all(c.Record)) == records


def test_an_incident_that_ends_leaves_the_world_after_its_last_record() -> None:
    scene = Scene(SOLO).serve()
    scene.crash("primary", 10.0)
    scene.serve()
    scene.at(40.0)
    assert scene.world.incidents == ()
    assert scene.only(c.Record).incident.wall_resolved == pytest.approx(40.0 + 1_795_000_000.0)
    assert scene.only(c.Alert).kind == "resolved"


def test_two_incidents_of_one_turn_are_told_each() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    turn.symptom(HOST, "disk_low", Urgency.WARNING, "full")
    turn.symptom("backup", "oom_runtime", Urgency.CRITICAL, "oom")
    turn.symptom("primary", "engine_dead_v1", Urgency.CRITICAL, "dead")
    alerts = [(it.kind, it.incident.service, it.incident.class_) for it in turn.flush() if isinstance(it, c.Alert)]
    assert alerts == [("opened", "host", "disk_low"), ("opened", "primary", "oom_runtime")]


def test_a_note_without_an_incident_is_not_kept() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    turn.note("primary", "phase", "x")
    turn.cleared("primary", "x")
    assert turn.flush() == () and turn.world.incidents == ()


def test_a_symptom_that_cleared_is_noted_and_its_incident_is_calm_from_then_on() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    turn.symptom(HOST, "disk_low", Urgency.WARNING, "full")
    later = Turn(turn.world, 99.0)
    later.cleared(HOST, "disk_low of host")
    incident = later.world.incidents[0]
    last = incident.timeline[-1]
    assert (incident.touched_at, last.what, last.text) == (99.0, "cleared", "disk_low of host")


def test_a_bundle_names_a_generation_only_where_there_was_one() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    for name in (HOST, "backup", "primary"):
        turn.bundle("id", name, "why", stacks=False)
    assert turn.flush() == tuple(c.Dump("id", whose, "why", stacks=False, deadline_s=10) for whose in (None, None, M))
    assert [engine.bundles for engine in turn.world.engines] == [1, 0]


def test_waiting_for_memory_means_looking_often() -> None:
    scene = Scene(plan(gpus=(0,)))
    assert scene.only(c.SampleGpus) == c.SampleGpus()
    assert scene.world.look_at == LOOK_S == 0.1


def test_orphans_that_had_to_be_ended_are_named_in_the_timeline() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.LogRead(10.0, M, (finding("engine_dead_v1"),)))
    scene.feed(e.Exited(10.1, M, 0))
    scene.feed(e.Emptied(10.2, M, (Holder(12, "VLLM::EngineCore", M),)))
    assert ("reaped", "orphans ended: PID 12 (VLLM::EngineCore), ours: primary#1") in timeline(scene)
    assert ("exited", "primary#1 exited with code 0") in timeline(scene)


def test_every_sign_is_carried_out_by_name() -> None:
    turn = Turn(Scene(plan()).world, 5.0)
    turn.sign("primary", Sign.EXIT)
    assert c.Kill(M) in turn.flush()




def test_a_page_is_taken_back_when_its_engine_is_held_no_longer() -> None:
    scene = Scene(SOLO)
    scene.crash("primary", 1.0, finding("bad_args", "no such flag"))
    assert [need.engine for need in scene.world.incidents[0].needs] == ["primary"]
    scene.ask("restart", "primary")
    assert (scene.world.incidents[0].page, scene.world.incidents[0].needs) == ("", ())


# -- rates

def oom_rate(scene: Scene) -> list[str]:
    return [text for incident in scene.world.incidents for entry in incident.timeline
            if (text := entry.text).startswith("oom_rate")]


def test_more_ooms_of_a_service_than_allowed_within_five_minutes_are_said() -> None:
    """Counted over both engines: the prompt that kills the primary kills its backup next."""
    scene = Scene(plan()).serve()
    scene.crash("primary", 10.0, finding("oom_runtime"))
    scene.serve()
    scene.crash("primary", 20.0, finding("oom_runtime"))
    scene.serve("backup", 200)
    assert oom_rate(scene) == []
    scene.crash("backup", 30.0, finding("oom_runtime"))
    assert oom_rate(scene) == ["oom_rate: out of memory 3 times within 300 s"]
    assert scene.world.incidents[0].class_ == "oom_runtime"


def test_ooms_that_are_far_apart_are_no_rate() -> None:
    scene = Scene(SOLO).serve()
    for at in (10.0, 300.0, 310.0):
        scene.crash("primary", at, finding("oom_runtime"))
        scene.at(at + 5)
        scene.serve()
    assert oom_rate(scene) == []


def failing(scene: Scene, *ats: float) -> set[str]:
    for at in ats:
        scene.crash("primary", at)
        scene.serve()
        scene.at(at + 70)
    return {entry.text for record in scene.all(c.Record) for entry in record.incident.timeline
            if entry.text.startswith("crash_loop")}


def test_failures_that_a_restart_does_not_cure_are_said_though_none_spends_the_budget() -> None:
    scene = Scene(SOLO).serve()
    assert failing(scene, 10_000.0, 20_000.0, 30_000.0) == set()
    assert failing(scene, 40_000.0) == {"crash_loop: primary failed 4 times within a day; a restart does not cure it"}
    assert len(scene.world.failed) == 4


def test_failures_of_yesterday_are_history() -> None:
    scene = Scene(SOLO).serve()
    assert failing(scene, 10.0, 20_000.0, 30_000.0, DAY_S + 10.0) == set()


def test_an_operators_restart_forgives_what_failed() -> None:
    scene = Scene(SOLO).serve()
    failing(scene, 10_000.0, 20_000.0, 30_000.0)
    scene.now = 35_000.0
    scene.ask("restart", "primary")
    assert scene.world.failed == ()


# -- a second failure inside an open incident

def hung(scene: Scene, whose: str, since: float) -> None:
    """Its tokens stand still from `since` on, and a one-token request is not answered, until it is told to go."""
    name = mark(whose).engine
    second = since
    while scene.phase(name) is not Phase.DUMPING:
        second += 1.0
        scene.scrape(2.0, name, at=second)
        if scene.engine(name).pulse.asked_at is not None:
            scene.feed(e.Answered(second, mark(whose), False, 3.0))


def killed_then_hung() -> Scene:
    scene = Scene(plan(limits=Limits(still_s=3, suspect_s=5))).serve()
    scene.feed(e.Exited(10.0, M, -9))
    scene.bury("primary", finding("engine_proc_died", "engine core exited"))
    scene.feed(e.Dumped(10.1, M, scene.world.incidents[0].id, "logs/x"))
    scene.now = 12.0
    scene.serve(pid=200)
    scene.scrape(1.0, at=13.0)
    scene.scrape(2.0, at=20.0)
    hung(scene, "primary#2", 20.0)
    return scene


def test_a_second_failure_stands_beside_the_first_one_with_its_own_end_and_evidence() -> None:
    scene = killed_then_hung()
    incident = scene.world.incidents[0]
    scene.feed(e.Dumped(30.0, mark("primary#2"), incident.id, "logs/x/dump-2"))
    scene.feed(e.Exited(30.5, mark("primary#2"), 0))
    incident = scene.world.incidents[0]
    assert [(each.number, each.mark, each.class_, each.ended, each.folder) for each in incident.failures] == [
        (1, "primary#1", "engine_proc_died", Ended("primary#1", -9, False), "logs/x"),
        (2, "primary#2", "engine_hang", Ended("primary#2", 0, True), "logs/x/dump-2")]
    assert incident.class_ == "engine_proc_died", "the title stays the most specific cause"


def test_a_second_failure_of_another_class_is_told_with_what_was_done() -> None:
    scene = killed_then_hung()
    assert scene.alerts() == [("opened", "engine_proc_died"), ("worsened", "engine_proc_died")]
    alert = scene.only(c.Alert)
    assert alert.incident.failures[-1].class_ == "engine_hang"
    assert "failover" in [entry.what for entry in alert.incident.timeline]


def test_a_hang_counts_from_its_last_sign_of_life_though_the_backups_turn_begins_with_it() -> None:
    scene = killed_then_hung()
    assert scene.world.service("primary").wanted == "backup"
    assert (scene.world.incidents[0].down_s, scene.world.incidents[0].down_at) == (2.0, 20.0)


def test_a_clean_stop_leaves_the_ends_of_before() -> None:
    scene = Scene(SOLO).serve()
    scene.feed(e.Exited(10.0, M, -9))
    scene.bury()
    scene.serve(pid=200)
    scene.feed(e.StopAsked(20.0, "SIGTERM"))
    scene.feed(e.Exited(21.0, mark("primary#2"), 0))
    assert [each.ended for each in scene.world.incidents[0].failures] == [Ended("primary#1", -9, False)]


def test_the_second_engine_that_is_held_is_told_and_named_beside_the_first() -> None:
    scene = Scene(plan())
    scene.crash("primary", 1.0, finding("bad_args", "no such flag"))
    scene.crash("backup", 2.0, finding("bad_args", "no such flag"))
    assert scene.alerts() == [("opened", "bad_args"), ("worsened", "bad_args")]
    assert [need.engine for need in scene.world.incidents[0].needs] == ["primary", "backup"]
    scene.ask("restart", "primary")
    assert [need.engine for need in scene.world.incidents[0].needs] == ["backup"]
