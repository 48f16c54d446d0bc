"""What was proved so far: findings, the incident they belong to, and the verdict on it.

An incident keeps the first line of each class and lets the highest rank win, so a cause beats its consequences.  A
failure that vLLM may survive waits here, pending, until its next words confirm it or take it back.  Pure and bounded:
one finding a class, a few pending ones, clipped text.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core.advice import advise
from vllm_watchdog.core.case import Case
from vllm_watchdog.core.catalog import CATALOG, Action, Severity
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.details import Details
from vllm_watchdog.core.signatures import STARTUP_CLASSES, Phase

EVIDENCE_LIMIT = 8      # lines in a verdict
PENDING_LIMIT = 8
KERNEL_RANK = {"xid_node": 95, "xid_reset": 92, "host_oom_kill": 85, "xid_app": 80, "xid_other": 9}
STALLS = ("shm_stall", "engine_stall", "scheduler_deadlock")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line that proves a class.  `line` counts from 1 in the text that was fed; `text` is clipped and masked."""

    class_: str
    severity: Severity
    action: Action
    line: int
    text: str
    details: Details = ()
    phase: Phase = Phase.UNKNOWN
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a whole text says; class "none" and action "ignore" where nothing is wrong."""

    class_: str
    severity: Severity
    action: Action
    phase: str
    evidence: tuple[tuple[int, str], ...] = ()
    details: Details = ()

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, in English, as far as the text alone tells."""
        return tuple(each.en for each in advise(Case(self.class_, self.details)))


NOTHING = Verdict("none", Severity.NONE, Action.IGNORE, Phase.UNKNOWN)


class Incident:
    """The findings since the engine's start.  Asked again, an OOM may turn out to have been a start-up error."""

    def __init__(self) -> None:
        self._first: dict[str, Finding] = {}    # the first finding of each class
        self._pending: list[Finding] = []

    def keep(self, finding: Finding, phase: Phase) -> Finding | None:
        """Remembers it; returns the most telling finding that is new by it.  A fatal one confirms what was pending."""
        fresh: list[Finding] = []
        if finding.severity is Severity.FATAL:
            fresh = [each for each in self._pending if self._add(each)]
            self._pending.clear()
        if self._add(finding):
            fresh.append(finding)
        return settled(max(fresh, key=lambda each: each.rank), phase) if fresh else None

    def complete(self, class_: str, line: int, text: str, details: Details) -> Finding | None:
        """The finding of that very line is told in full; None where there is none."""
        known = self._first.get(class_)
        if known is None or known.line != line:
            return None
        facts = tuple((dict(known.details) | dict(details)).items())
        whole = self._first[class_] = replace(known, text=text, details=facts)
        return whole

    def suspect(self, finding: Finding) -> None:
        """Remembers what may yet turn out harmless."""
        if len(self._pending) < PENDING_LIMIT:
            self._pending.append(finding)

    def survived(self) -> None:
        self._pending.clear()

    def drop(self, classes: tuple[str, ...], pci: object = None) -> None:
        """Takes findings back; only those of one GPU where `pci` is given."""
        for class_ in classes:
            if class_ in self._first and pci in (None, dict(self._first[class_].details).get("pci")):
                del self._first[class_]

    def clear(self) -> None:
        self._first.clear()
        self._pending.clear()

    def findings(self, phase: Phase) -> tuple[Finding, ...]:
        """All of them, pending ones too, as they look now that the engine is in `phase`."""
        return tuple(settled(each, phase) for each in (*self._first.values(), *self._pending))

    def fatal(self, phase: Phase) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings(phase) if each.severity is Severity.FATAL)

    def _add(self, finding: Finding) -> bool:
        """Whether the class is new; a later line of a known class only adds facts."""
        known = self._first.setdefault(finding.class_, finding)
        if known is finding:
            return True
        facts = dict(finding.details) | dict(known.details)
        self._first[known.class_] = replace(known, details=tuple(facts.items()), rank=max(known.rank, finding.rank))
        return False


def settled(finding: Finding, now: Phase) -> Finding:
    """The class of an OOM follows from the phase, which later lines may tell."""
    if finding.class_ not in ("oom", "startup_oom"):
        return finding
    unsure = finding.phase is Phase.UNKNOWN or (finding.phase is Phase.STARTUP and now is Phase.SERVING)
    phase = now if unsure else finding.phase
    if finding.class_ == "oom" and phase is not Phase.STARTUP:
        return replace(finding, class_="oom_runtime", phase=phase)
    others = "other_processes" in dict(finding.details)
    action = Action.WAIT_VRAM if others else CATALOG["startup_oom"].action
    return replace(finding, class_="startup_oom", action=action, phase=Phase.STARTUP)


def judge(found: tuple[Finding, ...]) -> Verdict:
    """The verdict on the findings of one incident: the highest rank wins, the earliest among equals."""
    best = min(found, key=lambda each: (-each.rank, each.line))
    facts = dict(best.details)
    for each in found:
        facts = dict(each.details) | facts
    others = sorted((each for each in found if each is not best), key=lambda each: each.line)
    shown = sorted([best, *others[: EVIDENCE_LIMIT - 1]], key=lambda each: each.line)
    lines = tuple(dict.fromkeys((each.line, each.text) for each in shown))
    return Verdict(best.class_, best.severity, best.action, _phase_of(best), lines, tuple(facts.items()))


def _phase_of(finding: Finding) -> str:
    """An excerpt that does not tell its phase: some classes exist only in one."""
    if finding.class_ in KERNEL_RANK:
        return "any"
    if finding.phase is not Phase.UNKNOWN:
        return finding.phase
    return Phase.STARTUP if finding.class_ in STARTUP_CLASSES else Phase.SERVING
