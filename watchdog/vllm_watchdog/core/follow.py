"""What follows from the facts, whatever event brought them: deadlines, gates, probes, failover, recovery, the end."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from vllm_watchdog.core import causes, failover, gate, incidents, liveness, lowering, outages, repeats, standby
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import changed, replace
from vllm_watchdog.core.commands import Ask, Quit
from vllm_watchdog.core.failover import Facts, Hint, Service, Side
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.liveness import Life
from vllm_watchdog.core.phrases import BECAUSE, COMMA, filled, strung
from vllm_watchdog.core.policy import HAS_CHILD, Phase, Sign
from vllm_watchdog.core.readings import Metrics, Unknown
from vllm_watchdog.core.sampled import GPUS_LOST, watches_of
from vllm_watchdog.core.symptoms import Watch
from vllm_watchdog.core.turn import HOST, Turn
from vllm_watchdog.core.units import duration, time_of_day
from vllm_watchdog.core.world import ROUTED, Engine, World, due_at

ROUNDS = 8      # one failure can time out, settle, back off by nothing, pass the gate and spawn in one turn


def follow(turn: Turn) -> None:
    """Until nothing changes any more; bounded, because every round but the last one moved an engine on."""
    for _ in range(ROUNDS):
        before = turn.world
        for service in turn.world.services if not turn.world.stopping else ():
            standby.keep_ready(turn, service)       # before the gates: who sleeps first must be wanted first
        for engine in turn.world.engines:
            _move(turn, engine.plan.name)
        for service in turn.world.services:
            _service(turn, service.name)
        if turn.world == before:
            break
    outages.watch(turn)
    for engine in turn.world.engines:
        _ask(turn, engine)
    # Nobody waits, or only for so long that the schedule will do.
    if turn.world.look_at < inf and (turn.world.look_at <= turn.at or not _waits_for_room(turn.world)):
        turn.world = replace(turn.world, look_at=inf)
    _outages(turn)
    _recovered(turn)
    _remind(turn)
    if turn.world.stopping and turn.world.all_at_rest:
        turn.do(Quit())


def _waits_for_room(world: World) -> bool:
    releasing = any(engine.phase is Phase.RELEASING for engine in world.engines)
    return releasing or any(world.engine(service.wanted).phase is Phase.ASLEEP for service in world.services)


def _move(turn: Turn, name: str) -> None:
    """Most engines serve, answered when they were asked last, and have no deadline: three looks tell that."""
    engine = turn.world.engine(name)
    if engine.life.phase is Phase.RELEASING:
        _queue(turn, name)
    elif engine.life.phase is Phase.SUSPECT or (engine.life.phase is Phase.SERVING and engine.pulse.missed_at is not None):
        _judge(turn, name)      # before the deadline: tokens that came late came all the same
    if turn.world.engine(name).life.deadline <= turn.at:
        _deadline(turn, name)
    if turn.world.engine(name).life.phase is Phase.RELEASING:
        _gate(turn, name)


def _deadline(turn: Turn, name: str) -> None:
    engine = turn.world.engine(name)
    if due_at(turn.world, engine) <= turn.at:
        turn.sign(name, Sign.TIMEOUT)
    else:
        turn.overdue(name)


def _queue(turn: Turn, name: str) -> None:
    """While another engine loads first, or leaves, its own wait for room has not begun: nobody is paged for it."""
    world, engine = turn.world, turn.world.engine(name)
    phases = [(e.plan, e.phase) for e in world.engines]
    if standby.goes_first(world, engine) or gate.loads_there(engine.plan, phases) or gate.leaves(engine.plan, phases):
        turn.change(name, life=replace(engine.life, deadline=turn.at + engine.plan.limits.release_s))


def _gate(turn: Turn, name: str) -> None:
    """Let it start once no rival is left, no stray, and a sample taken since then shows room on its cards."""
    world, engine = turn.world, turn.world.engine(name)
    others = gate.rivals(engine.plan, ((e.plan, e.phase) for e in world.engines))
    others += tuple(map(str, gate.in_the_way(engine.plan, world.strays, world.plan.engines)))
    others += (sleeper,) if (sleeper := standby.goes_first(world, engine)) else ()
    fresh = not engine.plan.gpus or world.gpus_at >= engine.since or gate.blind(world.gpus, world.gpus_at)
    if not others and fresh and not gate.shortage(engine.plan, world.gpus):
        turn.sign(name, Sign.CLEAR)
    elif world.look_at <= turn.at < engine.since + engine.plan.limits.release_s:
        turn.sample_again()


def _judge(turn: Turn, name: str) -> None:
    engine = turn.world.engine(name)
    life = liveness.judge(engine.pulse)
    if life is Life.QUIET or (life is Life.BLIND and _blind_long_enough(engine, turn.at)):
        turn.sign(name, Sign.ILL)
    elif engine.phase is Phase.SUSPECT and life in (Life.ALIVE, Life.BUSY):
        turn.sign(name, Sign.WELL)


def _blind_long_enough(engine: Engine, at: float) -> bool:
    limits, missed_at = engine.plan.limits, engine.pulse.missed_at
    return missed_at is not None and at - missed_at >= limits.suspect_blind_s - limits.suspect_s


def _ask(turn: Turn, engine: Engine) -> None:
    limits = engine.plan.limits
    if engine.phase in ROUTED and liveness.due(engine.pulse, turn.at, limits):
        turn.change(engine.name, pulse=liveness.asked(engine.pulse, turn.at))
        turn.do(Ask(engine.mark, limits.probe_s))


# -- failover

def _service(turn: Turn, name: str) -> None:
    world = turn.world
    service = world.service(name)
    watches = lowering.answered(world.watches, world.engine(name).plan)
    facts = _facts(turn, service, watches)
    service = failover.observe(service, turn.at, facts)
    if (lowered := lowering.observe(service.lowering, turn.at, watches)) is not service.lowering:
        service = replace(service, lowering=lowered)
    turn.world = world.with_service(service)
    if world.stopping or world.paused:
        return
    if service.side is Side.PRIMARY and (watches or service.lowering.to is not None):
        _lower(turn, service, watches)
    why = failover.hint(service, turn.at, facts, world.plan.failover)
    if why is Hint.PREPARE:
        turn.sign(service.name, Sign.WANT)
    elif why is not Hint.NONE:
        turn_service(turn, service, why)


def _lower(turn: Turn, service: Service, watches: tuple[Watch, ...]) -> None:
    """Fewer requests at a time while memory is short, and as many as come again when it has been calm."""
    plan, now = turn.world.plan, service.lowering
    raised = [watch for watch in watches if watch.raised]
    if now.to is None and raised and (to := _limit(turn.world, service)) is not None:
        why = strung((filled(causes.OVER, symptom=watch.class_, subject=watch.subject) for watch in raised), COMMA)
        now = lowering.begun(now, turn.at, to, why, plan.failover.stable_s)
        turn.symptom(service.name, raised[0].class_, Urgency.WARNING, why)      # who shares the card has an incident too
        turn.say("service.lowered", service=service.name, to=to, because=why)
        turn.note(service.name, "lowered", filled(causes.LOWERED, to=to, why=why), to=str(to), because=why.en)
    elif now.to is not None and lowering.over(now, turn.at, watches, plan.thresholds.clear_after_s):
        after = f"{turn.at - now.since:.0f}"
        turn.say("service.restored", service=service.name, after_s=after)
        turn.cleared(service.name, filled(causes.RESTORED, s=after))
        now = lowering.ended(now, turn.at)
    turn.world = turn.world.with_service(changed(service, lowering=now))


def _limit(world: World, service: Service) -> int | None:
    """What the service can be lowered to now: only a primary that serves has requests to be spared."""
    primary = world.engine(service.name)
    if service.backup is None or primary.phase not in ROUTED:
        return None
    return lowering.limit(primary.plan, world.engine(service.backup).plan)


def turn_service(turn: Turn, service: Service, why: Hint, start: Sign = Sign.WANT) -> None:
    """The other engine's turn.  The gate keeps it waiting until this one has left the cards they share."""
    leaving = service.wanted
    counted = _failures(turn, service) if why is Hint.FAILURES else {}
    excused_until = EXCUSES[why](turn.at) if why in EXCUSES else service.excused_until
    service = replace(failover.turned(service, turn.at, turn.world.plan.failover), excused_until=excused_until)
    turn.world = turn.world.with_service(service)
    name = "failover" if service.wanted != service.name else "failback"
    turn.say(f"service.{name}", service=service.name, leaving=leaving, to=service.wanted, because=why)
    text = filled(causes.TURNED, leaving=leaving, to=service.wanted, why=Text(why, BECAUSE[why].zh))
    turn.note(service.name, name, text, leaving=leaving, to=service.wanted, because=why.value, **counted)
    if why is Hint.DEGRADED or not standby.stays(service, leaving):     # only its end frees memory: a hot one starts anew
        turn.sign(leaving, Sign.UNWANT)
    turn.sign(service.wanted, start)


