"""LogTail on real files: a growing log, cut short, replaced, rotated, flooded, and read on by the next daemon."""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_watchdog.core.events import LogRead, MemberDied
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.sense import bell, logtail
from vllm_watchdog.sense.logfile import LogFile
from vllm_watchdog.sense.logtail import LogTail

ONE, TWO = Mark("primary", 1), Mark("primary", 2)
PREFIX = "(EngineCore pid=9) ERROR 10-26 21:05:17 [core.py:844] "
READY = "INFO:     Application startup complete.\n"
OOM = PREFIX + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 352.00 MiB. GPU 0 has a total capacity\n"
DEATH = PREFIX + "EngineCore encountered a fatal error.\n"
WORKER = PREFIX.replace("core.py", "multiproc_executor.py") + "Worker proc VllmWorker-0 died unexpectedly, gone.\n"
STOPPED = "(APIServer pid=7) INFO 10-26 21:05:17 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
DIED = MemberDied(0.0, ONE, 9, "VLLM::EngineCore")
CHATTER = "(APIServer pid=7) INFO 10-26 21:05:17 [loggers.py:123] nothing to see here\n"


class Desk:
    """A log, its tail, and what the tail posted."""

    def __init__(self, folder: Path) -> None:
        self.path, self.place = folder / "primary.log", folder / "primary.place"
        self.events: queue.Queue[Any] = queue.Queue()
        self.tails: list[LogTail] = []

    def tail(self, **limits: Any) -> LogTail:
        self.tails.append(LogTail("primary", self.path, self.place, self.events.put, time.monotonic, **limits))
        self.tails[-1].start()
        return self.tails[-1]

    def follow(self, mark: Mark = ONE, **limits: Any) -> LogTail:
        """A tail that follows, and has begun to."""
        tail = self.tail(**limits)
        tail.follow(mark)
        settle(tail)
        return tail

    def write(self, *texts: str) -> None:
        with self.path.open("a") as log:
            log.write("".join(texts))

    def read(self) -> LogRead:
        event = self.events.get(timeout=5)
        assert isinstance(event, LogRead)
        return event

    def classes(self) -> list[str]:
        return [finding.class_ for finding in self.read().findings]

    def rest(self, tail: LogTail, mark: Mark = ONE) -> list[str]:
        """Every class told until the log was read to its end."""
        tail.drain(mark)
        found: list[str] = []
        while True:
            event = self.read()
            assert event.mark == mark
            found += [finding.class_ for finding in event.findings]
            if event.drained:
                return found

    def crash(self, tail: LogTail) -> None:
        """What is left of a daemon after kill -9: the place on disk as it was last saved."""
        kept = self.place.read_bytes()
        tail.stop(5)
        self.place.write_bytes(kept)


def settle(tail: LogTail) -> None:
    """All orders so far were carried out."""
    done = queue.Queue[None]()
    tail._order(lambda: done.put(None))
    done.get(timeout=5)


@contextmanager
def held_up(tail: LogTail) -> Iterator[None]:
    """Its thread hangs meanwhile, as on a slow disk."""
    held, free = threading.Event(), threading.Event()

    def hang() -> None:
        held.set()
        free.wait(5)

    tail._order(hang)
    assert held.wait(5)
    try:
        yield
    finally:
        free.set()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path)
    yield one
    for tail in one.tails:
        tail.stop(5)
        assert not tail._thread.is_alive()


def test_a_traceback_written_in_pieces_is_one_event(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logtail, "QUIET_S", 0.5)    # a loaded machine may take more than the real 0.1 s for two writes
    monkeypatch.setattr(logtail, "BURST_S", 5.0)
    tail = desk.follow()
    desk.write(READY, DEATH)
    until(lambda: bool(tail._pending))
    desk.write(OOM)
    event = desk.read()
    assert event.mark == ONE
    assert not event.drained
    assert [finding.class_ for finding in event.findings] == ["engine_dead_v1", "oom_runtime"]
    assert event.findings[1].line == 3


def test_a_burst_that_does_not_end_is_told_after_half_a_second(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logtail, "QUIET_S", 0.1)        # on a loaded machine two writes may be 10 ms apart
    desk.follow()
    began = time.monotonic()
    desk.write(READY, DEATH)
    while desk.events.empty():
        desk.write(CHATTER)
        time.sleep(0.01)
        assert time.monotonic() - began < 3
    assert time.monotonic() - began > 0.4
    assert desk.classes() == ["engine_dead_v1"]


