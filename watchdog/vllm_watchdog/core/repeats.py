"""What repeats: restarts and failures of a day, OOMs of minutes; more of them than allowed are a symptom of their own.

A restart answers each failure by itself; only the count says that restarts do not cure it.  Pure.
"""

from __future__ import annotations

from vllm_watchdog.core import causes
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.core.world import World

OOM_RATE_S = 300.0


def restarted(world: World) -> World:
    """With one restart more, now."""
    return replace(world, restarts=(*(at for at in world.restarts if at > world.at - DAY_S), world.at))


def failed(world: World, failure: Mark, class_: str) -> World:
    """With one failure more, now; a generation fails once, and its class may be known better by now."""
    recent = [each for each in world.failed if each[1] > world.at - DAY_S]
    if any(mark == failure for mark, _, _ in recent):
        return replace(world, failed=tuple((mark, at, class_ if mark == failure else was) for mark, at, was in recent))
    return replace(world, failed=(*recent, (failure, world.at, class_)))


def before(world: World, engine: Mark, since: float) -> tuple[float, str] | None:
    """When, and of which class, the generations of an engine before this one failed last; None: not since then."""
    failures = [(at, class_) for mark, at, class_ in world.failed if mark.engine == engine.engine and mark != engine]
    return max((each for each in failures if each[0] > since), default=None)


def crash_loop(world: World, name: str) -> Text | None:
    """Why the failures of an engine are no accident any more; None while they may be."""
    count = sum(mark.engine == name for mark, _, _ in world.failed)
    loops = count > world.plan.thresholds.crash_loop
    return filled(causes.CRASH_LOOP, engine=name, n=count) if loops else None


def oom_rate(world: World, service: str) -> Text | None:
    """Why the OOMs of a service are too many, of all its engines together; None while they are not."""
    count = sum(at > world.at - OOM_RATE_S for engine in world.engines
                if world.plan.service_of(engine.name) == service for at in engine.ooms)
    often = count > world.plan.thresholds.oom_rate
    return filled(causes.OOM_RATE, n=count, s=f"{OOM_RATE_S:.0f}") if often else None
