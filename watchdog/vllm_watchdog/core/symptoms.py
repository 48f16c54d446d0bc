"""Detectors: a value over its threshold for long enough is a symptom, and it is one symptom until it has been calm.

A value that hovers at its threshold raises once: it clears only after it stayed `hysteresis` below for `clear_after_s`.
Unknown values change nothing: a symptom neither starts nor ends because a sensor was blind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from math import inf

from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.readings import Gpu, Host, Metrics, Tree
from vllm_watchdog.core.units import GIB

RATE_S, RATE_STEP_S = 60.0, 10.0
PREEMPTED_S = 300.0     # a full batch preempts now and then; one that goes on recomputes prompts instead of serving


class Change(StrEnum):
    RAISED = auto()
    CLEARED = auto()


@dataclass(frozen=True, slots=True)
class Watch:
    """One detector of one subject (`gpu0`, an engine, `host`).  `value` as last seen, in the threshold's unit."""

    class_: str
    subject: str
    raised: bool = False
    above_since: float = inf
    calm_since: float = inf
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A value to hold against its threshold now.  `text` says it to a human.

    `clear_after_s` None: as the thresholds say.  `evidence`: does raising it earn a bundle?
    """

    class_: str
    subject: str
    value: float
    threshold: float
    after_s: float
    margin: float           # below the threshold by this much is calm
    text: str
    clear_after_s: float | None = None
    urgency: Urgency = Urgency.WARNING
    evidence: bool = True


def observe(watch: Watch, at: float, seen: Sighting, clear_after_s: float) -> tuple[Watch, Change | None]:
    """The detector's next state, and what changed."""
    above, calm = seen.value >= seen.threshold, seen.value < seen.threshold - seen.margin
    watch = replace(
        watch,
        value=seen.value,
        above_since=min(watch.above_since, at) if above else inf,
        calm_since=min(watch.calm_since, at) if calm else inf,
    )
    if not watch.raised and at - watch.above_since >= seen.after_s:
        return replace(watch, raised=True), Change.RAISED
    if watch.raised and at - watch.calm_since >= clear_after_s:
        return replace(watch, raised=False), Change.CLEARED
    return watch, None


# -- what each reading is held against

def of_gpu(gpu: Gpu, thresholds: Thresholds, warm_bytes: int | None, growth: str = "") -> Iterator[Sighting]:
    """`warm_bytes`: the card's level after warm-up, None before it; `growth` says how fast it grows, where that is known."""
    subject, share, margin = f"gpu{gpu.index}", gpu.used_share, thresholds.hysteresis
    level = f"GPU {gpu.index}: {share:.1%} of {gpu.total_bytes / GIB:.1f} GiB in use"
    if (warn := dict(thresholds.vram_warn).get(gpu.index)) is not None:
        yield Sighting("vram_high", subject, share, warn, 0, margin, f"{level}, threshold {warn:.1%}")
    if (degrade := dict(thresholds.vram_degrade).get(gpu.index)) is not None:
        text = f"{level}, threshold {degrade:.1%} for {thresholds.degrade_after_s:.0f} s"
        yield Sighting("vram_degrade", subject, share, degrade, thresholds.degrade_after_s, margin, text)
    if warm_bytes is not None:
        grown = (gpu.used_bytes - warm_bytes) / gpu.total_bytes
        text = f"{level}, {grown:.1%} of the card more than after warm-up" + (growth and f"; it grows by {growth}")
        yield Sighting("vram_growth", subject, grown, thresholds.vram_growth, 60, margin, text)


def of_host(host: Host, thresholds: Thresholds) -> Iterator[Sighting]:
    """The disk is held by what is missing, so that 'above' is bad as everywhere."""
    used, limit = host.disk_total - host.disk_free, host.disk_total - thresholds.disk_free_bytes
    text = f"{host.disk_free / GIB:.1f} GiB left on the log disk, wanted {thresholds.disk_free_bytes / GIB:.1f}"
    yield Sighting("disk_low", "host", used, limit, 0, thresholds.disk_free_bytes * 0.1, text)


def of_metrics(engine: str, metrics: Metrics, thresholds: Thresholds, preempted: float | None) -> Iterator[Sighting]:
    """KV use counts only while requests wait for it: a full cache with nobody waiting is a cache doing its work.

    `preempted`: requests a minute, None while too little is known.
    """
    if metrics.kv_usage is not None:
        usage = metrics.kv_usage if metrics.waiting else 0.0
        text = f"KV cache {metrics.kv_usage:.0%} full, {metrics.waiting or 0:.0f} waiting"
        yield Sighting("kv_pressure", engine, usage, thresholds.kv_cache, thresholds.kv_cache_after_s,
                       thresholds.hysteresis, text)
    if preempted is not None:
        limit = thresholds.preemptions_per_min
        text = f"{preempted:.0f} requests a minute are preempted, threshold {limit:g} for {PREEMPTED_S:.0f} s"
        yield Sighting("preemptions", engine, preempted, limit, PREEMPTED_S, limit * 0.2, text)


def of_tree(tree: Tree, thresholds: Thresholds) -> Iterator[Sighting]:
    if thresholds.rss_bytes is not None:
        text = f"{tree.rss_bytes / GIB:.1f} GiB resident, threshold {thresholds.rss_bytes / GIB:.1f}"
        yield Sighting("rss_high", tree.mark.engine, tree.rss_bytes, thresholds.rss_bytes, 0,
                       thresholds.rss_bytes * thresholds.hysteresis, text)


# -- a counter's rate

@dataclass(frozen=True, slots=True)
class Counter:
    """(at, count), one in RATE_STEP_S, of the last RATE_S."""

    points: tuple[tuple[float, float], ...] = ()


def counted(counter: Counter, at: float, count: float | None) -> Counter:
    """A count that fell belongs to another process: begin anew."""
    if count is None or (counter.points and at - counter.points[-1][0] < RATE_STEP_S):
        return counter
    if counter.points and count < counter.points[-1][1]:
        return Counter(((at, count),))
    recent = tuple(point for point in counter.points if at - point[0] <= RATE_S)
    return Counter((*recent, (at, count)))


def per_minute(counter: Counter) -> float | None:
    """None while less than half of RATE_S is known."""
    if not counter.points:
        return None
    (began, low), (ended, high) = counter.points[0], counter.points[-1]
    return (high - low) * 60 / (ended - began) if ended - began >= RATE_S / 2 else None
