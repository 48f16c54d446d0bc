"""When is a card's memory alarming?  Follows from the engines that are placed on it.  Pure.

A healthy vLLM takes its share of the card at start and stays there for ever, so a fixed 0.85 would always be crossed by
an engine that was given 0.92.  "auto" is the engines' own share plus part of the room that is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_watchdog.core.gate import DEFAULT_SHARE, SLACK, fit_together
from vllm_watchdog.core.plan import EnginePlan, Standby
from vllm_watchdog.launch import Arg

# An engine was seen 0.5 % of the card over its share (CUDA context, NCCL); 5 % is beyond that, and at the field's usual
# share of 0.80 it gives the 0.85 and 0.90 that operators alarm at by hand.  On a fuller card half and three quarters of
# the room, so that a threshold never reaches 1, which is never crossed.
WARN_ROOM, WARN_PART = 0.05, 0.5
DEGRADE_ROOM, DEGRADE_PART = 0.10, 0.75
SLEEPER = 0.01      # a sleeper kept 1.4 of 140 GiB
FULLEST = 0.96      # engines that ask for more than this of a card are watched as if they asked for this


def share_of(args: Mapping[str, Arg]) -> float | None:
    """The part of each card that vLLM is told to take; None where args do not say, or count the KV cache in bytes."""
    if "kv-cache-memory-bytes" in args:
        return None     # vLLM then ignores the share
    value = args.get("gpu-memory-utilization", args.get("device-memory-utilization"))
    try:
        share = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):
        return None
    return share if 0 < share <= 1 else None    # vLLM itself refuses any other


def card_parts(engines: Iterable[EnginePlan]) -> dict[int, dict[str, float]]:
    """By card, who takes which share: a primary and its backup take turns where they don't fit side by side, so they count
    as one, under the primary's name."""
    plans = {engine.name: engine for engine in engines}
    cards: dict[int, dict[str, float]] = {}
    for engine in plans.values():
        share = DEFAULT_SHARE if engine.vram_share is None else engine.vram_share
        primary = plans.get(engine.backup_for or "")
        beside = primary is not None and fit_together(primary, engine)
        for gpu in engine.gpus:
            parts = cards.setdefault(gpu, {})
            name = engine.name if beside else engine.backup_for or engine.name
            parts[name] = max(parts.get(name, 0.0), share)
            if engine.standby is Standby.SLEEPING:
                parts[f"{engine.name} asleep"] = SLEEPER
    return dict(sorted(cards.items()))


def card_shares(engines: Iterable[EnginePlan]) -> dict[int, float]:
    """By card, what its engines take together."""
    return {gpu: round(sum(parts.values()), 6) for gpu, parts in card_parts(engines).items()}


def told(parts: Mapping[str, float]) -> str:
    """`short 0.5 + long 0.4 = 0.9, with CUDA contexts of 0.01 each 0.92`; of one engine only its share."""
    total = sum(parts.values())
    if len(parts) == 1:
        return f"{total:g}"
    terms = " + ".join(f"{name} {share:g}" for name, share in parts.items())
    return f"{terms} = {round(total, 6):g}, with CUDA contexts of {SLACK:g} each {full(parts):g}"


def full(parts: Mapping[str, float]) -> float:
    """Of a card, with what each engine has beside its share; what a sleeper keeps is that already."""
    return round(sum(parts.values()) + SLACK * sum(share > SLEEPER for share in parts.values()), 6)


def levels(share: float, warn: float | None, degrade: float | None) -> tuple[float, float]:
    """Where to warn and where to degrade on a card of which `share` is taken by plan; None: auto.

    A fixed value is kept; an auto one gives way to it, so that degrade lies above warn.
    """
    share = min(share, FULLEST)
    room = 1 - share
    auto_warn = share + min(room * WARN_PART, WARN_ROOM)
    auto_degrade = share + min(room * DEGRADE_PART, DEGRADE_ROOM)
    low = auto_warn if warn is None else warn
    high = auto_degrade if degrade is None else degrade
    if low >= high and degrade is None:
        high = (low + 1) / 2
    elif low >= high and warn is None:
        low = high * 0.95
    return round(low, 4), round(high, 4)
