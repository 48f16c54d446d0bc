from __future__ import annotations

from tests.core.scenes import Scene, gpu, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.policy import ONLY_WHEN_ACTIVE, Phase
from vllm_watchdog.core.reasons import OVERDUE, PAGES, exited


def test_an_exit_is_told_by_its_code_or_its_signal() -> None:
    assert exited(1) == "it exited with code 1"
    assert exited(-9) == "it was ended by signal 9, which we did not send"


def test_every_phase_that_may_last_too_long_says_so() -> None:
    assert set(OVERDUE) == (ONLY_WHEN_ACTIVE - {Phase.BACKOFF}) | {Phase.STARTING}


def test_a_held_engine_says_why() -> None:
    scene = Scene(plan(backup=False, limits=Limits(budget=0))).serve()
    scene.crash()
    engine = scene.engine()
    assert PAGES[Phase.HELD](scene.world, engine) == (
        "budget_spent", "primary is held: 1 failures within 3600 s, 0 are allowed; the last was unexpected_exit")


def test_a_doomed_engine_says_that_it_would_fail_alike() -> None:
    from tests.core.scenes import finding

    scene = Scene(plan(backup=False))
    scene.crash("primary", 1.0, finding("bad_args", "no such flag"))
    assert PAGES[Phase.HELD](scene.world, scene.engine()) == (
        "bad_args", "primary is held: another try would fail alike (no such flag)")


def test_no_room_names_rivals_strays_and_holders() -> None:
    scene = Scene(plan(gpus=(0,), share=0.8), survivors=(e.Survivor(e.Mark("old", 1), 9, True, 5.0),))
    told = PAGES[Phase.RELEASING](scene.world, scene.engine())[1]
    assert told.startswith("primary can't be started: old#1 is not gone yet")
    scene = Scene(plan(gpus=(0,), share=0.8))
    assert PAGES[Phase.RELEASING](scene.world, scene.engine())[1].endswith("no GPU sample has come")
    scene.gpus(1.0, gpu(90, (7, "nginx", None, 90)))
    assert "nginx" in PAGES[Phase.RELEASING](scene.world, scene.engine())[1]
    asleep = scene.world.with_engine(e_asleep(scene))
    assert "can't be woken" in PAGES[Phase.ASLEEP](asleep, asleep.engine("primary"))[1]


def e_asleep(scene: Scene) -> object:
    from dataclasses import replace

    engine = scene.engine()
    return replace(engine, life=replace(engine.life, phase=Phase.ASLEEP))


def test_a_wedged_engine_names_its_pid() -> None:
    scene = Scene(plan(backup=False)).serve(pid=77)
    assert "survived SIGKILL for 30 s (PID 77)" in PAGES[Phase.WEDGED](scene.world, scene.engine())[1]
