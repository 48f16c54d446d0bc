"""The last ten minutes in figures, one row a second: what `samples.csv` of a bundle shows and history keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from vllm_watchdog.core.policy import HAS_CHILD
from vllm_watchdog.core.readings import Metrics, Unknown
from vllm_watchdog.core.world import Engine, World
from vllm_watchdog.tell.history import Sample
from vllm_watchdog.tell.plot import Point

KEPT = 600 * 4      # ten minutes of one row a second and engine, for four engines
HEADER = ("time", "engine", "generation", "phase", "rss_bytes", "cpu_cores", "vram_bytes", "kv_usage", "running", "waiting")


class Samples:
    """Only the loop writes it; a bundle gets a copy."""

    def __init__(self) -> None:
        self._rows: deque[tuple[str, ...]] = deque(maxlen=KEPT)
        self._points: deque[tuple[str, Point]] = deque(maxlen=KEPT)

    def take(self, world: World) -> list[Sample]:
        """One row an engine that has a process."""
        samples = [sample for engine in world.engines if engine.phase in HAS_CHILD for sample in _samples(world, engine)]
        for sample in samples:
            engine = world.engine(sample.engine)
            figures = (sample.rss_bytes, sample.cpu, sample.vram_bytes, sample.kv_usage, sample.running, sample.waiting)
            known = ("" if figure is None else f"{figure:.10g}" for figure in figures)
            self._rows.append((f"{sample.wall:.3f}", engine.name, str(engine.generation), engine.phase.value, *known))
            point = Point(sample.wall, _cards(world, engine), sample.rss_bytes, sample.kv_usage)
            self._points.append((engine.name, point))
        return samples

    def points(self, engine: str) -> tuple[Point, ...]:
        """For the plot of an incident: memory around one engine, oldest first."""
        return tuple(point for name, point in self._points if name == engine)

    def rows(self) -> tuple[str, ...]:
        """Lines of CSV, the heading first."""
        return tuple(",".join(row) for row in (HEADER, *self._rows))


def _samples(world: World, engine: Engine) -> Iterator[Sample]:
    metrics = engine.metrics if isinstance(engine.metrics, Metrics) else Metrics(None)
    yield Sample(
        engine=engine.name,
        wall=world.at + world.wall_offset,
        rss_bytes=engine.tree.rss_bytes if engine.tree else None,
        cpu=engine.tree.cpu if engine.tree else None,
        vram_bytes=_vram(world, engine),
        kv_usage=metrics.kv_usage,
        running=metrics.running,
        waiting=metrics.waiting,
    )


def _cards(world: World, engine: Engine) -> tuple[tuple[int, int], ...]:
    """What is in use of the engine's cards, by whomever."""
    gpus = () if isinstance(world.gpus, Unknown) else world.gpus
    return tuple((gpu.index, gpu.used_bytes) for gpu in gpus if gpu.index in engine.plan.gpus or not engine.plan.gpus)


def _vram(world: World, engine: Engine) -> int | None:
    """What the engine's own processes hold, on all cards; None where nobody can tell."""
    if isinstance(world.gpus, Unknown):
        return None
    rows = [row for gpu in world.gpus for row in gpu.processes if row.holder.mark == engine.mark]
    return sum(row.used_bytes or 0 for row in rows)
