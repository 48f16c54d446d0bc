"""What daemon and gateway tell each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.core.scenes import Scene, mark, plan

from vllm_watchdog.app.gateway_link import GatewayLink, heard
from vllm_watchdog.core import events as e
from vllm_watchdog.core.readings import InFlight, Wait
from vllm_watchdog.gateway.routes import parse_route
from vllm_watchdog.gateway_rules import Rule
from vllm_watchdog.launch import Launch

REQUEST = {"id": 1, "bytes": 20, "age_s": 0.5, "begun": False, "hash": "ab", "tokens_estimated": 5, "verdict": "held"}
DEATH = {"verb": "casualties", "engine": "primary", "generation": 2, "in_flight": 3}
WAIT = {"requests": 2, "failed": 1, "replayed": 1, "longest_s": 3.5, "median_s": 2.0}
WAITED = {"verb": "waited", "service": "primary"} | WAIT
LOAD: dict[str, Any] = {
    "verb": "load", "connections": 2, "quarantined": 0,
    "services": [{"service": "primary", "waiting": 3, "waiting_long": 1}]}
DRILLED = {"verb": "drilled", "incident": "20261130T-primary", "fault": "engine-core-kill"}


def test_a_route_is_told_and_saved_once() -> None:
    told: list[dict[str, Any]] = []
    saved: list[dict[str, Any]] = []
    launches = {"primary": Launch("primary", ("vllm",), (), Path(), "127.0.0.1", 8100, ("m",), None, Path("primary.log"))}
    link = GatewayLink(launches, (), told.append, saved.append, lambda: 12.3456)
    scene = Scene(plan(backup=False))
    link.publish(scene.world)
    link.publish(scene.world)
    assert [document["version"] for document in told] == [12345]
    scene.serve()
    link.publish(scene.world)
    assert [document["services"][0]["serving"] is None for document in told] == [True, False]
    assert saved == told


def test_new_rules_are_told_with_the_next_world() -> None:
    told: list[dict[str, Any]] = []
    launches = {"primary": Launch("primary", ("vllm",), (), Path(), "127.0.0.1", 8100, ("m",), None, Path("primary.log"))}
    link = GatewayLink(launches, (), told.append, lambda _: None)
    scene = Scene(plan(backup=False))
    link.publish(scene.world)
    link.rules = (Rule("primary", tokens_min=8000),)
    link.publish(scene.world)
    link.publish(scene.world)
    assert [parse_route(document).rules for document in told] == [(), link.rules]


def test_the_gateways_words_become_events() -> None:
    assert heard(DEATH | {"requests": [REQUEST]}, 7.0) == e.Casualties(
        7.0, mark("primary#2"), 3, (InFlight(**REQUEST),))
    assert heard(DRILLED, 7.0) == e.Drilled(7.0, "20261130T-primary", "engine-core-kill")
    assert heard(WAITED, 7.0) == e.Waited(7.0, "primary", Wait(2, 3.5, 2.0, failed=1, replayed=1))


@pytest.mark.parametrize("said", [
    DEATH, DEATH | {"requests": "many"}, DEATH | {"requests": ["one"]}, DEATH | {"requests": [{"id": 1}]},
    DEATH | {"requests": [], "in_flight": "some"}, WAITED | {"requests": "two"}, WAITED | {"unknown": 1},
    {"verb": "waited"}, DRILLED | {"fault": "made-up"}, DRILLED | {"incident": 7}, {"verb": "drilled"}])
def test_words_that_can_not_be_read_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        heard(said, 7.0)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def link_of(clock: Clock, expected: bool = False) -> GatewayLink:
    return GatewayLink({}, (), lambda _: None, lambda _: None, lambda: 1000.0, clock, expected)


def test_the_report_holds_the_newest_word_on_how_busy_the_gateway_is() -> None:
    clock = Clock()
    link = link_of(clock)
    assert link.report() is None, "none has told anything"
    link.take(LOAD)
    assert link.report() == {"at": 1000.0, "connections": 2, "quarantined": 0, "services": [
        {"service": "primary", "waiting": 3, "waiting_long": 1, "engine": None, "requests": 0, "max_concurrent": None,
         "prompt_tokens": 0, "max_tokens": None, "throttled": None, "breaker": "closed"}]}
    clock.now += 12
    assert "services" in (link.report() or {})
    clock.now += 1
    assert link.report() == {"unknown": "it has told nothing for 13 s"}


def test_a_gateway_that_is_configured_and_never_heard_is_told_as_silent() -> None:
    clock = Clock()
    expected, other = link_of(clock, expected=True), link_of(clock)
    assert expected.report() is None
    clock.now += 13
    assert (expected.report(), other.report()) == ({"unknown": "none has told anything: does it run?"}, None)


def test_a_load_is_nothing_else_whatever_it_calls_itself() -> None:
    link = link_of(Clock())
    link.take(LOAD | {"_": "Memory"})
    assert (link.report() or {}).keys() == {"at", "connections", "quarantined", "services"}


@pytest.mark.parametrize("more", [
    {"services": None}, {"services": ["primary"]}, {"services": [{"service": "primary"}]}, {"connections": "many"},
    {"services": [LOAD["services"][0] | {"engine": 7}]}, {"colour": "blue"}, {"services": [{"_": "Wait"}]}])
def test_a_load_that_can_not_be_read_changes_nothing(more: dict[str, Any]) -> None:
    link = GatewayLink({}, (), lambda _: None, lambda _: None)
    link.take(LOAD)
    before = link.report()
    with pytest.raises(ValueError, match=r"\w"):
        link.take(LOAD | more)
    assert link.report() == before
