from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.lowering import (
    PATIENCE_MAX,
    Lowering,
    answered,
    begun,
    ended,
    failed,
    limit,
    observe,
    over,
)
from vllm_watchdog.core.plan import EnginePlan
from vllm_watchdog.core.symptoms import Watch

CLEAR_S, SOON_S = 120.0, 600.0
WHY = Text("why", "原因")
PRIMARY = EnginePlan("primary", 8100, (0, 1), max_seqs=64)
FULL = Watch("vram_degrade", "gpu0", raised=True, above_since=100.0)
CALM = Watch("vram_degrade", "gpu0", calm_since=150.0)
HOVERS = Watch("vram_degrade", "gpu0")
KV = Watch("kv_pressure", "primary", raised=True, above_since=10.0)
LOWERED = Lowering(16, 220.0, "vram_degrade of gpu0")


# -- to what, and for what

@pytest.mark.parametrize(("primary", "backup", "to"), [
    (64, 16, 16), (None, 16, 16), (64, None, None), (None, None, None), (16, 16, None), (8, 16, None),
])
def test_a_service_is_lowered_to_what_its_backup_takes_if_that_is_less(
        primary: int | None, backup: int | None, to: int | None) -> None:
    assert limit(EnginePlan("a", 1, max_seqs=primary), EnginePlan("b", 2, max_seqs=backup)) == to


def test_what_the_gateway_lets_through_counts_as_what_an_engine_takes() -> None:
    primary = EnginePlan("a", 1, max_seqs=64, max_concurrent=8)
    assert limit(primary, EnginePlan("b", 2, max_seqs=16)) is None
    assert limit(primary, EnginePlan("b", 2, max_seqs=16, max_concurrent=4)) == 4


def test_it_answers_the_memory_of_the_primarys_cards_and_its_kv_cache() -> None:
    others = (replace(FULL, subject="gpu2"), replace(FULL, class_="vram_high"), replace(KV, subject="backup"),
              replace(FULL, subject="primary"))
    assert answered((FULL, *others, KV, replace(FULL, subject="gpu1")), PRIMARY) == (FULL, KV, replace(FULL, subject="gpu1"))


# -- begun and ended

def test_a_service_is_not_lowered_until_it_is() -> None:
    assert Lowering() == Lowering(None, inf, "", inf, -inf, 1.0)
    assert observe(Lowering(), 5.0, ()) == Lowering(), "there is no calm to be counted"


def test_since_when_all_is_calm_is_kept_while_it_is() -> None:
    calm = observe(LOWERED, 230.0, (CALM,))
    assert calm.calm_since == 230.0 and observe(calm, 240.0, (CALM,)) == calm
    assert observe(calm, 240.0, ()) == calm, "a detector that is gone is calm"
    assert observe(calm, 240.0, (CALM, HOVERS)).calm_since == inf


@pytest.mark.parametrize(("at", "watches", "is_over"), [
    (350.0, (CALM,), True), (349.9, (CALM,), False), (350.0, (replace(CALM, raised=True),), False), (350.0, (), True),
])
def test_it_ends_when_all_was_calm_for_as_long_as_a_symptom_takes_to_clear(
        at: float, watches: tuple[Watch, ...], is_over: bool) -> None:
    assert over(replace(LOWERED, calm_since=230.0), at, watches, CLEAR_S) is is_over
    assert ended(LOWERED, at) == Lowering(ended_at=at)


def test_pressure_that_is_soon_back_must_be_calm_for_twice_as_long_up_to_a_limit() -> None:
    lowering, at, patience = Lowering(), 0.0, []
    for _ in range(7):
        lowering = begun(lowering, at, 16, WHY, SOON_S)
        patience.append(lowering.patience)
        calm = replace(lowering, calm_since=at)
        assert [over(calm, at + CLEAR_S * lowering.patience + off, (), CLEAR_S) for off in (-1, 0)] == [False, True]
        lowering, at = ended(lowering, at), at + 599
    assert patience == [1, 2, 4, 8, 16, 16, 16] and PATIENCE_MAX == 16


def test_pressure_long_after_is_a_first_time() -> None:
    impatient = Lowering(ended_at=100.0, patience=8.0)
    assert begun(impatient, 699.9, 16, WHY, SOON_S).patience == 16.0
    assert begun(impatient, 700.0, 16, WHY, SOON_S) == Lowering(16, 700.0, "why", ended_at=100.0, why_zh="原因")


# -- in vain

@pytest.mark.parametrize(("at", "lowering", "watches", "possible", "in_vain"), [
    (340.0, LOWERED, (FULL,), True, True),
    (339.9, LOWERED, (FULL,), True, False),
    (340.0, LOWERED, (FULL,), False, True),                                 # e.g. its engine has just died
    (339.9, LOWERED, (FULL,), False, False),
    (999.0, LOWERED, (replace(FULL, above_since=inf),), True, False),       # raised still, but over it no more
    (419.9, LOWERED, (replace(FULL, above_since=300.0),), True, False),     # it was below for a while
    (420.0, LOWERED, (replace(FULL, above_since=300.0),), True, True),
    (999.0, LOWERED, (replace(FULL, raised=False),), True, False),
    (999.0, Lowering(), (FULL,), True, False),                              # it is lowered in this very turn
    (220.0, Lowering(), (FULL,), False, True),                              # nothing to be lowered: as soon as it is raised
    (999.0, LOWERED, (KV,), True, False),                                   # the backup's KV cache is no larger
    (999.0, Lowering(), (KV,), False, False),
    (340.0, LOWERED, (replace(FULL, above_since=inf), FULL), True, True),
    (999.0, LOWERED, (), True, False),
])
def test_only_a_card_that_stays_full_although_lowered_is_a_reason_to_leave(
        at: float, lowering: Lowering, watches: tuple[Watch, ...], possible: bool, in_vain: bool) -> None:
    assert failed(lowering, at, watches, possible, 120.0) is in_vain