def test_what_was_written_before_belongs_to_an_earlier_generation(desk: Desk) -> None:
    desk.write(READY, DEATH, OOM)
    tail = desk.follow()
    desk.write(CHATTER)
    assert desk.rest(tail) == []


@pytest.mark.parametrize("before", ["", READY + WORKER], ids=["no log yet", "an older generation's log"])
def test_the_first_lines_of_a_generation_are_read_however_late_the_tail_gets_to_them(desk: Desk, before: str) -> None:
    if before:
        desk.write(before)
    tail = desk.tail()
    with held_up(tail):
        tail.follow(ONE)
        tail.begins(ONE)
        desk.write(READY, DEATH)
    assert desk.classes() == ["engine_dead_v1"]
    assert tail._scanner.lines == 2


def test_a_tail_that_is_held_up_takes_no_line_of_the_next_generation_for_one_of_the_last(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY)
    with held_up(tail):
        desk.write(DEATH)
        tail.drain(ONE)
        tail.follow(TWO)
        tail.begins(TWO)
        desk.write(READY, OOM)
    read = [desk.read(), desk.read()]
    assert [(event.mark, event.drained, [finding.class_ for finding in event.findings]) for event in read] == [
        (ONE, True, ["engine_dead_v1"]), (TWO, False, ["oom_runtime"])]


def test_a_log_that_was_moved_away_before_a_generation_began_is_read_anew(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, CHATTER)
    desk.path.rename(desk.path.with_suffix(".old"))
    tail.follow(TWO)
    settle(tail)
    tail.begins(TWO)
    desk.write(READY, OOM)
    assert desk.rest(tail, TWO) == ["oom_runtime"]


def test_a_log_that_does_not_exist_yet_is_empty(desk: Desk) -> None:
    tail = desk.follow()
    assert desk.rest(tail) == []
    desk.write(READY, DEATH)
    assert desk.classes() == ["engine_dead_v1"]


