"""Which rule a request meets, where it goes while that engine is down, and which rules nothing can reach."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_watchdog.gateway.routes import Route, RouteError, Service, parse_route
from vllm_watchdog.gateway.rules import Choice, choose
from vllm_watchdog.gateway_rules import Rule, WhenDown, fits, unreachable, wider


@dataclass(frozen=True)
class Asked:
    path: str = "/v1/completions"
    model: str | None = "m"
    key: str = ""
    bound: int = 100
    tokens: int | None = None


SHORT, LONG, OTHER = Service("short", ("m",)), Service("long", ("m",)), Service("other", ("n",))
SERVICES = (SHORT, LONG, OTHER)
WAIT, REFUSE, SPILL = WhenDown
BY_LENGTH = (Rule("long", tokens_min=8000), Rule("short"))


def chosen(rules: tuple[Rule, ...], asked: Asked = Asked(), down: str = "", small: str = "",
           headers: dict[str, str] | None = None) -> tuple[str, int, bool] | None:
    """Service, rule, refused.  `down`, `small`: names of services that are, or that the request does not fit into."""
    choice = choose(Route(1, SERVICES, rules), asked, (headers or {}).get,
                    lambda service: service.name not in down.split(), lambda service: service.name not in small.split())
    if choice is None:
        return None
    assert choice.service is not None
    return choice.service.name, choice.rule, choice.refused


def test_without_rules_a_request_goes_by_its_model() -> None:
    assert chosen(()) == ("short", 0, False)
    assert chosen((), Asked(model="n")) == ("other", 0, False)
    assert choose(Route(), Asked(), lambda _: None, lambda _: True, lambda _: True) == Choice(None)


def test_the_first_rule_that_matches_counts() -> None:
    assert chosen(BY_LENGTH, Asked(bound=7999)) == ("short", 2, False)
    assert chosen(BY_LENGTH, Asked(bound=9000, tokens=8000)) == ("long", 1, False)
    assert chosen(BY_LENGTH, Asked(bound=9000, tokens=7999)) == ("short", 2, False)


def test_tokens_are_counted_only_where_the_bytes_can_not_decide() -> None:
    assert chosen(BY_LENGTH, Asked(bound=8000)) is None
    assert chosen((Rule("long", path="/x", tokens_min=10), *BY_LENGTH[1:]), Asked()) == ("short", 2, False)
    at_most = (Rule("short", tokens_max=100), Rule("long"))
    assert chosen(at_most, Asked(bound=100)) == ("short", 1, False)
    assert chosen(at_most, Asked(bound=101)) is None
    assert chosen(at_most, Asked(bound=101, tokens=101)) == ("long", 2, False)


@pytest.mark.parametrize(("rule", "matches"), [
    (Rule("long", model="m"), True), (Rule("long", model="n"), False), (Rule("long", model="m*"), True),
    (Rule("long", path="/v1/*"), True), (Rule("long", path="/v1"), False),
    (Rule("long", key="k1"), True), (Rule("long", key="k2"), False),
    (Rule("long", header="X-Tier"), True), (Rule("long", header="x-tier: batch"), True),
    (Rule("long", header="X-Tier: b*"), True), (Rule("long", header="X-Tier: now"), False),
    (Rule("long", header="X-Other"), False), (Rule("long", header="X-Tier: batch", key="k2"), False)])
def test_every_condition_of_a_rule_must_hold(rule: Rule, matches: bool) -> None:
    assert (chosen((rule,), Asked(key="k1"), headers={"x-tier": "batch"}) == ("long", 1, False)) is matches


def test_a_rule_without_a_model_leaves_the_models_of_other_engines_alone() -> None:
    rules = (Rule("long"),)
    assert chosen(rules, Asked(model="n")) == ("other", 0, False)
    assert chosen(rules, Asked(model="an-adapter")) == ("long", 1, False), "no engine is known to have it"
    assert chosen(rules, Asked(model=None)) == ("long", 1, False)
    assert chosen((Rule("long", model="n"),), Asked(model="n")) == ("long", 1, False), "it is named"


def long_rules(when_down: WhenDown) -> tuple[Rule, ...]:
    return (Rule("long", when_down, tokens_min=50), Rule("other", tokens_min=60, model="m"))


LENGTHY = Asked(tokens=70)


def test_while_its_engine_is_down_a_request_waits_is_refused_or_spills() -> None:
    assert chosen(long_rules(WAIT), LENGTHY, down="long") == ("long", 1, False)
    assert chosen(long_rules(REFUSE), LENGTHY, down="long") == ("long", 1, True)
    assert chosen(long_rules(SPILL), LENGTHY, down="long") == ("other", 2, False)
    for when_down in WhenDown:
        assert chosen(long_rules(when_down), LENGTHY) == ("long", 1, False)


def test_what_spills_goes_where_it_fits_or_waits() -> None:
    rules = long_rules(SPILL)
    assert chosen(rules, LENGTHY, down="long other") == ("short", 1, False)
    assert chosen(rules, LENGTHY, down="long", small="other") == ("short", 1, False)
    assert chosen(rules, LENGTHY, down="long", small="other short") == ("long", 1, False)
    assert chosen(rules, LENGTHY, down="long other short") == ("long", 1, False)
    assert chosen((Rule("short", SPILL),), Asked(), down="short") == ("long", 1, False), "the same model"


def test_a_rule_whose_engine_the_route_lacks_is_passed_over() -> None:
    assert chosen((Rule("gone"), Rule("long"))) == ("long", 2, False)


# -- what can never be reached

def lost(*rules: Rule) -> list[tuple[int, str]]:
    models = {service.name: service.models for service in SERVICES}
    return list(unreachable(rules, models.__getitem__))


def test_a_rule_that_earlier_ones_leave_nothing_to_is_found() -> None:
    assert lost(Rule("short"), Rule("long", tokens_min=8000)) == [(1, "1")]
    assert lost(Rule("short", tokens_max=7999), Rule("long", tokens_min=8000), Rule("short", path="/x")) == [(2, "1 and 2")]
    assert lost(Rule("short", path="/v1/*"), Rule("long", path="/v1/completions")) == [(1, "1")]
    assert lost(Rule("short", header="X-A"), Rule("long", header="x-a: b")) == [(1, "1")]
    assert lost(Rule("short"), Rule("long", model="m")) == [(1, "1")]


def test_a_rule_that_something_is_left_to_is_not_found() -> None:
    assert lost(*BY_LENGTH) == []
    assert lost(Rule("short", tokens_max=7999), Rule("long", tokens_min=8001), Rule("short", path="/x")) == []
    assert lost(Rule("short", header="X-A: b"), Rule("long", header="X-A")) == []
    assert lost(Rule("short", header="X-A"), Rule("long", header="X-B")) == []
    assert lost(Rule("short"), Rule("other")) == [], "they have no model in common"
    assert lost(Rule("short"), Rule("other", model="n")) == []
    assert lost(Rule("long", SPILL), Rule("short")) == [], "what spills comes here"


TEXTS = st.sampled_from([None, "a", "ab", "a*", "b", "*"])
MADE = st.builds(
    Rule, st.sampled_from(["short", "long", "other"]), st.sampled_from([WAIT, REFUSE]),
    tokens_min=st.integers(0, 3), tokens_max=st.none() | st.integers(3, 6),
    model=st.sampled_from([None, "m", "n", "*"]), path=TEXTS, key=TEXTS,
    header=st.sampled_from([None, "X-A", "x-a: ab", "X-A: a*", "X-B"]))
REQUESTS = st.builds(
    Asked, path=st.sampled_from(["a", "ab", "b"]), model=st.sampled_from([None, "m", "n", "else"]),
    key=st.sampled_from(["", "a", "b"]), bound=st.just(9), tokens=st.integers(0, 9))
HEADERS = st.fixed_dictionaries({}, optional={"x-a": st.sampled_from(["a", "ab", "b"]), "x-b": st.just("1")})


@given(st.lists(MADE, max_size=4), REQUESTS, HEADERS)
def test_no_request_meets_a_rule_that_is_said_to_be_unreachable(
        rules: list[Rule], asked: Asked, headers: dict[str, str]) -> None:
    choice = chosen(tuple(rules), asked, headers=headers)
    assert choice is not None
    assert choice[1] - 1 not in [index for index, _ in lost(*rules)]


@given(st.lists(MADE, max_size=4), REQUESTS, HEADERS, st.integers(0, 9))
def test_a_bound_decides_only_what_the_count_would(
        rules: list[Rule], asked: Asked, headers: dict[str, str], more: int) -> None:
    assert asked.tokens is not None
    guess = chosen(tuple(rules), replace(asked, tokens=None, bound=asked.tokens + more), headers=headers)
    assert guess in (None, chosen(tuple(rules), asked, headers=headers))


@given(TEXTS, TEXTS, st.sampled_from([None, "", "a", "ab", "abc", "b"]))
def test_a_wider_pattern_fits_whatever_the_other_does(one: str | None, other: str | None, text: str | None) -> None:
    if wider(one, other) and fits(other, text):
        assert fits(one, text)


# -- in the route

DOCUMENT = {"version": 1, "services": [{"name": "long", "models": ["m"], "serving": None}]}


@given(MADE)
def test_a_rule_is_read_as_it_was_written(rule: Rule) -> None:
    assert parse_route(DOCUMENT | {"rules": [rule.document()]}).rules == (rule,)


@pytest.mark.parametrize(("rule", "where"), [
    (5, r"rules\[0\]"), ({}, r"rules\[0\]\.when_down"), ({"when_down": "fly"}, "expected one of wait, refuse, spill"),
    ({"when_down": "wait"}, r"rules\[0\]\.service"), (BY_LENGTH[0].document() | {"tokens_min": "1"}, "tokens_min"),
    (BY_LENGTH[0].document() | {"model": 1}, "model"), (BY_LENGTH[0].document() | {"tokens_max": True}, "tokens_max")])
def test_a_rule_that_can_not_be_read_says_where(rule: object, where: str) -> None:
    with pytest.raises(RouteError, match=where):
        parse_route(DOCUMENT | {"rules": [rule]})
