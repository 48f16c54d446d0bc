from __future__ import annotations

from dataclasses import replace
from math import inf

from tests.core.scenes import finding

from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import (
    DEATHS_KEPT,
    FINDINGS_KEPT,
    TIMELINE_KEPT,
    TOLD_S,
    Flight,
    Incident,
    Need,
    Urgency,
    down,
    failed,
    flown,
    joined,
    needed,
    noted,
    opened,
    owed,
    proved,
    relieved,
    remind_at,
    reminded,
    resolved,
    shifted,
    stamp,
    up,
    waited,
)
from vllm_watchdog.core.levels import Levels
from vllm_watchdog.core.readings import Wait

W, C, PAGE = Urgency.WARNING, Urgency.CRITICAL, Urgency.PAGE


def one(class_: str = "unexpected_exit", urgency: Urgency = C) -> Incident:
    return opened("primary", "backup", 3, class_, urgency, "exit code 1", 100.0, 1_795_000_100.0)


def told(incident: Incident) -> list[tuple[str, str]]:
    return [(entry.what, entry.text) for entry in incident.timeline]


def test_the_folder_is_fixed_when_it_opens() -> None:
    incident = one()
    assert incident.id == "20261118T110820Z-backup-unexpected_exit"
    assert (incident.service, incident.engine, incident.generation) == ("primary", "backup", 3)
    assert incident.class_ == "unexpected_exit"
    assert (incident.opened_at, incident.touched_at, incident.wall_opened, incident.wall_resolved) == (
        100.0, 100.0, 1_795_000_100.0, None)
    assert told(incident) == [("opened", "unexpected_exit: exit code 1")]
    assert incident.timeline[0].at == 100.0
    worse = joined(incident, "oom_runtime", C, "CUDA out of memory", 101.0)
    assert worse.id == incident.id


def test_a_stamp_is_utc_and_sorts() -> None:
    assert stamp(0) == "19700101T000000Z"


def test_what_says_more_becomes_the_cause() -> None:
    incident = joined(one(), "oom_runtime", C, "CUDA out of memory", 101.0)
    assert (incident.class_, incident.text, incident.touched_at) == ("oom_runtime", "CUDA out of memory", 101.0)
    assert told(incident)[-1] == ("symptom", "oom_runtime: CUDA out of memory")


def test_a_consequence_does_not_replace_the_cause() -> None:
    incident = joined(one("oom_runtime"), "engine_dead_v1", C, "EngineDeadError", 101.0)
    assert (incident.class_, incident.text) == ("oom_runtime", "exit code 1")
    assert told(incident)[-1] == ("symptom", "engine_dead_v1: EngineDeadError")


def test_of_two_that_say_as_much_the_first_is_the_cause() -> None:
    incident = joined(one("engine_hang"), "load_timeout", C, "not ready", 101.0)
    assert incident.class_ == "engine_hang"


def test_a_symptom_that_goes_on_is_one_line_a_minute() -> None:
    incident = one("api_unreachable")
    for second in range(1, 121):
        incident = joined(incident, "api_unreachable", C, f"for {second} s", 100.0 + second)
    assert TOLD_S == 60
    assert [entry.at for entry in incident.timeline] == [100.0, 160.0, 220.0]
    assert incident.touched_at == 220.0


def test_two_symptoms_that_go_on_together_do_not_flood_it() -> None:
    incident = one("api_unreachable")
    for second in range(1, 59):
        incident = joined(incident, ("api_unreachable", "port_stranger")[second % 2], C, "again", 100.0 + second)
    assert len(incident.timeline) == 2


def test_urgency_only_rises() -> None:
    assert joined(one(urgency=C), "kv_pressure", W, "full", 101.0).urgency is C
    assert joined(one(urgency=C), "wedged", PAGE, "survived", 101.0).urgency is PAGE
    assert [urgency.rank for urgency in (W, C, PAGE)] == [0, 1, 2]


def test_what_calls_a_human_says_why_even_if_the_class_was_told() -> None:
    incident = joined(one("bad_args"), "bad_args", PAGE, "primary is held", 100.5)
    assert told(incident)[-1] == ("symptom", "bad_args: primary is held")


