"""May this engine start now?  Never into memory that somebody holds, never beside a rival on its cards.

Without a GPU reading the gate waits only for rivals: a machine without a GPU has none to wait for, and a driver that
does not answer is told as a symptom of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.plan import EnginePlan, Standby
from vllm_watchdog.core.policy import HAS_CHILD, Phase
from vllm_watchdog.core.readings import Gpu, GpuProcess, Mark, Unknown
from vllm_watchdog.core.units import GIB

LEAVING = frozenset({Phase.DUMPING, Phase.STOPPING, Phase.KILLING})     # each has its own deadline, and WEDGED its own page
PROFILING = frozenset({Phase.STARTING, Phase.LOADING})
TOGETHER = 0.95         # of a card for two engines: each takes some hundred MiB beside its share
FRESH_SHARE = 0.98      # of a card, free: nobody holds it, whatever the engine's own share is
SLACK = 0.01            # of a card: what CUDA contexts and rounding take beside the engine's share
SMALL_BYTES = 1 << 29   # a display server or a bare CUDA context is no reason to wait
DEFAULT_SHARE = 0.92    # vLLM's --gpu-memory-utilization when args do not say (0.90 before 0.20)


def rivals(plan: EnginePlan, phases: Iterable[tuple[EnginePlan, Phase]]) -> tuple[str, ...]:
    """Engines that must leave this one's cards, or finish loading there, first; no card named: any."""
    return tuple(other.name for other, phase in phases if other.name != plan.name and _in_the_way(plan, other, phase))


def loads_there(plan: EnginePlan, phases: Iterable[tuple[EnginePlan, Phase]]) -> bool:
    """Does another engine load on this one's cards?  It is waited for as long as it takes."""
    return any(_profiles(plan, other, phase) for other, phase in phases if other.name != plan.name)


def leaves(plan: EnginePlan, phases: Iterable[tuple[EnginePlan, Phase]]) -> bool:
    """Is a rival of this one on its way out?  It is waited for as long as its stop may take."""
    return any(phase in LEAVING and _in_the_way(plan, other, phase) for other, phase in phases if other.name != plan.name)


def _profiles(plan: EnginePlan, other: EnginePlan, phase: Phase) -> bool:
    """Two that measure a card at the same time take each other's memory for lost (seen on 0.24)."""
    return phase in PROFILING and bool(set(plan.gpus) & set(other.gpus))


def _in_the_way(plan: EnginePlan, other: EnginePlan, phase: Phase) -> bool:
    if _profiles(plan, other, phase):
        return True
    same_service = (plan.backup_for or plan.name) == (other.backup_for or other.name)
    return same_service and phase in HAS_CHILD - {Phase.ASLEEP} and not fit_together(plan, other)


def fit_together(one: EnginePlan, other: EnginePlan) -> bool:
    """Both may run at once: on cards of their own, or by shares that were chosen to fit, as a hot pair's are."""
    if not share_a_card(one, other) or Standby.HOT in (one.standby, other.standby):
        return True
    shares = sum(DEFAULT_SHARE if plan.vram_share is None else plan.vram_share for plan in (one, other))
    return round(shares, 6) <= TOGETHER


def blind(gpus: tuple[Gpu, ...] | Unknown, at: float) -> bool:
    """The GPU sensor has said that it can't see: waiting for a newer sample would be waiting for ever."""
    return isinstance(gpus, Unknown) and at > -inf


def in_the_way(plan: EnginePlan, strays: tuple[Mark, ...], plans: Iterable[EnginePlan]) -> tuple[Mark, ...]:
    """Strays that may hold this one's cards; of an engine that is configured no more nobody knows which it had."""
    known = {other.name: other for other in plans}
    return tuple(mark for mark in strays if mark.engine not in known or share_a_card(plan, known[mark.engine]))


def share_a_card(one: EnginePlan, other: EnginePlan) -> bool:
    return not one.gpus or not other.gpus or bool(set(one.gpus) & set(other.gpus))


def shortage(
    plan: EnginePlan, gpus: tuple[Gpu, ...] | Unknown, sleeper: Mark | None = None
) -> tuple[tuple[Gpu, int], ...]:
    """The engine's cards that lack room, each with the bytes that are missing; what a sleeper keeps is its own room."""
    if isinstance(gpus, Unknown):
        return ()
    mine = [gpu for gpu in gpus if gpu.index in plan.gpus]
    return tuple((gpu, missing) for gpu in mine if (missing := _missing(gpu, plan.vram_share, sleeper)) > 0)


def _missing(gpu: Gpu, share: float | None, sleeper: Mark | None) -> int:
    need = min((DEFAULT_SHARE if share is None else share) + SLACK, FRESH_SHARE) * gpu.total_bytes
    kept = sum(row.used_bytes or 0 for row in gpu.processes if sleeper and row.holder.mark == sleeper)
    return max(0, int(need) - kept - (gpu.total_bytes - gpu.used_bytes))


def others_on(plan: EnginePlan, gpus: tuple[Gpu, ...], mark: Mark) -> tuple[GpuProcess, ...]:
    """Processes on the engine's cards that do not carry its mark: whom its memory is waiting for."""
    rows = (row for gpu in gpus if gpu.index in plan.gpus for row in gpu.processes)
    return tuple(row for row in rows if row.holder.mark != mark and (row.used_bytes or 0) > SMALL_BYTES)


def holders(gpu: Gpu) -> tuple[GpuProcess, ...]:
    """Who holds the card's memory, the largest first."""
    return tuple(sorted(gpu.processes, key=lambda row: -(row.used_bytes or 0)))


def told(plan: EnginePlan, gpus: tuple[Gpu, ...] | Unknown, sleeper: Mark | None = None) -> tuple[Text, ...]:
    """A sentence for each card that lacks memory: how much, and who holds it."""
    return tuple(
        filled(p.CARD_LACKS, gpu=gpu.index, lacks=f"{missing / GIB:.1f}",
               holders=", ".join(f"{row.holder} {(row.used_bytes or 0) / GIB:.1f} GiB" for row in holders(gpu)[:5])
               or p.NAMELESS)
        for gpu, missing in shortage(plan, gpus, sleeper)
    )
