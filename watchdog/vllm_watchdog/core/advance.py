"""`advance(world, event)`: the next world, and the commands to carry out.  One small handler an event, then what follows.

What follows from the facts (deadlines, gates, probes, failover, recovery) is worked out after every event alike, in
`follow.py`, so that no handler can forget it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from vllm_watchdog.core import boot, causes, events, incidents, liveness, operate, story
from vllm_watchdog.core.blame import specificity
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.commands import Command
from vllm_watchdog.core.failures import Ended, filed
from vllm_watchdog.core.follow import follow
from vllm_watchdog.core.incidents import REQUESTS_KEPT, Flight, Urgency
from vllm_watchdog.core.logs import kernel_read, log_read
from vllm_watchdog.core.phrases import filled, strung
from vllm_watchdog.core.policy import ALIVE, Phase, Sign
from vllm_watchdog.core.readings import Health, Mark, Unknown
from vllm_watchdog.core.reload import settled
from vllm_watchdog.core.renew import renew
from vllm_watchdog.core.sampled import gpus_sampled, host_sampled, watch_metrics
from vllm_watchdog.core.turn import Turn
from vllm_watchdog.core.world import ROUTED, Engine, World

NOT_RUN = frozenset({126, 127})     # a shell's word that its command can't be executed, or was not found
BAD_HEALTH = frozenset({Health.DEAD, Health.REFUSED})


def advance(world: World, event: events.Event) -> tuple[World, tuple[Command, ...]]:
    """Pure: the same world and event give the same answer, whenever and wherever."""
    turn = Turn(world, event.at)
    HANDLERS[type(event)](turn, event)
    renew(turn)
    follow(turn)
    commands = turn.flush()
    return turn.world, commands


def _current(turn: Turn, mark: Mark) -> Engine | None:
    """The engine, if the mark is of its newest generation; what older ones did is history."""
    engine = next((engine for engine in turn.world.engines if engine.mark == mark), None)
    return engine if engine and engine.generation else None


def _ignore(turn: Turn, event: events.Tick) -> None:
    pass


def _clock_set(turn: Turn, event: events.ClockSet) -> None:
    turn.say("clock.stepped", by_s=f"{event.wall_offset - turn.world.wall_offset:+.1f}")
    turn.world = replace(turn.world, wall_offset=event.wall_offset)


def _reloaded(turn: Turn, event: events.Reloaded) -> None:
    turn.world = settled(replace(turn.world, asked=event.plan))
    turn.say("daemon.reloaded", waits="yes" if turn.world.asked else "")


def _stop_asked(turn: Turn, event: events.StopAsked) -> None:
    turn.say("daemon.stopping", by=event.by)
    kill_s = max((engine.plan.limits.kill_s for engine in turn.world.engines), default=0.0)
    turn.world = replace(turn.world, stopping=True, strays_until=turn.at + kill_s)
    for incident in turn.world.incidents:
        turn.note(incident.service, "left", causes.LEFT)
    for engine in turn.world.engines:
        turn.sign(engine.name, Sign.UNWANT)


def _spawned(turn: Turn, event: events.Spawned) -> None:
    if engine := _current(turn, event.mark):
        turn.change(engine.name, pid=event.pid, active_at=event.at)
        turn.say("engine.spawned", engine=event.mark, pid=event.pid)
        if event.lost_log:
            text = filled(causes.NO_LOG, mark=event.mark, why=event.lost_log)
            turn.change(engine.name, unlogged=True)
            turn.symptom(engine.name, "log_lost", Urgency.WARNING, text)
        turn.sign(engine.name, Sign.SPAWNED)


def _spawn_failed(turn: Turn, event: events.SpawnFailed) -> None:
    if engine := _current(turn, event.mark):
        turn.say("engine.spawn_failed", engine=event.mark, class_=event.class_, why=event.why)
        turn.explain(engine.name, event.class_, filled(causes.NOT_STARTED, why=event.why))
        doom = event.class_ if event.class_ == "port_stranger" else ""      # a full disk or process table may pass
        turn.sign(engine.name, Sign.EMPTY, doom=doom)


def _exited(turn: Turn, event: events.Exited) -> None:
    if engine := _current(turn, event.mark):
        turn.say("engine.exited", engine=event.mark, code=event.code, phase=engine.phase)
        _ended_for_memory(turn, engine, event.oom_kills)
        turn.note(engine.name, "exited", filled(causes.EXITED, mark=event.mark, code=event.code))
        ours = engine.phase in (Phase.STOPPING, Phase.KILLING)
        ended = Ended(str(event.mark), event.code, ours)
        turn.change(engine.name, exit_code=event.code, ended=ended)
        if engine.life.charged:
            turn.failed(engine.name)
        never_ran = engine.phase is Phase.LOADING and event.code in NOT_RUN and not engine.cause
        if never_ran:
            turn.change(engine.name, cause="spawn_failed")
        turn.sign(engine.name, Sign.EXIT, doom="spawn_failed" if never_ran else "")


def _member_died(turn: Turn, event: events.MemberDied) -> None:
    """Only of what has come up, and is not being moved: while loading, processes come and go, and later they are stopped."""
    engine = _current(turn, event.mark)
    if engine and engine.phase in ROUTED | {Phase.ASLEEP}:
        turn.say("engine.member_died", engine=event.mark, pid=event.pid, process=event.name)
        turn.change(engine.name, lost_at=event.at)
        class_ = "worker_died" if event.name.startswith("VLLM::Worker") else "engine_proc_died"
        turn.fault(engine.name, class_, filled(causes.MEMBER_DIED, process=event.name, pid=event.pid))


def _ended_for_memory(turn: Turn, engine: Engine, oom_kills: int) -> None:
    """Its control group counts the kernel's kills.  What happens after our own stop is not a symptom."""
    if oom_kills and (engine.life.charged or engine.phase in ALIVE):
        text = filled(causes.OOM_KILLED, n=oom_kills, mark=engine.mark)
        turn.symptom(engine.name, "host_oom_kill", Urgency.CRITICAL, text)
        if specificity("host_oom_kill") > specificity(engine.cause):
            turn.explain(engine.name, "host_oom_kill", text)


