"""What the daemon shows of the world: the status document's engines and totals, and what a bundle is written from.

Pure: the world and what it needs are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_watchdog.act.evidence import Context
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.report import report
from vllm_watchdog.core.totals import Totals, told
from vllm_watchdog.core.world import World


def document(world: World, totals: Totals, profile: Callable[[str], Mapping[str, Any]],
             stage: Callable[[str], str]) -> dict[str, Any]:
    """The report, with the profile that each engine was started by, and what it loads."""
    shown = report(world)
    for engine in shown["engines"]:
        name = engine["name"]
        engine["profile"] = profile(name)
        if engine["phase"] == Phase.LOADING:
            engine["loading"] = {"stage": stage(name), "about_s": totals.loads.get(name)}
    return shown | {"totals": told(totals, world.wall_offset)}


def context(world: World, mark: Mark | None, samples: Callable[[], Iterable[str]]) -> Context:
    """Of a bundle about the engine `mark` (None: about the host)."""
    engine = next((engine for engine in world.engines if engine.mark == mark), None)
    return Context(
        report=lambda: report(world),
        samples=samples,
        pids=tuple(process.pid for process in engine.tree.processes) if engine and engine.tree else (),
    )
