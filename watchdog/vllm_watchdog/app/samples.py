"""The figures of each second: for the plots, and the last quarter of an hour of them as `samples.csv` of a bundle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_watchdog.core.policy import HAS_CHILD
from vllm_watchdog.core.readings import Gpu, Metrics, Unknown
from vllm_watchdog.core.world import Engine, World
from vllm_watchdog.tell.plot import Point
from vllm_watchdog.tell.samples import Sample

KEPT_S = 900.0      # an incident's plot shows ten minutes before it and five after it
KEPT = 600 * 4      # ... but no more rows: ten minutes of one row a second and engine, for four engines
FIGURES = ("rss_bytes", "cpu", "vram_bytes", "kv_usage", "running", "waiting")
HEADER = ",".join(("time", "engine", "generation", "phase", "rss_bytes", "cpu_cores", *FIGURES[2:]))
HELD = "held:"      # figures of a card: bytes by engine ...
OTHERS = "others"   # ... and of all that is not ours


@dataclass(frozen=True, slots=True)
class Row:
    """One look at one engine: monotonic seconds, a line of CSV, a point of its plot."""

    at: float
    engine: str
    line: str
    point: Point


class Sampler:
    """Taken by one thread; others read copies, each made in one step: to walk a deque that grows meanwhile is an error."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._counted: dict[str, tuple[int, float, float]] = {}     # engine: generation, wall, tokens

    def take(self, world: World) -> list[Sample]:
        """One sample an engine that has a process, one a card."""
        wall = world.at + world.wall_offset
        while self._rows and self._rows[0].at <= world.at - KEPT_S:
            self._rows.popleft()
        samples = [] if isinstance(world.gpus, Unknown) else [_card(gpu, wall) for gpu in world.gpus]
        for engine in world.engines:
            if engine.phase in HAS_CHILD:
                sample = Sample(f"engine/{engine.name}", wall, dict(self._engine(world, engine, wall)))
                known = (sample.figures.get(name) for name in FIGURES)
                texts = ("" if figure is None else f"{figure:.10g}" for figure in known)
                line = ",".join((f"{wall:.3f}", engine.name, str(engine.generation), engine.phase.value, *texts))
                point = Point(wall, _cards(world, engine), engine.tree.rss_bytes if engine.tree else None,
                              sample.figures.get("kv_usage"))
                self._rows.append(Row(world.at, engine.name, line, point))
                samples.append(sample)
        return samples

    def points(self, engine: str) -> tuple[Point, ...]:
        """For the plot of an incident: memory around one engine, oldest first."""
        return tuple(row.point for row in list(self._rows) if row.engine == engine)

    def rows(self) -> tuple[str, ...]:
        """Lines of CSV, the heading first."""
        return (HEADER, *(row.line for row in list(self._rows)))

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


def _cards(world: World, engine: Engine) -> tuple[tuple[int, int], ...]:
    """What is in use of the engine's cards, by whomever."""
    gpus = () if isinstance(world.gpus, Unknown) else world.gpus
    return tuple((gpu.index, gpu.used_bytes) for gpu in gpus if gpu.index in engine.plan.gpus or not engine.plan.gpus)


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
