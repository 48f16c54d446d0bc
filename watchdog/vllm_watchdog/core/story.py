"""An incident in words: what happened, how it stands, what was done, what clients saw, and the memory at the time.

Page, terminal and alerts all take it from here, and what to change from `lessons`.  Pure; instants are told in UTC,
local time is the teller's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_watchdog.core import causes
from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.failures import Ended
from vllm_watchdog.core.incidents import HOST, Flight, Incident, Urgency
from vllm_watchdog.core.levels import CardLevels
from vllm_watchdog.core.phrases import NOTHING, filled, joined
from vllm_watchdog.core.readings import Wait
from vllm_watchdog.core.units import duration, gib, time_of_day

STEPS_SHOWN = 12        # the first and the last: a crash loop repeats itself
HOLDERS_SHOWN = 3
USAGE_CODE = 2          # argparse's; other programs say other things by it
PAGE_SHOWN = 200        # characters of why a human is needed; the proof has all of it


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done; `at` monotonic."""

    at: float
    text: Text


def title(incident: Incident) -> Text:
    return title_of(incident.class_)


def title_of(class_: str) -> Text:
    entry = CATALOG.get(class_)
    return entry.title if entry else plain(class_)


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


def cause(incident: Incident) -> Text:
    """The class and the sentence that proves it."""
    return filled(causes.SYMPTOM, class_=incident.class_, words=incident.words) if incident.text else plain(incident.class_)


def told(incident: Incident) -> tuple[tuple[float, Text, Text], ...]:
    """The timeline: each line's instant, the word for what it is, and its sentence."""
    return tuple((entry.at, causes.STEPS.get(entry.what, plain(entry.what)), entry.words) for entry in incident.timeline)


def state(incident: Incident) -> Text:
    """How it stands now, and whether somebody must do something."""
    if incident.class_ == "snapshot":
        return p.SNAPSHOT
    page = paged(incident, PAGE_SHOWN)
    if incident.wall_resolved is not None:
        lasted = duration(incident.wall_resolved - incident.wall_opened)
        text = p.RESOLVED_HELD if incident.needs else p.RESOLVED
        return filled(text, lasted=lasted, page=page)
    if _left_at(incident) is not None:
        return p.LEFT
    if incident.needs:
        return filled(p.NEEDED, page=page)
    if incident.down_at is not None:
        return filled(p.UNSERVED if _unserved(incident) else p.DOWN, time=clock(incident, incident.down_at))
    return p.WATCHED if incident.urgency is Urgency.WARNING or incident.service == HOST else p.UP


def paged(incident: Incident, most: int = 10_000) -> Text:
    """Why only a human can help, in so many characters, each engine alike; empty while the watchdog still acts."""
    each = most // max(len(incident.needs), 1)
    return joined(Text(clipped(need.en, each), clipped(need.zh, each)) for need in incident.needs)


def _unserved(incident: Incident) -> bool:
    """Has no engine served since the first start?"""
    return incident.unserved and incident.up_at is None


def clipped(text: str, most: int = PAGE_SHOWN) -> str:
    text = text.rstrip(".")
    return text if len(text) <= most else f"{text[:most]}…"


def _left_at(incident: Incident) -> float | None:
    """When the watchdog was stopped; None: it was not, or something was begun since."""
    turns = (entry for entry in reversed(incident.timeline) if entry.what in ("left", "started", "woken", "ready"))
    return next((entry.at if entry.what == "left" else None for entry in turns), None)


def actions(incident: Incident) -> tuple[Step, ...]:
    """What was done, in order; of many the first and the last."""
    steps = []
    for entry in incident.timeline:
        if entry.what in p.DEEDS:
            facts: dict[str, Any] = dict(entry.facts)
            if "because" in facts:
                facts["because"] = _because(facts)
            steps.append(Step(entry.at, filled(p.DEEDS[entry.what], text=entry.words, **facts)))
    half = STEPS_SHOWN // 2
    return tuple(steps) if len(steps) <= STEPS_SHOWN else (*steps[:half], *steps[-half:])


