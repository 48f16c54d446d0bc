"""World -> the status document that command line, page, metrics and gateway share.  Plain dicts: it is made to be shown."""

from __future__ import annotations

from math import isfinite
from typing import Any

from vllm_watchdog.core import liveness
from vllm_watchdog.core.failover import Service
from vllm_watchdog.core.leaks import Growth
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.phrases import joined
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.policy import HAS_CHILD, Phase
from vllm_watchdog.core.readings import Gpu, Host, Metrics, Tree, Unknown
from vllm_watchdog.core.reasons import doubt, no_room
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import ROUTED, Engine, World, routed

CLASSES = {"rss": "rss_leak", "fds": "fd_leak", "vram": "vram_growth"}      # that a growth is a symptom of
NO_PROCESS = Unknown(0.0, "no process")


def report(world: World) -> dict[str, Any]:
    """`health`: healthy, degraded (served, but not as configured), or down.  Instants are epoch seconds."""
    services = [_service(world, service) for service in world.services]
    return {
        "at": round(world.at + world.wall_offset, 3),
        "health": _health(world, services),
        "paused": world.paused,
        "stopping": world.stopping,
        "services": services,
        "engines": [_engine(world, engine) for engine in world.engines],
        "gpus": _known(world.gpus, lambda gpus: [_gpu(gpu, world.plan.thresholds) for gpu in gpus]),
        "host": _known(world.host, _host),
        "kernel_log": {"unknown": world.kernel.why} if world.kernel else "read",
        "incidents": [
            {"id": i.id, "service": i.service, "class": i.class_, "urgency": i.urgency.value, "text": i.page or i.text,
             "text_zh": "；".join(need.zh for need in i.needs) or i.words.zh, "waits_for": [need.engine for need in i.needs],
             "opened": round(i.wall_opened, 3)}
            for i in world.incidents
        ],
        "symptoms": [
            {"class": w.class_, "subject": w.subject, "value": round(w.value, 4)} for w in world.watches if w.raised
        ],
        "restarts_24h": sum(at > world.at - DAY_S for at in world.restarts),
    }


def headline(world: World) -> str:
    """One line for people: `primary serving, gen 3, VRAM 71 %, 1 restart today`."""
    engines = [world.engine(service.wanted) for service in world.services]
    if world.stopping:
        engines = [engine for engine in world.engines if engine.phase in HAS_CHILD]
    said = [f"{engine.name} {engine.phase}, gen {engine.generation}" for engine in engines] or ["nothing runs"]
    placed = {gpu for engine in world.engines for gpu in engine.plan.gpus}
    gpus = () if isinstance(world.gpus, Unknown) else world.gpus
    shares = [gpu.used_share for gpu in gpus if gpu.index in placed]
    said += [f"VRAM {max(shares) * 100:.0f} %"] if shares else []
    restarts = sum(at > world.at - DAY_S for at in world.restarts)
    said += [f"{restarts} restart{'s' if restarts > 1 else ''} today"] if restarts else []
    said += ["automatic actions are paused"] if world.paused else []
    return ", ".join(said)


def serving(world: World, service: Service) -> str | None:
    """The engine that serves, None while nobody does."""
    engine = world.engine(service.wanted)
    return engine.name if routed(engine) else None


def _health(world: World, services: list[dict[str, Any]]) -> str:
    if not services or any(service["serving"] is None for service in services):     # none: nothing was folded yet
        return "down"
    urgent = any(incident.urgency.rank > 0 for incident in world.incidents)
    on_backup = any(service["side"] == "backup" for service in services)
    suspect = any(engine.phase is Phase.SUSPECT for engine in world.engines)
    lowered = any(service["lowered"] for service in services)
    return "degraded" if urgent or on_backup or suspect or lowered or world.paused else "healthy"


def _service(world: World, service: Service) -> dict[str, Any]:
    return {
        "name": service.name,
        "side": service.side.value,
        "wanted": service.wanted,
        "serving": serving(world, service),
        "port": world.engine(service.wanted).plan.port,
        "since": _wall(world, service.turned_at if isfinite(service.turned_at) else service.since),
        "lowered": _lowered(world, service.lowering),
    }


def _lowered(world: World, lowering: Lowering) -> dict[str, Any] | None:
    """`to`: requests that the gateway lets through at a time."""
    if lowering.to is None:
        return None
    return {"to": lowering.to, "since": _wall(world, lowering.since), "why": lowering.why,
            "why_zh": lowering.why_zh or lowering.why}


