"""What has happened since this daemon began, counted from the turns of the loop: for metrics and the status page.

Nothing is decided by it, so it is no part of the world.  Causes, services and engines come from the configuration and the
catalogue, so every table here is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from vllm_watchdog.core import events as e
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.commands import Command, Dump, Say, Spawn
from vllm_watchdog.core.report import serving
from vllm_watchdog.core.world import Engine, World

GAP_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
SOON_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PLANNED = "planned"         # a restart that no failure caused: an operator, a failover, a failback

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Spread:
    """A histogram: how many values were at most each bound, and more than the one before; the last one: more than all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()
    sum: float = 0.0

    def with_value(self, value: float) -> Spread:
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        return replace(self, counts=tuple(counts), sum=self.sum + value)


@dataclass(frozen=True, slots=True)
class Change:
    """The last failover or failback of a service.  `gap_s`: nobody served for so long; None: nobody serves yet."""

    at: float
    kind: str
    leaving: str
    to: str
    because: str
    gap_s: float | None


@dataclass(frozen=True)
class Totals:
    """Instants are monotonic seconds."""

    restarts: Mapping[tuple[str, str], int] = field(default_factory=dict)          # engine, cause
    ooms: Mapping[str, int] = field(default_factory=dict)                          # engine
    changes: Mapping[tuple[str, str, str], int] = field(default_factory=dict)      # service, kind, because
    latest: Mapping[str, Change] = field(default_factory=dict)                     # service
    down_since: Mapping[str, float] = field(default_factory=dict)                  # service
    gaps: Mapping[str, Spread] = field(default_factory=dict)                       # service
    detection: Mapping[str, Spread] = field(default_factory=dict)                  # engine
    probes: Mapping[str, Spread] = field(default_factory=dict)                     # engine
    loads: Mapping[str, float] = field(default_factory=dict)                       # engine: seconds of its last start
    sampled: Mapping[str, float] = field(default_factory=dict)                     # sensor
    well_at: Mapping[str, float] = field(default_factory=dict)                     # engine


def count(totals: Totals, before: World, event: e.Event, after: World, commands: Sequence[Command]) -> Totals:
    """The totals after one turn of the loop."""
    totals = _heard(totals, event)
    known = {engine.name: engine for engine in before.engines}
    for engine in after.engines:
        was = known.get(engine.name)
        if was is not None and was is not engine:
            totals = _engine(totals, was, engine, event.at)
    for command in commands:
        match command:
            case Spawn(mark) if mark.engine in known and known[mark.engine].spawned_at < inf:    # else its first
                totals = _restarted(totals, known[mark.engine], commands)
            case Say(name, fields) if name in ("service.failover", "service.failback"):
                totals = _changed(totals, name.removeprefix("service."), dict(fields), event.at)
    return totals if after.stopping else _routes(totals, before, after)


def _heard(totals: Totals, event: e.Event) -> Totals:
    match event:
        case e.GpusSampled():
            return replace(totals, sampled={**totals.sampled, "gpu": event.at})
        case e.HostSampled():
            return replace(totals, sampled={**totals.sampled, "host": event.at})
        case e.Scraped():
            return replace(totals, sampled={**totals.sampled, f"scrape-{event.mark.engine}": event.at})
        case e.Probed():
            sampled = {**totals.sampled, f"health-{event.mark.engine}": event.at}
            well = {**totals.well_at, event.mark.engine: event.at} if event.owners else totals.well_at
            return replace(totals, sampled=sampled, well_at=well)
        case e.Answered(answer=True):
            return replace(totals, probes=_added(totals.probes, event.mark.engine, event.took_s, SOON_S))
    return totals


