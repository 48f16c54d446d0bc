"""Golden journeys: histories of the whole world as text.  `python -m tests.core.test_journeys` writes them anew."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.core.retelling import retell
from tests.core.scenes import Scene

from vllm_watchdog.core.commands import Command, Record
from vllm_watchdog.core.events import Event
from vllm_watchdog.core.incidents import Incident

JOURNEYS = sorted((Path(__file__).parent / "journeys").glob("*.txt"))


@cache
def retold(path: Path) -> tuple[str, frozenset[Incident]]:
    """A journey told again, and every state of its incidents."""
    seen: set[Incident] = set()
    feed = Scene.feed

    def fed(scene: Scene, event: Event) -> tuple[Command, ...]:
        done = feed(scene, event)
        seen.update(scene.world.incidents, (command.incident for command in done if isinstance(command, Record)))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scene, "feed", fed)
        return retell(path.read_text("utf-8")), frozenset(seen)


@pytest.mark.parametrize("path", JOURNEYS, ids=lambda path: path.stem)
def test_a_journey_is_told_as_it_was(path: Path) -> None:
    assert retold(path)[0] == path.read_text("utf-8")


def test_what_a_journey_brings_is_told_in_chinese_too() -> None:
    """What is not: lines of a log or of the kernel's, names."""
    told = frozenset.union(*(retold(path)[1] for path in JOURNEYS))
    quoted = {finding.text for incident in told for finding in incident.findings}
    english = {entry.text for incident in told for entry in incident.timeline
               if entry.words.zh == entry.text and entry.text.partition(": ")[2] not in quoted}
    assert len(told) > 100
    assert english <= {"primary#1", "backup#1", "incidents/x"}, english
    assert not {incident.text for incident in told if incident.words.zh == incident.text} - quoted


def test_there_are_journeys() -> None:
    assert len(JOURNEYS) >= 20


if __name__ == "__main__":
    for path in JOURNEYS:
        path.write_text(retell(path.read_text("utf-8")), "utf-8")
