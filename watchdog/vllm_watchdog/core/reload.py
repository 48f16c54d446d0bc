"""What a new configuration changes at once, and what waits: an engine keeps what it was started with until its next start.

Thresholds, limits and the rules of failover count from the next event on; a deadline that runs already stays.  Which
engines there are, their ports, cards and roles are those of the daemon's start.
"""

from __future__ import annotations

from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.plan import EnginePlan, Plan
from vllm_watchdog.core.policy import HAS_CHILD
from vllm_watchdog.core.world import World


def settled(world: World) -> World:
    """Takes over of the plan that was asked for what can be now; called again when an engine is about to start."""
    asked, plan = world.asked, world.plan
    if asked is None:
        return world
    engines = tuple(_engine(world, engine, asked) for engine in plan.engines)
    known = {engine.name: engine for engine in asked.engines}
    waits = any(engine.vram_share != known.get(engine.name, engine).vram_share for engine in engines)
    levels = asked.thresholds
    if waits:       # what is "auto" follows the shares, and the shares are not yet those that it follows from
        levels = replace(levels, vram_warn=plan.thresholds.vram_warn, vram_degrade=plan.thresholds.vram_degrade)
    plan = replace(asked, engines=engines, thresholds=levels, seed=plan.seed)
    return replace(
        world, plan=plan, asked=asked if waits else None,
        engines=tuple(replace(engine, plan=plan.engine(engine.name)) for engine in world.engines))


def _engine(world: World, plan: EnginePlan, asked: Plan) -> EnginePlan:
    new = next((engine for engine in asked.engines if engine.name == plan.name), plan)
    runs = world.engine(plan.name).phase in HAS_CHILD
    return replace(plan, limits=new.limits, vram_share=plan.vram_share if runs else new.vram_share,
                   max_concurrent=new.max_concurrent, max_concurrent_tokens=new.max_concurrent_tokens)
