"""Which engine of a service is meant to serve: the primary, or its backup.

It only says who is wanted.  That the two never run on one card at the same time is the gate's work (`gate.py`): the one
that is wanted waits in RELEASING until the other has left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum, auto
from math import inf

from vllm_watchdog.core.plan import Failback, FailoverPlan


class Side(StrEnum):
    PRIMARY = auto()
    BACKUP = auto()


class Hint(StrEnum):
    """Why the service should change sides; NONE: it should not."""

    NONE = ""
    FAILURES = auto()       # the primary failed more often than a restart is tried
    OOM_AGAIN = auto()      # it ran out of memory twice within the window
    DEGRADED = auto()       # its VRAM stayed over the threshold
    HELD = auto()           # it is held, or can't be killed
    OPERATOR = auto()
    STABLE = auto()         # the backup has served long enough
    BACKUP_HELD = auto()


@dataclass(frozen=True, slots=True)
class Service:
    """`backup` None: there is nobody to fail over to.  `since`: of this side; `idle_since` inf: it is not idle.

    `turned_at`: what the primary did before the last change of sides has had its answer, and counts no more.
    """

    name: str
    backup: str | None = None
    side: Side = Side.PRIMARY
    since: float = 0.0
    turned_at: float = -inf
    serving_since: float = inf
    idle_since: float = inf

    @property
    def wanted(self) -> str:
        """The engine that is meant to serve."""
        return self.backup if self.side is Side.BACKUP and self.backup else self.name


@dataclass(frozen=True, slots=True)
class Facts:
    """What failover needs to know of the two engines."""

    failures: int = 0           # of the primary, within the window and since the last change of sides
    ooms: int = 0
    degraded: bool = False
    primary_held: bool = False  # or wedged: no further try without a human
    backup_held: bool = False
    backup_usable: bool = True  # False: it stands on the card that failed
    serving: bool = False       # the wanted engine serves
    idle: bool = False


def observe(service: Service, at: float, facts: Facts) -> Service:
    """Keep since when the wanted engine serves, and since when it is idle."""
    return replace(
        service,
        serving_since=min(service.serving_since, at) if facts.serving else inf,
        idle_since=min(service.idle_since, at) if facts.serving and facts.idle else inf,
    )


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
    return Hint.DEGRADED if facts.degraded else Hint.NONE


def _back(service: Service, at: float, facts: Facts, plan: FailoverPlan) -> Hint:
    if facts.primary_held:
        return Hint.NONE
    if facts.backup_held:
        return Hint.BACKUP_HELD
    if facts.degraded:
        return Hint.NONE            # the card that drove the primary away is still full
    stable = at - service.serving_since >= plan.stable_s
    idle = plan.failback is Failback.AUTO or at - service.idle_since >= plan.idle_s
    return Hint.STABLE if plan.failback is not Failback.MANUAL and stable and idle else Hint.NONE


def turned(service: Service, at: float) -> Service:
    """The other side's turn."""
    side = Side.BACKUP if service.side is Side.PRIMARY else Side.PRIMARY
    return replace(service, side=side, since=at, turned_at=at, serving_since=inf, idle_since=inf)
