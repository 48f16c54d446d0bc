from __future__ import annotations

from dataclasses import replace

from tests.core.scenes import GIB, Scene, gpu, host, mark, metrics, plan, tree

from vllm_watchdog.core import events as e
from vllm_watchdog.core.levels import HOLDERS_KEPT, Levels, levels_of
from vllm_watchdog.core.plan import Thresholds
from vllm_watchdog.core.readings import GpuProcess, Holder

M = mark("primary#1")


def scene(**options: object) -> Scene:
    made = Scene(plan(backup=False, share=0.5, **options))
    if options.get("gpus"):
        made.gpus(0.0, gpu(0), gpu(0, index=1))
    return made.serve()


def test_all_that_was_sampled_of_an_engine_is_kept() -> None:
    made = scene(gpus=(), thresholds=Thresholds(vram_warn=((0, 0.9),), warm_up_s=0))
    made.gpus(1.0, gpu(80, (100, "VLLM::EngineCor", M, 70), (4711, "python3", None, 9), (5, "Xorg", None, None)))
    made.feed(e.HostSampled(2.0, host(), (tree(M, rss_gib=3),)))
    made.feed(e.HostSampled(3.0, host(), (tree(M, rss_gib=4),)))
    made.feed(e.Scraped(4.0, M, metrics(1.0, running=4, waiting=12, kv=0.98)))
    levels = levels_of(made.world, replace(made.engine(), warm=((0, 60 * GIB),)))
    (card,) = levels.cards
    assert (card.gpu, card.used, card.total, card.ours, card.warm, card.warn) == (
        0, 80 * GIB, 100 * GIB, 70 * GIB, 60 * GIB, 0.9)
    assert card.others == (GpuProcess(Holder(4711, "python3"), 9 * GIB), GpuProcess(Holder(5, "Xorg"), None))
    assert (levels.at, levels.rss, levels.rss_warm) == (4.0, 4 * GIB, 3 * GIB)
    assert (levels.kv_usage, levels.running, levels.waiting) == (0.98, 4, 12)
    assert (levels.host_total, levels.host_available) == (64 * GIB, 32 * GIB)


def test_what_was_not_sampled_is_none() -> None:
    made = scene()
    assert levels_of(made.world, made.engine()) == Levels(0.0)
    assert levels_of(made.world, None) == Levels(0.0)


def test_only_the_engines_own_cards_are_kept_and_for_the_host_all() -> None:
    made = scene(gpus=(1,))
    made.gpus(1.0, gpu(1), gpu(2, index=1))
    assert [card.gpu for card in levels_of(made.world, made.engine()).cards] == [1]
    assert [card.gpu for card in levels_of(made.world, None).cards] == [0, 1]
    assert levels_of(made.world, made.engine()).cards[0].ours is None


def test_of_many_other_processes_the_largest_are_kept() -> None:
    made = scene(gpus=(0,))
    made.gpus(1.0, gpu(50, *((pid, "x", None, pid) for pid in range(1, HOLDERS_KEPT + 4))))
    others = levels_of(made.world, made.engine()).cards[0].others
    assert [row.holder.pid for row in others] == list(range(HOLDERS_KEPT + 3, 3, -1))
