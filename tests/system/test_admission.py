"""The articles' case, half a minute of it: tests/bench/admission.py is the long one, and the one that measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.admission import LONGS, measured
from tests.fakes.crowd import p95, verdicts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_sixteen_clients_of_all_sizes_meet_no_oom_and_lose_no_request(tmp_path: Path) -> None:
    alone, *_ = measured(tmp_path / "alone", True, 0, 5)
    mixed, generation, cause = measured(tmp_path / "mixed", True, LONGS, 10)
    assert (generation, cause) == (1, "")
    assert verdicts(mixed).keys() == {"short whole", "long whole"}
    assert p95(mixed, first=False) < 2 * p95(alone, first=False), "the bench's goal is 1.3; here others may run beside it"


def test_without_limits_the_same_clients_run_the_card_out_of_memory(tmp_path: Path) -> None:
    got, generation, cause = measured(tmp_path / "control", False, LONGS, 10)
    assert generation > 1 and cause == "oom_runtime"
    assert any(each.verdict != "whole" for each in got)
