"""The memory rules are walked by the same cases as the rest: what follows are the edges of their arithmetic."""

from __future__ import annotations

import pytest
from tests.core.test_advice import CASES, OOM, of, test_the_remedy_of_a_known_case_is_advised

from vllm_watchdog.core import advice_memory as memory

GIB = 1 << 30
__all__ = ["test_the_remedy_of_a_known_case_is_advised"]


@pytest.mark.parametrize(("asked_gib", "new"), [(0.1, "0.90"), (1.0, "0.89"), (3.0, "0.87"), (40, "0.40")])
def test_the_share_falls_by_what_was_missing_and_room_but_by_two_hundredths_at_least(asked_gib: float, new: str) -> None:
    facts = OOM | {"requested_bytes": int(asked_gib * GIB), "free_bytes": 0, "total_bytes": 80 * GIB}
    (line,) = memory.less_util(of("oom_runtime", facts, "gpu-memory-utilization=0.92"))
    assert f"--gpu-memory-utilization {new} " in line.en


def test_a_share_below_the_least_is_no_advice() -> None:
    assert memory.less_util(of("vram_degrade", None, "gpu-memory-utilization=0.3")) is None


def test_every_case_is_walked() -> None:
    assert len(CASES) > 80
