"""What an alert says: one incident in plain words, as the JSON that a channel receives (version 1).

Pure.  It holds no command line and no secret (the core clips and masks the log line that proves a cause); every part
has a limit, so all of it stays below 32 KiB.  Chat channels show `headline` and `lines`, programs read the fields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import Template
from typing import Any

from vllm_watchdog.core import lessons, story
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.units import iso, utc
from vllm_watchdog.tell.phrases import EN, TONGUES, Language, Tongue

text_limit = 300            # characters of one line
actions_kept = 4            # the newest
advice_kept = 3

Payload = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Templates:
    """`string.Template` texts with the names of `config_channels.NAMES`; empty: our own words."""

    title: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Writer:
    """`incidents`: the folder that holds the evidence bundles, one an incident id."""

    host: str
    incidents: Path
    language: Language = Language.BOTH
    templates: Templates = Templates()

    def payload(self, alert: Alert, wall: float) -> dict[str, Any]:
        """`wall`: epoch seconds of telling."""
        incident, title = alert.incident, story.title(alert.incident)
        facts = [_facts(tongue, alert.kind, incident, self) for tongue in self._tongues]
        headline = " / ".join(self._headline(tongue, each) for tongue, each in zip(self._tongues, facts, strict=True))
        lines = [list(line) for tongue, each in zip(self._tongues, facts, strict=True) for line in self._lines(tongue, each)]
        return {
            "version": 1, "id": f"{incident.id}/{key(alert)}", "kind": alert.kind, "incident": incident.id,
            "service": incident.service, "engine": incident.engine, "class": incident.class_,
            "urgency": incident.urgency.value, "title": {"en": title.en, "zh": title.zh},
            "headline": headline, "lines": lines, "text": plain(headline, lines),
            "state": self._said([story.state(incident)]), "actions": self._said(_done(incident)),
            "gap_s": None if story.gap(incident) is None else incident.down_s,
            "advice": self._said(_advice(alert.kind, incident)),
            "host": self.host, "at": iso(wall), "opened": iso(incident.wall_opened),
            "resolved": None if incident.wall_resolved is None else iso(incident.wall_resolved),
            "folder": facts[0]["folder"],
        }

    def group(self, payloads: Sequence[Payload]) -> dict[str, Any]:
        """One message about several alerts: it says how many and which, and holds them all.

        Of each incident the newest alert is shown, for it tells what the older ones did.
        """
        newest = {each["incident"]: each for each in payloads}
        if len(newest) == 1:
            return dict(payloads[-1])
        kinds = {incident: [each["kind"] for each in payloads if each["incident"] == incident] for incident in newest}
        heads = [_group_head(tongue, payloads, self.host) for tongue in self._tongues]
        tongue = self._tongues[-1]
        lines = [[tongue.comma.join(tongue.kinds.get(kind, kind) for kind in kinds[incident]), _row(tongue, each)]
                 for incident, each in newest.items()]
        headline = " / ".join(heads)
        return {
            "version": 1, "id": sha256("\n".join(each["id"] for each in payloads).encode()).hexdigest()[:32],
            "kind": "group", "count": len(payloads), "urgency": max((each["urgency"] for each in payloads), key=_rank),
            "host": self.host, "headline": headline, "lines": lines, "text": plain(headline, lines),
            "over": all(kinds[-1] == "resolved" for kinds in kinds.values()), "alerts": [dict(each) for each in payloads],
        }

    @property
    def _tongues(self) -> tuple[Tongue, ...]:
        return TONGUES[self.language]

    def _said(self, texts: Sequence[Text]) -> list[str]:
        return [_line(tongue.of(text)) for tongue in self._tongues for text in texts]

    def _headline(self, tongue: Tongue, facts: Mapping[str, str]) -> str:
        own = self.templates.title
        form = {"resolved": tongue.over, "test": tongue.trial}.get(facts["code"], tongue.head)
        return _line(Template(own).safe_substitute(facts) if own else form.format(**facts))

    def _lines(self, tongue: Tongue, facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if own := self.templates.text:
            yield from (("", line[:text_limit]) for line in Template(own).safe_substitute(facts).splitlines()[:40] if line)
            return
        if facts["code"] == "test":
            return
        for name in ("cause", "failures", "state", "action", "gap", "next", "engine", "opened", "resolved", "folder"):
            if facts[name]:
                yield tongue.labels[name], facts["who"] if name == "engine" else facts[name]


def _facts(tongue: Tongue, kind: str, incident: Incident, writer: Writer) -> dict[str, str]:
    """Every name that a template may hold.  `code` and `who` are for our own."""
    trial_ = kind == "test"
    advice = [] if kind == "resolved" else [tongue.of(text) for text in _advice(kind, incident)]
    failures = lessons.counted(incident, newest=kind == "worsened")
    gap = _gap(incident)
    opened, resolved = utc(incident.wall_opened), incident.wall_resolved
    return {name: _line(text) for name, text in {
        "code": kind, "kind": tongue.kinds.get(kind, kind), "urgency": tongue.urgencies[incident.urgency],
        "title": tongue.test if trial_ else tongue.of(story.title(incident)), "class": incident.class_, "host": writer.host,
        "service": incident.service, "engine": incident.engine, "incident": incident.id,
        "who": tongue.engine.format(engine=incident.engine, service=incident.service),
        "cause": tongue.test if trial_ else tongue.of(story.cause(incident)),
        "failures": tongue.of(failures) if failures else "",
        "state": "" if trial_ else tongue.of(story.state(incident)),
        "human": "" if kind == "resolved" else tongue.of(story.paged(incident)),
        "action": tongue.semicolon.join(map(tongue.of, _done(incident))) or _plan(tongue, kind, incident),
        "gap": tongue.of(gap) if gap else "",
        "opened": opened,
        "resolved": "" if resolved is None else tongue.lasted.format(
            at=utc(resolved), lasted=_lasted(tongue, resolved - incident.wall_opened)),
        "next": " ".join(advice), "folder": "" if trial_ else str(writer.incidents / incident.id),
    }.items()}


def _plan(tongue: Tongue, kind: str, incident: Incident) -> str:
    """Nothing was done yet: what the catalogue says will be, unless only a human can do something."""
    entry = CATALOG.get(incident.class_)
    return tongue.plans.get(entry.action, "") if entry and kind != "resolved" and not incident.page else ""


def _done(incident: Incident) -> list[Text]:
    return [step.text for step in story.actions(incident)[-actions_kept:]]


def _advice(kind: str, incident: Incident) -> tuple[Text, ...]:
    """Of what has just failed first, where that is the news."""
    first = incident.failures[-1].class_ if kind == "worsened" and len(incident.failures) > 1 else ""
    return lessons.advice(incident, first)[:advice_kept]


def _gap(incident: Incident) -> Text | None:
    """That there was none is news only when all is over."""
    silent = incident.wall_resolved is None and incident.down_at is None and incident.up_at is None
    return None if silent else story.gap(incident)


def _group_head(tongue: Tongue, payloads: Sequence[Payload], host: str) -> str:
    counted = Counter(each["kind"] for each in payloads)
    kinds = tongue.comma.join(f"{count} {tongue.kinds.get(kind, kind)}" for kind, count in counted.items())
    return tongue.group.format(count=len(payloads), kinds=kinds, host=host)


def _row(tongue: Tongue, payload: Payload) -> str:
    title = payload["title"]["zh" if tongue.name == "zh" else "en"]
    return _line(f"{title}{tongue.comma}{tongue.urgencies[payload['urgency']]} ({payload['incident']})")


def _rank(urgency: str) -> int:
    return Urgency(urgency).rank


def _line(text: str) -> str:
    """One line that every encoder takes: a log line may hold bytes that are no UTF-8."""
    return " ".join(text.split())[:text_limit].encode("utf-8", "replace").decode()


def _lasted(tongue: Tongue, seconds: float) -> str:
    return tongue.seconds.format(seconds) if seconds < 600 else tongue.minutes.format(seconds / 60)


def plain(headline: str, lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([headline, *(f"{label}{EN.colon}{value}" if label else value for label, value in lines)])


def key(alert: Alert) -> str:
    """What makes an alert of one incident one that is told once: it may worsen twice, and reminders are counted."""
    detail = {"worsened": _worse(alert.incident), "reminder": str(alert.incident.reminders)}
    return f"{alert.kind}-{detail[alert.kind]}" if alert.kind in detail else alert.kind


def _worse(incident: Incident) -> str:
    told = len(incident.classes)
    engines = sorted(need.engine for need in incident.needs)
    parts = (incident.urgency.value, *([str(told)] if told else []), *(engines if len(engines) > 1 else []))
    return "-".join(parts)


def trial(wall: float) -> Alert:
    """The alert that `alert test` sends.  Each has an id of its own, lest a receiver take it for one it had."""
    return Alert("test", Incident(f"test-{wall:.0f}", "test", "test", 0, "none", Urgency.WARNING, 0.0, wall, 0.0,
                                  text=EN.test))
