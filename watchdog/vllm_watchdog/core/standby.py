"""What a standby is told while it is not its turn, and when it is: sleep, wake, start.

`failover` says whose turn it is; this keeps the backup ready.  It never starts a backup into memory that the serving
primary has: a sleeper that died while the primary serves is gone until the next change of sides, and the failover is a
cold one.
"""

from __future__ import annotations

from math import inf

from vllm_watchdog.core import causes, gate
from vllm_watchdog.core.failover import Service, Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import Standby
from vllm_watchdog.core.policy import Phase, Sign
from vllm_watchdog.core.turn import Turn
from vllm_watchdog.core.world import Engine, World

READY = {
    Standby.COLD: frozenset[Phase](),
    Standby.SLEEPING: frozenset({Phase.ASLEEP}),
    Standby.HOT: frozenset({Phase.SERVING}),
}


def keep_ready(turn: Turn, service: Service) -> None:
    """Level-triggered: whatever happened to the backup, it is told again what it should be.

    Under `pause` it finishes a change of sides that has begun, or that a human asked for, and starts nothing.
    """
    if service.backup is None or service.standby is Standby.COLD:
        return
    if service.side is Side.BACKUP:
        _its_turn(turn, service, turn.world.engine(service.backup))
    else:
        _stand_by(turn, service, turn.world.engine(service.backup))


def _its_turn(turn: Turn, service: Service, backup: Engine) -> None:
    if service.standby is Standby.HOT:
        _want(turn, service.name)
    elif backup.phase is Phase.ASLEEP and _has_room(turn.world, backup):
        turn.sign(backup.name, Sign.ROUSE)
    elif backup.phase is Phase.ASLEEP and _memory_may_come(turn, service, backup):
        turn.look_soon()
    elif backup.phase is Phase.ASLEEP and not _paged(turn.world, service):
        turn.page(backup.name)


def _stand_by(turn: Turn, service: Service, backup: Engine) -> None:
    if service.standby is Standby.SLEEPING and backup.phase is Phase.SERVING:
        turn.sign(backup.name, Sign.REST)
    elif service.standby is Standby.HOT or _may_boot(turn.world, service):
        _want(turn, backup.name)
    elif backup.life.wanted and backup.phase in (Phase.BACKOFF, Phase.RELEASING) and not turn.world.paused:
        text = filled(causes.STANDBY_LOST, engine=backup.name, primary=service.name)
        turn.symptom(backup.name, "standby_lost", Urgency.WARNING, text)
        turn.sign(backup.name, Sign.UNWANT)


def ready(service: Service, backup: Engine) -> bool:
    return backup.phase in READY[service.standby]


def stays(service: Service, name: str) -> bool:
    """Does an engine whose turn has ended keep its process?"""
    return service.standby is Standby.HOT or (service.standby is Standby.SLEEPING and name == service.backup)


def goes_first(world: World, engine: Engine) -> str:
    """The backup that must be asleep before this primary takes the memory; empty: nobody."""
    service = world.service(engine.name)
    if service.standby is not Standby.SLEEPING or engine.name != service.name or service.backup is None:
        return ""
    backup = world.engine(service.backup)
    waiting = backup.life.wanted and backup.phase not in (Phase.ASLEEP, Phase.HELD, Phase.WEDGED, Phase.BACKOFF)
    return backup.name if waiting and not gate.fit_together(engine.plan, backup.plan) else ""


def _paged(world: World, service: Service) -> bool:
    incident = world.incident(service.name)
    return incident is not None and bool(incident.page)


def _want(turn: Turn, name: str) -> None:
    engine = turn.world.engine(name)
    if not turn.world.paused and not engine.life.wanted and engine.phase is Phase.STOPPED:
        turn.sign(name, Sign.WANT)


def _memory_may_come(turn: Turn, service: Service, backup: Engine) -> bool:
    """The primary still leaves, or left a moment ago."""
    if gate.leaves(backup.plan, ((engine.plan, engine.phase) for engine in turn.world.engines)):
        return True
    return turn.at - max(service.since, turn.world.engine(service.name).since) < backup.plan.limits.release_s


def _may_boot(world: World, service: Service) -> bool:
    """Beside the primary where both fit; else once, before its first start: a standby that fails must not hold it up."""
    primary, backup = world.engine(service.name), world.engine(service.backup or service.name)
    unstarted = primary.spawned_at == inf and not backup.life.charged
    return unstarted or gate.fit_together(primary.plan, backup.plan)


def _has_room(world: World, backup: Engine) -> bool:
    others = gate.rivals(backup.plan, ((engine.plan, engine.phase) for engine in world.engines))
    strays = gate.in_the_way(backup.plan, world.strays, world.plan.engines)
    seen = world.gpus_at >= world.service(backup.name).since or gate.blind(world.gpus, world.gpus_at)
    if others or strays or not (seen or not backup.plan.gpus):
        return False
    return not gate.shortage(backup.plan, world.gpus, backup.mark)
