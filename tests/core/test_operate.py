from __future__ import annotations

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.plan import EnginePlan, Limits, Plan, Standby
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.world import World, remembered

M = mark("primary#1")


def serving(**options: object) -> Scene:
    return Scene(plan(**options)).serve()


def test_what_was_asked_is_said_and_answered_to_who_asked() -> None:
    scene = serving()
    scene.feed(e.Asked(5.0, 42, "pause", None, "upgrade"))
    assert scene.only(c.Answer).ref == 42
    assert scene.said("operator.asked") == [{"verb": "pause", "text": "upgrade"}]


def test_an_unknown_verb_is_refused() -> None:
    answer = serving().ask("dance")
    assert (answer.ok, answer.text) == (False, "unknown verb dance")


@pytest.mark.parametrize("verb", ["restart", "failover", "failback", "pause", "resume", "snapshot", "handover", "dance"])
def test_nothing_is_begun_while_the_daemon_stops(verb: str) -> None:
    scene = serving()
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    before = scene.world
    answer = scene.ask(verb, "primary")
    assert (answer.ok, answer.text) == (False, "the daemon is stopping")
    assert scene.world == before


# -- restart

def test_a_restart_stops_and_starts_without_a_charge() -> None:
    scene = serving()
    answer = scene.ask("restart", "primary")
    assert answer.ok and answer.text == (
        "primary (generation 1, serving) is being stopped, and then started; its failures are forgiven")
    assert scene.only(c.Term).mark == M
    scene.crash()
    assert scene.only(c.Spawn).mark == mark("primary#2")
    assert scene.engine().life.failures == () and not scene.world.incidents


@pytest.mark.parametrize(("engine", "why"), [
    ("nobody", "no engine 'nobody' is configured; there are: primary, backup"),
    (None, "no engine None is configured; there are: primary, backup"),
    ("backup", "backup is not in service, primary is: use failover or failback"),
])
def test_a_restart_of_what_does_not_serve_is_refused(engine: str | None, why: str) -> None:
    answer = serving().ask("restart", engine)
    assert (answer.ok, answer.text) == (False, why)


def test_a_held_engine_is_started_and_its_failures_are_forgiven() -> None:
    scene = serving(backup=False, limits=Limits(budget=0))
    scene.crash()
    assert scene.phase() is Phase.HELD
    answer = scene.ask("restart", "primary")
    assert answer.text == "primary (generation 1, held) is being started; its failures are forgiven"
    assert scene.phase() is Phase.STARTING and scene.engine().life.failures == ()


def test_a_waiting_engine_is_started_at_once() -> None:
    scene = serving(backup=False)
    scene.crash()
    scene.serve()
    scene.crash()
    assert scene.phase() is Phase.BACKOFF
    assert "is being started" in scene.ask("restart", "primary").text
    assert scene.phase() is Phase.STARTING


def test_a_restart_is_noted_in_the_open_incident() -> None:
    scene = serving(backup=False)
    scene.crash()
    scene.ask("restart", "primary")
    assert ("operator", "restart of primary") in [(t.what, t.text) for t in scene.world.incidents[0].timeline]


# -- failover and failback

def test_a_failover_and_a_failback_change_sides() -> None:
    scene = serving()
    answer = scene.ask("failover")
    assert (answer.ok, answer.text) == (True, "primary: primary is being stopped, then backup starts")
    assert scene.world.services[0].side is Side.BACKUP
    assert scene.said("service.failover") == [
        {"service": "primary", "leaving": "primary", "to": "backup", "because": "operator"}]
    scene.crash()
    scene.serve("backup")
    answer = scene.ask("failback", "backup")
    assert (answer.ok, answer.text) == (True, "primary: backup is being stopped, then primary starts")
    assert scene.said("service.failback")[0]["to"] == "primary"


