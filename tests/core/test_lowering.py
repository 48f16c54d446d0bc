from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import Scene, gpu, mark, metrics, plan

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.incidents import Urgency
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
from vllm_watchdog.core.plan import EnginePlan, Plan, Standby, Thresholds
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.symptoms import Watch

CLEAR_S, SOON_S = 120.0, 600.0
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
        lowering = begun(lowering, at, 16, "why", SOON_S)
        patience.append(lowering.patience)
        calm = replace(lowering, calm_since=at)
        assert [over(calm, at + CLEAR_S * lowering.patience + off, (), CLEAR_S) for off in (-1, 0)] == [False, True]
        lowering, at = ended(lowering, at), at + 599
    assert patience == [1, 2, 4, 8, 16, 16, 16] and PATIENCE_MAX == 16


def test_pressure_long_after_is_a_first_time() -> None:
    impatient = Lowering(ended_at=100.0, patience=8.0)
    assert begun(impatient, 699.9, 16, "why", SOON_S).patience == 16.0
    assert begun(impatient, 700.0, 16, "why", SOON_S) == Lowering(16, 700.0, "why", ended_at=100.0)


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


# -- in the world

M = mark("primary#1")
LEVELS = Thresholds(vram_degrade=((0, 0.9),), degrade_after_s=120)
CARD = {"gpus": (0,), "share": 0.8, "thresholds": LEVELS, "seqs": 64, "backup_seqs": 16}
TO_16 = "the gateway lets 16 requests through at a time, because: vram_degrade of gpu0"


def serving(**options: object) -> Scene:
    scene = Scene(plan(**CARD | options))
    scene.gpus(0.0, gpu(1), gpu(1, index=1))
    scene.serve()
    if scene.phases().get("backup") is Phase.STARTING:
        scene.serve("backup")
    return scene


def fill(scene: Scene, first: int, last: int, gib: float = 95.0) -> Scene:
    for second in range(first, last + 1):
        scene.gpus(float(second), gpu(gib))
    return scene


def to(scene: Scene) -> int | None:
    return scene.world.services[0].lowering.to


def timeline(scene: Scene) -> list[tuple[str, str]]:
    return [(entry.what, entry.text) for entry in scene.world.incidents[0].timeline]


def test_a_card_over_its_limit_lowers_the_service_and_restarts_nothing() -> None:
    scene = fill(serving(), 10, 129)
    assert to(scene) is None
    fill(scene, 130, 200)
    assert to(scene) == 16 and scene.phases() == {"primary": Phase.SERVING, "backup": Phase.STOPPED}
    assert scene.said("service.lowered") == [{"service": "primary", "to": "16", "because": "vram_degrade of gpu0"}]
    assert ("lowered", TO_16) in timeline(scene)
    assert not scene.all(c.Term) and len(scene.all(c.Spawn)) == 1 and scene.alerts() == [("opened", "vram_degrade")]


def test_it_recovers_by_itself_and_then_the_incident_ends() -> None:
    scene = fill(fill(serving(), 10, 200), 201, 320, 50.0)
    assert to(scene) == 16
    fill(scene, 321, 321, 50.0)
    assert to(scene) is None and scene.world.services[0].side is Side.PRIMARY
    assert scene.said("service.restored") == [{"service": "primary", "after_s": "191"}]
    assert timeline(scene)[-1] == ("cleared", "lowering, after 191 s: the gateway lets through what comes")
    scene.at(350.9)
    assert scene.world.incidents
    scene.at(351.0)
    assert not scene.world.incidents


def test_a_card_that_stays_over_its_limit_for_as_long_again_sends_the_service_to_its_backup() -> None:
    scene = fill(serving(), 10, 249)
    assert scene.world.services[0].side is Side.PRIMARY
    fill(scene, 250, 250)
    assert scene.said("service.failover")[0]["because"] == "degraded"
    assert to(scene) is None, "the backup takes no more of itself"
    assert not scene.said("service.restored")


def test_a_failure_while_lowered_is_answered_by_a_restart_as_any_other() -> None:
    scene = fill(serving(), 10, 200)
    scene.crash("primary", 200.5)
    fill(scene, 201, 201, 1.0)
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.STOPPED} and to(scene) == 16
    scene.serve()
    fill(scene, 202, 321, 80.0)
    assert to(scene) is None


def test_a_full_kv_cache_lowers_and_never_fails_over() -> None:
    scene = serving()
    for at in range(10, 3000, 10):
        scene.feed(e.Scraped(float(at), M, metrics(float(at), 16.0, 5.0, 0.99)))
    assert to(scene) == 16 and scene.world.services[0].side is Side.PRIMARY
    assert scene.said("service.lowered") == [{"service": "primary", "to": "16", "because": "kv_pressure of primary"}]


