"""The daemon's side of the gateway: the route that the gateway is told, and the words that come back.

The loop publishes, and never waits: the route goes to a queue and to the writer of a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from vllm_watchdog.app.route import route
from vllm_watchdog.core.drills import FAULTS
from vllm_watchdog.core.events import Event
from vllm_watchdog.core.readings import GatewayLoad
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.core.world import World
from vllm_watchdog.gateway_rules import Rule
from vllm_watchdog.launch import Launch
from vllm_watchdog.prompt_plan import PromptPlan

SILENT_S = 12.0         # it says something every five seconds
FAULT_NAMES = frozenset(fault.name for fault in FAULTS)


class GatewayLink:
    """`tell` reaches a gateway that listens, `save` one that starts without us.  Any thread may set `rules`, and by engine
    the `limits` of prompts; they are told with the next world.  `expected`: silence of a gateway that was never heard is
    told, too."""

    def __init__(self, launches: Mapping[str, Launch], rules: tuple[Rule, ...], tell: Callable[[dict[str, Any]], None],
                 save: Callable[[dict[str, Any]], None], wall: Callable[[], float] = time.time,
                 clock: Callable[[], float] = time.monotonic, expected: bool = False) -> None:
        self._launches, self._tell, self._save, self._wall, self._clock = launches, tell, save, wall, clock
        self.rules = rules
        self.limits: Mapping[str, PromptPlan] = {}      # newer than what an engine was started with
        self._routed: dict[str, Any] = {}
        self._load: tuple[float, GatewayLoad] | None = None     # when it came, by the wall clock
        self._heard_at = clock() if expected else None

    def publish(self, world: World) -> None:
        """A route that is as it was is not told again."""
        routed = {"services": route(world, self._launches, self.limits), "rules": [rule.document() for rule in self.rules]}
        if routed != self._routed:
            self._routed = routed
            document = {"version": int(self._wall() * 1000)} | routed
            self._tell(document)
            self._save(document)


    def take(self, said: Mapping[str, Any]) -> None:
        """The gateway's word on how busy it is.  Raises ValueError."""
        services = said.get("services")
        if not isinstance(services, list) or not all(isinstance(each, dict) for each in services):
            raise ValueError("services: expected a list of objects")
        load = {key: value for key, value in said.items() if key != "verb"} | {"_": "GatewayLoad"}
        load["services"] = [each | {"_": "ServiceLoad"} for each in services]
        self._load, self._heard_at = (self._wall(), CODEC.decode(load)), self._clock()

    def report(self) -> dict[str, Any] | None:
        """The newest of these words, for the status document; None: there was none so far."""
        silent_s = self._clock() - self._heard_at if self._heard_at is not None else 0.0
        if silent_s > SILENT_S:
            never = "none has told anything: does it run?"
            return {"unknown": f"it has told nothing for {silent_s:.0f} s" if self._load else never}
        if self._load is None:
            return None
        at, load = self._load
        return {"at": round(at, 3), "connections": load.connections, "quarantined": load.quarantined,
                "services": [asdict(each) for each in load.services]}


def heard(said: Mapping[str, Any], at: float) -> Event:
    """The event in the gateway's words, or a drill's.  Raises ValueError for what can't be read."""
    event: Event = CODEC.decode(READ[said["verb"]](said) | {"at": at})
    return event


def _waited(said: Mapping[str, Any]) -> dict[str, Any]:
    wait = {key: value for key, value in said.items() if key not in ("verb", "service")}
    return {"_": "Waited", "service": said.get("service"), "wait": {"_": "Wait"} | wait}


def _casualties(said: Mapping[str, Any]) -> dict[str, Any]:
    requests = said.get("requests")
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise ValueError("requests: expected a list of objects")
    return {
        "_": "Casualties", "in_flight": said.get("in_flight"),
        "mark": {"_": "Mark", "engine": said.get("engine"), "generation": said.get("generation")},
        "requests": [{"_": "InFlight"} | each for each in requests],
    }


def _drilled(said: Mapping[str, Any]) -> dict[str, Any]:
    if said.get("fault") not in FAULT_NAMES:
        raise ValueError("fault: expected the name of a drill")
    return {"_": "Drilled", "incident": said.get("incident"), "fault": said["fault"]}


READ: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "waited": _waited, "casualties": _casualties, "drilled": _drilled,
}
