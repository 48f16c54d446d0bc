"""The first event of a daemon: what is configured, what is remembered, what still runs.

A start never launches beside an engine of ours that still runs: the one that is meant to serve is adopted, every other
is stopped, and each is said.
"""

from __future__ import annotations

from math import inf

from vllm_watchdog.core import causes, incidents, reasons
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.commands import Adopt, Drain, Kill
from vllm_watchdog.core.events import Booted, Survivor
from vllm_watchdog.core.failover import Service, Side
from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import EnginePlan, Standby
from vllm_watchdog.core.policy import Phase, Sign, State
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.standby import stays
from vllm_watchdog.core.turn import HOST, Turn
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import Engine, World


def booted(turn: Turn, event: Booted) -> None:
    memory = event.memory or Memory(event.boot_id)
    same_boot = memory.boot_id == event.boot_id
    known = {engine.name: engine for engine in memory.engines}
    engines = tuple(_engine(plan, known.get(plan.name), same_boot, event) for plan in event.plan.engines)
    running = {engine.name: _leader(engine, event.survivors) for engine in engines}
    turn.world = World(
        plan=event.plan,
        boot_id=event.boot_id,
        at=event.at,
        wall_offset=event.wall_offset,
        engines=engines,
        services=tuple(_services(event, memory, running)),
        incidents=memory.incidents if same_boot else tuple(_rebased(i, event) for i in memory.incidents),
        paused=memory.paused,
        supervised=event.supervised,
        restarts=tuple(at for wall in memory.restarts if (at := wall - event.wall_offset) > event.at - DAY_S),
    )
    turn.taken_over = turn.world.incidents
    turn.say("daemon.started", engines=len(event.plan.engines), survivors=len(event.survivors), same_boot=same_boot)
    _forget(turn)
    _take_over(turn, event, running, {Mark(engine.name, engine.generation): engine for engine in memory.engines})
    if same_boot:
        served = [Mark(name, engine.generation) for name, engine in known.items() if engine.served and name in running]
        _missed(turn, [mark.engine for mark in served if running[mark.engine] is None])
        for mark in served:
            if (now := running[mark.engine]) and now.mark.generation > mark.generation:
                _replaced(turn, mark)
    if not turn.world.paused:
        want(turn)


def _missed(turn: Turn, names: list[str]) -> None:
    """What died while no watchdog ran was an outage all the same.  Nobody saw how it ended, but its log may say why."""
    for name in names:
        text = reasons.unseen(turn.world.engine(name).mark)
        turn.symptom(name, "unexpected_exit", Urgency.CRITICAL, text)
        turn.explain(name, "", text)
        turn.failed(name)
        turn.do(Drain(turn.world.engine(name).mark))


def _replaced(turn: Turn, mark: Mark) -> None:
    """Its successor was started, which comes first, and then that daemon died before it had told why."""
    known = turn.world.incident(turn.service_of(mark.engine))
    if known and any(failure.mark == str(mark) for failure in known.failures):
        return
    text = reasons.unseen(mark)
    turn.symptom(mark.engine, "unexpected_exit", Urgency.CRITICAL, text)
    failure = Failure(turn.at, str(mark), "unexpected_exit", text.en, zh=text.zh)
    turn.amend(mark.engine, lambda incident: incidents.failed(
        incident if known else replace(incident, generation=mark.generation), failure))


def want(turn: Turn) -> None:
    """Every service wants the engine that is meant to serve; a held one waits for a human."""
    for service in turn.world.services:
        if turn.world.engine(service.wanted).phase is not Phase.HELD:
            turn.sign(service.wanted, Sign.WANT)


def _forget(turn: Turn) -> None:
    """An incident of a service that is configured no more has nobody left who could recover."""
    services = {service.name for service in turn.world.services} | {HOST}
    for incident in turn.world.incidents:
        if incident.service not in services:
            text = filled(causes.UNKNOWN_SERVICE, service=incident.service)
            turn.world = turn.world.with_incident(incidents.resolved(incident, turn.at, turn.wall, text))
            turn.say("incident.resolved", incident=incident.id)


def _rebased(incident: Incident, event: Booted) -> Incident:
    """After a reboot the monotonic clock began anew: the wall clock says how long ago it was."""
    by = (incident.wall_opened - event.wall_offset) - incident.opened_at
    return incidents.shifted(incident, by, event.at)


