"""What leaves the log disk, and what never does."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.fakes.tell import Said

from vllm_watchdog.act.retention import Retention
from vllm_watchdog.core.units import DAY_S

NOW = 1_795_000_000.0
OPEN = "20261101T000000Z-primary-oom_runtime"


def aged(path: Path, days: float, folder: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        path.mkdir()
        (path / "ps.txt").write_text("x")
    else:
        path.write_text("x" * 100)
    os.utime(path, (NOW - days * DAY_S,) * 2)
    return path


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Ours from 50 days ago to today, and what is not ours to remove."""
    aged(tmp_path / "primary.log", 50)
    aged(tmp_path / "primary.log.1", 9)
    aged(tmp_path / "primary.log.2", 40)
    aged(tmp_path / "history.db", 50)
    aged(tmp_path / "history.db.corrupt-20261001T000000Z", 45)
    aged(tmp_path / "notes.txt", 50)
    for day, days in (("2026-10-01", 42), ("2026-10-02", 8), ("2026-10-03", 7)):
        aged(tmp_path / "journal" / f"{day}.jsonl", days)
    aged(tmp_path / "incidents" / "20261001T000000Z-primary-hang", 43, folder=True)
    aged(tmp_path / "incidents" / "20261110T000000Z-primary-hang", 7, folder=True)
    aged(tmp_path / "incidents" / OPEN, 44, folder=True)
    aged(tmp_path / "incidents" / "my-own-notes", 50, folder=True)
    return tmp_path


@pytest.fixture
def said() -> Said:
    return Said()


def retention(logs: Path, said: Said, days: float = 30) -> Retention:
    return Retention(logs, days, lambda: NOW, lambda: frozenset((OPEN,)), said)


def left(logs: Path) -> set[str]:
    return {path.name for folder in (logs, logs / "journal", logs / "incidents") for path in folder.iterdir()}


STAY = {"primary.log", "history.db", "notes.txt", "journal", "incidents", "2026-10-03.jsonl", OPEN, "my-own-notes"}
YOUNG = {"primary.log.1", "2026-10-02.jsonl", "20261110T000000Z-primary-hang"}


def test_what_is_too_old_goes_and_nothing_else(logs: Path, said: Said) -> None:
    retention(logs, said).sweep()
    assert left(logs) == STAY | YOUNG
    ((name, fields),) = said.lines
    assert name == "retention.expired"
    assert fields == {"count": 4, "oldest": "history.db.corrupt-20261001T000000Z", "newest": "primary.log.2"}
    retention(logs, said).sweep()
    assert len(said.lines) == 1, "nothing is said where nothing went"


def test_room_is_made_from_the_oldest_on_until_there_is_enough(
    logs: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter((10, 20, 30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    retention(logs, said).make_room(25)
    assert left(logs) == STAY | YOUNG | {"primary.log.2", "2026-10-01.jsonl"}


def test_room_that_cannot_be_made_costs_all_that_may_go_and_no_more(logs: Path, said: Said) -> None:
    retention(logs, said).make_room(1 << 62)
    assert left(logs) == STAY
    assert said.lines[0][0] == "retention.made_room"


def test_the_journal_that_is_written_stays_however_old(tmp_path: Path, said: Said) -> None:
    aged(tmp_path / "journal" / "2026-10-01.jsonl", 50)
    retention(tmp_path, said).sweep()
    retention(tmp_path, said).make_room(1 << 62)
    assert said.lines == []


def test_a_folder_that_is_a_link_is_removed_and_not_followed(tmp_path: Path, said: Said) -> None:
    precious = tmp_path / "precious"
    aged(precious / "x", 0)
    (tmp_path / "logs" / "incidents").mkdir(parents=True)
    (tmp_path / "logs" / "incidents" / "20261001T000000Z-primary-hang").symlink_to(precious)
    retention(tmp_path / "logs", said).make_room(1 << 62)
    assert (precious / "x").exists()


def test_logs_that_are_not_there_are_no_error(tmp_path: Path, said: Said) -> None:
    retention(tmp_path / "nowhere", said).sweep()
    retention(tmp_path / "nowhere", said).make_room(1)
    assert said.lines == []


def test_it_sweeps_at_the_start_and_stops_at_once(logs: Path, said: Said) -> None:
    one = retention(logs, said)
    one.start()
    until = time.monotonic() + 10
    while "primary.log.2" in left(logs):
        assert time.monotonic() < until
        time.sleep(0.01)
    one.stop(5)
    assert not one._thread.is_alive()
    retention(logs, said).stop(1)
