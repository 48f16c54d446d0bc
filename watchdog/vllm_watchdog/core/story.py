"""An incident in words: what happened, how it stands, what was done, what clients saw, what to change.

Page, terminal and alerts all take it from here.  Pure; instants are told in UTC, local time is the teller's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.advice import advise
from vllm_watchdog.core.case import Case
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.incidents import HOST, Ended, Flight, Incident, Urgency
from vllm_watchdog.core.levels import CardLevels, Levels
from vllm_watchdog.core.phrases import filled, joined
from vllm_watchdog.core.readings import InFlight, Wait
from vllm_watchdog.core.units import duration, gib

NOTHING = Text("", "")
STEPS_SHOWN = 12        # the first and the last: a crash loop repeats itself
HOLDERS_SHOWN = 3
PAGE_SHOWN = 200        # characters of why a human is needed; the proof has all of it
NO_RESTART = frozenset({"wedged", "vram_held"})     # the watchdog waits for what a human must do elsewhere


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done; `at` monotonic."""

    at: float
    text: Text


def title(incident: Incident) -> Text:
    entry = CATALOG.get(incident.class_)
    return entry.title if entry else Text(incident.class_, incident.class_)


def heading(incident: Incident) -> Text:
    """What happened to which service."""
    text = title(incident)
    return Text(f"{text.en}: {incident.service}", f"{text.zh}：{incident.service}")


def happened(incident: Incident, host: str = "") -> Text:
    """When it happened, to whom, where: one sentence under the title, which says what."""
    where = filled(p.ON_HOST, host=host) if host else NOTHING
    text = p.HAPPENED_ON_HOST if incident.service == HOST else p.HAPPENED
    return filled(text, time=clock(incident, incident.opened_at), engine=incident.engine, generation=incident.generation,
                  service=incident.service, host=where)


def state(incident: Incident) -> Text:
    """How it stands now, and whether somebody must do something."""
    if incident.class_ == "snapshot":
        return p.SNAPSHOT
    page = Text(_clipped(paged(incident).en), _clipped(paged(incident).zh))
    if incident.wall_resolved is not None:
        lasted = duration(incident.wall_resolved - incident.wall_opened)
        text = p.RESOLVED_HELD if incident.page else p.RESOLVED
        return filled(text, lasted=lasted, engine=incident.paged_for, page=page)
    if _left_at(incident) is not None:
        return p.LEFT
    if incident.page:
        return filled(p.NEEDED, page=page)
    if incident.down_at is not None:
        return filled(p.DOWN, time=clock(incident, incident.down_at))
    return p.WATCHED if incident.urgency is Urgency.WARNING or incident.service == HOST else p.UP


def paged(incident: Incident) -> Text:
    """Why only a human can help; empty while the watchdog still acts."""
    return Text(incident.page, incident.page_zh or incident.page)


def _clipped(text: str) -> str:
    text = text.rstrip(".")
    return text if len(text) <= PAGE_SHOWN else f"{text[:PAGE_SHOWN]}…"


def _left_at(incident: Incident) -> float | None:
    """When the watchdog was stopped; None: it was not, or something was begun since."""
    turns = (entry for entry in reversed(incident.timeline) if entry.what in ("left", "started", "woken", "ready"))
    return next((entry.at if entry.what == "left" else None for entry in turns), None)


def actions(incident: Incident) -> tuple[Step, ...]:
    """What was done, in order; of many the first and the last."""
    steps = []
    for entry in incident.timeline:
        if entry.what in p.DEEDS:
            facts = {name: p.BECAUSE.get(value, value) if name == "because" else value for name, value in entry.facts}
            steps.append(Step(entry.at, filled(p.DEEDS[entry.what], text=entry.text, **facts)))
    half = STEPS_SHOWN // 2
    return tuple(steps) if len(steps) <= STEPS_SHOWN else (*steps[:half], *steps[-half:])


# -- what clients saw

def gap(incident: Incident) -> Text | None:
    """How long the service was without an engine; None where no service is concerned."""
    if incident.service == HOST or incident.class_ == "snapshot":
        return None
    if incident.down_at is not None:
        return filled(p.DOWN_SINCE, time=clock(incident, incident.down_at))
    if incident.up_at is None:
        return p.NEVER_DOWN
    left_at = _left_at(incident)
    text = p.DOWN_FOR if left_at is None or incident.up_at < left_at else p.DOWN_UNTIL_LEFT
    return filled(text, s=duration(incident.down_s), time=clock(incident, incident.up_at))


def clients(incident: Incident) -> tuple[Text, ...]:
    """What the gateway told of its clients."""
    if incident.waits:
        return tuple(map(wait_of, incident.waits))
    return (p.NO_GATEWAY,) if incident.up_at is not None and not incident.flights else ()


def wait_of(wait: Wait) -> Text:
    """How many, how long, and what became of them."""
    text = (p.WAITED_NONE, p.WAITED_ONE, p.WAITED)[min(wait.requests, 2)]
    told = [filled(text, n=wait.requests, longest=duration(wait.longest_s), median=duration(wait.median_s))]
    told += [filled(p.UNANSWERED, n=wait.failed)] if wait.failed else []
    told += [filled(p.SENT_AGAIN, n=wait.replayed)] if wait.replayed else []
    return Text("".join(each.en for each in told), "".join(each.zh for each in told))