def test_a_log_that_can_not_be_read_is_said_once_and_read_as_soon_as_it_can(
        desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.path.mkdir()
    tail = desk.follow()
    settle(tail)
    until(lambda: "log.unreadable" in caplog.text)
    desk.path.rmdir()
    desk.write(READY, OOM)
    assert desk.rest(tail) == ["oom_runtime"]
    assert caplog.text.count("log.unreadable") == 1


def test_the_rest_of_a_dead_generation_counts_for_it_and_not_for_the_next(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, DEATH)
    tail.follow(TWO)
    event = desk.read()
    assert (event.mark, [finding.class_ for finding in event.findings]) == (ONE, ["engine_dead_v1"])
    assert desk.rest(tail, TWO) == []
    desk.write(READY, OOM)
    event = desk.read()
    assert (event.mark, [finding.class_ for finding in event.findings]) == (TWO, ["oom_runtime"])


def test_a_last_line_without_an_end_is_read_by_the_drain(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, DEATH.rstrip("\n"))
    assert desk.rest(tail) == ["engine_dead_v1"]


def test_a_headline_and_what_completes_it_are_one_finding(desk: Desk) -> None:
    tail = desk.follow()
    desk.write("pydantic_core._pydantic_core.ValidationError: 1 validation error for CacheConfig\n", "block_size\n",
               "  Input should be 1 [type=x, input_value=0, input_type=int]\n")
    tail.drain(ONE)
    found = desk.read().findings
    assert [each.text.partition("CacheConfig")[2] for each in found] == [": block_size: Input should be 1 (it is 0)"]


def test_the_drain_tells_the_last_lines_of_that_generation_and_no_other(desk: Desk) -> None:
    desk.write("of the generation before\n")
    tail = desk.follow()
    desk.write("Traceback:\n", "  \n", "token=secretsecret\n", "bash: vllm: command not found")
    tail.drain(ONE)
    event = desk.read()
    assert event.drained and event.last_words == ("Traceback:", "token=***", "bash: vllm: command not found")


def test_the_last_lines_are_bounded_and_survive_a_file_cut_short(desk: Desk) -> None:
    desk.write("old\n" * 100)
    tail = desk.follow()
    os.truncate(desk.path, 0)
    desk.write("x" * 100_000, "\n", "the end\n")
    tail.drain(ONE)
    words = desk.read().last_words
    assert words[-1] == "the end" and sum(map(len, words)) < 1000


def test_draining_a_generation_nobody_followed_is_answered(desk: Desk) -> None:
    assert desk.rest(desk.tail(), TWO) == []


def test_what_follows_our_own_stop_is_no_symptom(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY)
    tail.asked_to_stop(ONE)
    settle(tail)
    desk.write(DEATH)
    assert desk.rest(tail) == []


def test_what_it_wrote_before_we_asked_it_to_stop_is_told(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY)
    until(lambda: tail._file.offset == desk.path.stat().st_size)
    desk.write(DEATH)
    tail.asked_to_stop(ONE)
    assert desk.rest(tail) == ["engine_dead_v1"]


def test_what_a_process_wrote_before_it_died_is_told_before_its_death(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logtail, "QUIET_S", 60.0)
    monkeypatch.setattr(logtail, "BURST_S", 60.0)
    tail = desk.follow()
    desk.write(READY, OOM, DEATH)
    before = time.monotonic()
    tail.member_died(DIED)
    assert [finding.class_ for finding in desk.read().findings] == ["oom_runtime", "engine_dead_v1"]
    told = desk.events.get(timeout=5)
    assert told == replace(DIED, at=told.at) and told.at >= before


def test_the_death_of_a_process_of_another_generation_is_passed_on(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, STOPPED)
    tail.member_died(replace(DIED, mark=TWO))
    assert desk.events.get(timeout=5).mark == TWO


def test_a_server_that_a_stranger_asked_to_stop_ends_its_processes_itself(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, STOPPED)
    tail.member_died(DIED)
    assert desk.rest(tail) == []


def test_a_stop_of_another_generation_hides_nothing(desk: Desk) -> None:
    tail = desk.follow()
    tail.asked_to_stop(TWO)
    settle(tail)
    desk.write(READY, DEATH)
    assert desk.rest(tail) == ["engine_dead_v1"]


@pytest.mark.parametrize(
    "text",
    [
        DEATH.replace("\n", "\r\n"),
        DEATH.replace("ERROR", "\x1b[31mERROR\x1b[0m"),
        "Loading:  10%|#   | 1/9 [00:01<00:09, 1.00it/s]\rLoading:  90%|### | 8/9 [00:08<00:01, 1.00it/s]\r\n" + DEATH,
        json.dumps({"levelname": "ERROR", "name": "vllm.v1.engine.core", "filename": "core.py", "lineno": 844,
                    "process": 9, "processName": "EngineCore", "message": DEATH[len(PREFIX):].strip()}) + "\n",
    ],
    ids=["crlf", "ansi", "progress bar", "json"],
)
def test_records_are_read_in_every_shape_they_come_in(desk: Desk, text: str) -> None:
    tail = desk.follow()
    desk.write(READY, text)
    assert desk.rest(tail) == ["engine_dead_v1"]


def test_a_line_cut_anywhere_is_read_whole(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY)
    for start in range(0, len(DEATH), 20):
        desk.write(DEATH[start : start + 20])
        settle(tail)
    assert desk.rest(tail) == ["engine_dead_v1"]


# -- truncation, replacement, rotation

def test_a_file_cut_short_is_read_from_its_start(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY, CHATTER * 100)
    until(lambda: tail._file.offset == desk.path.stat().st_size)
    os.truncate(desk.path, 0)
    desk.write(DEATH)
    assert desk.classes() == ["engine_dead_v1"]


def test_the_place_in_a_file_cut_short_is_kept_at_once(desk: Desk) -> None:
    """A next daemon that went by the old one would skip what is new, once that is longer."""
    tail = desk.follow()
    desk.write(READY, CHATTER * 9)
    until(lambda: tail._file.offset == desk.path.stat().st_size)
    os.truncate(desk.path, 0)
    desk.write(CHATTER)
    until(lambda: json.loads(desk.place.read_text())["offset"] == len(CHATTER))
    desk.write(CHATTER * 100)
    desk.crash(tail)
    assert json.loads(desk.place.read_text())["offset"] == len(CHATTER)     # the rest would be kept after SAVE_S


def test_a_file_moved_away_is_read_to_its_end_and_then_its_successor(desk: Desk) -> None:
    desk.write(READY)
    tail = desk.follow()
    with desk.path.open("a") as engine:
        desk.path.rename(desk.path.with_suffix(".old"))
        desk.path.touch()
        engine.write(DEATH)         # the engine keeps its descriptor
        engine.flush()
        assert desk.classes() == ["engine_dead_v1"]
    desk.write(WORKER)
    assert desk.rest(tail) == ["worker_died"]


def test_rotation_loses_no_line_and_keeps_so_many_old_files(desk: Desk) -> None:
    tail = desk.follow(rotate_bytes=20_000, keep=2)
    lines = 0
    desk.write(READY)
    with desk.path.open("ab", buffering=0) as engine:
        for _ in range(4):
            while desk.path.stat().st_size < 20_000:    # and nothing while it is rotated: that may be lost
                engine.write(CHATTER.encode())
                lines += 1
            until(lambda: desk.path.stat().st_size < 20_000)
        engine.write(DEATH.encode())
    assert desk.rest(tail) == ["engine_dead_v1"]
    assert tail._scanner.lines == lines + 2
    assert sorted(path.name for path in desk.path.parent.glob("*log*")) == [
        "primary.log", "primary.log.1", "primary.log.2"
    ]


def test_what_was_not_read_before_a_rotation_is_read_from_the_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n")
    log = LogFile(path)
    assert log.read() == b"one\ntwo\n"
    with path.open("ab") as engine:
        engine.write(b"three\n")
        engine.flush()
        log.rotate(3)
        assert (path.read_bytes(), path.with_name("a.log.1").read_bytes()) == (b"", b"one\ntwo\nthree\n")
        engine.write(b"four\n")
        engine.flush()
        log.rotate(3)       # not while the copy is still being read
        assert path.read_bytes() == b"four\n"
    assert [log.read() for _ in range(3)] == [b"three\n", b"four\n", b""]
    assert not log.rotating
    log.close()


def test_a_rotation_that_fails_changes_nothing_and_is_tried_again_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_watchdog.sense.logfile.os.sendfile", full)
    tail = desk.follow(rotate_bytes=1000)
    with caplog.at_level(logging.WARNING):
        desk.write(READY, CHATTER * 20, DEATH)
        assert desk.rest(tail) == ["engine_dead_v1"]
        until(lambda: bool(caplog.messages))
    assert caplog.messages == [f"log.rotate_failed path={desk.path} error=No space left on device"]
    assert sorted(path.name for path in desk.path.parent.iterdir() if "log" in path.name) == ["primary.log"]


# -- the next daemon

def test_a_new_daemon_reads_on_where_the_old_one_stopped(desk: Desk) -> None:
    first = desk.follow()
    desk.write(READY, DEATH)
    assert desk.classes() == ["engine_dead_v1"]
    first.stop(5)
    desk.write(CHATTER, WORKER)
    second = desk.tail()
    second.follow(ONE)
    assert desk.rest(second) == ["worker_died"]


@pytest.mark.parametrize("cut", range(0, len(DEATH), 10))
def test_a_line_half_written_when_the_daemon_died_is_neither_lost_nor_told_twice(desk: Desk, cut: int) -> None:
    first = desk.follow()
    desk.write(READY, WORKER, DEATH[:cut])
    told = desk.classes()
    until(lambda: json.loads(desk.place.read_text())["offset"] == len(READY + WORKER))
    desk.crash(first)
    desk.write(DEATH[cut:])
    second = desk.tail()
    second.follow(ONE)
    assert told + desk.rest(second) == ["worker_died", "engine_dead_v1"]


def test_the_phase_goes_over_to_the_new_daemon(desk: Desk) -> None:
    """An OOM of a serving engine is not one of its start."""
    first = desk.follow()
    desk.write(READY, CHATTER)
    until(lambda: first._file.offset == desk.path.stat().st_size)
    first.stop(5)
    assert json.loads(desk.place.read_text())["phase"] == "serving"
    second = desk.tail()
    second.follow(ONE)
    settle(second)
    desk.write(OOM)
    assert desk.rest(second) == ["oom_runtime"]


def test_the_place_of_one_generation_is_not_taken_for_the_next(desk: Desk) -> None:
    first = desk.follow()
    desk.write(READY)
    first.stop(5)
    desk.write(DEATH)           # of generation 1, while no daemon ran
    second = desk.follow(TWO)
    assert desk.rest(second, TWO) == []


def test_what_a_generation_wrote_while_no_daemon_ran_is_told_by_its_drain(desk: Desk) -> None:
    first = desk.follow()
    desk.write(READY)
    first.stop(5)
    desk.write(DEATH)
    assert desk.rest(desk.tail(), ONE) == ["engine_dead_v1"]


@pytest.mark.parametrize("by", ["truncated", "replaced"])
def test_a_log_rotated_while_no_daemon_ran_is_read_from_its_start(desk: Desk, by: str) -> None:
    first = desk.follow()
    desk.write(READY, CHATTER * 50)
    until(lambda: first._file.offset == desk.path.stat().st_size)
    first.stop(5)
    if by == "truncated":
        os.truncate(desk.path, 0)
    else:
        desk.path.rename(desk.path.with_name("kept"))
    desk.write(DEATH)
    second = desk.tail()
    second.follow(ONE)
    assert desk.rest(second) == ["engine_dead_v1"]


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"engine": 1}', '{"engine": "primary", "generation": 1, "inode": 1, '
                                  '"offset": 0, "lines": 0, "phase": "nonsense"}'])
