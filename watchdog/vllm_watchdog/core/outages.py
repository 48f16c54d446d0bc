"""A service that no engine serves is an outage, unless the gap is its first start, or was asked for or planned.

A failure within such a gap ends the excuse (`Turn.blame`), and so does its length, where it is we who planned it.
"""

from __future__ import annotations

from functools import partial
from math import inf

from vllm_watchdog.core import causes
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.failover import Service
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.sampled import hold
from vllm_watchdog.core.symptoms import Sighting
from vllm_watchdog.core.turn import DOWN, Turn
from vllm_watchdog.core.world import ROUTED


def watch(turn: Turn) -> None:
    for service in turn.world.services if not turn.world.stopping else ():
        _watch(turn, service)


def _watch(turn: Turn, service: Service) -> None:
    engine = turn.world.engine(service.wanted)
    served = engine.phase in ROUTED
    if served and service.excused_until > -inf:
        turn.world = turn.world.with_service(replace(service, excused_until=-inf))
    down = not served and turn.at >= service.excused_until
    watches = turn.world.watches
    known = bool(watches) and any(watch.class_ == DOWN and watch.subject == service.name for watch in watches)
    if down or known:
        after_s = turn.world.plan.thresholds.engine_down_s
        words = partial(filled, causes.NOT_SERVED, service=service.name, s=f"{after_s:.0f}", engine=engine.name,
                        phase=causes.PHASES[engine.phase])
        hold(turn, [Sighting(DOWN, service.name, float(down), 1.0, after_s, 0.5, words, clear_after_s=0.0,
                             urgency=Urgency.CRITICAL, evidence=False)])