def _emptied(turn: Turn, event: events.Emptied) -> None:
    turn.world = replace(turn.world, strays=tuple(mark for mark in turn.world.strays if mark != event.mark))
    turn.say("engine.emptied", engine=event.mark, killed=", ".join(map(str, event.killed)))
    if engine := _current(turn, event.mark):
        if event.killed:
            killed = ", ".join(map(str, event.killed))
            turn.note(engine.name, "reaped", filled(causes.REAPED, killed=killed), killed=killed)
        turn.sign(engine.name, Sign.EMPTY)


def _dumped(turn: Turn, event: events.Dumped) -> None:
    turn.say("evidence.done", incident=event.incident, folder=event.folder, missing=", ".join(event.missing))
    for incident in turn.world.incidents:
        if incident.id == event.incident:
            missing = strung(filled(causes.WITHOUT, part=part) for part in event.missing)
            text = filled(causes.FILED if event.folder else causes.NOT_FILED, folder=event.folder, missing=missing)
            if event.folder:
                turn.note(incident.service, "evidence", text, folder=event.folder)
            else:
                turn.note(incident.service, "no evidence", text)
            incident = turn.world.incident(incident.service) or incident
            if event.folder:
                turn.world = turn.world.with_incident(replace(
                    incident, evidence=(*incident.evidence, event.folder),
                    failures=filed(incident.failures, str(event.mark), event.folder)))
    if event.mark and (engine := _current(turn, event.mark)):
        turn.bundled(engine.name)
    operate.written(turn, event)


def _probed(turn: Turn, event: events.Probed) -> None:
    engine = _current(turn, event.mark)
    if engine is None or engine.phase not in ALIVE:
        return
    bad = event.health in BAD_HEALTH
    engine = turn.change(engine.name, health=event.health, ill_since=min(engine.ill_since, event.at) if bad else inf)
    if event.health is Health.OK:
        _answers(turn, engine, event)
    elif bad and engine.phase in ROUTED | {Phase.ASLEEP} and event.at - engine.ill_since >= engine.plan.limits.dead_s:
        text = filled(causes.UNHEALTHY, health=event.health, s=f"{event.at - engine.ill_since:.0f}")
        turn.fault(engine.name, "api_unreachable", text)


def _answers(turn: Turn, engine: Engine, event: events.Probed) -> None:
    """Readiness belongs to our generation: whoever else listens on the port is named."""
    strangers = [owner for owner in event.owners if owner.mark != engine.mark]
    if strangers and engine.phase is Phase.LOADING:
        text = filled(causes.STRANGER, port=engine.plan.port, who=", ".join(map(str, strangers)), mark=engine.mark)
        turn.fault(engine.name, "port_stranger", text, doom=True)
    elif strangers:
        text = filled(causes.SHARED_PORT, port=engine.plan.port, who=", ".join(map(str, strangers)))
        turn.symptom(engine.name, "port_stranger", Urgency.CRITICAL, text)
    elif event.owners and engine.phase is Phase.LOADING:
        pulse = replace(engine.pulse, since=event.at)
        turn.change(engine.name, ready_at=event.at, pulse=pulse)
        turn.say("engine.ready", engine=engine.mark, after_s=f"{event.at - engine.spawned_at:.1f}")
        turn.note(engine.name, "ready", filled(causes.SERVES, mark=engine.mark), engine=str(engine.mark))
        turn.sign(engine.name, Sign.WELL)


