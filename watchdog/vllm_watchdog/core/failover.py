"""Which engine of a service is meant to serve: the primary, or its backup.

It only says who is wanted.  That the two never run on one card at the same time is the gate's work (`gate.py`): the one
that is wanted waits in RELEASING until the other has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf

from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.plan import Failback, FailoverPlan, Standby

PLANNED_S = 600.0       # a gap that we planned may last as long as a large model loads; then it is an outage
PATIENCE_MAX = 16.0     # times stable_s, 2.7 hours by default: longer is a human's work


class Side(StrEnum):
    PRIMARY = auto()
    BACKUP = auto()


class Hint(StrEnum):
    """Why the service should change sides; NONE: it should not."""

    NONE = ""
    FAILURES = auto()       # the primary failed more often than a restart is tried
    OOM_AGAIN = auto()      # it ran out of memory twice within the window
    DEGRADED = auto()       # its VRAM stayed over the threshold, and fewer requests at a time did not help
    HELD = auto()           # it is held, or can't be killed
    OPERATOR = auto()
    DOWN = auto()           # the one that serves failed, and the other can serve at once
    STABLE = auto()         # the backup has served long enough
    PREPARE = auto()        # the same, and both fit: start the primary beside it before changing sides
    BACKUP_HELD = auto()
    LEAKS = auto()          # the one that serves leaks, and a hot standby serves beside it


@dataclass(frozen=True, slots=True)
class Service:
    """`backup` None: there is nobody to fail over to.  `since`: of this side; `idle_since` inf: it is not idle.

    `turned_at`: what the primary did before the last change of sides has had its answer, and counts no more.
    `excused_until`: a gap is no outage until then, since it is the first start, or was asked for or planned.
    """

    name: str
    backup: str | None = None
    standby: Standby = Standby.COLD
    side: Side = Side.PRIMARY
    since: float = 0.0
    turned_at: float = -inf
    serving_since: float = inf
    idle_since: float = inf
    excused_until: float = inf
    served: bool = False            # since its first start
    patience: float = 1.0           # times stable_s: doubled by each failover that follows soon on a failback
    lowering: Lowering = Lowering()

    @property
    def wanted(self) -> str:
        """The engine that is meant to serve."""
        return self.backup if self.side is Side.BACKUP and self.backup else self.name


@dataclass(frozen=True, slots=True)
class Facts:
    """What failover needs to know of the two engines."""

    failures: int = 0           # of the primary, within the window and since the last change of sides
    ooms: int = 0
    degraded: bool = False      # its card is over its threshold, and lowering did not help, or can't
    card_full: bool = False     # it is, or was a moment ago
    primary_held: bool = False  # or wedged: no further try without a human
    backup_held: bool = False
    backup_usable: bool = True  # False: it stands on the card that failed
    serving: bool = False       # the wanted engine serves
    idle: bool = False
    down: bool = False          # the wanted engine failed, and does not serve
    primary_serves: bool = False
    standby_ready: bool = False # the backup sleeps, or serves already
    fit: bool = False           # both may run at once


def observe(service: Service, at: float, facts: Facts) -> Service:
    """Keep since when the wanted engine serves, and since when it is idle."""
    serving_since = min(service.serving_since, at) if facts.serving else inf
    idle_since = min(service.idle_since, at) if facts.serving and facts.idle else inf
    served = service.served or facts.serving
    if serving_since == service.serving_since and idle_since == service.idle_since and served == service.served:
        return service
    return replace(service, served=served, serving_since=serving_since, idle_since=idle_since)


def hint(service: Service, at: float, facts: Facts, plan: FailoverPlan) -> Hint:
    """Should it change sides now?"""
    if service.side is Side.PRIMARY:
        return _away(service, facts, plan)
    return _back(service, at, facts, plan)


def _away(service: Service, facts: Facts, plan: FailoverPlan) -> Hint:
    if service.backup is None or facts.backup_held or not facts.backup_usable:
        return Hint.NONE
    if facts.primary_held:
        return Hint.HELD
    if facts.ooms > 1:
        return Hint.OOM_AGAIN
    if facts.failures > plan.after_failures:
        return Hint.FAILURES
    if facts.down and facts.standby_ready:
        return Hint.DOWN
    return Hint.DEGRADED if facts.degraded else Hint.NONE


def _back(service: Service, at: float, facts: Facts, plan: FailoverPlan) -> Hint:
    if facts.primary_held:
        return Hint.NONE
    if facts.backup_held:
        return Hint.BACKUP_HELD
    if facts.down and facts.primary_serves:
        return Hint.DOWN
    stable = at - service.serving_since >= plan.stable_s * service.patience
    if facts.card_full or plan.failback is Failback.MANUAL or not stable:
        return Hint.NONE
    if facts.fit:
        return Hint.STABLE if facts.primary_serves else Hint.PREPARE
    idle = plan.failback is Failback.AUTO or at - service.idle_since >= plan.idle_s
    return Hint.STABLE if idle else Hint.NONE


def turned(service: Service, at: float, plan: FailoverPlan) -> Service:
    """The other side's turn.  A failover that follows soon on a failback doubles the wait for the next one."""
    away = service.side is Side.PRIMARY
    soon = at - service.turned_at < 2 * plan.stable_s
    patience = service.patience if not away else min(service.patience * 2, PATIENCE_MAX) if soon else 1.0
    side = Side.BACKUP if away else Side.PRIMARY
    return replace(service, side=side, since=at, turned_at=at, serving_since=inf, idle_since=inf, patience=patience,
                   lowering=Lowering())