def _because(facts: Mapping[str, Any]) -> Text:
    """Why sides were changed; of failures how many, and the one before."""
    if "times" in facts:
        return filled(p.FAILED_BEFORE if "before" in facts else p.FAILED_OFTEN, **facts)
    return p.BECAUSE.get(facts["because"], plain(facts["because"]))


# -- what clients saw

def gap(incident: Incident) -> Text | None:
    """How long the service was without an engine; None where no service is concerned."""
    if incident.service == HOST or incident.class_ == "snapshot":
        return None
    if incident.down_at is not None:
        return filled(p.NEVER_SERVED if _unserved(incident) else p.DOWN_SINCE, time=clock(incident, incident.down_at))
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
    told += [filled(p.SENT_AGAIN if wait.replayed > 1 else p.SENT_AGAIN_ONE, n=wait.replayed)] if wait.replayed else []
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
    """How the generation that failed last ended."""
    last = next((each for each in reversed(incident.failures) if each.ended), None)
    if last is None or last.ended is None:
        return None
    told = how(last.ended, refused=last.class_ == "bad_args")
    return Text(f"{last.ended.mark}: {told.en}", f"{last.ended.mark}：{told.zh}")


def how(end: Ended, refused: bool) -> Text:
    if end.ours:
        return p.OURS
    if end.code is None:
        return p.UNSEEN
    if end.code < 0:
        return filled(p.SIGNALLED, code=-end.code)
    if end.code == USAGE_CODE and refused:
        return p.REFUSED
    return p.EXITS.get(end.code) or filled(p.EXIT, code=end.code)


# -- memory

def memory(incident: Incident) -> tuple[tuple[Text, Text, Text], ...]:
    """Rows of a small table: what, at the time, to compare with."""
    levels = incident.levels
    if levels is None:
        return ()
    rows = [(plain(f"GPU {card.gpu} {card.name}"), *_card(card)) for card in levels.cards]
    if levels.rss is not None:
        warm = NOTHING if levels.rss_warm is None else filled(p.WARM, gib=gib(levels.rss_warm))
        rows.append((p.LABELS["rss"], plain(gib(levels.rss)), warm))
    if levels.kv_usage is not None:
        rows.append((p.LABELS["kv"], plain(f"{levels.kv_usage:.0%}"), NOTHING))
    if levels.running is not None and levels.waiting is not None and not _belied(incident, levels.running + levels.waiting):
        counts = filled(p.COUNTS, running=f"{levels.running:.0f}", waiting=f"{levels.waiting:.0f}")
        rows.append((p.LABELS["requests"], counts, NOTHING))
    if levels.host_available is not None and levels.host_total is not None:
        rows.append((p.LABELS["host"], plain(gib(levels.host_available)), filled(p.OF_TOTAL, gib=gib(levels.host_total))))
    return tuple(rows)


def _belied(incident: Incident, gauged: float) -> bool:
    """The gateway knew of more requests than the gauges: a stuck or a dead engine core shows none."""
    return any(flight.count > gauged for flight in incident.flights)


def _card(card: CardLevels) -> tuple[Text, Text]:
    share = card.used / card.total if card.total else 0.0
    notes = [filled(p.WARN_AT, share=f"{card.warn:.0%}")] if card.warn is not None else []
    notes += [filled(p.OURS_HOLDS, gib=gib(card.ours))] if card.ours is not None else []
    notes += [filled(p.WARM, gib=gib(card.warm))] if card.warm is not None else []
    notes += [filled(p.OTHER_HOLDS, who=row.holder, gib="?" if row.used_bytes is None else gib(row.used_bytes))
              for row in card.others[:HOLDERS_SHOWN]]
    used = plain(f"{gib(card.used)} / {gib(card.total)} ({share:.0%})")
    return used, joined(notes)


def plain(text: str) -> Text:
    return Text(text, text)


# -- figures

def wall(incident: Incident, at: float) -> float:
    """Epoch seconds of an instant."""
    return incident.wall_opened + at - incident.opened_at


def clock(incident: Incident, at: float) -> str:
    return time_of_day(wall(incident, at))
