from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from vllm_watchdog.core.failover import PATIENCE_MAX, Facts, Hint, Service, Side, hint, observe, turned
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.plan import Failback, FailoverPlan, Standby

PLAN = FailoverPlan(after_failures=1, stable_s=600, idle_s=10)
ON_PRIMARY = Service("primary", "backup")
ON_BACKUP = Service("primary", "backup", side=Side.BACKUP, since=0.0, turned_at=0.0, serving_since=100.0, idle_since=790.0)
IDLE = Facts(serving=True, idle=True)


def test_nothing_is_wrong_until_it_is_known_to_be() -> None:
    assert Facts() == Facts(0, 0, False, False, False, False, True, False, False, False, False, False, False)
    assert Service("primary") == Service(
        "primary", None, Standby.COLD, Side.PRIMARY, 0.0, -inf, inf, inf, inf, False, 1.0, Lowering())


def test_the_wanted_engine_is_the_sides() -> None:
    assert ON_PRIMARY.wanted == "primary"
    assert ON_BACKUP.wanted == "backup"


def test_a_service_without_a_backup_wants_its_primary_whatever_side() -> None:
    assert Service("solo", None, side=Side.BACKUP).wanted == "solo"


@pytest.mark.parametrize(("facts", "why"), [
    (Facts(), Hint.NONE),
    (Facts(failures=1), Hint.NONE),
    (Facts(failures=2), Hint.FAILURES),
    (Facts(ooms=1), Hint.NONE),
    (Facts(ooms=2), Hint.OOM_AGAIN),
    (Facts(degraded=True), Hint.DEGRADED),
    (Facts(card_full=True), Hint.NONE),
    (Facts(primary_held=True), Hint.HELD),
    (Facts(failures=2, ooms=2, primary_held=True), Hint.HELD),
    (Facts(failures=2, ooms=2), Hint.OOM_AGAIN),
])
def test_it_leaves_the_primary_for_a_reason(facts: Facts, why: Hint) -> None:
    assert hint(ON_PRIMARY, 800.0, facts, PLAN) is why


@pytest.mark.parametrize("stop", [{"backup_held": True}, {"backup_usable": False}])
def test_it_stays_where_the_backup_is_of_no_use(stop: dict[str, bool]) -> None:
    ill = Facts(failures=9, ooms=9, degraded=True, primary_held=True)
    assert hint(ON_PRIMARY, 800.0, replace(ill, **stop), PLAN) is Hint.NONE


def test_it_stays_where_there_is_no_backup() -> None:
    ill = Facts(failures=9, ooms=9, degraded=True, primary_held=True)
    assert hint(Service("solo"), 800.0, ill, PLAN) is Hint.NONE


def test_failures_that_are_answered_by_restarts_are_as_many_as_the_plan_says() -> None:
    plan = replace(PLAN, after_failures=3)
    assert [hint(ON_PRIMARY, 0.0, Facts(failures=n), plan) for n in (3, 4)] == [Hint.NONE, Hint.FAILURES]


def test_it_comes_back_when_stable_and_idle() -> None:
    assert hint(ON_BACKUP, 800.0, IDLE, PLAN) is Hint.STABLE


@pytest.mark.parametrize("change", [{"serving_since": 200.5}, {"idle_since": 790.5},
                                    {"idle_since": inf}, {"serving_since": inf}])
def test_it_does_not_come_back_too_soon_or_while_busy(change: dict[str, float]) -> None:
    assert hint(replace(ON_BACKUP, **change), 800.0, IDLE, PLAN) is Hint.NONE


def test_it_comes_back_at_the_very_second() -> None:
    assert hint(replace(ON_BACKUP, serving_since=200.0), 800.0, IDLE, PLAN) is Hint.STABLE


def test_automatic_failback_does_not_wait_for_idleness_but_for_stability() -> None:
    plan = replace(PLAN, failback=Failback.AUTO)
    busy = replace(ON_BACKUP, idle_since=inf)
    assert hint(busy, 800.0, Facts(serving=True), plan) is Hint.STABLE
    assert hint(replace(busy, serving_since=201.0), 800.0, Facts(serving=True), plan) is Hint.NONE


def test_manual_failback_waits_for_a_human() -> None:
    assert hint(ON_BACKUP, 800.0, IDLE, replace(PLAN, failback=Failback.MANUAL)) is Hint.NONE


def test_a_backup_that_is_held_sends_it_back_even_by_hand_only() -> None:
    facts = Facts(backup_held=True)
    assert hint(ON_BACKUP, 0.0, facts, replace(PLAN, failback=Failback.MANUAL)) is Hint.BACKUP_HELD


def test_it_never_comes_back_to_a_primary_that_is_held() -> None:
    assert hint(ON_BACKUP, 800.0, replace(IDLE, primary_held=True, backup_held=True), PLAN) is Hint.NONE


