"""Memory at one moment, as an incident keeps it: cards, host memory of the engine, KV cache.

Taken from the last samples before the failure; what was not sampled is None, never zero.  Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_watchdog.core.readings import Gpu, GpuProcess, Host, Metrics, Unknown

if TYPE_CHECKING:
    from vllm_watchdog.core.world import Engine, World

HOLDERS_KEPT = 6        # other processes of one card, the largest first


@dataclass(frozen=True, slots=True)
class CardLevels:
    """One card, in bytes.  `ours`: the engine's own processes; `warm`: all of the card some minutes after ready."""

    gpu: int
    name: str
    used: int
    total: int
    ours: int | None = None
    warm: int | None = None
    warn: float | None = None           # the threshold, as a share of the card
    others: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Levels:
    """`at`: when they were taken; `rss` of all processes of the engine, `rss_warm` the same some minutes after ready."""

    at: float
    cards: tuple[CardLevels, ...] = ()
    rss: int | None = None
    rss_warm: int | None = None
    kv_usage: float | None = None       # 0..1
    running: float | None = None
    waiting: float | None = None
    host_total: int | None = None
    host_available: int | None = None


def levels_of(world: World, engine: Engine | None) -> Levels:
    """The newest samples, of the engine's cards; of every card where no engine is named or none is assigned to it."""
    cards = () if isinstance(world.gpus, Unknown) else world.gpus
    placed = engine.plan.gpus if engine and engine.plan.gpus else tuple(gpu.index for gpu in cards)
    metrics = engine.metrics if engine and isinstance(engine.metrics, Metrics) else Metrics(None)
    host = world.host if isinstance(world.host, Host) else None
    return Levels(
        at=world.at,
        cards=tuple(_card(world, gpu, engine) for gpu in cards if gpu.index in placed),
        rss=engine.tree.rss_bytes if engine and engine.tree else None,
        rss_warm=engine.warm_rss if engine else None,
        kv_usage=metrics.kv_usage,
        running=metrics.running,
        waiting=metrics.waiting,
        host_total=host.memory_total if host else None,
        host_available=host.memory_available if host else None,
    )


def _card(world: World, gpu: Gpu, engine: Engine | None) -> CardLevels:
    mark = engine.mark if engine else None
    ours = [row.used_bytes for row in gpu.processes if row.holder.mark == mark and mark]
    others = sorted((row for row in gpu.processes if row.holder.mark != mark or not mark),
                    key=lambda row: -(row.used_bytes or 0))
    return CardLevels(
        gpu.index, gpu.name, gpu.used_bytes, gpu.total_bytes,
        ours=sum(used or 0 for used in ours) if ours else None,
        warm=dict(engine.warm).get(gpu.index) if engine else None,
        warn=dict(world.plan.thresholds.vram_warn).get(gpu.index),
        others=tuple(others[:HOLDERS_KEPT]),
    )