def _failures(turn: Turn, service: Service) -> dict[str, str]:
    """How often the primary failed within how long, and of what the time before: it may be another incident's failure."""
    primary = turn.world.engine(service.name)
    since = max(turn.at - primary.plan.limits.window_s, service.turned_at)
    times = sum(at > since for at in primary.life.failures)
    told = {"times": str(times), "window": duration(primary.plan.limits.window_s)}
    if before := repeats.before(turn.world, primary.mark, since):
        told |= {"before": before[1], "before_at": time_of_day(before[0] + turn.world.wall_offset)}
    return told


EXCUSES: dict[Hint, Callable[[float], float]] = {
    Hint.OPERATOR: lambda _: inf,
    Hint.STABLE: lambda at: at + failover.PLANNED_S,
}


def _facts(turn: Turn, service: Service, watches: tuple[Watch, ...]) -> Facts:
    world, primary = turn.world, turn.world.engine(service.name)
    limits, serving = primary.plan.limits, world.engine(service.wanted)
    serves, idle = serving.phase is Phase.SERVING, is_idle(serving)
    if service.backup is None:      # the rest is for a choice
        return ALONE[serves, idle]
    backup = world.engine(service.backup)
    possible, after_s = _limit(world, service) is not None, world.plan.thresholds.degrade_after_s
    charged = [at for at in primary.life.failures if at > turn.at - limits.window_s]
    counts_from = max(turn.at - limits.window_s, service.turned_at)
    lost_card = primary.phase is Phase.HELD and primary.life.doom in LOST_CARD
    stuck = lost_card or primary.phase is Phase.WEDGED
    return Facts(
        failures=sum(at > counts_from for at in charged),
        ooms=sum(at > counts_from for at in primary.ooms),
        degraded=lowering.failed(service.lowering, turn.at, watches, possible, after_s),
        card_full=any(watch.raised and watch.class_ == lowering.VRAM for watch in watches),
        primary_held=_given_up(primary) or len(charged) > limits.budget,
        serving=serves,
        idle=idle,
        down=any(at > counts_from for at in serving.life.failures[-1:]) and serving.phase not in ROUTED,
        primary_serves=primary.phase is Phase.SERVING,
        standby_ready=standby.ready(service, backup),
        fit=gate.fit_together(primary.plan, backup.plan),
        backup_held=_given_up(backup),
        backup_usable=not stuck or not gate.share_a_card(primary.plan, backup.plan),
    )


