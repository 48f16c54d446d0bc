"""A journal says the same when it is folded again, wherever the daemon that wrote it was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.system.harness import Watchdog, command, engine

from vllm_watchdog.app.replay import Replayed, parsed, replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One daemon's journal, from the first event to the last."""
    watchdog = Watchdog(tmp_path_factory.mktemp("replay"), {"one": engine()})
    watchdog.start().serving("one")
    watchdog.finish()
    return list(watchdog.lines())


def folded(lines: list[str]) -> Replayed:
    return replay(parsed(lines))


def test_a_journal_replays_wherever_its_daemon_was_killed(life: list[str]) -> None:
    for length in range(1, len(life)):
        done = folded(life[:length] + life)     # the next daemon begins with a Booted of its own
        assert done.difference is None, life[length - 1]
    torn = [*life[:9], life[9][:20] + "\n", *life]
    assert folded(torn).events == folded(life[:9] + life).events


def test_what_follows_a_gap_is_skipped_until_a_daemon_boots(life: list[str]) -> None:
    gap = json.dumps({"say": "journal.lost", "lines": 3}) + "\n"
    done = folded([*life[:10], gap, *life[20:], *life])
    assert done.difference is None
    assert done.events == folded(life[:10]).events + folded(life).events


def test_a_line_that_no_crash_explains_is_an_error_that_names_it(life: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text("".join([*life[:5], "{nonsense\n", *life[5:]]), "utf-8")
    said = command("replay", str(broken))
    assert (said.code, said.err) == (2, f"{broken}: line 6: expected a JSON object\n")
