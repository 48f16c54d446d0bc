"""What the samples of GPUs, host, process trees and metrics mean: facts to keep, thresholds to hold them against."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from vllm_watchdog.core import causes, leaks, symptoms
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import changed, replace
from vllm_watchdog.core.events import GpusSampled, HostSampled
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Gpu, Host, Metrics, Tree, Unknown
from vllm_watchdog.core.symptoms import Change, Sighting, Watch
from vllm_watchdog.core.turn import HOST, Turn
from vllm_watchdog.core.world import NOT_YET, Engine, World

GPUS_LOST = "gpu_driver_unresponsive"
BUSY_CORES = 0.05       # of CPU: less than this is not loading a model
BUSY_BYTES = 1 << 20


def gpus_sampled(turn: Turn, event: GpusSampled) -> None:
    was = turn.world.gpus
    turn.world = replace(turn.world, gpus=event.gpus, gpus_at=event.at)
    if isinstance(event.gpus, Unknown):
        if not isinstance(was, Unknown):
            turn.say("gpus.unknown", why=event.gpus.why)
            turn.symptom(HOST, GPUS_LOST, Urgency.CRITICAL, filled(causes.DRIVER_LOST, why=event.gpus.why))
        return
    if isinstance(was, Unknown) and was is not NOT_YET:
        turn.cleared(HOST, causes.DRIVER_BACK)
    for gpu in event.gpus:
        if (engine := turn.world.engine_on(gpu.index)) is not None:
            warm = _warm(turn, engine, gpu)
            growth = None if warm is None else _card_grows(turn, turn.world.engine(engine.name), gpu)
            hold(turn, symptoms.of_gpu(gpu, turn.world.plan.thresholds, warm, growth))


def _warm(turn: Turn, engine: Engine, gpu: Gpu) -> int | None:
    """The card's level some minutes after its engine became ready; vLLM's VRAM is flat from then on."""
    if engine.phase is not Phase.SERVING:
        return None
    if turn.at - engine.ready_at < turn.world.plan.thresholds.warm_up_s:
        return None
    warm = dict(engine.warm)
    if gpu.index not in warm:
        turn.change(engine.name, warm=(*engine.warm, (gpu.index, gpu.used_bytes)))
    return warm.get(gpu.index)


def _card_grows(turn: Turn, engine: Engine, gpu: Gpu) -> Text | None:
    """How fast, and until when; None where it does not."""
    key = f"vram/{gpu.index}"
    trends = leaks.fed_by_card(engine.trends, turn.at, gpu)
    if leaks.fresh(engine.trends, trends, key):
        others = tuple(growth for growth in engine.growths if growth.what != key)
        new = tuple(leaks.of_card(trends, gpu, turn.world.plan.thresholds.leak_within_s))
        engine = turn.change(engine.name, growths=(*others, *new))
    turn.change(engine.name, trends=trends)
    return next((growth.words for growth in engine.growths if growth.what == key and growth.slope > 0), None)


def host_sampled(turn: Turn, event: HostSampled) -> None:
    turn.world = replace(turn.world, host=event.host)
    if isinstance(event.host, Host):
        hold(turn, symptoms.of_host(event.host, turn.world.plan.thresholds))
    for tree in event.trees:
        for engine in turn.world.engines:
            if engine.mark == tree.mark:
                _tree_sampled(turn, engine.name, tree)


def _tree_sampled(turn: Turn, name: str, tree: Tree) -> None:
    engine = turn.world.engine(name)
    moved = (tree.io_bytes or 0) - ((engine.tree.io_bytes or 0) if engine.tree else 0)
    active = tree.cpu >= BUSY_CORES or moved >= BUSY_BYTES
    thresholds = turn.world.plan.thresholds
    engine = turn.change(name, tree=tree, active_at=turn.at if active else engine.active_at)
    hold(turn, symptoms.of_tree(tree, thresholds))
    if turn.at - engine.ready_at >= thresholds.warm_up_s:
        _tree_grows(turn, engine, tree)
    idle_s = turn.at - engine.active_at
    if engine.phase is Phase.LOADING and idle_s >= engine.plan.limits.load_idle_s:
        turn.fault(name, "load_timeout", filled(causes.NO_ACTIVITY, s=f"{idle_s:.0f}"))


def _tree_grows(turn: Turn, engine: Engine, tree: Tree) -> None:
    thresholds, trends = turn.world.plan.thresholds, leaks.fed_by_tree(engine.trends, turn.at, tree)
    if leaks.fresh(engine.trends, trends, "rss"):
        cards = tuple(growth for growth in engine.growths if growth.what.startswith("vram/"))
        new = tuple(leaks.of_tree(trends, tree, turn.world.host, thresholds.leak_within_s))
        turn.change(engine.name, growths=(*cards, *new))
        hold(turn, leaks.sightings(engine.name, new, thresholds))
    warm = tree.rss_bytes if engine.warm_rss is None else engine.warm_rss
    turn.change(engine.name, trends=trends, warm_rss=warm)


def watch_metrics(turn: Turn, name: str, metrics: Metrics | Unknown) -> None:
    if isinstance(metrics, Metrics):
        preempted = symptoms.counted(turn.world.engine(name).preempted, turn.at, metrics.preemptions)
        turn.change(name, preempted=preempted)
        rate = symptoms.per_minute(preempted)
        hold(turn, symptoms.of_metrics(name, metrics, turn.world.plan.thresholds, rate))


def watches_of(world: World, service: str) -> tuple[Watch, ...]:
    """The detectors whose symptoms belong to a service: of its engines, and of their cards."""
    if service == HOST:
        return tuple(watch for watch in world.watches if watch.subject == HOST)
    engines = [plan for plan in world.plan.engines if service in (plan.name, plan.backup_for)]
    subjects = {plan.name for plan in engines} | {f"gpu{gpu}" for plan in engines for gpu in plan.gpus}
    return tuple(watch for watch in world.watches if watch.subject in subjects)


def hold(turn: Turn, sightings: Iterable[Sighting]) -> None:
    """Hold values against their thresholds; what is raised joins an incident and earns a bundle."""
    for seen in sightings:
        known = {(watch.class_, watch.subject): watch for watch in turn.world.watches}
        watch = known.get((seen.class_, seen.subject), Watch(seen.class_, seen.subject))
        calm_s = turn.world.plan.thresholds.clear_after_s if seen.clear_after_s is None else seen.clear_after_s
        watch, change = symptoms.observe(watch, turn.at, seen, calm_s)
        others = tuple(w for w in turn.world.watches if (w.class_, w.subject) != (seen.class_, seen.subject))
        turn.world = changed(turn.world, watches=others if watch.at_ease else (*others, watch))
        if change is Change.RAISED:
            _raised(turn, seen)
        elif change is Change.CLEARED:
            turn.say("symptom.cleared", symptom=seen.class_, subject=seen.subject)
            turn.cleared(_whose(turn, seen.subject), filled(causes.OVER, symptom=seen.class_, subject=seen.subject))


def _whose(turn: Turn, subject: str) -> str:
    """The engine to name for a subject: itself, the one on the card, or the host."""
    if subject.startswith("gpu") and subject[3:].isdigit():
        engine = turn.world.engine_on(int(subject[3:]))
        return engine.name if engine else HOST
    return subject


def _raised(turn: Turn, seen: Sighting) -> None:
    name, words = _whose(turn, seen.subject), seen.words()
    turn.say("symptom.raised", symptom=seen.class_, subject=seen.subject, text=words)
    incident = turn.symptom(name, seen.class_, seen.urgency, words)
    if not seen.evidence:
        return
    key = f"{seen.class_}/{seen.subject}"
    bundled = dict(turn.world.bundled)
    if turn.at - bundled.get(key, -inf) < turn.world.plan.bundle_interval_s:
        return
    turn.world = replace(turn.world, bundled=tuple((bundled | {key: turn.at}).items()))
    turn.bundle(incident.id, name, seen.class_, stacks=False)
