"""What an earlier daemon left running: asked once, when a daemon boots.  One walk of `/proc`; it waits for nothing."""

from __future__ import annotations

from vllm_watchdog.core.events import Survivor
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MarkIndex, Stat, age_s, launch_of


def survey(instance: str, index: MarkIndex | None = None) -> tuple[Survivor, ...]:
    """One survivor a generation: its leader, or where that is gone the oldest of its orphans."""
    generations: dict[Mark, list[Stat]] = {}
    for owned in (index or MarkIndex(instance)).owned():
        if owned.stat.alive:
            generations.setdefault(owned.mark, []).append(owned.stat)
    return tuple(
        Survivor(mark, stats[0].who.pid, _is_leader(stats), round(age_s(stats[0].who), 1), launch_of(stats[0].who.pid))
        for mark, stats in generations.items()
    )


def _is_leader(stats: list[Stat]) -> bool:
    """Is the oldest the one that was launched?

    A launch begins a session.  An orphan may have begun one too, but then others still live in the launch's session,
    whose leader is gone.
    """
    living = {stat.who.pid for stat in stats}
    oldest = stats[0]
    return oldest.session == oldest.who.pid and all(stat.session in living for stat in stats)