def _engine(totals: Totals, was: Engine, engine: Engine, at: float) -> Totals:
    if was.ready_at == inf != engine.ready_at and engine.spawned_at < inf:      # an adopted one was not seen to load
        totals = replace(totals, loads={**totals.loads, engine.name: engine.ready_at - engine.spawned_at})
    if engine.ooms[-1:] not in ((), was.ooms[-1:]):
        totals = replace(totals, ooms=_more(totals.ooms, engine.name))
    if engine.life.failures[-1:] == (at,) != was.life.failures[-1:] and was.ready_at <= at:
        # A hung engine answers /health: the last proof is a token.  A dead one was well when it was last looked at.
        hung = was.pulse.missed_at is not None
        well_at = was.pulse.sign_at if hung else max(was.pulse.sign_at, totals.well_at.get(engine.name, was.ready_at))
        detection = _added(totals.detection, engine.name, max(at - well_at, 0.0), SOON_S)
        totals = replace(totals, detection=detection)
    return totals


def _restarted(totals: Totals, was: Engine, commands: Sequence[Command]) -> Totals:
    reason = next((c.reason for c in commands if isinstance(c, Dump) and c.mark == was.mark), was.blame)
    cause = PLANNED if not was.life.charged else was.cause or reason
    return replace(totals, restarts=_more(totals.restarts, (was.name, cause)))


def _changed(totals: Totals, kind: str, said: Mapping[str, str], at: float) -> Totals:
    change = Change(at, kind, said["leaving"], said["to"], said["because"], None)
    changes = _more(totals.changes, (said["service"], kind, said["because"]))
    return replace(totals, changes=changes, latest={**totals.latest, said["service"]: change})


def _routes(totals: Totals, before: World, after: World) -> Totals:
    """A gap begins when a service that was served is not, and ends when it is again; a change without one is 0 s long."""
    if before.engines is after.engines and before.services is after.services:
        return totals
    earlier = {service.name: service for service in before.services}
    for service in after.services:
        name, then = service.name, earlier.get(service.name)
        if then is service and before.engine(then.wanted) is after.engine(then.wanted):
            continue
        was, now = serving(before, then) if then else None, serving(after, service)
        down = totals.down_since.get(name)
        if now is None:
            if was is not None:
                totals = replace(totals, down_since={**totals.down_since, name: after.at})
        elif down is not None or (was is not None and was != now):
            gap_s = 0.0 if down is None else after.at - down
            rest = {other: at for other, at in totals.down_since.items() if other != name}
            totals = replace(totals, gaps=_added(totals.gaps, name, gap_s, GAP_S), down_since=rest)
            totals = _closed(totals, name, now, gap_s)
    return totals


def _closed(totals: Totals, name: str, now: str, gap_s: float) -> Totals:
    change = totals.latest.get(name)
    if change is None or change.gap_s is not None or change.to != now:
        return totals
    return replace(totals, latest={**totals.latest, name: replace(change, gap_s=gap_s)})


def told(totals: Totals, wall_offset: float) -> dict[str, Any]:
    """For the status document: instants as epoch seconds."""
    spreads = {"gaps": totals.gaps, "detection": totals.detection, "probes": totals.probes}
    return {
        "restarts": [{"engine": engine, "cause": cause, "count": n} for (engine, cause), n in totals.restarts.items()],
        "ooms": dict(totals.ooms),
        "loads": {engine: round(took_s, 1) for engine, took_s in totals.loads.items()},
        "changes": [{"service": service, "kind": kind, "because": because, "count": n}
                    for (service, kind, because), n in totals.changes.items()],
        "latest": {
            name: {"at": round(change.at + wall_offset, 3), "kind": change.kind, "leaving": change.leaving, "to": change.to,
                   "because": change.because, "gap_s": None if change.gap_s is None else round(change.gap_s, 3)}
            for name, change in totals.latest.items()
        },
        "down_since": {name: round(at + wall_offset, 3) for name, at in totals.down_since.items()},
        "sampled": {name: round(at + wall_offset, 3) for name, at in totals.sampled.items()},
        **{what: {name: {"bounds": list(spread.bounds), "counts": list(spread.counts), "sum": round(spread.sum, 6)}
                  for name, spread in table.items()} for what, table in spreads.items()},
    }


def _more(table: Mapping[Key, int], key: Key) -> dict[Key, int]:
    return {**table, key: table.get(key, 0) + 1}


def _added(table: Mapping[str, Spread], key: str, value: float, bounds: tuple[float, ...]) -> dict[str, Spread]:
    return {**table, key: table.get(key, Spread(bounds)).with_value(value)}