@pytest.mark.parametrize(("mode", "there", "back"), [
    (Standby.COLD, "primary is being stopped, then backup starts", "backup is being stopped, then primary starts"),
    (Standby.SLEEPING, "primary is being stopped, then backup is woken", "backup is put to sleep, then primary starts"),
    (Standby.HOT, "primary stays as it is, backup takes over", "backup stays as it is, primary takes over"),
])
def test_the_answer_says_what_a_change_of_sides_means_in_each_mode(mode: Standby, there: str, back: str) -> None:
    scene = Scene(plan(standby=mode))
    if mode is Standby.SLEEPING:
        scene.serve("backup")
        scene.sleep()
    scene.serve()
    if mode is Standby.HOT:
        scene.serve("backup")
    assert scene.ask("failover").text == f"primary: {there}"
    if mode is not Standby.HOT:
        scene.crash()
    if mode is Standby.SLEEPING:
        scene.wake()
    if mode is Standby.COLD:
        scene.serve("backup")
    assert scene.ask("failback").text == f"primary: {back}"


def test_a_human_wakes_a_backup_whose_failures_are_forgiven_or_starts_one_that_is_lost() -> None:
    scene = Scene(plan(standby=Standby.SLEEPING))
    scene.serve("backup")
    scene.crash("backup", 1.0)
    scene.serve()
    assert scene.ask("failover").text == "primary: primary is being stopped, then backup starts"
    scene.crash()
    assert scene.phase("backup") is Phase.STARTING and scene.engine("backup").life.failures == ()


@pytest.mark.parametrize("name", ["primary", "backup"])
@pytest.mark.parametrize("side", ["failback", "failover"])
def test_each_engine_of_a_hot_pair_can_be_restarted_whoever_serves(name: str, side: str) -> None:
    scene = Scene(plan(standby=Standby.HOT)).serve().serve("backup")
    scene.ask(side)
    assert scene.ask("restart", name).ok
    assert scene.phase(name) is Phase.STOPPING


def test_a_failover_to_where_it_is_already_changes_nothing() -> None:
    scene = serving()
    answer = scene.ask("failback", "primary")
    assert (answer.ok, answer.text) == (True, "primary: primary is already meant to serve")
    assert scene.phase() is Phase.SERVING


def test_a_failover_without_a_backup_is_refused() -> None:
    scene = serving(backup=False)
    assert scene.ask("failover").text == "there is no backup to change to"
    answer = scene.ask("failover", "primary")
    assert (answer.ok, answer.text) == (False, "there is no backup to change to for 'primary'")


def test_a_failover_of_nobody_is_told_who_there_is() -> None:
    answer = serving().ask("failback", "nope")
    assert (answer.ok, answer.text) == (False, "no engine 'nope' is configured; there are: primary, backup")


def test_a_failover_that_names_no_engine_changes_every_service_that_can() -> None:
    engines = (EnginePlan("a", 1, (0,)), EnginePlan("a2", 2, (0,), backup_for="a"), EnginePlan("b", 3, (1,)),
               EnginePlan("b2", 4, (1,), backup_for="b"), EnginePlan("c", 5, (2,)))
    scene = Scene(Plan(engines))
    scene.gpus(0.1, *(gpu(0, index=index) for index in range(3)))
    answer = scene.ask("failover")
    assert answer.text == "a: a is being stopped, then a2 starts; b: b is being stopped, then b2 starts"
    assert scene.ask("failback", "b").text == "b: b2 is being stopped, then b starts"
    assert [service.side for service in scene.world.services] == [Side.BACKUP, Side.PRIMARY, Side.PRIMARY]


def test_a_human_sends_it_even_to_an_engine_that_is_held() -> None:
    scene = Scene(plan())
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 1.0, finding("bad_args"))
    assert scene.phases() == {"primary": Phase.HELD, "backup": Phase.STARTING}
    scene.serve("backup")
    scene.ask("failback")
    scene.crash("backup")
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STOPPED}


def test_a_failover_is_noted_in_the_open_incident() -> None:
    scene = serving()
    scene.crash()
    scene.serve()
    scene.ask("failover")
    told = [(t.what, t.text) for t in scene.world.incidents[0].timeline]
    assert ("operator", "failover") in told and ("failover", "primary -> backup, because: operator") in told


# -- pause and resume

