"""What operators ask, and the answer each gets: what is being done now, or why not."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from vllm_watchdog.core import causes, incidents
from vllm_watchdog.core.boot import want
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.commands import Answer, Quit, Record
from vllm_watchdog.core.events import Asked, Dumped
from vllm_watchdog.core.failover import Hint, Service, Side
from vllm_watchdog.core.follow import turn_service
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import Standby
from vllm_watchdog.core.policy import ALIVE, HAS_CHILD, Phase, Sign
from vllm_watchdog.core.standby import stays
from vllm_watchdog.core.turn import Turn
from vllm_watchdog.core.world import Snapshot

Reply = tuple[bool, str]
ALONE = ("It is not run by systemd, so nobody starts the next one: until you do (llm-watchdog run), nobody watches the "
         "engines")
SNAPSHOTS = 16      # operators who wait at once; the control socket has no more connections


def asked(turn: Turn, event: Asked) -> None:
    turn.say("operator.asked", verb=event.verb, engine=event.engine, text=event.text)
    if turn.world.stopping:
        ok, text = False, "the daemon is stopping"
    elif event.verb in VERBS:
        ok, text = VERBS[event.verb](turn, event)
    else:
        ok, text = False, f"unknown verb {event.verb}"
    if not any(snapshot.ref == event.ref for snapshot in turn.world.snapshots):
        turn.do(Answer(event.ref, ok, text))


def written(turn: Turn, event: Dumped) -> None:
    """A bundle is over: whoever waits for it, and for no other, is told where it lies and what it lacks, or why not."""
    lacks = ", ".join(event.missing)
    told = event.folder + (f" (without {lacks})" if lacks else "") if event.folder else (
        f"nothing was written: {lacks.removeprefix('everything: ')}")
    left = []
    for snapshot in turn.world.snapshots:
        if event.incident in snapshot.waiting:
            waiting = tuple(name for name in snapshot.waiting if name != event.incident)
            snapshot = replace(snapshot, waiting=waiting, told=(*snapshot.told, told),
                               ok=snapshot.ok and bool(event.folder))
        if snapshot.waiting:
            left.append(snapshot)
        else:
            turn.do(Answer(snapshot.ref, snapshot.ok, "\n".join(snapshot.told)))
    turn.world = replace(turn.world, snapshots=tuple(left))


def _names(turn: Turn) -> list[str]:
    return [engine.name for engine in turn.world.engines]


def _nobody(turn: Turn, name: str | None) -> Reply:
    return False, f"no engine {name!r} is configured; there are: {', '.join(_names(turn))}"


def _restart(turn: Turn, event: Asked) -> Reply:
    if event.engine not in _names(turn):
        return _nobody(turn, event.engine)
    engine = turn.world.engine(event.engine)
    service = turn.world.service(engine.name)
    if service.wanted != engine.name and engine.phase is Phase.HELD:
        turn.note(engine.name, "operator", filled(causes.FORGIVEN, engine=engine.name), verb="restart", engine=engine.name)
        turn.sign(engine.name, Sign.FORGIVE)
        return True, f"{engine.name} is not held any more; it starts when it is needed"
    if service.wanted != engine.name and service.standby is not Standby.HOT:
        return False, f"{engine.name} is not in service, {service.wanted} is: use failover or failback"
    turn.note(engine.name, "operator", filled(causes.RESTART, engine=engine.name), verb="restart", engine=engine.name)
    forgiven = tuple(each for each in turn.world.failed if each[0].engine != engine.name)
    turn.world = replace(turn.world, failed=forgiven)
    if service.wanted == engine.name:
        turn.world = turn.world.with_service(replace(service, excused_until=inf))
    was = engine.phase
    turn.sign(engine.name, Sign.AGAIN)
    doing = "is being stopped, and then started" if was in HAS_CHILD else "is being started"
    return True, f"{engine.name} (generation {engine.generation}, {was}) {doing}; its failures are forgiven"


def _turn(turn: Turn, event: Asked, side: Side, start: Sign) -> Reply:
    services = [service for service in turn.world.services if service.backup]
    if event.engine:
        if event.engine not in _names(turn):
            return _nobody(turn, event.engine)
        services = [service for service in services if event.engine in (service.name, service.backup)]
    if not services:
        return False, "there is no backup to change to" + (f" for {event.engine!r}" if event.engine else "")
    done = []
    for service in services:
        if service.side is side:
            done.append(f"{service.name}: {service.wanted} is already meant to serve")
            continue
        turn.note(service.name, "operator", causes.STEPS[event.verb], verb=event.verb, engine=service.name)
        done.append(f"{service.name}: {_course(turn, service)}")
        turn_service(turn, service, Hint.OPERATOR, start)
    return True, "; ".join(done)


def _course(turn: Turn, service: Service) -> str:
    """What a change of sides will do, in words."""
    leaving, coming = service.wanted, service.name if service.side is Side.BACKUP else service.backup or ""
    phase = turn.world.engine(coming).phase
    begins = {Phase.SERVING: "takes over", Phase.ASLEEP: "is woken"}.get(phase, "starts")
    if service.standby is Standby.HOT:
        return f"{leaving} stays as it is, {coming} {begins}"
    ends = "is put to sleep" if stays(service, leaving) else "is being stopped"
    return f"{leaving} {ends}, then {coming} {begins}"


def _failover(turn: Turn, event: Asked) -> Reply:
    return _turn(turn, event, Side.BACKUP, Sign.START)


def _failback(turn: Turn, event: Asked) -> Reply:
    return _turn(turn, event, Side.PRIMARY, Sign.START)


def _pause(turn: Turn, _: Asked) -> Reply:
    turn.world = replace(turn.world, paused=True)
    return True, "automatic actions are paused; watching, evidence and alerts go on"


def _resume(turn: Turn, _: Asked) -> Reply:
    """What failed while paused is acted on now, unless it has given a sign of life since."""
    turn.world = replace(turn.world, paused=False)
    for engine in turn.world.engines:
        charged = engine.phase in ALIVE and engine.life.charged
        if charged and all(engine.pulse.sign_at <= at for at in engine.life.failures[-1:]):
            turn.sign(engine.name, Sign.FAULT)
    want(turn)
    return True, "automatic actions are on"


def _snapshot(turn: Turn, event: Asked) -> Reply:
    """Into the open incident's folder, or into one of its own, which the history lists; answered when it is written."""
    names = [event.engine] if event.engine else [service.wanted for service in turn.world.services]
    if unknown := [name for name in names if name not in _names(turn)]:
        return _nobody(turn, unknown[0])
    folders = []
    for name in names:
        incident = turn.world.incident(turn.world.plan.service_of(name))
        incident = incident or _recorded(turn, name, event.text)
        turn.bundle(incident.id, name, event.text or "snapshot", stacks=True)
        folders.append(incident.id)
    turn.world = replace(turn.world, snapshots=(*turn.world.snapshots, Snapshot(event.ref, tuple(folders)))[-SNAPSHOTS:])
    return True, ""