def _answered(turn: Turn, event: events.Answered) -> None:
    if engine := _current(turn, event.mark):
        unprovable = event.answer.why if isinstance(event.answer, Unknown) else ""
        if unprovable and unprovable != engine.pulse.unprovable:
            turn.say("probe.proves_nothing", engine=event.mark, why=unprovable)
        turn.change(engine.name, pulse=liveness.answered(engine.pulse, event.at, event.answer))


def _slept(turn: Turn, event: events.Slept) -> None:
    if engine := _current(turn, event.mark):
        turn.say("engine.slept", engine=event.mark, took_s=f"{event.took_s:.2f}", why=event.why)
        if event.why:
            turn.fault(engine.name, "sleep_failed", filled(causes.NOT_SLEPT, why=event.why))
        else:
            turn.sign(engine.name, Sign.SLEPT)


def _woke(turn: Turn, event: events.Woke) -> None:
    if engine := _current(turn, event.mark):
        turn.say("engine.woke", engine=event.mark, took_s=f"{event.took_s:.2f}", why=event.why)
        if event.why:
            turn.fault(engine.name, "wake_failed", filled(causes.NOT_WOKEN, why=event.why))
        else:
            turn.change(engine.name, pulse=liveness.Pulse(since=event.at))
            text = filled(causes.AWAKE, mark=event.mark, s=f"{event.took_s:.2f}")
            turn.note(engine.name, "ready", text, engine=str(event.mark))
            turn.sign(engine.name, Sign.WOKE)


def _scraped(turn: Turn, event: events.Scraped) -> None:
    if engine := _current(turn, event.mark):
        pulse = liveness.scraped(engine.pulse, event.at, event.metrics)
        turn.change(engine.name, pulse=pulse, metrics=event.metrics)
        watch_metrics(turn, engine.name, event.metrics)


def _casualties(turn: Turn, event: events.Casualties) -> None:
    """Which requests were there: told in the incident, or kept until there is one."""
    largest = sorted(event.requests, key=lambda request: -request.bytes)[:REQUESTS_KEPT]
    flight = Flight(str(event.mark), event.in_flight, sum(each.begun for each in event.requests), tuple(largest))
    turn.say("gateway.casualties", engine=event.mark, text=story.flight_of(flight))
    if engine := _current(turn, event.mark):
        if turn.world.incident(turn.service_of(engine.name)):
            turn.flown(engine.name, flight)
        else:
            turn.change(engine.name, in_flight=flight)


def _waited(turn: Turn, event: events.Waited) -> None:
    """How long clients waited; of no incident where an operator, or the first start, let them wait."""
    text = story.wait_of(event.wait)
    turn.say("gateway.waited", service=event.service, text=text)
    if event.service in {service.name for service in turn.world.services}:
        turn.amend(event.service, lambda incident: incidents.waited(incident, event.wait))
        turn.note(event.service, "waited", text)


def _drilled(turn: Turn, event: events.Drilled) -> None:
    turn.say("drill", incident=event.incident, fault=event.fault)
    for incident in turn.world.incidents:
        if incident.id == event.incident:
            turn.note(incident.service, "drill", event.fault, fault=event.fault)


HANDLERS: dict[type[events.Event], Callable[[Turn, Any], None]] = {
    events.Booted: boot.booted,
    events.ClockSet: _clock_set,
    events.Tick: _ignore,
    events.Reloaded: _reloaded,
    events.StopAsked: _stop_asked,
    events.Spawned: _spawned,
    events.SpawnFailed: _spawn_failed,
    events.Exited: _exited,
    events.MemberDied: _member_died,
    events.Emptied: _emptied,
    events.Dumped: _dumped,
    events.Probed: _probed,
    events.Answered: _answered,
    events.Slept: _slept,
    events.Woke: _woke,
    events.Scraped: _scraped,
    events.GpusSampled: gpus_sampled,
    events.HostSampled: host_sampled,
    events.LogRead: log_read,
    events.KernelRead: kernel_read,
    events.Casualties: _casualties,
    events.Waited: _waited,
    events.Drilled: _drilled,
    events.Asked: operate.asked,
}
