"""Is a host calm enough for a drill, what does it promise there, and was it kept?  Pure: values in, values out.

What a promise is in seconds depends on the service: its patience, its standby, how long its engines load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_watchdog.core.drills import NEXT_S, Fault, Gap, Sees
from vllm_watchdog.core.plan import Plan, Standby

BUSY_OVER = 4           # requests running or waiting: a host with more is not calm
SETTLED = frozenset({"serving", "asleep", "stopped"})       # phases in which an engine waits for nothing

EXIT_S = 2.0            # the kernel tells of an end within milliseconds, a log line within 0.5 s; the rest is a busy host's
SILENT_S = 12.0         # three silent periods of the GPU helper, of a second or more
SLACK_S = 3.0           # one turn of the probes, on busy processors
GOES_ON_S = 1.5         # for clients of what goes on as if nothing had been
READY_S = {Standby.HOT: 1.5, Standby.SLEEPING: 5.0}         # from the end of the one engine to the other's first answer
LOAD_S = 120.0          # of an engine whose start was never seen


@dataclass(frozen=True, slots=True)
class Pace:
    """What one service takes, in seconds: to notice, to save evidence, to stop an engine, to have the next one serve."""

    hang_s: float
    evidence_s: float
    stop_s: float
    start_s: float          # an engine's start
    release_s: float        # until somebody is told that memory does not come back
    next_s: float           # until the next engine serves
    settle_s: float         # from the last trouble until the incident is resolved

    def noticed_s(self, fault: Fault) -> float:
        """Within how long the watchdog notices."""
        return fault.takes_s + {
            Sees.EXIT: EXIT_S, Sees.HANG: self.hang_s, Sees.NEXT: NEXT_S, Sees.GPU: SILENT_S, Sees.NONE: 0.0,
            Sees.WAIT: self.release_s, Sees.START: self.stop_s + self.start_s}[fault.sees]

    def saved_s(self, fault: Fault) -> float:
        """Within how long evidence is written."""
        return self.noticed_s(fault) + self.evidence_s + SLACK_S

    def gap_s(self, fault: Fault, slowest_s: float) -> float | None:
        """How long clients may be without an answer, who waited for `slowest_s` before; None: nothing is promised."""
        replaced = self.noticed_s(fault) + (self.evidence_s + self.stop_s if fault.runs else 0.0) + self.next_s
        bounds = {Gap.NONE: GOES_ON_S, Gap.LASTS: fault.lasts_s + GOES_ON_S, Gap.REPLACED: fault.lasts_s + replaced}
        return bounds[fault.gap] + slowest_s if fault.gap in bounds else None

    def limit_s(self, fault: Fault) -> float:
        """No drill waits longer for the one thing that it waits for."""
        return self.saved_s(fault) + self.stop_s + 2 * self.next_s + self.settle_s + fault.lasts_s


def pace(plan: Plan, service: str, loads: Mapping[str, float]) -> Pace:
    """Of one service; `loads`: how long its engines took to load, as far as that was seen."""
    limits = plan.engine(service).limits
    backup = next((engine for engine in plan.engines if engine.backup_for == service), None)
    load_s = max((loads[engine.name] for engine in plan.engines
                  if service in (engine.name, engine.backup_for) and engine.name in loads), default=LOAD_S)
    start_s = 2 * load_s + limits.backoff_s + SLACK_S       # twice: it loads on a busy host, beside what ends
    return Pace(
        hang_s=limits.still_s + limits.probe_s + limits.suspect_s + SLACK_S,
        evidence_s=limits.dump_s, stop_s=limits.stop_s + SLACK_S, start_s=start_s,
        release_s=limits.release_s + SLACK_S,
        next_s=READY_S.get(backup.standby, start_s) if backup else start_s,
        settle_s=plan.confirm_s + 2 * start_s + SLACK_S,
    )


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of one drill.  Seconds count from the injection; None: it was not seen, or can't be here."""

    detected_s: float | None
    evidence_s: float | None
    gap_s: float | None             # the longest time without any answer for the clients of the gateway
    slowest_s: float                # a client's wait before the fault
    asked: int                      # requests that were sent while it lasted
    lost: int                       # ... and not answered with 200
    orphans: int                    # processes of ours that belong to no engine that lives
    vram_left_bytes: int | None     # on cards, of such processes
    incidents: tuple[str, ...]      # classes
    alerts: str                     # "opened, resolved"; "" where nobody was told
    channels: int                   # how many there are to be told
    back: bool                      # every engine is as it was, and no incident is open
    took_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what was promised, what was seen, whether that keeps it."""

    what: str
    promised: str
    seen: str
    kept: bool


def judge(fault: Fault, seen: Observed, pace: Pace) -> tuple[Check, ...]:
    """Every promise of the fault against what was seen."""
    return tuple(_checks(fault, seen, pace))


def _checks(fault: Fault, seen: Observed, pace: Pace) -> Iterator[Check]:
    if fault.sees is not Sees.NONE:
        yield _within("detected", seen.detected_s, pace.noticed_s(fault))
    if fault.incident and fault.evidence:
        yield _within("evidence", seen.evidence_s, pace.saved_s(fault))
    bound = pace.gap_s(fault, seen.slowest_s)
    if bound is not None and seen.gap_s is not None:
        yield _within("client gap", seen.gap_s, bound)
    if fault.lost is not None and seen.asked:
        yield Check("requests lost", f"at most {fault.lost}", f"{seen.lost} of {seen.asked}", seen.lost <= fault.lost)
    yield Check("orphans", "none", str(seen.orphans), not seen.orphans)
    if seen.vram_left_bytes is not None:
        yield Check("VRAM left over", "none", f"{seen.vram_left_bytes / 2**30:.1f} GiB", not seen.vram_left_bytes)
    yield _incident(fault, seen)
    if fault.incident and seen.channels:
        yield Check("alerts delivered", "opened, resolved", seen.alerts or "none",
                    all(kind in seen.alerts for kind in ("opened", "resolved")))
    yield Check("restored", "as it was before", "yes" if seen.back else "no", seen.back)


def _within(what: str, seen_s: float | None, bound_s: float) -> Check:
    return Check(what, f"within {bound_s:.1f} s", "never" if seen_s is None else f"{seen_s:.2f} s",
                 seen_s is not None and seen_s <= bound_s)


def _incident(fault: Fault, seen: Observed) -> Check:
    said, told = ", ".join(seen.incidents) or "none", tuple(each for each in seen.incidents if each not in fault.also)
    if not fault.incident:
        return Check("incidents", "none", said, not told)
    if fault.incident == "*":
        return Check("incidents", "one", said, len(told) == 1)
    return Check("incidents", f"one, {fault.incident}", said, told == (fault.incident,))


def unfit(doc: Mapping[str, Any], service: str) -> tuple[str, ...]:
    """Why a host with this report is not calm: one sentence each; nothing where it is."""
    return tuple(_unfit(doc, service))


def _unfit(doc: Mapping[str, Any], service: str) -> Iterator[str]:
    if doc["stopping"]:
        yield "the watchdog is stopping"
    if doc["paused"]:
        yield "automatic actions are paused: `llm-watchdog resume`"
    for incident in doc["incidents"]:
        yield f"incident {incident['id']} is open"
    for each in doc["services"]:
        if each["serving"] is None:
            yield f"service {each['name']} is not served"
        elif each["name"] == service and each["side"] != "primary":
            yield f"{each['serving']} serves in place of {service}: `llm-watchdog failback`"
    for engine in doc["engines"]:
        if engine["phase"] not in SETTLED:
            yield f"{engine['name']} is {engine['phase']}"
    under_way = sum(requests(engine) for engine in doc["engines"])
    if under_way > BUSY_OVER:
        yield f"{under_way} requests are under way, expected at most {BUSY_OVER}"


def requests(engine: Mapping[str, Any]) -> int:
    """Running and waiting in one engine of a report; 0 where it does not tell."""
    metrics = engine["metrics"]
    return int(sum(metrics.get(key) or 0 for key in ("running", "waiting")))
