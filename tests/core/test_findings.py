from __future__ import annotations

from vllm_watchdog.core.catalog import Action, Severity
from vllm_watchdog.core.details import Details
from vllm_watchdog.core.findings import EVIDENCE_LIMIT, PENDING_LIMIT, Finding, Incident, judge, settled
from vllm_watchdog.core.places import Phase

SERVING = Phase.SERVING


def finding(
    class_: str,
    line: int = 1,
    rank: int = 50,
    severity: Severity = Severity.FATAL,
    details: Details = (),
    phase: Phase = SERVING,
) -> Finding:
    return Finding(class_, severity, Action.RESTART, line, f"line {line}", details, phase, rank)


def test_a_class_is_new_once_and_gathers_facts() -> None:
    incident = Incident()
    assert incident.keep(finding("a", details=(("x", 1),)), SERVING)
    assert incident.keep(finding("a", 2, 60, details=(("x", 2), ("y", 3))), SERVING) is None
    (kept,) = incident.findings(SERVING)
    assert (kept.line, kept.rank, dict(kept.details)) == (1, 60, {"x": 1, "y": 3})


def test_a_fatal_line_confirms_what_was_pending() -> None:
    incident = Incident()
    incident.suspect(finding("oom", 1, 80))
    assert incident.keep(finding("warning", 2, 5, Severity.WARNING), SERVING)
    confirmed = incident.keep(finding("engine_dead_v1", 3), SERVING)
    assert confirmed and confirmed.class_ == "oom_runtime"
    incident.survived()
    assert [each.class_ for each in incident.fatal(SERVING)] == ["oom_runtime", "engine_dead_v1"]


def test_what_was_survived_is_forgotten() -> None:
    incident = Incident()
    for line in range(PENDING_LIMIT + 5):
        incident.suspect(finding("oom", line))
    assert len(incident.findings(SERVING)) == PENDING_LIMIT
    incident.survived()
    assert incident.findings(SERVING) == ()


def test_a_new_start_begins_with_nothing() -> None:
    incident = Incident()
    incident.keep(finding("a"), SERVING)
    incident.suspect(finding("oom"))
    incident.clear()
    assert incident.findings(SERVING) == ()


def test_findings_of_one_gpu_can_be_taken_back() -> None:
    incident = Incident()
    incident.keep(finding("xid_reset", details=(("pci", "a"),)), SERVING)
    incident.drop(("xid_reset", "xid_node"), "b")
    assert incident.findings(SERVING)
    incident.drop(("xid_reset",), "a")
    incident.keep(finding("x"), SERVING)
    incident.drop(("x",))
    assert incident.findings(SERVING) == ()


def test_the_phase_decides_what_an_oom_was() -> None:
    assert settled(finding("x"), SERVING).class_ == "x"
    assert settled(finding("oom", phase=Phase.UNKNOWN), Phase.STARTUP).class_ == "startup_oom"
    assert settled(finding("oom", phase=Phase.UNKNOWN), Phase.UNKNOWN).class_ == "oom_runtime"
    assert settled(finding("oom", phase=Phase.STARTUP), SERVING).class_ == "oom_runtime"
    assert settled(finding("startup_oom"), SERVING).action is Action.CONFIG_ERROR_STOP
    neighbour = finding("oom", phase=Phase.STARTUP, details=(("other_processes", ((7, 1),)),))
    assert settled(neighbour, Phase.STARTUP).action is Action.WAIT_VRAM


def test_the_cause_wins_and_its_line_is_always_shown() -> None:
    many = tuple(finding(f"c{line}", line) for line in range(20))
    verdict = judge((*many, finding("cause", 99, 90, details=(("x", 1),))))
    assert verdict.class_ == "cause" and dict(verdict.details) == {"x": 1}
    assert len(verdict.evidence) == EVIDENCE_LIMIT and verdict.evidence[-1] == (99, "line 99")
    assert judge(many).class_ == "c0"


def test_an_excerpt_without_a_phase_gets_the_only_one_its_class_has() -> None:
    assert judge((finding("bad_args", phase=Phase.UNKNOWN),)).phase == "startup"
    assert judge((finding("worker_died", phase=Phase.UNKNOWN),)).phase == "serving"
    assert judge((finding("worker_died"),)).phase == "serving"
    assert judge((finding("xid_app"),)).phase == "any"


def test_a_verdict_comes_with_advice() -> None:
    assert judge((finding("bad_args"),)).advice