def test_a_pause_and_a_resume_say_what_they_mean() -> None:
    scene = serving()
    answer = scene.ask("pause")
    assert (answer.ok, answer.text) == (True, "automatic actions are paused; watching, evidence and alerts go on")
    assert scene.world.paused
    answer = scene.ask("resume")
    assert (answer.ok, answer.text) == (True, "automatic actions are on")
    assert not scene.world.paused and scene.phase() is Phase.SERVING


def test_what_a_log_said_under_pause_is_acted_on_after_it() -> None:
    scene = serving()
    scene.ask("pause")
    scene.feed(e.LogRead(10.0, M, (finding("engine_dead_v1"),)))
    scene.now = 20.0
    scene.ask("resume")
    assert scene.phase() is Phase.DUMPING and len(scene.engine().life.failures) == 1


def test_what_has_lived_on_since_is_left_alone() -> None:
    scene = serving()
    scene.ask("pause")
    scene.scrape(1, at=9.0)
    scene.feed(e.LogRead(10.0, M, (finding("engine_dead_v1"),)))
    scene.scrape(2, at=10.5)
    scene.now = 11.0
    scene.ask("resume")
    assert scene.phase() is Phase.SERVING


def test_tokens_of_the_same_instant_do_not_save_it() -> None:
    scene = serving()
    scene.ask("pause")
    scene.scrape(1, at=9.0)
    scene.scrape(2, at=10.0)
    scene.feed(e.LogRead(10.0, M, (finding("engine_dead_v1"),)))
    scene.ask("resume")
    assert scene.phase() is Phase.DUMPING


def test_a_doomed_engine_is_held_after_the_pause() -> None:
    scene = serving(backup=False)
    scene.ask("pause")
    scene.feed(e.LogRead(10.0, M, (finding("cuda_hw"),)))
    scene.ask("resume")
    scene.feed(e.Dumped(11.0, M, "x", "y"))
    scene.crash("primary", 12.0)
    assert scene.phase() is Phase.HELD


def test_an_engine_that_dies_under_pause_is_started_after_it() -> None:
    scene = serving()
    scene.ask("pause")
    scene.crash("primary", 10.0)
    scene.at(99.0)
    assert scene.phase() is Phase.BACKOFF
    scene.ask("resume")
    assert scene.phase() is Phase.STARTING


def test_a_human_may_restart_and_fail_over_under_pause() -> None:
    scene = serving()
    scene.ask("pause")
    scene.ask("restart", "primary")
    scene.crash()
    assert scene.phase() is Phase.STARTING
    scene.serve()
    scene.ask("failover")
    scene.crash()
    assert scene.phase("backup") is Phase.STARTING


# -- snapshot

def test_a_snapshot_opens_a_folder_of_its_own_and_the_history_lists_it() -> None:
    scene = serving()
    scene.snapshot(text="before the upgrade")
    folder = "20261118T110640Z-primary-snapshot"
    assert scene.only(c.Dump) == c.Dump(folder, M, "before the upgrade", stacks=True, deadline_s=10)
    listed = scene.only(c.Record).incident
    assert (listed.id, listed.class_, listed.text, listed.wall_resolved) == (
        folder, "snapshot", "before the upgrade", listed.wall_opened)
    assert not scene.world.incidents and not scene.all(c.Alert)


def test_a_snapshot_is_answered_when_it_is_written() -> None:
    scene = serving()
    scene.snapshot()
    assert not scene.all(c.Answer)
    scene.feed(e.Dumped(scene.now, None, "another", "logs/incidents/another"))
    assert not scene.all(c.Answer)
    missing = ("stacks.txt: py-spy is not installed",)
    scene.feed(e.Dumped(scene.now, M, "20261118T110640Z-primary-snapshot", "logs/incidents/x", missing))
    assert scene.only(c.Answer) == c.Answer(7, True, "logs/incidents/x (without stacks.txt: py-spy is not installed)")
    assert scene.world.snapshots == ()