def test_a_long_timeline_keeps_its_first_and_its_last_lines() -> None:
    incident = one()
    for number in range(TIMELINE_KEPT + 99):
        incident = noted(incident, 101.0 + number, "phase", str(number))
    texts = [entry.text for entry in incident.timeline]
    assert len(texts) == TIMELINE_KEPT
    assert texts[:3] == ["unexpected_exit: exit code 1", "0", "1"]
    assert texts[-2:] == [str(TIMELINE_KEPT + 97), str(TIMELINE_KEPT + 98)]


def test_a_timeline_of_exactly_its_limit_is_whole() -> None:
    incident = one()
    for number in range(TIMELINE_KEPT - 1):
        incident = noted(incident, 101.0, "phase", str(number))
    assert [entry.text for entry in incident.timeline[1:]] == [str(number) for number in range(TIMELINE_KEPT - 1)]


def test_a_failure_takes_the_place_of_a_warning_that_seems_to_say_more() -> None:
    incident = joined(one("vram_high", W), "unexpected_exit", C, "it exited with code 0", 101.0)
    assert (incident.class_, incident.text, incident.urgency) == ("unexpected_exit", "it exited with code 0", C)
    assert list(owed(one("vram_high", W), incident)) == ["worsened"]


def test_a_warning_after_a_failure_never_becomes_its_cause() -> None:
    assert joined(one("unexpected_exit"), "vram_high", W, "97 %", 101.0).class_ == "unexpected_exit"
    assert joined(one("kv_pressure", W), "vram_high", W, "97 %", 101.0).class_ == "vram_high"


def test_what_only_warns_here_and_is_fatal_by_its_class_explains_a_failure() -> None:
    assert joined(one("unexpected_exit"), "xid_node", W, "Xid 79", 101.0).class_ == "xid_node"
    assert joined(one("unexpected_exit"), "no_such_class", W, "?", 101.0).class_ == "unexpected_exit"


def test_figures_by_name_are_kept_with_a_line() -> None:
    assert noted(one(), 101.0, "started", "starting", engine="primary#2").timeline[-1].facts == (("engine", "primary#2"),)


def test_the_time_without_an_engine_adds_up() -> None:
    incident = down(one(), 102.0)
    assert down(incident, 105.0) is incident
    incident = up(incident, 110.0)
    assert (incident.down_at, incident.down_s, incident.up_at) == (None, 8.0, 110.0)
    assert up(incident, 111.0) is incident
    incident = up(down(incident, 120.0), 122.5)
    assert (incident.down_s, incident.up_at) == (10.5, 122.5)
    assert up(down(incident, 130.0), 129.0).down_s == 10.5
    assert up(down(incident, 103.0), 124.0).down_s == 12.0      # known late, and some of it was counted then


def test_of_many_deaths_the_last_are_kept() -> None:
    incident = one()
    for number in range(DEATHS_KEPT + 2):
        incident = waited(flown(incident, Flight(f"primary#{number}", 1, 0)), Wait(number, 1.0, 1.0))
    assert [flight.mark for flight in incident.flights] == [f"primary#{n}" for n in range(2, DEATHS_KEPT + 2)]
    assert [wait.requests for wait in incident.waits] == list(range(2, DEATHS_KEPT + 2))


def test_after_a_reboot_every_instant_is_moved() -> None:
    incident = replace(up(down(one(), 101.0), 103.0), levels=Levels(100.0))
    moved = shifted(down(incident, 104.0), 1000.0, 2000.0)
    assert (moved.opened_at, moved.touched_at, moved.down_at, moved.up_at) == (1100.0, 2000.0, 1104.0, 1103.0)
    assert (moved.timeline[0].at, moved.levels) == (1100.0, Levels(1100.0))
    assert (shifted(one(), 1.0, 2.0).down_at, shifted(one(), 1.0, 2.0).levels) == (None, None)


def test_proof_is_kept_once_and_not_without_end() -> None:
    lines = tuple(finding("oom_runtime", f"line {number}") for number in range(FINDINGS_KEPT + 5))
    incident = proved(proved(one(), lines[:2]), lines[:2])
    assert incident.findings == lines[:2]
    assert proved(incident, lines).findings == lines[:FINDINGS_KEPT]
    assert proved(incident, ()) is incident


