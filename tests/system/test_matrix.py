"""The reliability matrix: one cell in the quick suite, each cell once as a slow test; `matrix.py` runs it more often."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from tests.system.faults import FAULTS
from tests.system.matrix import Cell, Result, cells, column, report, side_by_side, table
from tests.system.stage import PHASES

from vllm_watchdog.core.catalog import CATALOG


def test_a_killed_engine_core_behind_the_gateway(tmp_path: Path) -> None:
    (result,) = column(tmp_path, [Cell("SIGKILL engine core", "none", loaded=False)])
    assert not result.problems, result
    assert 0 < result.gap_s < 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_cell_holds(tmp_path: Path) -> None:
    wanted = list(cells())
    results = list(side_by_side(wanted, tmp_path))
    assert {result.cell for result in results} == {str(cell) for cell in wanted}
    failed = {result.cell: result.problems for result in results if result.problems}
    assert not failed, failed


def test_every_fault_meets_every_standby_mode_and_load_it_can() -> None:
    per_fault = defaultdict[str, set[tuple[str, bool]]](set)
    for cell in cells():
        per_fault[cell.fault].add((cell.standby, cell.loaded))
    assert set(per_fault) == set(FAULTS)
    for name, fault in FAULTS.items():
        assert len(per_fault[name]) == 2 * len(fault.standbys), name
        assert set(fault.standbys) <= set(PHASES) and set(fault.classes) <= set(CATALOG), name
    assert [str(cell) for cell in cells("hang, /health 200/hot/idle")] == ["hang, /health 200/hot/idle"]
    assert not list(cells("hang"))


def test_the_table_counts_passes_and_tells_each_failure_once() -> None:
    cell = "CUDA OOM/hot/idle"
    results = [Result(cell, gap_s=1.0), Result(cell, gap_s=3.0), Result(cell, ["left: primary#1 7\nmore"])]
    assert "| CUDA OOM | – | – | – | – | – | – | 2/3, 2.00 (3.00) s | – |" in table(results).splitlines()
    assert report(results).splitlines()[-1] == "- CUDA OOM/hot/idle: left: primary#1 7"
