"""What the gateway counts, and what it tells the daemon: how busy it is, and who was there when an engine died; never
their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm_watchdog.gateway.errors import Refusal
from vllm_watchdog.gateway.quarantine import tokens_of
from vllm_watchdog.gateway.routes import Kind, Target

if TYPE_CHECKING:
    from vllm_watchdog.gateway.dispatch import Dispatcher
    from vllm_watchdog.gateway.lines import Line, Station
    from vllm_watchdog.gateway.relay import Exchange

casualty_limit = 64
load_s, load_same_s = 2.0, 5.0
gap_buckets_s = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STATUSES = frozenset(status.value for status in HTTPStatus)
PREFIX = "llm_watchdog_gateway_"
Rows = Iterable[tuple[str, float]]      # labels as the text format has them, value


@dataclass(frozen=True, slots=True)
class Casualty:
    """A request at an engine's death.  `verdict`: replayed, held, suspect, refused or cut."""

    id: int
    bytes: int
    age_s: float
    begun: bool
    hash: str
    tokens_estimated: int
    verdict: str

    def with_verdict(self, verdict: str) -> Casualty:
        return replace(self, verdict=verdict)


def casualty(exchange: Exchange, at: float, verdict: str) -> Casualty:
    begun = exchange.phase == "begun"
    tokens = tokens_of(exchange.size) if exchange.kind is Kind.GENERATION else 0
    return Casualty(exchange.id, exchange.size, round(at - exchange.at, 3), begun, exchange.digest, tokens, verdict)


def casualties(target: Target, all_: Iterable[Casualty]) -> dict[str, Any]:
    """The message for the daemon: suspects and the largest first, at most `casualty_limit`."""
    ranked = sorted(all_, key=lambda one: (one.verdict not in ("suspect", "refused"), -one.bytes))
    return {
        "verb": "casualties", "engine": target.engine, "generation": target.generation, "in_flight": len(ranked),
        "requests": [asdict(one) for one in ranked[:casualty_limit]],
    }


class Load:
    """How busy it is, for the daemon's report: told when it has changed, every `load_s` at most, and the same again every
    `load_same_s`, so that silence tells that the gateway is gone."""

    def __init__(self) -> None:
        self._listener = 0
        self.forget()

    def forget(self) -> None:
        """Nothing was told."""
        self._told: dict[str, Any] = {}
        self._at = float("-inf")

    def told(self, gate: Dispatcher, at: float, listener: int) -> dict[str, Any] | None:
        """The message; None: not now.  `listener`: a new one was told nothing yet."""
        if listener != self._listener:
            self._listener = listener
            self.forget()
        if at - self._at < load_s:
            return None
        clients = sum(not each.private for each in gate.connections)
        message = {
            "verb": "load", "connections": clients, "quarantined": len(gate.quarantine.entries(at)),
            "services": [_service(line, at) for line in gate.lines.values()],
        }
        if message == self._told and at - self._at < load_same_s:
            return None
        self._told, self._at = message, at
        return message


def _service(line: Line, at: float) -> dict[str, Any]:
    depths = line.queue.depths()
    waits = {"service": line.service.name, "waiting": sum(depths.values()), "waiting_long": depths["long"] + depths["alone"]}
    return waits if line.open is None else waits | seats(line, line.open, at)


def seats(line: Line, station: Station, at: float) -> dict[str, Any]:
    """What the engine has of requests, and what it may have."""
    limits = line.limits(station)
    return {
        "engine": station.target.engine, "requests": station.seats.requests, "prompt_tokens": station.seats.tokens,
        "max_concurrent": limits.requests, "max_tokens": limits.tokens,
        "throttled": station.throttle.why if station.throttle.limit is not None else None,
        "breaker": station.breaker.state(at).value,
    }


class Metrics:
    """Counters since the start; labels are statuses and our own codes, so their number is bounded."""

    def __init__(self) -> None:
        self.requests = self.held = self.replayed = self.cancelled = self.truncated = self.deaths = 0
        self.statuses: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.gaps: Counter[float] = Counter()
        self.gap_sum_s = 0.0

    def began(self, status: int, gap_s: float | None) -> None:
        self.statuses[status if status in STATUSES else status // 100] += 1      # 7: an odd one, 7xx
        if gap_s is not None:
            self.gaps[next((edge for edge in gap_buckets_s if gap_s <= edge), float("inf"))] += 1
            self.gap_sum_s += gap_s

    def refused(self, refusal: Refusal) -> None:
        self.statuses[refusal.status] += 1
        self.refusals[refusal.code] += 1

    def render(self, now: Mapping[str, float], each: Mapping[str, Rows]) -> str:
        """`now`: gauges by name; `each`: those with labels."""
        lines: list[str] = []
        for name in ("requests", "held", "replayed", "cancelled", "truncated"):
            lines += _family(f"{name}_total", "counter", [("", getattr(self, name))])
        lines += _family("engine_deaths_total", "counter", [("", self.deaths)])
        codes = [(f'{{code="{_code(status)}"}}', value) for status, value in sorted(self.statuses.items())]
        lines += _family("responses_total", "counter", codes)
        lines += _family("refused_total", "counter", [(f'{{code="{k}"}}', v) for k, v in sorted(self.refusals.items())])
        for name, value in now.items():
            lines += _family(name, "gauge", [("", value)])
        for name, rows in each.items():
            lines += _family(name, "gauge", rows)
        return "\n".join([*lines, *self._histogram(), ""])

    def _histogram(self) -> list[str]:
        """How long a request had to wait for an engine, from arrival or its first engine's death to its first byte."""
        name, sofar = f"{PREFIX}gap_seconds", 0
        lines = [f"# TYPE {name} histogram"]
        for edge in (*gap_buckets_s, float("inf")):
            sofar += self.gaps[edge]
            lines.append(f'{name}_bucket{{le="{"+Inf" if edge == float("inf") else edge}"}} {sofar}')
        return [*lines, f"{name}_sum {self.gap_sum_s:.6f}", f"{name}_count {sofar}"]


def _code(status: int) -> str:
    return str(status) if status in STATUSES else f"{status}xx"


def _family(name: str, kind: str, rows: Rows) -> list[str]:
    return [f"# TYPE {PREFIX}{name} {kind}", *(f"{PREFIX}{name}{labels} {value:g}" for labels, value in rows)]
