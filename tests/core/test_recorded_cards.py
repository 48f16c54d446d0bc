"""What NVML told of H200s (driver 580.159.04, vLLM 0.24.0), one sample a file: `solo` by the new count of used memory,
in which what the driver keeps for itself is left out, the others by the old one.

Who a process is was read beside it; each rule that decides by the cards' memory is held against the figures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.core.scenes import GIB, Scene, gpu, mark, plan

from vllm_watchdog.core import gate
from vllm_watchdog.core.advice import advise
from vllm_watchdog.core.case import Case
from vllm_watchdog.core.levels import levels_of
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.core.readings import Gpu, GpuProcess, Holder
from vllm_watchdog.core.verdict import classify

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAMES = sorted(path.stem for path in (FIXTURES / "nvml").glob("*.jsonl"))
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker_TP"
PRIMARY, BACKUP = mark("primary#1"), mark("backup#1")


def recorded(name: str, **who: Holder) -> tuple[Gpu, ...]:
    """`who`: those whose name or mark is known, by `pPID`."""
    def row(of: dict[str, int]) -> GpuProcess:
        return GpuProcess(who.get(f"p{of['pid']}", Holder(of["pid"], "")), of["used_bytes"])

    (line,) = (FIXTURES / "nvml" / f"{name}.jsonl").read_text().splitlines()
    return tuple(Gpu(**card | {"processes": tuple(map(row, card["processes"]))}) for card in json.loads(line)["gpus"])


def served(the_plan: Plan, cards: tuple[Gpu, ...]) -> Scene:
    """A primary that was started on empty cards, and then this sample."""
    scene = Scene(the_plan)
    scene.gpus(0.1, gpu(1, index=0), gpu(1, index=1))
    scene.serve()
    scene.gpus(1.0, *cards)
    return scene


def core(pid: int, whose: str) -> Holder:
    return Holder(pid, CORE, mark(whose))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_processes_hold_is_what_is_used_but_for_the_drivers_own(name: str) -> None:
    for card in recorded(name):
        named = sum(row.used_bytes or 0 for row in card.processes)
        least, most = (0, 64) if name == "solo" else (614, 614 + 64)
        assert least <= (card.used_bytes - named) / 2**20 < most
        assert card.bus_id and card.uuid.startswith("GPU-") and card.total_bytes == 143_771 << 20


def test_a_sleeping_backup_keeps_little_and_wakes_only_when_the_primary_has_left() -> None:
    cards = recorded("both-up", p10114=core(10114, "primary#1"), p21533=core(21533, "backup#1"))
    held = {row.holder.mark: row.used_bytes or 0 for row in cards[0].processes}
    assert held[PRIMARY] > 63 * GIB and held[BACKUP] == 782 << 20
    sleeper = plan(gpus=(0,), share=0.6).engines[1]
    assert [card.index for card, _ in gate.shortage(sleeper, cards, BACKUP)] == [0]


def test_an_orphaned_core_keeps_the_gate_shut_and_its_mark_says_that_it_is_ours() -> None:
    cards = recorded("orphan", p27798=core(27798, "primary#1"), p21533=core(21533, "backup#1"))
    (primary,) = plan(backup=False, gpus=(0,), share=0.6).engines
    (text,) = gate.told(primary, cards)
    assert text.en.startswith("GPU 0 lacks ") and f"PID 27798 ({CORE}), ours: primary#1 63.7 GiB" in text.en
    assert not gate.others_on(primary, cards, PRIMARY)[1:], "beside it only the sleeping backup"


def test_the_neighbour_that_fills_a_card_is_named_and_our_own_backup_is_not() -> None:
    cards = recorded("full-card", p9002=core(9002, "primary#1"), p21290=core(21290, "backup#1"),
                     p27709=Holder(27709, "python3"))
    scene = served(plan(gpus=(1,), share=0.5), cards)
    log = (FIXTURES / "logs" / "real__cuda_oom_full_card_0.24_h200.log").read_text()
    verdict = classify(log.split("\n"))
    lines = [line.en for line in advise(Case(verdict.class_, verdict.details,
                                             levels=levels_of(scene.world, scene.engine())))]
    assert any("74.7 GiB of GPU memory: PID 27709 (python3)" in line for line in lines)
    assert not any("21290" in line for line in lines), "torch names the sleeping backup too"


def test_a_card_that_somebody_else_fills_holds_up_the_engine_of_that_card_alone() -> None:
    cards = recorded("gpu0-full", p30622=Holder(30622, "python3"), p8186=core(8186, "backup#1"))
    (primary,) = plan(backup=False, gpus=(0,), share=0.5).engines
    (elsewhere,) = plan(backup=False, gpus=(1,), share=0.45).engines
    (text,) = gate.told(primary, cards)
    assert text.en.startswith("GPU 0 lacks 1.") and "PID 30622 (python3) 69.2 GiB" in text.en
    assert gate.told(elsewhere, cards) == ()


def test_a_hot_pair_has_a_card_each() -> None:
    cards = recorded("hot-pair", p8175=core(8175, "primary#1"), p8186=core(8186, "backup#1"))
    assert [[str(row.holder.mark) for row in card.processes] for card in cards] == [["primary#1"], ["backup#1"]]
    assert gate.others_on(plan(gpus=(0,), share=0.5).engines[0], cards, PRIMARY) == ()


def test_a_tensor_parallel_engine_holds_as_much_on_each_of_its_cards_in_its_own_order() -> None:
    """`gpus = [1, 0]`: rank 0 lies on NVML's card 1."""
    cards = recorded("tensor-parallel", p6590=Holder(6590, f"{WORKER}0", PRIMARY), p6591=Holder(6591, f"{WORKER}1", PRIMARY))
    assert [[row.holder.name for row in card.processes] for card in cards] == [[f"{WORKER}1"], [f"{WORKER}0"]]
    scene = served(plan(backup=False, gpus=(1, 0), share=0.4), cards)
    levels = levels_of(scene.world, scene.engine())
    held = 61_419_290_624
    assert [(card.gpu, card.ours, card.others) for card in levels.cards] == [(0, held, ()), (1, held, ())]
    (whole,) = plan(backup=False, gpus=(1, 0), share=0.6).engines
    assert [card.index for card, _ in gate.shortage(whole, cards)] == [0, 1], "each of its cards is waited for"
