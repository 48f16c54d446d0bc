from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import Scene, finding, gpu, mark, plan, tree

from vllm_watchdog.core import events as e
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.logs import ONE_RETRY, SAME_WHILE_HELD, doomed
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.turn import Turn

M = mark("primary#1")
ON_CARD = plan(backup=False, gpus=(0,), share=0.8)


def loading() -> Scene:
    scene = Scene(ON_CARD)
    scene.gpus(0.0, gpu(1))
    scene.feed(e.Spawned(0.0, M, 100))
    return scene


def doom(scene: Scene, class_: str) -> bool:
    return doomed(Turn(scene.world, scene.now), scene.engine(), finding(class_))


# -- would another try fail alike?

@pytest.mark.parametrize(("class_", "verdict"), [
    ("oom_runtime", False), ("engine_dead_v1", False), ("hf_network", False),
    ("bad_args", True), ("model_not_found", True), ("cuda_hw", True), ("xid_node", True), ("port_in_use", True),
])
def test_what_the_catalogue_says_decides(class_: str, verdict: bool) -> None:
    assert doom(loading(), class_) is verdict


@pytest.mark.parametrize("class_", [*sorted(SAME_WHILE_HELD), "startup_vram_busy"])
def test_memory_that_somebody_else_holds_is_waited_for(class_: str) -> None:
    scene = loading()
    scene.gpus(1.0, gpu(90, (100, "core", M, 50), (7, "python", None, 40)))
    assert not doom(scene, class_)
    scene.gpus(2.0, gpu(50, (100, "core", M, 50)))
    assert doom(scene, class_)


def test_an_older_generation_of_ours_is_somebody_else_too() -> None:
    scene = loading()
    scene.gpus(1.0, gpu(90, (99, "core", mark("primary#0"), 40)))
    assert not doom(scene, "startup_kv_insufficient")


def test_a_race_in_profiling_is_never_doom() -> None:
    scene = loading()
    scene.gpus(1.0, gpu(50, (100, "core", M, 50)))
    assert not doom(scene, "startup_profile_race")


def test_without_a_gpu_reading_only_a_configuration_error_is_doom() -> None:
    scene = loading()
    scene.blind(1.0)
    assert not doom(scene, "startup_vram_busy")
    assert doom(scene, "startup_kv_insufficient") and doom(scene, "startup_oom")


def test_a_failed_compilation_is_tried_once_more() -> None:
    assert frozenset({"compile_failure"}) == ONE_RETRY
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.0, M, 100))
    scene.crash("primary", 5.0, finding("compile_failure"))
    assert scene.phase() is Phase.STARTING, "the exit was charged before the log was read to its end"
    scene.feed(e.Spawned(6.0, mark("primary#2"), 100))
    scene.feed(e.LogRead(7.0, mark("primary#2"), (finding("compile_failure"),)))
    scene.crash("primary", 8.0)
    assert scene.phase() is Phase.HELD


def test_a_failed_compilation_seen_before_the_exit_is_tried_once_more_too() -> None:
    scene = Scene(plan(backup=False))
    scene.feed(e.Spawned(0.0, M, 100))
    assert not doom(scene, "compile_failure")


# -- the engine's log

def test_a_fatal_line_condemns_and_is_kept_as_proof() -> None:
    scene = loading()
    proof = finding("oom_runtime", "CUDA out of memory")
    scene.feed(e.LogRead(3.0, M, (proof,)))
    assert scene.phase() is Phase.DUMPING
    assert scene.world.incidents[0].findings == (proof,)
    assert scene.said("log.finding") == [
        {"engine": "primary#1", "class_": "oom_runtime", "action": "restart", "text": "CUDA out of memory"}]


def test_of_lines_that_came_together_the_cause_is_told_first() -> None:
    scene = loading()
    lines = (replace(finding("engine_dead_v1"), rank=50), replace(finding("oom_runtime"), rank=80))
    scene.feed(e.LogRead(3.0, M, lines))
    assert scene.world.incidents[0].id.endswith("-oom_runtime")


def test_a_line_of_another_generation_is_history() -> None:
    scene = loading()
    scene.feed(e.LogRead(3.0, mark("primary#7"), (finding("oom_runtime"),), drained=True))
    assert scene.phase() is Phase.LOADING and not scene.world.incidents


def test_a_warning_is_told_and_nothing_is_done() -> None:
    scene = loading()
    scene.feed(e.LogRead(3.0, M, (finding("shm_stall"),)))
    assert scene.phase() is Phase.LOADING and scene.world.incidents[0].urgency is Urgency.WARNING


def test_a_line_that_means_nothing_is_not_told() -> None:
    scene = loading()
    scene.feed(e.LogRead(3.0, M, (finding("none"),)))
    assert not scene.world.incidents