def test_an_end_is_dated_and_said() -> None:
    incident = resolved(one(), 160.0, 1_795_000_160.0, "calm for 30 s")
    assert incident.wall_resolved == 1_795_000_160.0
    assert told(incident)[-1] == ("resolved", "calm for 30 s")


def test_an_opening_owes_one_alert() -> None:
    assert list(owed(None, one(urgency=PAGE))) == ["opened"]


def test_a_rise_in_urgency_owes_one_alert() -> None:
    before = one(urgency=W)
    assert list(owed(before, replace(before, urgency=C))) == ["worsened"]
    assert list(owed(before, noted(before, 101.0, "phase"))) == []


def test_an_end_owes_one_alert_also_where_it_opened_in_the_same_turn() -> None:
    after = resolved(one(), 160.0, 1_795_000_160.0, "")
    assert list(owed(one(), after)) == ["resolved"]
    assert list(owed(None, after)) == ["opened", "resolved"]


def test_a_human_who_is_needed_is_reminded_until_it_ends() -> None:
    calm = one(urgency=C)
    assert remind_at(calm, 60.0) == inf
    held = joined(calm, "budget_spent", PAGE, "held", 110.0)
    assert held.paged_at == 110.0 and remind_at(held, 60.0) == 170.0 and remind_at(held, 0.0) == inf
    again = reminded(joined(held, "budget_spent", PAGE, "held", 150.0), 170.0, 60.0)
    assert again.reminders == 1 and remind_at(again, 60.0) == 230.0
    assert list(owed(held, again)) == ["reminder"] and list(owed(again, again)) == []
    assert remind_at(resolved(again, 200.0, 0.0, "calm"), 60.0) == inf
    assert one(urgency=PAGE).paged_at == 100.0


def test_several_reminders_that_nobody_was_there_to_give_are_one() -> None:
    held = one(urgency=PAGE)
    late = reminded(held, 100.0 + 605.0, 60.0)
    assert late.reminders == 10 and remind_at(late, 60.0) == 100.0 + 11 * 60.0
    assert reminded(held, 159.999, 60.0).reminders == 1     # a rounding error must not make a reminder that counts nothing


# -- what is worth a further alert

def fails(incident: Incident, number: int, class_: str) -> Incident:
    return failed(incident, Failure(100.0 + number, f"primary#{number}", class_, "x"))


def test_a_further_failure_is_told_once_a_class() -> None:
    first = fails(one(urgency=C), 1, "engine_proc_died")
    second = fails(first, 2, "engine_hang")
    assert list(owed(first, second)) == ["worsened"]
    assert list(owed(second, fails(second, 3, "engine_hang"))) == []
    assert list(owed(second, fails(second, 3, "engine_proc_died"))) == []
    assert list(owed(second, fails(second, 2, "oom_runtime"))) == ["worsened"], "what it was is known better now"
    back = fails(fails(second, 2, "oom_runtime"), 3, "engine_hang")
    assert list(owed(fails(second, 2, "oom_runtime"), back)) == [], "it was told already"


def test_the_failure_that_an_incident_opened_with_is_no_further_one() -> None:
    opened_ = one(class_="oom_runtime", urgency=C)
    assert list(owed(opened_, fails(opened_, 1, "oom_runtime"))) == []
    first = fails(opened_, 1, "engine_dead_v1")
    assert list(owed(first, fails(first, 1, "cuda_fault"))) == [], "it is the same failure"
    assert list(owed(opened_, first)) == ["worsened"], "the first failure of an incident that was about something else"


def test_another_engine_that_needs_a_human_is_told_and_one_alone_is_not_told_again() -> None:
    none = one(urgency=PAGE)
    held = needed(none, Need("primary", "bad_args", "primary is held", "…"))
    both = needed(held, Need("backup", "bad_args", "backup is held", "…"))
    assert [list(owed(*pair)) for pair in ((none, held), (held, both), (both, both))] == [[], ["worsened"], []]
    assert both.page == "primary is held; backup is held"
    assert needed(both, Need("backup", "wedged", "backup is stuck", "…")).page == "primary is held; backup is stuck"
    assert list(owed(both, relieved(both, "primary"))) == []


def test_failures_move_with_the_clock() -> None:
    assert shifted(fails(one(), 1, "x"), 50.0, 200.0).failures[0].at == 151.0
