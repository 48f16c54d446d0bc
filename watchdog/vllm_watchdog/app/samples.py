"""The figures of each second: for the plots, and the last quarter of an hour of them as `samples.csv` of a bundle."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter

from vllm_watchdog.core.policy import HAS_CHILD, Phase
from vllm_watchdog.core.readings import Gpu, Metrics, Unknown
from vllm_watchdog.core.world import Engine, World
from vllm_watchdog.tell.plot import Point
from vllm_watchdog.tell.samples import Sample
from vllm_watchdog.tell.track import Track

KEPT_S = 900.0      # an incident's plot shows ten minutes before it and five after it
KEPT_ROWS = 1_200   # ... but no more of one engine: four in three seconds
SLOT_S = 4.0        # of a point of the plot, which shows 300 at most
FIGURES = ("rss_bytes", "cpu", "vram_bytes", "kv_usage", "running", "waiting")
HEADER = ",".join(("time", "engine", "generation", "phase", "rss_bytes", "cpu_cores", *FIGURES[2:]))
# Columns beside FIGURES; `at` in monotonic, `wall` in epoch seconds, `card:INDEX` what is in use of each of its cards.
AT, WALL, GENERATION, PHASE, CARD = "at", "wall", "generation", "phase", "card:"
PHASES = tuple(Phase)
HELD = "held:"      # figures of a card: bytes by engine ...
OTHERS = "others"   # ... and of all that is not ours


class Sampler:
    """Taken by one thread; anybody may read."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}
        self._newest = 0.0      # when, monotonic seconds
        self._lock = threading.Lock()       # over the tracks, for copying them
        self._counted: dict[str, tuple[int, float, float]] = {}     # engine: generation, wall, tokens

    def take(self, world: World) -> list[Sample]:
        """One sample an engine that has a process, one a card."""
        wall, self._newest = world.at + world.wall_offset, world.at
        samples = [] if isinstance(world.gpus, Unknown) else [_card(gpu, wall) for gpu in world.gpus]
        for engine in world.engines:
            if engine.phase in HAS_CHILD:
                sample = Sample(f"engine/{engine.name}", wall, dict(self._engine(world, engine, wall)))
                samples.append(sample)
                known = {name: sample.figures[name] for name in FIGURES if name in sample.figures}
                self._keep(engine.name, {
                    AT: world.at, WALL: wall, GENERATION: engine.generation, PHASE: PHASES.index(engine.phase),
                    **known, **dict(_cards(world, engine))})
        return samples

    def _keep(self, engine: str, figures: dict[str, float]) -> None:
        with self._lock:
            if engine not in self._tracks:
                self._tracks[engine] = Track(KEPT_ROWS)
            self._tracks[engine].append(figures)

    def _rows(self, engine: str) -> Iterator[dict[str, float]]:
        with self._lock:
            track, newest = self._tracks[engine].copy(), self._newest
        yield from track.rows(AT, newest - KEPT_S)

    def points(self, engine: str) -> tuple[Point, ...]:
        """For the plot of an incident: memory around one engine, oldest first; of each slot the highest, since peaks are
        what kills."""
        if engine not in self._tracks:
            return ()
        slots = groupby(self._rows(engine), key=lambda row: row[WALL] // SLOT_S)
        return tuple(_point(_highest(rows)) for _, rows in slots)

    def rows(self) -> Iterator[str]:
        """Lines of CSV, the heading first."""
        yield HEADER
        for _, line in heapq.merge(*map(self._lines, list(self._tracks)), key=itemgetter(0)):
            yield line

    def _lines(self, engine: str) -> Iterator[tuple[float, str]]:
        """One at a time, since a quarter of an hour of rows is megabytes: epoch seconds, and the line."""
        for row in self._rows(engine):
            figures = (f"{row[name]:.10g}" if name in row else "" for name in FIGURES)
            yield row[WALL], ",".join(
                (f"{row[WALL]:.3f}", engine, str(row[GENERATION]), PHASES[int(row[PHASE])].value, *figures))

    def _engine(self, world: World, engine: Engine, wall: float) -> Iterator[tuple[str, float]]:
        if engine.tree:
            yield from (("rss_bytes", engine.tree.rss_bytes), ("cpu", round(engine.tree.cpu, 3)))
        if not isinstance(world.gpus, Unknown):
            rows = [row for gpu in world.gpus for row in gpu.processes if row.holder.mark == engine.mark]
            yield "vram_bytes", sum(row.used_bytes or 0 for row in rows)
        if isinstance(engine.metrics, Metrics):
            figures = {name: getattr(engine.metrics, name) for name in ("kv_usage", "running", "waiting")}
            yield from ((name, figure) for name, figure in figures.items() if figure is not None)
            if (rate := self._rate(engine, engine.metrics, wall)) is not None:
                yield "tokens_per_s", rate

    def _rate(self, engine: Engine, metrics: Metrics, wall: float) -> float | None:
        """Generated tokens a second since the last sample of this generation."""
        tokens = metrics.progress.generation_tokens if metrics.progress else None
        if tokens is None:
            return None
        generation, then, before = self._counted.get(engine.name, (0, 0.0, 0.0))
        self._counted[engine.name] = (engine.generation, wall, tokens)
        if generation != engine.generation or wall <= then or tokens < before:
            return None
        return round((tokens - before) / (wall - then), 2)


def _highest(rows: Iterator[dict[str, float]]) -> dict[str, float]:
    """Of the instant the first."""
    first = highest = next(rows)
    for row in rows:
        highest = {name: max(value, highest.get(name, value)) for name, value in (highest | row).items()}
    return highest | {WALL: first[WALL]}


def _point(row: dict[str, float]) -> Point:
    cards = tuple((int(name[len(CARD):]), int(used)) for name, used in row.items() if name.startswith(CARD))
    return Point(row[WALL], cards, int(row["rss_bytes"]) if "rss_bytes" in row else None, row.get("kv_usage"))


def _cards(world: World, engine: Engine) -> Iterator[tuple[str, float]]:
    """What is in use of the engine's cards, by whomever."""
    for gpu in () if isinstance(world.gpus, Unknown) else world.gpus:
        if gpu.index in engine.plan.gpus or not engine.plan.gpus:
            yield f"{CARD}{gpu.index}", gpu.used_bytes


def _card(gpu: Gpu, wall: float) -> Sample:
    figures: dict[str, float] = {"used_bytes": gpu.used_bytes, "total_bytes": gpu.total_bytes}
    if gpu.utilization is not None:
        figures["utilization"] = gpu.utilization
    if gpu.temperature_c is not None:
        figures["temperature_c"] = gpu.temperature_c
    for row in gpu.processes:
        name = HELD + (row.holder.mark.engine if row.holder.mark else OTHERS)
        figures[name] = figures.get(name, 0) + (row.used_bytes or 0)
    return Sample(f"gpu/{gpu.index}", wall, figures)
