"""Which service a request goes to, by the rules of the route and by who is up.  Pure.

The first rule that matches counts.  While its engine is down it waits, is refused or spills, as the rule says: to the next
rule that matches, else to another engine of its model, if that one is up and the request fits there; else it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_watchdog.gateway.routes import Route, Service
from vllm_watchdog.gateway_rules import Asked, Header, WhenDown, applicable


@dataclass(frozen=True, slots=True)
class Choice:
    """`rule`: the number of the one that decided, from 1; 0: none did.  `refused`: its engine is down, and it says no."""

    service: Service | None
    rule: int = 0
    refused: bool = False


Takes = Callable[[Service], bool]       # is it up, or does the request fit there


def choose(route: Route, asked: Asked, header: Header, up: Takes, room: Takes) -> Choice | None:
    """None: that depends on tokens that nobody has counted yet."""
    spilled: Choice | None = None
    known = route.models if route.rules else frozenset[str]()
    for number, rule in enumerate(route.rules, 1):
        service = route.service(rule.service)
        if service is None or not applicable(rule, asked.model, service.models, known):
            continue
        if (missed := rule.misses(asked, header)) is None:
            return None
        if missed:
            continue
        here = Choice(service, number)
        if up(service) and (spilled is None or room(service)):
            return here
        if spilled is None and rule.when_down is not WhenDown.SPILL:
            return Choice(service, number, rule.when_down is WhenDown.REFUSE)
        spilled = spilled or here
    if spilled is None:
        return Choice(route.pick(asked.model))
    other = next((each for each in _others(route, asked.model) if up(each) and room(each)), None)
    return Choice(other, spilled.rule) if other is not None else spilled


def _others(route: Route, model: str | None) -> Iterator[Service]:
    """Where it would go without rules, then whoever else has its model."""
    if (usual := route.pick(model)) is not None:
        yield usual
    yield from (service for service in route.services if model is None or model in service.models)
