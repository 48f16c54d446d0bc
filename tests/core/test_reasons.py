from __future__ import annotations

from dataclasses import replace

from tests.core.scenes import Scene, finding, gpu, plan

from vllm_watchdog.core import events as e
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.policy import ONLY_WHEN_ACTIVE, Phase
from vllm_watchdog.core.reasons import LAST_LINE, OVERDUE, PAGES, ended, last_words, overdue


def test_an_exit_is_told_by_its_code_or_its_signal() -> None:
    assert ended(1).en == "it exited with code 1"
    assert ended(None).en == "it ended; it was an earlier daemon's child, so its exit code is unknown"
    assert ended(-9).en == "it was ended by signal 9, which we did not send"


def test_an_exit_that_nothing_explains_is_told_with_the_end_of_its_log() -> None:
    assert ended(2, ("first", "x" * 999)).en == f"it exited with code 2; its log ends in: {'x' * LAST_LINE}"
    assert [(each.class_, each.text) for each in last_words(("a", "b"))] == [
        ("unexpected_exit", "a"), ("unexpected_exit", "b")]


def test_every_phase_that_may_last_too_long_says_so() -> None:
    assert set(OVERDUE) == (ONLY_WHEN_ACTIVE - {Phase.BACKOFF}) | {Phase.STARTING}
    text = Text("it was not started within 15 s", "15 秒内未能启动")
    assert overdue(Scene(plan()).engine(), 15.0) == ("spawn_failed", text)


def page(scene: Scene, phase: Phase) -> tuple[str, str, str]:
    class_, text = PAGES[phase](scene.world, scene.engine())
    return class_, text.en, text.zh


def test_a_held_engine_says_why() -> None:
    scene = Scene(plan(backup=False, limits=Limits(budget=0))).serve()
    scene.crash()
    assert page(scene, Phase.HELD) == (
        "budget_spent", "primary is held: 1 failures within 3600 s, 0 are allowed; the last was unexpected_exit",
        "primary 已停止重试：3600 秒内失败 1 次，最多允许 0 次；最后一次是 unexpected_exit")


def test_a_doomed_engine_says_that_it_would_fail_alike() -> None:
    scene = Scene(plan(backup=False))
    scene.crash("primary", 1.0, finding("bad_args", "no such flag {x}"))
    assert page(scene, Phase.HELD) == (
        "bad_args", "primary is held: another try would fail alike (no such flag {x})",
        "primary 已停止重试：再试也会同样失败（no such flag {x}）")


def test_no_room_names_rivals_strays_and_holders() -> None:
    scene = Scene(plan(gpus=(0,), share=0.8), survivors=(e.Survivor(e.Mark("old", 1), 9, True, 5.0),))
    assert page(scene, Phase.RELEASING)[1:] == ("primary can't be started: old#1 is not gone yet",
                                                "primary 无法启动：old#1 尚未退出")
    scene = Scene(plan(gpus=(0,), share=0.8))
    assert page(scene, Phase.RELEASING)[1:] == ("primary can't be started: no GPU sample has come",
                                                "primary 无法启动：没有 GPU 采样")
    scene.gpus(1.0, gpu(90, (7, "nginx", None, 90)))
    assert all("nginx" in text for text in page(scene, Phase.RELEASING)[1:])
    backup = replace(scene.engine("backup"), life=replace(scene.engine("backup").life, phase=Phase.STOPPING))
    scene.world = scene.world.with_engine(backup)
    assert page(scene, Phase.RELEASING)[2].startswith("primary 无法启动：backup 仍有进程；GPU 0 还缺")
    asleep = replace(scene.engine(), life=replace(scene.engine().life, phase=Phase.ASLEEP))
    scene.world = scene.world.with_engine(asleep)
    assert "can't be woken: backup still has processes; GPU 0 lacks" in page(scene, Phase.ASLEEP)[1]


def test_a_wedged_engine_names_its_pid() -> None:
    _, en, zh = page(Scene(plan(backup=False)).serve(pid=77), Phase.WEDGED)
    assert "survived SIGKILL for 30 s (PID 77)" in en and "SIGKILL 后 30 秒仍未退出（PID 77）" in zh
