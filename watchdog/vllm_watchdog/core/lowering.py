"""Live degradation: while memory is short, fewer requests at a time, and nothing is restarted.

It answers VRAM of the primary's cards over `vram_degrade`, and a full KV cache for which requests wait.  The service is
lowered to as many requests at a time as its backup takes; who enforces it is the gateway.

Lowering hides the pressure that it answers: what the gateway holds does not wait in the engine.  So full concurrency is a
try: it comes when all has been calm for as long as any symptom takes to clear, and if the pressure is soon back, the next
calm must last twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import changed, replace
from vllm_watchdog.core.plan import EnginePlan
from vllm_watchdog.core.symptoms import Watch

VRAM, KV = "vram_degrade", "kv_pressure"
PATIENCE_MAX = 16.0     # times clear_after_s: 32 minutes by default


@dataclass(frozen=True, slots=True)
class Lowering:
    """`to`: requests at a time, None: as many as come.  `since`, `why`: of this lowering; `ended_at`: of the last one."""

    to: int | None = None
    since: float = inf
    why: str = ""
    calm_since: float = inf
    ended_at: float = -inf
    patience: float = 1.0       # times clear_after_s: doubled by pressure that is back soon
    why_zh: str = ""            # `why` in Chinese


def limit(primary: EnginePlan, backup: EnginePlan) -> int | None:
    """What the service can be lowered to.  None: the args do not say, or the backup takes no fewer than the primary."""
    to, most = backup.at_once, primary.at_once
    return to if to is not None and (most is None or to < most) else None


def answered(watches: Sequence[Watch], primary: EnginePlan) -> tuple[Watch, ...]:
    """The detectors of what lowering may help against."""
    if not watches:     # as nearly always
        return ()
    subjects = {(VRAM, f"gpu{gpu}") for gpu in primary.gpus} | {(KV, primary.name)}
    return tuple(watch for watch in watches if (watch.class_, watch.subject) in subjects)


def observe(lowering: Lowering, at: float, watches: Iterable[Watch]) -> Lowering:
    """Keep since when all is calm.  A detector that is gone is calm: its engine has ended, or the daemon is a new one."""
    if lowering.to is None and lowering.calm_since == inf:      # as nearly always
        return lowering
    calm = lowering.to is not None and all(watch.calm_since < inf for watch in watches)
    return changed(lowering, calm_since=min(lowering.calm_since, at) if calm else inf)


def begun(lowering: Lowering, at: float, to: int, why: Text, soon_s: float) -> Lowering:
    soon = at - lowering.ended_at < soon_s
    patience = min(lowering.patience * 2, PATIENCE_MAX) if soon else 1.0
    return replace(lowering, to=to, since=at, why=why.en, why_zh=why.zh, patience=patience)


def over(lowering: Lowering, at: float, watches: Iterable[Watch], clear_after_s: float) -> bool:
    """Has it been calm for long enough?"""
    raised = any(watch.raised for watch in watches)
    return not raised and at - lowering.calm_since >= clear_after_s * lowering.patience


def ended(lowering: Lowering, at: float) -> Lowering:
    return Lowering(ended_at=at, patience=lowering.patience)


def failed(lowering: Lowering, at: float, watches: Iterable[Watch], possible: bool, after_s: float) -> bool:
    """Has a card stayed over its limit for `after_s` although lowered, or, where that is not `possible`, at all?

    Not so a full KV cache: the backup's is no larger, and fewer requests at a time are all that it has to offer.
    """
    full_since = min((watch.above_since for watch in watches if watch.raised and watch.class_ == VRAM), default=inf)
    tried_since = lowering.since if lowering.to is not None or possible else -inf
    return at - max(full_since, tried_since) >= after_s
