"""The life of an incident: opened, evidence, acted, recovered or held, resolved; and which alerts it owes.

One service has at most one open incident: what joins it is a symptom of it, and the most specific class is its cause;
a failure explains more than any warning.  The id, and with it the folder, is fixed when it opens.  It holds facts only;
`story` says them in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from vllm_watchdog.core import causes
from vllm_watchdog.core.blame import specificity
from vllm_watchdog.core.catalog import CATALOG, Severity, Text, Words, both
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.failures import Failure, added
from vllm_watchdog.core.levels import Levels
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.readings import InFlight, Wait
from vllm_watchdog.core.units import stamp
from vllm_watchdog.core.verdict import Finding

HOST = "host"           # the service of what belongs to no engine
TIMELINE_KEPT = 300     # lines: the first ones and the last ones tell the story
TOLD_S = 60.0           # a symptom that goes on is one line in this long, not one a sample
FINDINGS_KEPT = 40
DEATHS_KEPT = 6         # whose requests, and whose clients' waits, are told one by one
REQUESTS_KEPT = 3       # of one death, the largest


class Urgency(StrEnum):
    WARNING = "warning"     # look today
    CRITICAL = "critical"   # requests fail, or failed; the watchdog acts
    PAGE = "page"           # only a human can help

    @property
    def rank(self) -> int:
        return list(Urgency).index(self)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the timeline: `what` a word of `causes`, `text` its figures in English, `facts` the same by name; `zh`:
    `text` in Chinese, empty where it is the same."""

    at: float
    what: str
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    zh: str = ""

    @property
    def words(self) -> Text:
        return Text(self.text, self.zh or self.text)


@dataclass(frozen=True, slots=True)
class Flight:
    """The requests that were there when one generation died: all of them, those whose response had begun, the largest."""

    mark: str
    count: int
    begun: int
    largest: tuple[InFlight, ...] = ()


@dataclass(frozen=True, slots=True)
class Need:
    """Why only a human can help with one engine, and the class of that, in English and Chinese."""

    engine: str
    class_: str
    en: str
    zh: str


@dataclass(frozen=True)
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
    needs: tuple[Need, ...] = ()        # one an engine that waits for a human; () while the watchdog still acts
    timeline: tuple[Entry, ...] = ()
    findings: tuple[Finding, ...] = ()
    evidence: tuple[str, ...] = ()      # folders
    paged_at: float = inf               # when only a human could help
    reminders: int = 0                  # how often that was said again
    args: tuple[tuple[str, str], ...] = ()      # the engine's sizing flags, as configured
    port: int = 0
    levels: Levels | None = None        # memory when the cause was seen
    flights: tuple[Flight, ...] = ()
    waits: tuple[Wait, ...] = ()
    failures: tuple[Failure, ...] = ()  # of each generation, in order
    classes: tuple[str, ...] = ()       # that a failure of it ever had: each is told once
    unserved: bool = False              # no engine had served yet when it opened
    down_at: float | None = None        # since when nobody serves; None: somebody does
    down_s: float = 0.0                 # together, of the times before
    up_at: float | None = None          # when the service came back last
    zh: str = ""                        # `text` in Chinese; empty: the same

    @property
    def words(self) -> Text:
        """The sentence that proves the cause."""
        return Text(self.text, self.zh or self.text)

    @property
    def page(self) -> str:
        """Why only a human can help; empty while the watchdog still acts."""
        return "; ".join(need.en for need in self.needs)


def opened(service: str, engine: str, generation: int, class_: str, urgency: Urgency, words: Words,
           at: float, wall: float) -> Incident:
    incident = Incident(
        id=f"{stamp(wall)}-{engine}-{class_}", service=service, engine=engine, generation=generation, class_=class_,
        urgency=urgency, opened_at=at, wall_opened=wall, touched_at=at, paged_at=at if urgency is Urgency.PAGE else inf,
    )
    return caused(noted(incident, at, "opened", _symptom(class_, words)), class_, words)


def caused(incident: Incident, class_: str, words: Words) -> Incident:
    """With its cause, as it is known by now."""
    text = both(words)
    return replace(incident, class_=class_, text=text.en, zh=text.own_zh)


def _symptom(class_: str, words: Words) -> Text:
    return filled(causes.SYMPTOM, class_=class_, words=both(words))


def joined(incident: Incident, class_: str, urgency: Urgency, words: Words, at: float) -> Incident:
    """A further symptom.  It becomes the cause if it says more than the cause so far."""
    worse = urgency.rank > incident.urgency.rank        # what calls a human says why, in any case
    news = _says_more(incident, class_, urgency)
    incident = replace(incident, touched_at=at, urgency=max(incident.urgency, urgency, key=lambda u: u.rank))
    if incident.urgency is Urgency.PAGE:
        incident = replace(incident, paged_at=min(incident.paged_at, at))
    told = any(entry.what in ("opened", "symptom") and at - entry.at < TOLD_S and entry.text.startswith(f"{class_}: ")
               for entry in incident.timeline)
    if told and not worse:
        return incident
    incident = noted(incident, at, "symptom", _symptom(class_, words))
    return caused(incident, class_, words) if news else incident