def test_a_place_that_can_not_be_read_is_as_none(desk: Desk, kept: str) -> None:
    desk.write(DEATH)
    desk.place.write_text(kept)
    tail = desk.follow()
    desk.write(READY, WORKER)
    assert desk.rest(tail) == ["worker_died"]


def test_a_place_that_can_not_be_written_is_said_and_the_reading_goes_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.place = desk.place.parent / "nowhere" / "place"
    with caplog.at_level(logging.WARNING):
        tail = desk.follow()
        desk.write(READY, DEATH)
        assert desk.rest(tail) == ["engine_dead_v1"]
    assert f"log.place_not_saved path={desk.place} error=No such file or directory" in caplog.messages


# -- limits

def test_a_flood_costs_no_memory_and_hides_nothing(desk: Desk) -> None:
    tail = desk.follow(rotate_bytes=16 << 20, keep=1)
    desk.write(READY)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = (
        f"import sys\nlog = open({str(desk.path)!r}, 'a')\n"
        f"for _ in range(120): log.write({CHATTER!r} * 8000)\n"
        f"log.write({DEATH!r})\n"
    )
    subprocess.run([sys.executable, "-c", flood], check=True, timeout=30)      # 75 MB
    assert desk.rest(tail) == ["engine_dead_v1"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10   # KiB: the database is built, too
    assert sum(path.stat().st_size for path in desk.path.parent.glob("primary.log*")) < 75_000_000


def test_an_endless_line_costs_no_memory(desk: Desk) -> None:
    tail = desk.follow()
    desk.write(READY)
    for _ in range(8):
        desk.write("x" * (1 << 20))
    desk.write("\n", DEATH)
    assert desk.rest(tail) == ["engine_dead_v1"]
    assert len(tail._scanner._tail) == 0


def test_a_log_that_grows_faster_than_it_is_read_is_skipped_aloud(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logtail, "BEHIND", 100)
    tail = desk.follow()
    with caplog.at_level(logging.WARNING):
        desk.write(READY, CHATTER * 20)
        until(lambda: tail._file.offset == desk.path.stat().st_size)
    assert caplog.messages == [f"log.skipped path={desk.path} bytes={desk.path.stat().st_size}"]


def test_the_drain_of_a_log_that_never_ends_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logtail, "DRAIN_S", 0.1)
    tail = desk.follow()
    monkeypatch.setattr(tail._file, "read", lambda _: CHATTER.encode())
    began = time.monotonic()
    assert desk.rest(tail) == []
    assert time.monotonic() - began < 2


def test_a_tail_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    LogTail("primary", tmp_path / "log", tmp_path / "place", print, time.monotonic).stop(1)


def test_what_is_written_is_read_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """inotify tells: looks by the clock would come much later."""
    monkeypatch.setattr(logtail, "SURE_S", 30.0)
    tail = desk.follow()
    desk.write(READY)
    until(lambda: tail._bell.armed and tail._file.offset == desk.path.stat().st_size)
    began = time.monotonic()
    desk.write(DEATH)
    assert desk.classes() == ["engine_dead_v1"]
    assert time.monotonic() - began < 5


def test_without_inotify_it_is_read_by_the_clock(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bell, "_libc", SimpleNamespace(inotify_init1=lambda _: -1))
    tail = desk.follow()
    desk.write(READY, DEATH)
    assert desk.classes() == ["engine_dead_v1"]
    assert not tail._bell.armed
