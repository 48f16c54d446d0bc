"""What the KV caches of the engines still hold, asked of them while that matters: long prompts are there, or somebody waits.

A long prompt that the cache can't hold now would wait inside the engine, or push others out (preemption): it waits here
instead, where short ones pass it.  Never waits; looks are tasks, one for each engine at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_watchdog.gateway.learn import kv_share
from vllm_watchdog.gateway.lines import Line, Station

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher

every_s = 1.0


class KvWatch:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate
        self._looking: set[Station] = set()

    def sweep(self, at: float) -> None:
        for line in self._gate.lines.values():
            station = line.open
            if station is None or station in self._looking:
                continue
            tokens = self._gate.sizing.kv_tokens(station.target)
            if tokens is None or not (station.seats.long_requests or line.queue):
                station.kv_free = None
            elif at >= station.kv_at + every_s:
                self._looking.add(station)
                self._gate.spawn(self._look(station, line, tokens))

    async def _look(self, station: Station, line: Line, tokens: int) -> None:
        try:
            used = await kv_share(station.target)
        finally:
            self._looking.discard(station)
        station.kv_at = self._gate.now()
        station.kv_free = None if used is None else int(tokens * (1 - used))
        self._gate.admission.pump(line)
