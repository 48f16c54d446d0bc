from __future__ import annotations

from vllm_watchdog.core.case import Case
from vllm_watchdog.core.levels import CardLevels, Levels


def test_facts_and_flags_are_looked_up_by_name() -> None:
    case = Case("oom_runtime", (("gpu", 1),), (("max-num-seqs", "64"), ("max-model-len", "32k")))
    assert (case.fact("gpu"), case.fact("port")) == (1, None)
    assert (case.whole("max-num-seqs"), case.whole("max-model-len"), case.whole("swap-space")) == (64, None, None)


def test_the_share_is_the_configured_one_else_what_vllm_said() -> None:
    said = (("gpu_memory_utilization", 0.85),)
    assert Case("x", said, (("gpu-memory-utilization", "0.9"),)).util == 0.9
    assert Case("x", said).util == 0.85
    assert Case("x", (), (("gpu-memory-utilization", "much"),)).util is None


def test_the_total_is_the_lines_else_that_of_the_card() -> None:
    cards = Levels(0.0, (CardLevels(0, "a", 1, 10), CardLevels(1, "b", 1, 20)))
    assert Case("x", (("total_bytes", 5),), levels=cards).total == 5
    assert Case("x", (("gpu", 1),), levels=cards).total == 20
    assert Case("x", (("gpu", 7),), levels=cards).total == 10
    assert Case("x").total is None
