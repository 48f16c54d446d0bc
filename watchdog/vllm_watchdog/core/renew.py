"""The planned restart: an engine that leaks is started anew before its limit is met, while nobody uses it.

Off unless configured.  Once a day at most for each engine, never charged as a failure, never under `pause`.  Where a hot
standby serves beside it the route is changed first, so that a busy engine becomes idle.
"""

from __future__ import annotations

from vllm_watchdog.core import causes, gate
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.failover import PLANNED_S, Hint, Service
from vllm_watchdog.core.follow import is_idle, turn_service
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import Planned, Standby
from vllm_watchdog.core.policy import Phase, Sign
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.turn import Turn
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import Engine, World

IDLE_S = 60.0       # without a request: a pause between two of one client is shorter
OF_PROCESS = frozenset({"rss_leak", "fd_leak"})


def renew(turn: Turn) -> None:
    if turn.world.plan.planned is Planned.OFF or turn.world.paused or turn.world.stopping:
        return
    for service in turn.world.services:
        for engine in (turn.world.engine(name) for name in (service.name, service.backup) if name):
            if _is_due(turn, engine):
                _step(turn, service, engine)


def _is_due(turn: Turn, engine: Engine) -> bool:
    rested = turn.at - engine.renewed_at >= DAY_S
    return rested and engine.phase is Phase.SERVING and bool(leak_of(turn.world, engine))


def leak_of(world: World, engine: Engine) -> str:
    """The class of its leak.  A card that grows counts only where nobody else is on it."""
    raised = {(watch.class_, watch.subject) for watch in world.watches if watch.raised}
    for class_, subject in sorted(raised):
        if class_ in OF_PROCESS and subject == engine.name:
            return class_
    alone = not isinstance(world.gpus, Unknown) and not gate.others_on(engine.plan, world.gpus, engine.mark)
    grows = any(("vram_growth", f"gpu{gpu}") in raised for gpu in engine.plan.gpus)
    return "vram_growth" if alone and grows else ""


def _step(turn: Turn, service: Service, engine: Engine) -> None:
    if service.wanted != engine.name:
        if turn.at - service.since >= IDLE_S and is_idle(engine):
            _restart(turn, engine)
    elif turn.at - service.idle_since >= IDLE_S:
        turn.world = turn.world.with_service(replace(service, excused_until=turn.at + PLANNED_S))
        _restart(turn, engine)
    elif engine.name == service.name and _takes_over(turn.world, service):
        turn_service(turn, service, Hint.LEAKS)


def _takes_over(world: World, service: Service) -> bool:
    return service.standby is Standby.HOT and world.engine(service.backup or service.name).phase is Phase.SERVING


def _restart(turn: Turn, engine: Engine) -> None:
    leak = leak_of(turn.world, engine)
    turn.change(engine.name, renewed_at=turn.at)
    turn.say("engine.renewed", engine=engine.mark, because=leak)
    turn.note(engine.name, "action", filled(causes.PLANNED, mark=engine.mark, leak=leak))
    turn.sign(engine.name, Sign.RENEW)
