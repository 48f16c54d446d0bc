from __future__ import annotations

import errno
import json
import os
import resource
import threading
from pathlib import Path

import pytest
from tests.fakes.tell import WALL, Clock

from vllm_watchdog.core import events
from vllm_watchdog.core.codec import Codec
from vllm_watchdog.core.events import StopAsked, Tick
from vllm_watchdog.tell import journal
from vllm_watchdog.tell.journal import Journal, files, read


def started(folder: Path, **more) -> Journal:
    made = Journal(folder, Clock(), more.pop("wall", lambda: WALL), **more)
    made.start()
    return made


class Gate:
    """A tap that holds the writer up until it is opened."""

    def __init__(self) -> None:
        self.held, self.open = threading.Event(), threading.Event()

    def __call__(self, line) -> None:
        self.held.set()
        assert self.open.wait(10)


def test_lines_keep_their_order_and_say_when(tmp_path):
    book = started(tmp_path)
    book.event(StopAsked(7.5, "SIGTERM"))
    book.say("engine.killed", pid=12, after_s=3.5)
    book.write({"at": 9.0, "say": "route.changed", "decided": True})
    assert book.stop(5)
    first, second, third = read(tmp_path)
    assert first["wall"] == second["wall"] == "2026-11-29T21:53:20.000Z"
    assert Codec(events).decode(first["event"]) == StopAsked(7.5, "SIGTERM")
    assert (first["at"], second["at"], third["at"]) == (7.5, 100.0, 9.0)
    assert second["say"] == "engine.killed" and second["pid"] == 12
    assert third["decided"] is True


def test_only_the_owner_may_read_it(tmp_path):
    book = started(tmp_path / "journal")
    book.say("x")
    book.stop(5)
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o700
    assert files(tmp_path / "journal")[0].stat().st_mode & 0o777 == 0o600


def test_a_full_queue_loses_lines_at_once_and_counts_them_in_their_place(tmp_path):
    gate = Gate()
    book = started(tmp_path, tap=gate, queue_lines=5)
    book.say("first")
    assert gate.held.wait(5)            # the writer is busy; five more have room
    for number in range(12):
        book.say("later", number=number)
    gate.open.set()
    assert book.flush(5)
    book.say("last")
    book.stop(5)
    lines = list(read(tmp_path))
    assert [line["say"] for line in lines] == ["first", *["later"] * 5, "journal.lost", "last"]
    assert lines[6]["lines"] == 7 and book.lost == 7


def test_flush_gives_up_at_its_deadline(tmp_path):
    gate = Gate()
    book = started(tmp_path, tap=gate)
    book.say("x")
    assert gate.held.wait(5)
    assert not book.flush(0.05)
    gate.open.set()
    assert book.flush(5) and book.stop(5)


def test_a_full_disk_is_said_once_a_minute_and_loses_nothing(tmp_path, monkeypatch):
    """The file size limit of this process stands for the disk: the kernel cuts the write short, then refuses."""
    monkeypatch.setattr(journal, "retry_s", 0.01)
    complaints: list[str] = []
    tries = threading.Semaphore(0)
    real = journal._File.append

    def counted(self, data, wall, fresh):
        try:
            return real(self, data, wall, fresh)
        except OSError:
            tries.release()
            raise

    monkeypatch.setattr(journal._File, "append", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    book = started(tmp_path, complain=complaints.append)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))      # Python ignores SIGXFSZ
    try:
        for number in range(4):
            book.say("line", number=number, pad="x" * 40)
        for _ in range(5):
            assert tries.acquire(timeout=5)
        assert not book.flush(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert book.flush(5) and book.stop(5)
    assert [line["number"] for line in read(tmp_path)] == [0, 1, 2, 3]
    assert len(complaints) == 1 and os.strerror(errno.EFBIG) in complaints[0]


def test_a_disk_that_stays_full_does_not_hold_up_the_stop(tmp_path):
    blocked = tmp_path / "journal"
    blocked.write_text("a file where the folder should be")
    complaints: list[str] = []
    book = started(blocked, complain=complaints.append)
    book.say("x")
    assert not book.stop(5)
    assert complaints[-1] == "journal: stopped with 1 lines unwritten" and book.lost == 1


def test_files_rotate_by_size_in_an_order_that_read_keeps_and_the_oldest_go(tmp_path):
    book = started(tmp_path, max_bytes=2_000, total_bytes=14_000)
    for number in range(300):
        book.say("line", number=number, pad="x" * 20)
        assert book.flush(5)
    book.stop(5)
    names = [path.name for path in files(tmp_path)]
    assert names[-1] == "2026-11-29.jsonl" and names[-2].split(".")[1].isdecimal()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 16_000
    numbers = [line["number"] for line in read(tmp_path)]
    assert numbers == list(range(numbers[0], 300)) and len(numbers) > 50
    assert int(names[0].split(".")[1]) >= 2 and len(names) > 3      # two digits sort after one


def test_a_new_day_is_a_new_file(tmp_path):
    wall = Clock(WALL)
    book = started(tmp_path, wall=wall)
    book.say("today")
    assert book.flush(5)
    wall.at += 86_400
    book.say("tomorrow")
    book.stop(5)
    assert [path.name for path in files(tmp_path)] == ["2026-11-29.jsonl", "2026-11-30.jsonl"]


def test_a_file_removed_by_someone_is_begun_again(tmp_path):
    book = started(tmp_path)
    book.say("before")
    assert book.flush(5)
    files(tmp_path)[0].unlink()
    book.say("after")
    book.stop(5)
    assert [line["say"] for line in read(tmp_path)] == ["after"]


def test_a_line_torn_by_a_killed_daemon_costs_only_itself(tmp_path):
    torn = tmp_path / "2026-11-29.jsonl"
    torn.write_text('{"say":"whole"}\n{"say":"to')
    book = started(tmp_path)
    book.say("next")
    book.stop(5)
    lines = list(read(torn))
    assert lines[0] == {"say": "whole"}
    assert lines[1] == {"say": "journal.unreadable", "file": str(torn), "line": 2}
    assert lines[2]["say"] == "next"


@pytest.mark.parametrize("length", [journal.line_limit, 3 * journal.line_limit])
def test_a_line_over_the_limit_is_named_instead(tmp_path, length):
    book = started(tmp_path)
    book.event(StopAsked(1.0, "y" * length))
    book.event(Tick(2.0))
    book.stop(5)
    first, second = read(tmp_path)
    assert first["say"] == "journal.line_too_long" and first["what"] == "StopAsked" and first["bytes"] > length
    assert second["event"] == {"_": "Tick", "at": 2.0}
    assert max(map(len, files(tmp_path)[0].read_bytes().splitlines())) < journal.line_limit


def test_text_that_is_no_utf8_is_written_as_json_all_the_same(tmp_path):
    book = started(tmp_path)
    book.say("odd", text="\udcff\n\x00 显存")
    book.stop(5)
    (line,) = read(tmp_path)
    assert line["text"] == "?\n\x00 显存"
    assert json.loads(files(tmp_path)[0].read_text())["say"] == "odd"


def test_samples_are_gathered_and_what_is_said_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_watchdog.tell.journal.gather_s", 60.0)
    book = started(tmp_path)
    book.event(Tick(1.0))
    book.event(Tick(2.0))
    book.say("it.matters")
    assert book.flush(5)
    book.event(Tick(3.0))
    assert not book.flush(0.05)
    assert book.stop(5)
    (file,) = files(tmp_path)
    assert [line.get("say") or line["event"]["_"] for line in read(file)] == ["Tick", "Tick", "it.matters", "Tick"]
