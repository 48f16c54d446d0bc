"""Golden journeys: histories of the whole world as text.  `python -m tests.core.test_journeys` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.retelling import retell

JOURNEYS = sorted((Path(__file__).parent / "journeys").glob("*.txt"))


@pytest.mark.parametrize("path", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_is_told_as_it_was(path: Path) -> None:
    told = path.read_text("utf-8")
    assert retell(told) == told


def test_there_are_journeys() -> None:
    assert len(JOURNEYS) >= 20


if __name__ == "__main__":
    for path in JOURNEYS:
        path.write_text(retell(path.read_text("utf-8")), "utf-8")