def test_an_incident_stays_open_while_a_service_is_lowered() -> None:
    scene = serving()
    for first in (10, 260):         # lowered at 130, restored at 260; lowered at 390, for twice as long
        for at in range(first, first + 130, 10):
            scene.feed(e.Scraped(float(at), M, metrics(float(at), 64.0, 5.0, 0.99)))
        for at in range(first + 130, first + 260, 10):
            scene.feed(e.Scraped(float(at), M, metrics(float(at), 16.0, 0.0, 0.99)))
    assert not any(watch.raised for watch in scene.world.watches) and to(scene) == 16
    scene.at(600.0)
    assert len(scene.world.incidents) == 1


def test_a_second_service_on_the_card_is_lowered_too_and_has_an_incident_of_its_own() -> None:
    pairs = [(EnginePlan(name, port, (0,), 0.4, max_seqs=64),
              EnginePlan(f"{name}-backup", port + 1, (0,), 0.4, name, max_seqs=16)) for name, port in (("a", 1), ("b", 3))]
    scene = Scene(Plan((*pairs[0], *pairs[1]), LEVELS))
    scene.gpus(0.0, gpu(1))
    scene.serve("a")
    scene.gpus(0.5, gpu(41))
    scene.serve("b")
    fill(scene, 10, 130)
    assert [service.lowering.to for service in scene.world.services] == [16, 16]
    assert {incident.service: incident.urgency for incident in scene.world.incidents} == {
        "a": Urgency.WARNING, "b": Urgency.WARNING}


@pytest.mark.parametrize("options", [{"backup": False}, {"backup_seqs": None}, {"backup_seqs": 64}])
def test_without_a_smaller_number_nothing_is_lowered(options: dict[str, object]) -> None:
    scene = fill(serving(**options), 10, 130)
    assert to(scene) is None and not scene.said("service.lowered")
    assert (scene.world.services[0].side is Side.BACKUP) is ("backup" not in options), "as if there were no lowering"


def test_a_primary_that_does_not_serve_is_not_lowered_but_left_as_ever() -> None:
    scene = Scene(plan(**CARD))
    scene.gpus(0.0, gpu(1))
    scene.feed(e.Spawned(0.0, M, 100))
    fill(scene, 10, 130)
    assert scene.said("service.failover")[0]["because"] == "degraded" and not scene.said("service.lowered")


def test_a_service_on_its_backup_is_not_lowered() -> None:
    scene = serving(backup_gpus=(1,))
    scene.ask("failover")
    scene.gpus(0.2, gpu(80), gpu(1, index=1))
    scene.serve("backup")
    fill(scene, 10, 200)
    assert scene.phase("backup") is Phase.SERVING and to(scene) is None


@pytest.mark.parametrize("verb", ["pause", "stop"])
def test_a_pause_and_a_stop_lower_nothing(verb: str) -> None:
    scene = serving()
    if verb == "pause":
        scene.ask("pause")
    else:
        scene.feed(e.StopAsked(5.0, "SIGTERM"))
    fill(scene, 10, 300)
    assert to(scene) is None


def test_what_is_lowered_when_a_pause_begins_stays_so() -> None:
    scene = fill(serving(), 10, 130)
    scene.ask("pause")
    fill(scene, 131, 500, 50.0)
    assert to(scene) == 16
    scene.ask("resume")
    assert to(scene) is None


def test_a_hot_primary_that_stays_full_is_started_anew_beside_its_backup() -> None:
    """Only its end frees the memory; before, it kept its card full for ever, and there was no failback to it."""
    scene = serving(backup_gpus=(1,), standby=Standby.HOT)
    fill(scene, 10, 250)
    assert scene.said("service.failover")[0]["because"] == "degraded"
    assert scene.phases() == {"primary": Phase.STOPPING, "backup": Phase.SERVING}
    scene.crash("primary", 251.0)
    scene.gpus(252.0, gpu(1), gpu(80, index=1))
    assert scene.phases() == {"primary": Phase.STARTING, "backup": Phase.SERVING}


def test_an_operators_failover_of_a_hot_pair_stops_nobody() -> None:
    scene = serving(backup_gpus=(1,), standby=Standby.HOT)
    fill(scene, 10, 130)
    scene.ask("failover")
    assert scene.phases() == {"primary": Phase.SERVING, "backup": Phase.SERVING} and to(scene) is None