def flight_of(flight: Flight) -> Text:
    """The requests of one death: how many, and the largest one."""
    told = filled(p.FLIGHT, n=flight.count, mark=flight.mark, begun=flight.begun)
    if not flight.largest:
        return told
    one = flight.largest[0]
    more = filled(p.LARGEST, bytes=one.bytes, tokens=one.tokens_estimated, age=f"{one.age_s:.1f} s",
                  state=p.BEGUN if one.begun else p.NOT_BEGUN, verdict=p.VERDICTS.get(one.verdict, one.verdict),
                  hash=one.hash[:12])
    return Text(told.en + more.en, told.zh + more.zh)


def ended(incident: Incident) -> Text | None:
    """How the last generation that ended did so."""
    return None if incident.ended is None else _ended(incident.ended)


def _ended(end: Ended) -> Text:
    if end.ours:
        how = p.OURS
    elif end.code is None:
        how = p.UNSEEN
    elif end.code < 0:
        how = filled(p.SIGNALLED, code=-end.code)
    else:
        how = p.EXITS.get(end.code) or filled(p.EXIT, code=end.code)
    return Text(f"{end.mark}: {how.en}", f"{end.mark}：{how.zh}")


# -- memory

def memory(levels: Levels | None) -> tuple[tuple[Text, Text, Text], ...]:
    """Rows of a small table: what, at the time, to compare with."""
    if levels is None:
        return ()
    rows = [(_plain(f"GPU {card.gpu} {card.name}"), *_card(card)) for card in levels.cards]
    if levels.rss is not None:
        warm = NOTHING if levels.rss_warm is None else filled(p.WARM, gib=gib(levels.rss_warm))
        rows.append((p.LABELS["rss"], _plain(gib(levels.rss)), warm))
    if levels.kv_usage is not None:
        rows.append((p.LABELS["kv"], _plain(f"{levels.kv_usage:.0%}"), NOTHING))
    if levels.running is not None and levels.waiting is not None:
        counts = filled(p.COUNTS, running=f"{levels.running:.0f}", waiting=f"{levels.waiting:.0f}")
        rows.append((p.LABELS["requests"], counts, NOTHING))
    if levels.host_available is not None and levels.host_total is not None:
        rows.append((p.LABELS["host"], _plain(gib(levels.host_available)), filled(p.OF_TOTAL, gib=gib(levels.host_total))))
    return tuple(rows)


def _card(card: CardLevels) -> tuple[Text, Text]:
    share = card.used / card.total if card.total else 0.0
    notes = [filled(p.WARN_AT, share=f"{card.warn:.0%}")] if card.warn is not None else []
    notes += [filled(p.OURS_HOLDS, gib=gib(card.ours))] if card.ours is not None else []
    notes += [filled(p.WARM, gib=gib(card.warm))] if card.warm is not None else []
    notes += [filled(p.OTHER_HOLDS, who=row.holder, gib="?" if row.used_bytes is None else gib(row.used_bytes))
              for row in card.others[:HOLDERS_SHOWN]]
    used = _plain(f"{gib(card.used)} / {gib(card.total)} ({share:.0%})")
    return used, joined(notes)


def _plain(text: str) -> Text:
    return Text(text, text)


# -- what to change

def advice(incident: Incident) -> tuple[Text, ...]:
    """What to change, computed from all that the incident knows; and how a held engine is let go."""
    held = incident.page and incident.class_ not in NO_RESTART
    return advise(case_of(incident)) + ((filled(p.THEN, engine=incident.paged_for),) if held else ())


def case_of(incident: Incident) -> Case:
    """Facts of the cause's own lines count most, then those of the others."""
    facts: dict[str, object] = {}
    for finding in sorted(incident.findings, key=lambda each: each.class_ == incident.class_):
        facts |= dict(finding.details)
    requests = [request for flight in incident.flights for request in flight.largest]
    end = incident.ended
    return Case(
        incident.class_, tuple(facts.items()), incident.args, incident.levels,  # type: ignore[arg-type]  # merged Details
        longest=_prime(requests), exit_code=end.code if end and not end.ours else None, port=incident.port, files=True,
    )


def _prime(requests: list[InFlight]) -> InFlight | None:
    """The one to suspect: whom the gateway kept back, else the longest."""
    return max(requests, key=lambda each: (each.verdict in ("suspect", "refused"), each.tokens_estimated), default=None)


def proof(incident: Incident) -> tuple[str, ...]:
    """The sentence of the cause, and the log lines, each once and on one line."""
    lines = (" ".join(text.split()) for text in (incident.text, *(finding.text for finding in incident.findings)))
    return tuple(dict.fromkeys(line for line in lines if line))


# -- figures

def wall(incident: Incident, at: float) -> float:
    """Epoch seconds of an instant."""
    return incident.wall_opened + at - incident.opened_at


def clock(incident: Incident, at: float) -> str:
    return datetime.fromtimestamp(wall(incident, at), UTC).strftime("%H:%M:%SZ")
