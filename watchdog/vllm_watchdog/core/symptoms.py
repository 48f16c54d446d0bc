"""Detectors: a value over its threshold for long enough is a symptom, and it is one symptom until it has been calm.

A value that hovers at its threshold raises once: it clears only after it stayed `hysteresis` below for `clear_after_s`.
Unknown values change nothing: a symptom neither starts nor ends because a sensor was blind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf

from vllm_watchdog.core import causes
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.phrases import filled
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

    @property
    def at_ease(self) -> bool:
        """It knows nothing that a new one would not learn at the next look, and is not kept."""
        return not self.raised and self.calm_since < inf


@dataclass(frozen=True, slots=True)
class Sighting:
    """A value to hold against its threshold now.  `words` says it to a human: called only when there is something to say.

    `clear_after_s` None: as the thresholds say.  `evidence`: does raising it earn a bundle?
    """

    class_: str
    subject: str
    value: float
    threshold: float
    after_s: float
    margin: float           # below the threshold by this much is calm
    words: Callable[[], Text]
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

def of_gpu(gpu: Gpu, thresholds: Thresholds, warm_bytes: int | None, growth: Text | None = None) -> Iterator[Sighting]:
    """`warm_bytes`: the card's level after warm-up, None before it; `growth` says how fast it grows, where that is known."""
    subject, share, margin = f"gpu{gpu.index}", gpu.used_share, thresholds.hysteresis

    def level(text: Text, **more: str) -> Text:
        return filled(text, gpu=gpu.index, share=f"{share:.1%}", total=f"{gpu.total_bytes / GIB:.1f}", **more)

    if (warn := dict(thresholds.vram_warn).get(gpu.index)) is not None:
        yield Sighting("vram_high", subject, share, warn, 0, margin, lambda: level(causes.CARD_HIGH, limit=f"{warn:.1%}"))
    if (degrade := dict(thresholds.vram_degrade).get(gpu.index)) is not None:
        yield Sighting("vram_degrade", subject, share, degrade, thresholds.degrade_after_s, margin, lambda: level(
            causes.CARD_DEGRADED, limit=f"{degrade:.1%}", s=f"{thresholds.degrade_after_s:.0f}"))
    if warm_bytes is not None:
        grown = (gpu.used_bytes - warm_bytes) / gpu.total_bytes

        def words() -> Text:
            text = level(causes.CARD_GROWN, grown=f"{grown:.1%}")
            return filled(causes.CARD_GROWS, level=text, growth=growth) if growth else text

        yield Sighting("vram_growth", subject, grown, thresholds.vram_growth, 60, margin, words)


def of_host(host: Host, thresholds: Thresholds) -> Iterator[Sighting]:
    """The disk is held by what is missing, so that 'above' is bad as everywhere."""
    used, limit = host.disk_total - host.disk_free, host.disk_total - thresholds.disk_free_bytes
    yield Sighting("disk_low", "host", used, limit, 0, thresholds.disk_free_bytes * 0.1, lambda: filled(
        causes.DISK_LOW, left=f"{host.disk_free / GIB:.1f}", wanted=f"{thresholds.disk_free_bytes / GIB:.1f}"))


def of_metrics(engine: str, metrics: Metrics, thresholds: Thresholds, preempted: float | None) -> Iterator[Sighting]:
    """KV use counts only while requests wait for it: a full cache with nobody waiting is a cache doing its work.

    `preempted`: requests a minute, None while too little is known.
    """
    if metrics.kv_usage is not None:
        usage = metrics.kv_usage if metrics.waiting else 0.0
        yield Sighting("kv_pressure", engine, usage, thresholds.kv_cache, thresholds.kv_cache_after_s,
                       thresholds.hysteresis, lambda: filled(
                           causes.CACHE_FULL, share=f"{metrics.kv_usage:.0%}", waiting=f"{metrics.waiting or 0:.0f}"))
    if preempted is not None:
        limit = thresholds.preemptions_per_min
        yield Sighting("preemptions", engine, preempted, limit, PREEMPTED_S, limit * 0.2, lambda: filled(
            causes.PREEMPTED, n=f"{preempted:.0f}", limit=f"{limit:g}", s=f"{PREEMPTED_S:.0f}"))


def of_tree(tree: Tree, thresholds: Thresholds) -> Iterator[Sighting]:
    if (limit := thresholds.rss_bytes) is not None:
        yield Sighting("rss_high", tree.mark.engine, tree.rss_bytes, limit, 0, limit * thresholds.hysteresis, lambda: filled(
            causes.RSS_HIGH, size=f"{tree.rss_bytes / GIB:.1f}", limit=f"{limit / GIB:.1f}"))


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
