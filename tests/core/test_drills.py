"""The table of drills, and the judgement of what was seen."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.core.scenes import plan

from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.drill_verdict import BUSY_OVER, Observed, Pace, judge, pace, unfit
from vllm_watchdog.core.drills import FAULTS, Ends, Fault, Part, Sees
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.journal_phrases import EVENTS
from vllm_watchdog.core.plan import Limits, Standby

PACE = Pace(hang_s=20.0, evidence_s=10.0, stop_s=30.0, start_s=60.0, release_s=60.0, next_s=5.0, settle_s=90.0)
GOOD = Observed(
    detected_s=0.05, evidence_s=0.4, gap_s=0.3, slowest_s=0.1, asked=200, lost=0, orphans=0, vram_left_bytes=0,
    incidents=("engine_proc_died",), alerts="opened, resolved", channels=1, back=True, took_s=9.0)
KILL = next(fault for fault in FAULTS if fault.name == "engine-core-kill")
CALM: dict[str, Any] = {
    "stopping": False, "paused": False, "incidents": [],
    "services": [{"name": "primary", "serving": "primary", "side": "primary"}],
    "engines": [{"name": "primary", "phase": "serving", "metrics": {"running": 1, "waiting": 0}},
                {"name": "backup", "phase": "asleep", "metrics": {"unknown": "no process"}}],
}


def broken(fault: Fault, seen: Observed) -> list[str]:
    return [check.what for check in judge(fault, seen, PACE) if not check.kept]


def test_every_name_is_one_word_for_one_fault() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_says_how_it_is_noticed_and_when_it_ends(fault: Fault) -> None:
    assert bool(fault.signs) == (fault.sees is not Sees.NONE)
    assert fault.lasts_s > 0 or fault.ends is not Ends.LATER
    for name, *class_ in (sign.split(" ") for sign in fault.signs):
        assert name in EVENTS and all(word in (*CATALOG, *Urgency) for word in class_)
    assert fault.incident in ("", "*") or fault.incident in CATALOG
    assert all(class_ in CATALOG for class_ in fault.also)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_touches_more_than_processes_of_the_service_is_for_the_sandbox_only(fault: Fault) -> None:
    if fault.part in (Part.FILES, Part.HOST, Part.CARD):
        assert fault.sandbox


def test_what_went_well_keeps_every_promise() -> None:
    assert broken(KILL, GOOD) == []
    assert len(judge(KILL, GOOD, PACE)) == 9


@pytest.mark.parametrize(("change", "what"), [
    ({"detected_s": None}, "detected"), ({"detected_s": 2.01}, "detected"),
    ({"evidence_s": None}, "evidence"), ({"evidence_s": 99.0}, "evidence"),
    ({"gap_s": 7.2}, "client gap"), ({"lost": 1}, "requests lost"), ({"orphans": 1}, "orphans"),
    ({"vram_left_bytes": 1}, "VRAM left over"), ({"incidents": ()}, "incidents"),
    ({"incidents": ("engine_proc_died", "unexpected_exit")}, "incidents"),
    ({"alerts": "opened"}, "alerts delivered"), ({"alerts": ""}, "alerts delivered"), ({"back": False}, "restored"),
])
def test_each_promise_is_broken_by_what_breaks_it_alone(change: dict[str, Any], what: str) -> None:
    assert broken(KILL, replace(GOOD, **change)) == [what]


@pytest.mark.parametrize(("change", "what"), [
    ({"gap_s": None, "asked": 0}, {"client gap", "requests lost"}), ({"vram_left_bytes": None}, {"VRAM left over"}),
    ({"channels": 0, "alerts": ""}, {"alerts delivered"})])
def test_what_can_not_be_seen_on_this_host_is_not_judged(change: dict[str, Any], what: set[str]) -> None:
    judged = {check.what for check in judge(KILL, replace(GOOD, **change), PACE)}
    assert judged == {check.what for check in judge(KILL, GOOD, PACE)} - what


def test_a_fault_without_an_incident_is_broken_by_one() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "daemon-stop")
    calm = replace(GOOD, detected_s=None, evidence_s=None, incidents=(), alerts="")
    assert broken(fault, calm) == []
    assert broken(fault, replace(calm, incidents=("engine_hang",))) == ["incidents"]


def test_only_the_class_that_is_promised_will_do_but_for_those_that_may_open_beside_it() -> None:
    oom = next(fault for fault in FAULTS if fault.name == "cuda-oom")
    assert broken(oom, replace(GOOD, incidents=("oom_runtime",))) == []
    assert broken(oom, GOOD) == ["incidents"]
    full = next(fault for fault in FAULTS if fault.name == "disk-full")
    assert broken(full, replace(GOOD, incidents=("disk_low", "engine_proc_died"))) == []
    assert broken(full, replace(GOOD, incidents=("disk_low",))) == ["incidents"]


def test_a_hang_is_given_its_patience_and_a_cold_start_its_time() -> None:
    limits = Limits(still_s=10, probe_s=10, suspect_s=60, dump_s=10, stop_s=30)
    hang = next(fault for fault in FAULTS if fault.name == "engine-core-stop")
    cold, sleeping, hot = (pace(plan(limits=limits, standby=standby), "primary", {"primary": 50.0, "other": 999.0})
                           for standby in (Standby.COLD, Standby.SLEEPING, Standby.HOT))
    assert cold.noticed_s(hang) == pytest.approx(83.0) and cold.noticed_s(KILL) == 2.0
    assert cold.gap_s(KILL, 0.0) > 100.0 > sleeping.gap_s(KILL, 0.0) > hot.gap_s(KILL, 0.0)     # type: ignore[operator]
    assert hot.gap_s(KILL, 2.0) == hot.gap_s(KILL, 0.0) + 2.0       # type: ignore[operator]
    for fault in FAULTS:
        assert cold.limit_s(fault) > cold.noticed_s(fault) + fault.lasts_s


def test_an_engine_that_was_never_seen_to_load_is_given_long() -> None:
    assert pace(plan(backup=False), "primary", {}).start_s > pace(plan(backup=False), "primary", {"primary": 1.0}).start_s


def test_a_calm_host_is_fit() -> None:
    assert unfit(CALM, "primary") == ()


@pytest.mark.parametrize(("change", "why"), [
    ({"stopping": True}, "stopping"), ({"paused": True}, "resume"), ({"incidents": [{"id": "X-1"}]}, "X-1 is open"),
    ({"services": [{"name": "primary", "serving": None, "side": "primary"}]}, "primary is not served"),
    ({"services": [{"name": "primary", "serving": "backup", "side": "backup"}]}, "failback"),
    ({"engines": [{"name": "a", "phase": "loading", "metrics": {"unknown": "no process"}}]}, "a is loading"),
    ({"engines": [{"name": "a", "phase": "serving", "metrics": {"running": BUSY_OVER, "waiting": 1}}]}, "5 requests"),
])
def test_a_host_that_is_not_calm_says_why(change: dict[str, Any], why: str) -> None:
    (reason,) = unfit(CALM | change, "primary")
    assert why in reason


def test_a_request_more_or_less_is_calm() -> None:
    busy = [{"name": "a", "phase": "serving", "metrics": {"running": BUSY_OVER, "waiting": None}}]
    assert unfit(CALM | {"engines": busy}, "primary") == ()
