"""The route: which engine serves each service, as the gateway reads it.  Pure; `version` is set by who publishes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_watchdog.core.failover import Service
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.policy import HAS_CHILD
from vllm_watchdog.core.readings import Metrics, Unknown
from vllm_watchdog.core.report import serving
from vllm_watchdog.core.units import MIB
from vllm_watchdog.core.world import World
from vllm_watchdog.launch import Launch
from vllm_watchdog.prompt_plan import PromptPlan, told

VRAM_STEP = 256 * MIB
NO_LIMITS: Mapping[str, PromptPlan] = {}


def route(world: World, launches: Mapping[str, Launch],
          limits: Mapping[str, PromptPlan] = NO_LIMITS) -> list[dict[str, Any]]:
    """One object a service: `name`, `models`, `serving` (engine, generation, host, port, or None), `max_concurrent` and
    `max_tokens` (of prompts) at once, `why`, `prompt`, `vram_free` (bytes), `planned`, `preempted` (requests, since the
    engine started; None: not known)."""
    return [_service(world, service, launches, limits) for service in world.services]


def _service(world: World, service: Service, launches: Mapping[str, Launch],
             limits: Mapping[str, PromptPlan]) -> dict[str, Any]:
    names = [name for name in (service.name, service.backup) if name]
    name = serving(world, service)
    runs = name or service.wanted
    prompt = launches[runs].prompt
    prompt = prompt.limited_as(limits.get(runs, prompt))
    wanted, lowering = world.engine(service.wanted), service.lowering
    plan, metrics = (world.engine(name).plan, world.engine(name).metrics) if name else (wanted.plan, None)
    return {
        "name": service.name,
        "models": sorted({model for each in names for model in launches[each].models}),
        "serving": _target(world, name, launches[name]) if name else None,
        "max_concurrent": min(filter(None, (lowering.to, plan.max_concurrent)), default=None),
        "max_tokens": plan.max_concurrent_tokens,
        "why": _why(lowering) if name else f"{wanted.name} is {wanted.phase}",
        "prompt": told(prompt),
        "vram_free": _vram_free(world, name) if name and prompt.vram_share is not None else None,
        "planned": name is None and not any(_failed(world, each) for each in names),
        "preempted": _preempted(metrics),
    }


def _vram_free(world: World, name: str) -> int | None:
    """Of its cards together, as many times what the fullest has; in steps, so that the route doesn't change every second."""
    gpus = () if isinstance(world.gpus, Unknown) else world.gpus
    free = [gpu.total_bytes - gpu.used_bytes for gpu in gpus if gpu.index in world.engine(name).plan.gpus]
    return min(free) // VRAM_STEP * VRAM_STEP * len(free) if free else None


def _preempted(metrics: Metrics | Unknown | None) -> int | None:
    count = metrics.preemptions if isinstance(metrics, Metrics) else None
    return None if count is None else int(count)


def _why(lowering: Lowering) -> str:
    """Told to a client that has waited for too long."""
    return "" if lowering.to is None else f"only {lowering.to} requests run at a time ({lowering.why})"


def _failed(world: World, name: str) -> bool:
    """Its last generation ended, or is ending, by itself."""
    engine = world.engine(name)
    return engine.life.charged or (engine.phase in HAS_CHILD and bool(engine.cause))


def _target(world: World, name: str, launch: Launch) -> dict[str, Any]:
    engine = world.engine(name)
    host = launch.url.removeprefix("http://").rsplit(":", 1)[0].strip("[]")
    return {"engine": name, "generation": engine.generation, "host": host, "port": launch.port}