def test_it_does_not_come_back_to_a_card_that_is_still_full() -> None:
    assert hint(ON_BACKUP, 800.0, replace(IDLE, card_full=True), PLAN) is Hint.NONE


def test_failures_of_the_primary_do_not_keep_it_away_for_ever() -> None:
    assert hint(ON_BACKUP, 800.0, replace(IDLE, failures=9, ooms=9), PLAN) is Hint.STABLE


def test_since_when_it_serves_and_is_idle_is_kept_while_it_does() -> None:
    service = observe(Service("primary", "backup"), 5.0, IDLE)
    assert (service.serving_since, service.idle_since) == (5.0, 5.0)
    service = observe(service, 9.0, IDLE)
    assert (service.serving_since, service.idle_since) == (5.0, 5.0)
    service = observe(service, 11.0, Facts(serving=True))
    assert (service.serving_since, service.idle_since) == (5.0, inf)
    assert observe(service, 12.0, Facts(idle=True)) == replace(service, serving_since=inf, idle_since=inf)


def test_a_turn_begins_the_other_side_anew() -> None:
    assert turned(replace(ON_PRIMARY, lowering=Lowering(16, 5.0)), 9.0, PLAN).lowering == Lowering()
    after = turned(ON_BACKUP, 900.0, PLAN)
    assert after == Service("primary", "backup", side=Side.PRIMARY, since=900.0, turned_at=900.0)
    assert turned(after, 950.0, PLAN).side is Side.BACKUP


# -- a standby that can serve at once

@pytest.mark.parametrize(("facts", "why"), [
    (Facts(down=True, standby_ready=True), Hint.DOWN),
    (Facts(down=True), Hint.NONE),
    (Facts(standby_ready=True), Hint.NONE),
    (Facts(down=True, standby_ready=True, backup_held=True), Hint.NONE),
    (Facts(down=True, standby_ready=True, failures=2), Hint.FAILURES),
    (Facts(down=True, degraded=True, standby_ready=True), Hint.DOWN),
])
def test_the_first_failure_goes_to_a_standby_that_is_ready(facts: Facts, why: Hint) -> None:
    assert hint(ON_PRIMARY, 800.0, facts, PLAN) is why


@pytest.mark.parametrize(("facts", "why"), [
    (Facts(down=True, primary_serves=True), Hint.DOWN),
    (Facts(down=True), Hint.NONE),
    (Facts(primary_serves=True), Hint.NONE),
    (Facts(down=True, primary_serves=True, primary_held=True), Hint.NONE),
])
def test_a_backup_that_fails_beside_a_primary_that_serves_sends_it_back_at_once(facts: Facts, why: Hint) -> None:
    """Whatever the plan says of failback: nobody else serves."""
    assert hint(ON_BACKUP, 101.0, facts, replace(PLAN, failback=Failback.MANUAL)) is why


# -- failback where both fit

def test_where_both_fit_the_primary_is_started_beside_the_backup_busy_or_not_before_it_comes_back() -> None:
    busy = replace(ON_BACKUP, idle_since=inf)
    assert hint(busy, 800.0, Facts(serving=True, fit=True), PLAN) is Hint.PREPARE
    assert hint(busy, 800.0, Facts(serving=True, fit=True, primary_serves=True), PLAN) is Hint.STABLE


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, failback=Failback.MANUAL)])
def test_where_both_fit_it_still_waits_until_it_was_stable_or_for_a_human(plan: FailoverPlan) -> None:
    early = 699.9 if plan is PLAN else 9999.0
    assert hint(ON_BACKUP, early, Facts(serving=True, fit=True, primary_serves=True), plan) is Hint.NONE


# -- damping

def test_a_failover_soon_after_a_failback_doubles_the_wait_up_to_a_limit() -> None:
    service, at, waits = ON_PRIMARY, 0.0, []
    for _ in range(7):
        service = turned(service, at, PLAN)             # away
        waits.append(service.patience)
        service = turned(service, at + 700.0, PLAN)     # and back
        assert service.patience == waits[-1], "coming back changes nothing"
        at += 700.0 + 1199.9
    assert waits == [1, 2, 4, 8, 16, 16, 16] and PATIENCE_MAX == 16


def test_a_failover_long_after_a_failback_forgives() -> None:
    service = replace(ON_PRIMARY, turned_at=0.0, patience=8.0)
    assert turned(service, 1199.9, PLAN).patience == 16.0
    assert turned(service, 1200.0, PLAN).patience == 1.0


def test_patience_is_so_many_times_the_stable_time() -> None:
    patient = replace(ON_BACKUP, patience=2.0, idle_since=0.0)
    assert [hint(patient, at, IDLE, PLAN) for at in (1299.9, 1300.0)] == [Hint.NONE, Hint.STABLE]
