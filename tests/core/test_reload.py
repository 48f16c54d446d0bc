from __future__ import annotations

from dataclasses import replace

from tests.core.scenes import Scene, gpu, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.plan import EnginePlan, Limits, Plan, Thresholds
from vllm_watchdog.core.reload import settled
from vllm_watchdog.core.world import World

NOW = plan(gpus=(0,), share=0.8, thresholds=Thresholds(vram_warn=((0, 0.85),), vram_degrade=((0, 0.9),)))


def newer(share: float = 0.8, **limits: float) -> Plan:
    levels = Thresholds(vram_warn=((0, share + 0.05),), vram_degrade=((0, share + 0.1),), kv_cache=0.5)
    return plan(gpus=(0,), share=share, limits=Limits(**limits), thresholds=levels, seed=9)


def serving() -> Scene:
    scene = Scene(NOW)
    scene.gpus(0.1, gpu(0.0))
    return scene.serve()


def test_thresholds_and_limits_count_at_once() -> None:
    scene = serving()
    scene.feed(e.Reloaded(scene.now, newer(stop_s=7)))
    world = scene.world
    assert world.plan.thresholds.kv_cache == 0.5
    assert world.plan.thresholds.vram_degrade == ((0, 0.9),)
    assert [engine.plan.limits.stop_s for engine in world.engines] == [7, 7]
    assert world.engine("primary").plan is world.plan.engine("primary")
    assert (world.asked, world.plan.seed) == (None, NOW.seed)


def test_the_share_of_a_running_engine_and_the_levels_that_follow_from_it_wait_for_its_next_start() -> None:
    scene = serving()
    scene.feed(e.Reloaded(scene.now, newer(share=0.5)))
    world = scene.world
    assert world.engine("primary").plan.vram_share == 0.8
    assert world.engine("backup").plan.vram_share == 0.5        # it does not run
    assert world.plan.thresholds.vram_degrade == ((0, 0.9),), "0.8 of the card in use would be far over the new one"
    assert world.plan.thresholds.kv_cache == 0.5
    assert world.asked is not None
    scene.ask("restart", "primary")
    scene.crash("primary")
    world = scene.world
    assert world.engine("primary").plan.vram_share == 0.5
    assert world.plan.thresholds.vram_degrade == ((0, 0.6),)
    assert world.asked is None


def test_what_is_asked_for_other_engines_is_left_out() -> None:
    scene = serving()
    others = replace(newer(), engines=(EnginePlan("new", 9000),))
    scene.feed(e.Reloaded(scene.now, others))
    assert scene.world.plan.engines == NOW.engines


def test_ports_cards_and_roles_stay() -> None:
    scene = serving()
    moved = tuple(replace(engine, port=engine.port + 1, gpus=(3,), backup_for=None) for engine in newer().engines)
    scene.feed(e.Reloaded(scene.now, replace(newer(), engines=moved)))
    assert [(each.port, each.gpus, each.backup_for) for each in scene.world.plan.engines] == [
        (8100, (0,), None), (8101, (0,), "primary")]


def test_nothing_was_asked() -> None:
    world = World(plan=NOW)
    assert settled(world) is world