ALONE = {(serves, idle): Facts(serving=serves, idle=idle) for serves in (False, True) for idle in (False, True)}
LOST_CARD = frozenset({"cuda_hw", "cuda_init", "xid_reset", "xid_node"})     # every engine on that card fails alike


def _given_up(engine: Engine) -> bool:
    return engine.phase in (Phase.HELD, Phase.WEDGED)


def is_idle(engine: Engine) -> bool:
    """By the gauges, since our own one-token probes move the counters; a gauge that is not published is not zero."""
    return isinstance(engine.metrics, Metrics) and engine.metrics.running == 0 and engine.metrics.waiting == 0


# -- recovery

def _outages(turn: Turn) -> None:
    """Since when, and how long, each service with an incident is without an engine."""
    for incident in turn.world.incidents:
        if incident.service == HOST or incident.wall_resolved is not None:
            continue
        engine = turn.world.engine(turn.world.service(incident.service).wanted)
        if turn.world.stopping or engine.phase in ROUTED:
            incident = incidents.up(incident, turn.at)
        elif not (engine.adopted and engine.phase is Phase.LOADING):     # it may serve all the time: the next look tells
            incident = incidents.down(incident, turn.at)
        turn.world = turn.world.with_incident(incident)


def _still_blind(turn: Turn, incident: Incident) -> bool:
    lost = any(entry.text.startswith(f"{GPUS_LOST}: ") for entry in incident.timeline)
    return incident.service == HOST and lost and isinstance(turn.world.gpus, Unknown)


UNREAD = gate.LEAVING | {Phase.SETTLING}     # of whom the log may still say something


def _unfinished(engine: Engine) -> bool:
    """Its failure is not over: it still leaves, and has last words to write.  Or its log is lost, which nothing clears but
    the end of the generation: it will never open it again."""
    return (engine.life.charged and engine.phase in UNREAD) or (engine.unlogged and engine.phase in HAS_CHILD)


def _recovered(turn: Turn) -> None:
    """An incident ends when its service has served long enough and no symptom of it is left."""
    confirm_s = turn.world.plan.confirm_s
    for incident in turn.world.incidents:
        if incident.wall_resolved is not None:
            continue
        left = any(watch.raised for watch in watches_of(turn.world, incident.service))
        left = left or _still_blind(turn, incident) or any(
            _unfinished(engine) for engine in turn.world.engines if turn.service_of(engine.name) == incident.service)
        since = incident.touched_at
        if incident.service != HOST:
            service = turn.world.service(incident.service)
            since, left = max(since, service.serving_since), left or service.lowering.to is not None
        if not left and turn.at - since >= confirm_s and since != inf:
            text = filled(causes.CALM, s=f"{turn.at - since:.0f}")
            turn.world = turn.world.with_incident(incidents.resolved(incident, turn.at, turn.wall, text))
            turn.say("incident.resolved", incident=incident.id)


def _remind(turn: Turn) -> None:
    every_s = turn.world.plan.remind_s
    for incident in turn.world.incidents:
        if incidents.remind_at(incident, every_s) <= turn.at:
            turn.world = turn.world.with_incident(incidents.reminded(incident, turn.at, every_s))
