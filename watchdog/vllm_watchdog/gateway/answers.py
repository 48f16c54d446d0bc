"""What the gateway answers itself: /health and /v1/models for the service, /metrics, and the operators' paths.

/health: 200 while an engine serves, or while requests are held because none has served for less than `hold_s`; else 503.
With several services, 503 only when none of them can be had.  /v1/models is the engine's own answer while there is one
service and it serves.  Operators' paths exist on the private socket only: whoever may open it, may.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.breaker import State
from vllm_watchdog.gateway.dispatch import Dispatcher
from vllm_watchdog.gateway.lines import Line
from vllm_watchdog.gateway.relay import Exchange
from vllm_watchdog.gateway.report import casualty, seats

JSON = "application/json"
TEXT = "text/plain; version=0.0.4; charset=utf-8"
QUARANTINE = "/gateway/quarantine"
in_flight_limit = 1000

Answer = tuple[int, bytes, str]


class Answers:
    def __init__(self, gate: Dispatcher) -> None:
        self._gate = gate
        reads: dict[str, Callable[[], Answer | None]] = {
            "/health": self._health, "/v1/models": self._models, "/metrics": self._metrics,
        }
        private: dict[str, Callable[[], Answer | None]] = {
            **reads, QUARANTINE: self._quarantine, "/gateway/inflight": self._in_flight,
        }
        self._reads = {False: reads, True: private}

    def __call__(self, exchange: Exchange) -> bool:
        """False: this request is the engine's."""
        method, path, private = exchange.head.method, exchange.head.path, exchange.down.private
        handler = self._reads[private].get(path) if method in (b"GET", b"HEAD") else None
        found = handler() if handler is not None else None
        if private and method == b"DELETE" and path.startswith(QUARANTINE):
            found = self._clear(path.removeprefix(QUARANTINE).strip("/"))
        if found is not None:
            exchange.reply(*found)
        elif private:
            exchange.refuse(errors.NOT_FOUND)
        return found is not None or private

    def _health(self) -> Answer:
        states = {line.service.name: self._state(line) for line in self._gate.lines.values()}
        usable = any(state["state"] != "down" for state in states.values()) and not self._gate.draining
        return _json(200 if usable else 503, {"status": "ok" if usable else "down", "services": states})

    def _state(self, line: Line) -> dict[str, Any]:
        if line.open is not None:
            return {"state": "serving", "engine": line.open.target.engine}
        held = self._gate.now() - (line.down_since or 0.0) < self._gate.plan.hold_s
        return {"state": "holding" if held else "down", "why": line.service.why, "held": len(line.queue)}

    def _models(self) -> Answer | None:
        lines = list(self._gate.lines.values())
        if len(lines) == 1 and lines[0].open is not None:
            return None
        models = dict.fromkeys(model for line in lines for model in line.service.models)    # two may serve one name
        cards = [{"id": model, "object": "model", "created": 0, "owned_by": "vllm"} for model in models]
        return _json(200, {"object": "list", "data": cards})

    def _metrics(self) -> Answer:
        gate = self._gate
        gauges: dict[str, float] = {
            "connections": len(gate.connections),
            "in_flight": sum(len(station.in_flight) for station in gate.stations.values()),
            "holding": sum(len(line.queue) for line in gate.lines.values()),
            "holding_bytes": sum(line.queue.bytes for line in gate.lines.values()),
            "upstream_connections": sum(len(station.pool.open) for station in gate.stations.values()),
            "quarantined": len(gate.quarantine.entries(gate.now())),
            "serving": sum(line.open is not None for line in gate.lines.values()),
        }
        return 200, gate.metrics.render(gauges, self._by_label()).encode(), TEXT

    def _by_label(self) -> dict[str, list[tuple[str, float]]]:
        at = self._gate.now()
        serving = [(f'{{engine="{line.open.target.engine}"}}', line, line.open)
                   for line in self._gate.lines.values() if line.open is not None]
        limits = [(label, line.limits(station).requests) for label, line, station in serving]
        return {
            "waiting": [(f'{{service="{line.service.name}",kind="{kind}"}}', count)
                        for line in self._gate.lines.values() for kind, count in line.queue.depths().items()],
            "engine_requests": [(label, station.seats.requests) for label, _, station in serving],
            "engine_prompt_tokens": [(label, station.seats.tokens) for label, _, station in serving],
            "engine_limit": [(label, most) for label, most in limits if most is not None],
            "breaker_open": [(label, station.breaker.state(at) is not State.CLOSED) for label, _, station in serving],
        }

    def _quarantine(self) -> Answer:
        at = self._gate.now()
        entries = self._gate.quarantine.entries(at)
        rows = [
            {"hash": entry.digest, "why": entry.why.value, "tokens_estimated": entry.tokens, "hits": entry.hits,
             "age_s": round(at - entry.since, 1), "left_s": round(entry.since + self._gate.plan.refuse_s - at, 1)}
            for entry in entries
        ]
        return _json(200, {"quarantine": rows})

    def _clear(self, digest: str) -> Answer:
        cleared = self._gate.quarantine.clear(digest or None)
        return _json(200 if cleared or not digest else 404, {"cleared": cleared})

    def _in_flight(self) -> Answer:
        at = self._gate.now()
        submitted = (exchange for exchange in self._gate.exchanges if exchange.line is not None)
        rows = [
            asdict(casualty(each, at, each.phase.value)) | {"engine": each.station.target.engine if each.station else None}
            for each in sorted(submitted, key=lambda exchange: exchange.id)[:in_flight_limit]
        ]
        services = {name: self._load(line) for name, line in self._gate.lines.items()}
        return _json(200, {"requests": rows, "services": services})

    def _load(self, line: Line) -> dict[str, Any]:
        """What waits for a service, and what its engine has."""
        station, waiting = line.open, {"waiting": line.queue.depths()}
        if station is None:
            return waiting
        return waiting | seats(line, station, self._gate.now()) | {"long_requests": station.seats.long_requests}


def _json(status: int, value: Any) -> Answer:
    return status, json.dumps(value, separators=(",", ":")).encode(), JSON