def _recorded(turn: Turn, name: str, reason: str) -> Incident:
    """An incident in which nothing happened: for history and page, over as soon as it is begun, alerting nobody."""
    engine = turn.world.engine(name)
    text = reason or causes.ASKED_FOR
    made = incidents.opened(turn.service_of(name), name, engine.generation, "snapshot", Urgency.WARNING, text,
                            turn.at, turn.wall)
    made = replace(turn.measured(made, engine), wall_resolved=turn.wall)
    turn.do(Record(made))
    return made


def _handover(turn: Turn, _: Asked) -> Reply:
    """As if it were killed, but tidily: nothing is stopped, nothing is forgiven."""
    names = [str(engine.mark) for engine in turn.world.engines if engine.phase in HAS_CHILD]
    turn.say("daemon.leaving", engines=", ".join(names))
    turn.do(Quit())
    text = f"this daemon leaves; the next one takes over {', '.join(names) or 'no engine'}"
    return True, text if turn.world.supervised else f"{text}. {ALONE}"


VERBS: dict[str, Callable[[Turn, Asked], Reply]] = {
    "restart": _restart,
    "failover": _failover,
    "failback": _failback,
    "pause": _pause,
    "resume": _resume,
    "snapshot": _snapshot,
    "handover": _handover,
}