@pytest.mark.parametrize("stopping", [True, False])
def test_a_warning_of_an_engine_that_is_being_stopped_is_not_told(stopping: bool) -> None:
    scene = loading()
    if stopping:
        scene.feed(e.StopAsked(2.0, "SIGTERM"))
    scene.feed(e.LogRead(3.0, M, (finding("kv_pressure"),)))
    assert bool(scene.world.incidents) is not stopping


def test_any_reading_of_its_log_is_a_sign_that_it_loads() -> None:
    scene = loading()
    scene.feed(e.LogRead(30.0, M))
    assert scene.engine().active_at == 30.0


def test_the_log_of_a_dead_engine_decides_what_follows() -> None:
    scene = loading()
    scene.feed(e.Exited(5.0, M, 2))
    scene.feed(e.Emptied(5.1, M))
    scene.feed(e.LogRead(5.2, M, (finding("bad_args"),)))
    assert scene.phase() is Phase.SETTLING
    scene.feed(e.LogRead(5.3, M, drained=True))
    assert scene.phase() is Phase.HELD


def test_a_log_read_to_its_end_does_not_stop_an_engine_that_serves() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.feed(e.LogRead(3.0, M, drained=True))
    assert scene.phase() is Phase.SERVING


# -- the kernel's

def kernel(scene: Scene, class_: str, **details: object) -> None:
    scene.feed(e.KernelRead(scene.now + 1, (finding(class_, **details),)))


def test_a_kernel_log_that_may_not_be_read_is_unknown_until_it_can() -> None:
    scene = loading()
    scene.feed(e.KernelRead(1.0, Unknown(1.0, "permission denied")))
    assert scene.world.kernel == Unknown(1.0, "permission denied")
    assert scene.said("kernel.unknown") == [{"why": "permission denied"}]
    scene.feed(e.KernelRead(2.0, ()))
    assert scene.world.kernel is None


def test_a_kernel_line_concerns_the_engine_of_its_pid() -> None:
    scene = loading()
    kernel(scene, "host_oom_kill", pid=100)
    assert scene.phase() is Phase.DUMPING and scene.engine().cause == "host_oom_kill"


def test_a_kernel_line_concerns_the_engine_of_any_process_in_its_tree() -> None:
    scene = loading()
    kernel(scene, "host_oom_kill", pid=555)
    assert scene.phase() is Phase.LOADING
    scene.feed(e.HostSampled(2.0, Unknown(2.0, "x"), (tree(M, pid=555),)))
    kernel(scene, "host_oom_kill", pid=555)
    assert scene.phase() is Phase.DUMPING


@pytest.mark.parametrize(("pci", "ours"), [
    ("0000:3b:00", True), ("0000:3B:00.0", True), ("0000:3c:00", False), ("", False)])
def test_a_kernel_line_concerns_the_engines_of_its_card(pci: str, ours: bool) -> None:
    scene = loading()
    kernel(scene, "xid_node", pci=pci)
    assert (scene.phase() is Phase.DUMPING) is ours


def test_a_card_that_nobody_can_place_is_the_hosts() -> None:
    scene = loading()
    scene.gpus(0.5, gpu(1, bus_id=""), gpu(1, index=1))
    kernel(scene, "xid_node", pci="0000:3b:00")
    assert scene.world.incidents[0].service == "host"
    assert scene.world.incidents[0].urgency is Urgency.WARNING
    scene.blind(2.0)
    kernel(scene, "xid_reset", pci="0000:3b:00")
    assert scene.phase() is Phase.LOADING


def test_an_xid_of_a_card_where_nothing_runs_is_the_hosts() -> None:
    scene = Scene(ON_CARD)
    scene.gpus(0.0, gpu(99))
    assert scene.phase() is Phase.RELEASING
    kernel(scene, "xid_app", pci="0000:3b:00", pid=0)
    assert scene.world.incidents[0].service == "host"


def test_a_strangers_death_is_nobodys_incident() -> None:
    scene = loading()
    kernel(scene, "host_oom_kill", pid=9999)
    assert not scene.world.incidents


def test_one_card_may_carry_two_engines_and_both_are_concerned() -> None:
    scene = Scene(plan(gpus=(0,), share=0.4), survivors=(
        e.Survivor(mark("primary#1"), 100, True, 5.0), e.Survivor(mark("backup#1"), 200, True, 5.0)))
    scene.gpus(0.1, gpu(80))
    scene.feed(e.KernelRead(1.0, (finding("xid_node", pci="0000:3b:00"),)))
    assert len(scene.said("log.finding")) == 2
    assert scene.phases() == {"primary": Phase.DUMPING, "backup": Phase.STOPPING}