def _says_more(incident: Incident, class_: str, urgency: Urgency) -> bool:
    """No warning explains a failure that follows it, so an alert that gets worse names what failed; and none does later."""
    failed, so_far = urgency is not Urgency.WARNING, incident.urgency is not Urgency.WARNING
    if failed and not so_far:
        return True
    explains = failed or not so_far or (class_ in CATALOG and CATALOG[class_].severity is Severity.FATAL)
    return explains and specificity(class_) > specificity(incident.class_)


def noted(incident: Incident, at: float, what: str, words: Words = "", **facts: str) -> Incident:
    """One more line in the timeline; a long one keeps its first and its last lines."""
    text = both(words)
    entry = Entry(at, what, text.en, tuple(facts.items()), text.own_zh)
    timeline = (*incident.timeline, entry)
    if len(timeline) > TIMELINE_KEPT:
        timeline = (*timeline[: TIMELINE_KEPT // 2], *timeline[-TIMELINE_KEPT // 2 :])
    return replace(incident, timeline=timeline)


def proved(incident: Incident, findings: tuple[Finding, ...]) -> Incident:
    """Add the log lines that prove it."""
    new = tuple(finding for finding in findings if finding not in incident.findings)
    return replace(incident, findings=(incident.findings + new)[:FINDINGS_KEPT]) if new else incident


def failed(incident: Incident, failure: Failure) -> Incident:
    """One generation more has failed, or more is known of its failure."""
    classes = incident.classes if failure.class_ in incident.classes else (*incident.classes, failure.class_)
    return replace(incident, failures=added(incident.failures, failure), classes=classes)


def needed(incident: Incident, need: Need) -> Incident:
    """Only a human can help with this engine."""
    return replace(incident, needs=(*relieved(incident, need.engine).needs, need))


def relieved(incident: Incident, engine: str) -> Incident:
    """This engine needs no human any more."""
    return replace(incident, needs=tuple(need for need in incident.needs if need.engine != engine))


def flown(incident: Incident, flight: Flight) -> Incident:
    """Add the requests that were there at a death."""
    return replace(incident, flights=(*incident.flights, flight)[-DEATHS_KEPT:])


def waited(incident: Incident, wait: Wait) -> Incident:
    """Add what clients waited."""
    return replace(incident, waits=(*incident.waits, wait)[-DEATHS_KEPT:])


def down(incident: Incident, at: float) -> Incident:
    """Nobody serves, since `at`; what lies before the last return counted then."""
    if incident.down_at is not None:
        return incident
    return replace(incident, down_at=at if incident.up_at is None else max(at, incident.up_at))


def up(incident: Incident, at: float) -> Incident:
    """Somebody serves, or the service was stopped on purpose: the time without an engine ends."""
    if incident.down_at is None:
        return incident
    return replace(incident, down_at=None, down_s=incident.down_s + max(at - incident.down_at, 0.0), up_at=at)


def shifted(incident: Incident, by: float, at: float) -> Incident:
    """After a reboot the monotonic clock began anew: every instant is moved; it is `at` now."""
    def moved(instant: float | None) -> float | None:
        return None if instant is None else instant + by

    return replace(
        incident, opened_at=incident.opened_at + by, touched_at=at, down_at=moved(incident.down_at),
        up_at=moved(incident.up_at), paged_at=incident.paged_at + by,
        timeline=tuple(replace(entry, at=entry.at + by) for entry in incident.timeline),
        failures=tuple(replace(failure, at=failure.at + by) for failure in incident.failures),
        levels=incident.levels and replace(incident.levels, at=incident.levels.at + by),
    )


def resolved(incident: Incident, at: float, wall: float, words: Words) -> Incident:
    return replace(noted(incident, at, "resolved", words), wall_resolved=wall)


def remind_at(incident: Incident, every_s: float) -> float:
    """When the next reminder is due that a human is needed; inf: none is (`every_s` 0: never)."""
    open_ = incident.wall_resolved is None
    return incident.paged_at + (incident.reminders + 1) * every_s if open_ and every_s else inf


def reminded(incident: Incident, at: float, every_s: float) -> Incident:
    """Counts the reminder that is due; a daemon that was away while several were owes one."""
    return replace(incident, reminders=max(int((at - incident.paged_at) // every_s), incident.reminders + 1))


def owed(before: Incident | None, after: Incident) -> Iterator[str]:
    """The alerts that a change owes: when it opens, gets worse, still needs its human, and ends."""
    if before is None:
        yield "opened"
    elif after.urgency.rank > before.urgency.rank or _fails_anew(before, after) or _needs_more(before, after):
        yield "worsened"
    elif after.reminders > before.reminders:
        yield "reminder"
    if after.wall_resolved is not None:
        yield "resolved"


def _fails_anew(before: Incident, after: Incident) -> bool:
    """A further failure, of a class that was not told yet: so there are no more of these alerts than classes."""
    new = set(after.classes) - {*before.classes, before.class_}
    return bool(new) and (after.failures[-1].number > 1 or not before.failures)


def _needs_more(before: Incident, after: Incident) -> bool:
    """Another engine waits for a human, beside one that did already."""
    waiting = {need.engine for need in before.needs}
    return bool(waiting) and any(need.engine not in waiting for need in after.needs)
