"""What was done about an incident, and how long no engine served: read from its timeline.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core.incidents import Incident

DONE = frozenset({"action", "started", "woken", "failover", "failback", "lowered", "reaped", "operator", "paused"})
SERVES = frozenset({"serving", "suspect"})


@dataclass(frozen=True, slots=True)
class Deeds:
    """`gap_s`: the time without an engine, 0 where there was none, None where the timeline does not tell;
    `down_at`: monotonic, since when none serves; None: one does."""

    actions: tuple[str, ...]
    gap_s: float | None
    down_at: float | None


def deeds(incident: Incident) -> Deeds:
    actions = tuple(entry.text for entry in incident.timeline if entry.what in DONE)
    gap_s, down_at, moved = 0.0, None, set[str]()
    for entry in incident.timeline:
        if entry.what == "phase":
            engine, _, change = entry.text.partition(": ")
            was, _, now = change.partition(" -> ")
            if not moved and was not in SERVES:
                down_at = incident.opened_at        # it had left before there was an incident to note it
            elif was in SERVES and now not in SERVES and down_at is None:
                down_at = entry.at
            moved.add(engine)
        if down_at is not None and (entry.what == "ready" or entry.text.endswith("-> serving")):
            gap_s, down_at = gap_s + entry.at - down_at, None
    turns = [entry.text for entry in incident.timeline if entry.what == "failover"]
    if down_at is not None and {text.partition(" -> ")[2].partition(",")[0] for text in turns} - moved:
        return Deeds(actions, None, None)           # a hot backup took the route: it never changed its phase
    return Deeds(actions, gap_s, down_at)
