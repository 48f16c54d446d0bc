"""The life of an incident: opened, evidence, acted, recovered or held, resolved; and which alerts it owes.

One service has at most one open incident: what joins it is a symptom of it, and the most specific class is its cause.
The id, and with it the folder, is fixed when it opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf

from vllm_watchdog.core.blame import specificity
from vllm_watchdog.core.verdict import Finding

TIMELINE_KEPT = 300     # lines: the first ones and the last ones tell the story
TOLD_S = 60.0           # a symptom that goes on is one line in this long, not one a sample
FINDINGS_KEPT = 40


class Urgency(StrEnum):
    WARNING = "warning"     # look today
    CRITICAL = "critical"   # requests fail, or failed; the watchdog acts
    PAGE = "page"           # only a human can help

    @property
    def rank(self) -> int:
        return list(Urgency).index(self)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the timeline: `what` a dotted event name, `text` its figures in words."""

    at: float
    what: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Incident:
    """`id` is `20261129T144157Z-primary-oom_runtime`; instants are monotonic, `wall_*` epoch seconds."""

    id: str
    service: str
    engine: str
    generation: int
    class_: str
    urgency: Urgency
    opened_at: float
    wall_opened: float
    touched_at: float                   # last time a symptom joined
    wall_resolved: float | None = None
    text: str = ""                      # the sentence that proves the cause
    page: str = ""                      # why only a human can help, empty while the watchdog still acts
    timeline: tuple[Entry, ...] = ()
    findings: tuple[Finding, ...] = ()
    evidence: tuple[str, ...] = ()      # folders
    paged_at: float = inf               # when only a human could help
    reminders: int = 0                  # how often that was said again


def opened(service: str, engine: str, generation: int, class_: str, urgency: Urgency, text: str,
           at: float, wall: float) -> Incident:
    return Incident(
        id=f"{stamp(wall)}-{engine}-{class_}", service=service, engine=engine, generation=generation, class_=class_,
        urgency=urgency, opened_at=at, wall_opened=wall, touched_at=at, text=text,
        timeline=(Entry(at, "opened", f"{class_}: {text}"),), paged_at=at if urgency is Urgency.PAGE else inf,
    )


def stamp(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).strftime("%Y%m%dT%H%M%SZ")


def joined(incident: Incident, class_: str, urgency: Urgency, text: str, at: float) -> Incident:
    """A further symptom.  It becomes the cause if it says more than the cause so far."""
    worse = urgency.rank > incident.urgency.rank        # what calls a human says why, in any case
    incident = replace(incident, touched_at=at, urgency=max(incident.urgency, urgency, key=lambda u: u.rank))
    if incident.urgency is Urgency.PAGE:
        incident = replace(incident, paged_at=min(incident.paged_at, at))
    told = any(entry.what in ("opened", "symptom") and at - entry.at < TOLD_S and entry.text.startswith(f"{class_}: ")
               for entry in incident.timeline)
    if told and not worse:
        return incident
    incident = noted(incident, at, "symptom", f"{class_}: {text}")
    if specificity(class_) > specificity(incident.class_):
        return replace(incident, class_=class_, text=text)
    return incident


def noted(incident: Incident, at: float, what: str, text: str = "") -> Incident:
    """One more line in the timeline; a long one keeps its first and its last lines."""
    timeline = (*incident.timeline, Entry(at, what, text))
    if len(timeline) > TIMELINE_KEPT:
        timeline = (*timeline[: TIMELINE_KEPT // 2], *timeline[-TIMELINE_KEPT // 2 :])
    return replace(incident, timeline=timeline)


def proved(incident: Incident, findings: tuple[Finding, ...]) -> Incident:
    """Add the log lines that prove it."""
    new = tuple(finding for finding in findings if finding not in incident.findings)
    return replace(incident, findings=(incident.findings + new)[:FINDINGS_KEPT]) if new else incident


def resolved(incident: Incident, at: float, wall: float, text: str) -> Incident:
    return replace(noted(incident, at, "resolved", text), wall_resolved=wall)


def remind_at(incident: Incident, every_s: float) -> float:
    """When the next reminder is due that a human is needed; inf: none is (`every_s` 0: never)."""
    open_ = incident.wall_resolved is None
    return incident.paged_at + (incident.reminders + 1) * every_s if open_ and every_s else inf


def reminded(incident: Incident, at: float, every_s: float) -> Incident:
    """Counts the reminder that is due; a daemon that was away while several were owes one."""
    return replace(incident, reminders=max(int((at - incident.paged_at) // every_s), incident.reminders + 1))


def owed(before: Incident | None, after: Incident) -> Iterator[str]:
    """The alerts that a change owes: when it opens, becomes more urgent, still needs its human, and ends."""
    if before is None:
        yield "opened"
    elif after.urgency.rank > before.urgency.rank:
        yield "worsened"
    elif after.reminders > before.reminders:
        yield "reminder"
    if after.wall_resolved is not None:
        yield "resolved"
