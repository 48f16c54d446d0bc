"""What one daemon remembers is what the next one knows."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.core.scenes import Scene, finding, mark, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.lowering import Lowering
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.core.world import remembered


def test_what_is_remembered_survives_being_written_down() -> None:
    scene = Scene(plan())
    scene.serve()
    scene.crash("primary", 100.0, finding("oom_runtime"))
    memory = remembered(scene.world)
    assert memory.incidents and memory.engines[0].failures
    assert CODEC.decode(json.loads(json.dumps(encode(memory)))) == memory


def test_a_fresh_world_remembers_that_nothing_has_happened() -> None:
    memory = remembered(Scene(plan()).world)
    assert memory == Memory(
        "boot-1",
        (EngineMemory("primary", 1, wanted=True), EngineMemory("backup", 0, wanted=False)),
        (ServiceMemory("primary", on_backup=False, turned_at=float("-inf")),),
    )


def test_why_an_engine_is_held_is_remembered_in_the_words_of_the_first_reason() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.1, mark("primary#1"), 100))
    scene.crash("primary", 1.0, finding("bad_args", "unrecognized arguments: --swap-space"))
    assert remembered(scene.world).engines == (
        EngineMemory("primary", 1, True, (1.0,), "bad_args", "unrecognized arguments: --swap-space"),)


def test_a_pause_and_the_side_of_each_service_are_remembered() -> None:
    scene = Scene(plan()).serve()
    scene.now = 50.0
    scene.ask("failover")
    scene.ask("pause")
    memory = remembered(scene.world)
    assert memory.paused
    assert memory.services == (ServiceMemory("primary", on_backup=True, turned_at=50.0),)
    assert [engine.wanted for engine in memory.engines] == [False, True]


def test_that_a_service_is_lowered_and_how_long_failback_waits_is_remembered() -> None:
    scene = Scene(plan(seqs=64, backup_seqs=16)).serve()
    for at in range(10, 131, 10):
        scene.scrape(at, at=float(at), kv=0.99, waiting=5.0)
    scene.scrape(140, at=140.0)
    lowered = Lowering(16, 130.0, "kv_pressure of primary", why_zh="primary 的 kv_pressure")
    assert remembered(scene.world).services == (ServiceMemory("primary", False, float("-inf"), 1.0, lowered),)
    assert CODEC.decode(json.loads(json.dumps(encode(remembered(scene.world))))) == remembered(scene.world)
    patient = scene.world.with_service(replace(scene.world.services[0], patience=4.0))
    assert remembered(patient).services[0].patience == 4.0
    scene.feed(e.StopAsked(141.0, "SIGTERM"))
    assert remembered(scene.world).services[0].lowering == Lowering(), "the engine that starts next has all its memory"


def test_a_clean_stop_forgives_so_that_the_next_start_tries_again() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.1, mark("primary#1"), 100))
    scene.crash("primary", 1.0, finding("bad_args", "unrecognized arguments: --swap-space"))
    scene.feed(e.StopAsked(2.0, "SIGTERM"))
    assert remembered(scene.world).engines == (EngineMemory("primary", 1, wanted=False),)
    assert remembered(scene.world).incidents, "the incident stays open until it serves"