def _engine(world: World, engine: Engine) -> dict[str, Any]:
    runs = engine.phase in HAS_CHILD
    waits = joined(no_room(world, engine) if engine.phase is Phase.RELEASING else ())
    suspected = doubt(engine, world.at, world.paused)
    return {
        "name": engine.name,
        "phase": engine.phase.value,
        "generation": engine.generation,
        "pid": engine.pid if runs else None,
        "port": engine.plan.port,
        "gpus": list(engine.plan.gpus),
        "backup_for": engine.plan.backup_for,
        "wanted": engine.life.wanted,
        "since": _wall(world, engine.since),
        "ready": _wall(world, engine.ready_at),
        "next_try": _wall(world, engine.life.deadline) if engine.phase is Phase.BACKOFF else None,
        "life": liveness.judge(engine.pulse).value if engine.phase in ROUTED else None,
        "health": engine.health.value if engine.health else None,
        "probe": engine.pulse.unprovable or "ok",
        "failures": len(engine.life.failures),
        "cause": engine.cause,
        "why": engine.why,
        "why_zh": engine.words.zh,
        "waits": waits.en or None,      # for what its start waits; `cause` and `why` are of its last failure
        "waits_zh": waits.zh or None,
        "doubt": suspected and suspected.en,        # why it is suspected, and how long it still has
        "doubt_zh": suspected and suspected.zh,
        "metrics": _known(engine.metrics if runs else NO_PROCESS, _metrics),
        "tree": _tree(engine.tree) if engine.tree and runs else None,
        "growth": [_growth(growth) for growth in engine.growths] if runs else [],
    }


def _metrics(metrics: Metrics) -> dict[str, Any]:
    return {"running": metrics.running, "waiting": metrics.waiting, "kv_usage": metrics.kv_usage,
            "preemptions": metrics.preemptions, "counters": metrics.progress is not None,
            "generation_tokens": metrics.progress.generation_tokens if metrics.progress else None}


def _tree(tree: Tree) -> dict[str, Any]:
    return {
        "rss_bytes": tree.rss_bytes,
        "charged_bytes": tree.charged_bytes,
        "cpu": round(tree.cpu, 2),
        "processes": [
            {"pid": p.pid, "name": p.name, "rss_bytes": p.rss_bytes, "uss_bytes": p.uss_bytes, "cpu": p.cpu,
             "threads": p.threads, "fds": p.fds, "fd_limit": p.fd_limit}
            for p in tree.processes
        ],
    }


def _growth(growth: Growth) -> dict[str, Any]:
    """`per_min` in `unit`; `eta_s` None: its limit is not in sight."""
    return {"what": growth.what, "class": CLASSES[growth.what.partition("/")[0]], "who": growth.who,
            "per_min": round(growth.per_min, 3), "unit": growth.unit[1],
            "eta_s": round(growth.eta_s) if isfinite(growth.eta_s) else None, "leaks": growth.leaks, "text": growth.words.en,
            "text_zh": growth.words.zh}


def _gpu(gpu: Gpu, thresholds: Thresholds) -> dict[str, Any]:
    return {
        "index": gpu.index, "uuid": gpu.uuid, "name": gpu.name, "used_bytes": gpu.used_bytes,
        "total_bytes": gpu.total_bytes, "utilization": gpu.utilization, "temperature_c": gpu.temperature_c,
        "ecc_uncorrected": gpu.ecc_uncorrected,
        "vram_warn": dict(thresholds.vram_warn).get(gpu.index), "vram_degrade": dict(thresholds.vram_degrade).get(gpu.index),
        "processes": [
            {"pid": row.holder.pid, "name": row.holder.name, "used_bytes": row.used_bytes,
             "engine": str(row.holder.mark) if row.holder.mark else None}
            for row in gpu.processes
        ],
    }


def _host(host: Host) -> dict[str, Any]:
    return {"memory_total": host.memory_total, "memory_available": host.memory_available,
            "disk_total": host.disk_total, "disk_free": host.disk_free, "load": host.load,
            "cgroup_total": host.cgroup_total, "cgroup_available": host.cgroup_available}


def _known(reading: Any, show: Any) -> Any:
    return {"unknown": reading.why} if isinstance(reading, Unknown) else show(reading)


def _wall(world: World, at: float) -> float | None:
    return round(at + world.wall_offset, 3) if isfinite(at) else None