@pytest.mark.parametrize(("missing", "why"), [
    (("everything: 0.40 GiB free on the log disk",), "0.40 GiB free on the log disk"),
    (("ps.txt: No space left on device", "bundle.txt: No space left on device"),
     "ps.txt: No space left on device, bundle.txt: No space left on device"),
])
def test_a_snapshot_that_was_not_written_is_refused_with_the_reason(missing: tuple[str, ...], why: str) -> None:
    scene = serving()
    scene.snapshot()
    scene.feed(e.Dumped(scene.now, M, "20261118T110640Z-primary-snapshot", "", missing))
    assert scene.only(c.Answer) == c.Answer(7, False, f"nothing was written: {why}")


def test_one_of_two_snapshots_that_was_not_written_is_told_with_the_other() -> None:
    scene = Scene(Plan((EnginePlan("a", 1), EnginePlan("b", 2))))
    scene.snapshot()
    scene.feed(e.Dumped(scene.now, mark("a#1"), "20261118T110640Z-a-snapshot", "", ("everything: full",)))
    scene.feed(e.Dumped(scene.now, mark("b#1"), "20261118T110640Z-b-snapshot", "logs/b"))
    assert scene.only(c.Answer) == c.Answer(7, False, "nothing was written: full\nlogs/b")


def test_a_snapshot_joins_the_open_incident() -> None:
    scene = serving()
    scene.crash()
    scene.snapshot("backup")
    dump = scene.only(c.Dump)
    assert (dump.incident, dump.mark, dump.reason) == (scene.world.incidents[0].id, None, "snapshot")


def test_a_snapshot_of_an_engine_that_is_not_configured_is_refused() -> None:
    answer = serving().ask("snapshot", "nobody")
    assert (answer.ok, answer.text) == (False, "no engine 'nobody' is configured; there are: primary, backup")


def test_a_snapshot_without_a_name_is_one_of_every_service() -> None:
    engines = (EnginePlan("a", 1), EnginePlan("b", 2))
    scene = Scene(Plan(engines))
    scene.snapshot()
    assert [dump.mark for dump in scene.all(c.Dump)] == [mark("a#1"), mark("b#1")]
    scene.feed(e.Dumped(scene.now, mark("b#1"), "20261118T110640Z-b-snapshot", "b"))
    assert not scene.all(c.Answer)
    scene.feed(e.Dumped(scene.now, mark("a#1"), "20261118T110640Z-a-snapshot", "a"))
    assert scene.only(c.Answer).text == "b\na"


def test_a_held_backup_is_forgiven_by_a_restart_and_not_started() -> None:
    scene = serving(limits=Limits(budget=0))
    scene.ask("failover")
    scene.crash("primary")
    scene.serve("backup")
    scene.crash("backup")
    assert scene.phase("backup") is Phase.HELD
    scene.serve("primary")
    answer = scene.ask("restart", "backup")
    assert (answer.ok, answer.text) == (True, "backup is not held any more; it starts when it is needed")
    assert (scene.phase("backup"), scene.phase("primary")) == (Phase.STOPPED, Phase.SERVING)
    assert scene.engine("backup").life.failures == ()


# -- handover

def test_a_handover_leaves_everything_as_it_is_and_forgives_nothing() -> None:
    scene = serving()
    scene.crash("primary", 5.0)
    scene.serve()
    before = remembered(scene.world)
    answer = scene.ask("handover")
    assert answer.ok and answer.text == "this daemon leaves; the next one takes over primary#2"
    assert scene.only(c.Quit) == c.Quit()
    assert not scene.all(c.Term) and remembered(scene.world) == before
    assert scene.engine().life.failures == (5.0,)
    assert scene.said("daemon.leaving") == [{"engines": "primary#2"}]


def test_a_handover_without_a_process_hands_over_none() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.SpawnFailed(0.1, M, "port_stranger", "taken"))
    assert scene.ask("handover").text == "this daemon leaves; the next one takes over no engine"


def test_a_handover_without_systemd_says_that_nobody_starts_the_next_one() -> None:
    scene = Scene(plan(backup=False))
    scene.world, _ = advance(World(), e.Booted(0.0, plan(backup=False), 0.0, "boot-1", supervised=False))
    assert scene.ask("handover").text == (
        "this daemon leaves; the next one takes over primary#1. It is not run by systemd, so nobody starts the next one: "
        "until you do (llm-watchdog run), nobody watches the engines")