def _leader(engine: Engine, survivors: tuple[Survivor, ...]) -> Survivor | None:
    """The leader of an engine's newest generation, if it still runs."""
    return next((survivor for survivor in survivors if survivor.leader and survivor.mark == engine.mark), None)


def _engine(plan: EnginePlan, known: EngineMemory | None, same_boot: bool, event: Booted) -> Engine:
    """Generations only ever grow, so that a mark names one launch for ever."""
    seen = [survivor.mark.generation for survivor in event.survivors if survivor.mark.engine == plan.name]
    generation = max([known.generation if known else 0, *seen])
    engine = Engine(plan=plan, generation=generation, since=event.at, active_at=event.at)
    if known is None or not same_boot:
        return engine
    held = bool(known.held)
    life = State(phase=Phase.HELD if held else Phase.STOPPED, failures=known.failures, doom=known.held)
    return replace(engine, life=life, cause=known.held, why=known.why, why_zh=known.why_zh, renewed_at=known.renewed_at)


def _services(event: Booted, memory: Memory, running: dict[str, Survivor | None]) -> list[Service]:
    """A service stays with its backup if it was there, or if only its backup still runs."""
    known = {service.name: service for service in memory.services}
    services = []
    for primary in (engine for engine in event.plan.engines if engine.backup_for is None):
        backup = next((engine.name for engine in event.plan.engines if engine.backup_for == primary.name), None)
        only_backup = backup is not None and running[backup] is not None and running[primary.name] is None
        before = known.get(primary.name, ServiceMemory(primary.name, on_backup=False, turned_at=-inf))
        side = Side.BACKUP if backup and (before.on_backup or only_backup) else Side.PRIMARY
        standby = event.plan.engine(backup).standby if backup else Standby.COLD
        service = Service(primary.name, backup, standby, side, since=event.at)
        if memory.boot_id == event.boot_id:
            served = any(engine.served for engine in memory.engines if engine.name == service.wanted)
            service = replace(service, turned_at=before.turned_at, patience=before.patience,
                              excused_until=-inf if served else inf,     # only a first start is excused
                              served=served,
                              lowering=before.lowering if side is Side.PRIMARY else Lowering())
        services.append(service)
    return services


def _take_over(turn: Turn, event: Booted, running: dict[str, Survivor | None], known: dict[Mark, EngineMemory]) -> None:
    """Adopt the newest generation of each engine; what else carries our mark must be gone before anything starts."""
    adopted: set[Mark] = set()
    for name, survivor in running.items():
        if survivor is not None:
            adopted.add(survivor.mark)
            _adopt(turn, name, survivor, known.get(survivor.mark, EngineMemory(name, survivor.mark.generation, wanted=True)))
    strays = sorted({survivor.mark for survivor in event.survivors} - adopted, key=str)
    turn.world = replace(turn.world, strays=tuple(strays))
    for mark in strays:
        turn.say("engine.stray", engine=mark, action="killed: no leader, or an older generation")
        turn.do(Kill(mark))


def _adopt(turn: Turn, name: str, survivor: Survivor, before: EngineMemory) -> None:
    """What served goes on serving until it is proved not to.  A sleeper is put to sleep again before anything else, which
    does no harm: it may have been on its way back."""
    engine, asleep, served = turn.world.engine(name), before.asleep, before.since < inf
    service = turn.world.service(name)
    sleeps = engine.plan.standby is Standby.SLEEPING        # else nobody would wake it: configured anew, started anew
    kept = (service.wanted == name or stays(service, name)) and (sleeps or not asleep)
    left = max(engine.plan.limits.load_s - survivor.age_s, engine.plan.limits.suspect_s)
    phase, deadline = (Phase.SERVING, inf) if asleep or served else (Phase.LOADING, turn.at + left)
    life = State(phase=phase, wanted=True, deadline=deadline, failures=engine.life.failures)
    turn.change(name, life=life, pid=survivor.pid, spawned_at=turn.at - survivor.age_s, adopted=True,
                cause="", why="", why_zh="", pulse=replace(engine.pulse, since=turn.at),
                since=before.since if served else engine.since,
                ready_at=before.ready_at if asleep or served else inf, unlogged=before.unlogged)
    turn.do(Adopt(survivor.mark, survivor.pid))
    turn.say("engine.adopted", engine=survivor.mark, pid=survivor.pid, then="kept" if kept else "stopped")
    if not kept:
        turn.sign(name, Sign.UNWANT)
    elif asleep:
        turn.sign(name, Sign.REST)
