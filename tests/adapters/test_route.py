"""The route document that the daemon publishes, read as the gateway reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.core.scenes import Scene, gpu, mark, metrics, plan

from vllm_watchdog.app.route import route
from vllm_watchdog.core import events as e
from vllm_watchdog.core.units import GIB, MIB
from vllm_watchdog.gateway.routes import Service, Target, parse_route
from vllm_watchdog.launch import Launch
from vllm_watchdog.prompt_plan import PromptPlan

LAUNCHES = {
    name: Launch(name, ("vllm",), (), Path(), "127.0.0.1", port, models, None, Path(f"{name}.log"))
    for name, port, models in (("primary", 8100, ("m",)), ("backup", 8101, ("m", "small")))
}


def read(scene: Scene) -> Service:
    (service,) = parse_route({"version": 1, "services": route(scene.world, LAUNCHES)}).services
    return service


def test_it_names_who_serves_or_why_nobody_does() -> None:
    scene = Scene(plan())
    assert read(scene) == Service("primary", ("m", "small"), None, None, "primary is starting", planned=True)
    scene.serve()
    assert read(scene) == Service("primary", ("m", "small"), Target("primary", 1, "127.0.0.1", 8100))


def test_an_engine_that_failed_was_not_stopped_on_purpose() -> None:
    scene = Scene(plan()).serve()
    scene.ask("restart", "primary")
    assert read(scene).planned
    scene = Scene(plan()).serve()
    scene.feed(e.Exited(10.0, mark("primary#1"), 1))
    assert not read(scene).planned


def test_a_lowered_service_lets_so_many_through_at_a_time_and_says_why() -> None:
    scene = Scene(plan(seqs=64, backup_seqs=16)).serve()
    for at in range(10, 131, 10):
        assert read(scene).max_concurrent is None
        scene.scrape(at, at=float(at), kv=0.99, waiting=5.0)
    lowered = read(scene)
    assert (lowered.max_concurrent, lowered.why) == (16, "only 16 requests run at a time (kv_pressure of primary)")
    for at in range(140, 261, 10):
        scene.scrape(at, at=float(at))
    assert (read(scene).max_concurrent, read(scene).why) == (None, "")


def test_an_engines_own_limits_hold_at_once_after_a_reload_and_the_lower_one_counts() -> None:
    before = plan(seqs=64, backup_seqs=16)
    scene = Scene(before).serve()
    scene.scrape(1, at=5.0)
    limited = tuple(replace(engine, max_concurrent=32, max_concurrent_tokens=100_000) for engine in before.engines)
    scene.feed(e.Reloaded(6.0, replace(before, engines=limited)))
    told = read(scene)
    assert (told.max_concurrent, told.max_tokens, told.why) == (32, 100_000, "")
    for at in range(10, 141, 10):
        scene.scrape(at, at=float(at), kv=0.99, waiting=5.0)
    assert read(scene).max_concurrent == 16


def test_preemptions_of_the_engine_that_serves_are_told() -> None:
    scene = Scene(plan()).serve()
    assert read(scene).preempted is None
    scene.feed(e.Scraped(5.0, mark("primary#1"), replace(metrics(), preemptions=7.0)))
    assert read(scene).preempted == 7


def test_free_vram_is_told_in_steps_and_only_where_a_limit_depends_on_it() -> None:
    scene = Scene(plan(gpus=(0, 1)))
    scene.feed(e.GpusSampled(0.0, (gpu(1, total_gib=24), gpu(1, index=1, total_gib=24))))
    scene.serve()
    scene.feed(e.GpusSampled(10.0, (gpu(14.1, total_gib=24), gpu(14.3, index=1, total_gib=24), gpu(1, index=2))))
    assert read(scene).vram_free is None
    launches = {name: replace(launch, prompt=PromptPlan(vram_share=0.5)) for name, launch in LAUNCHES.items()}
    (service,) = parse_route({"version": 1, "services": route(scene.world, launches)}).services
    assert service.vram_free == 2 * (9 * GIB + 512 * MIB)       # the fullest has 9.7
