from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapters.test_logtail import OOM
from tests.core.scenes import WALL, mark
from tests.fakes.tell import Clock, Said, incident

from vllm_watchdog.app.haste import HASTE_S, Haste
from vllm_watchdog.core.events import LogRead
from vllm_watchdog.core.world import Memory
from vllm_watchdog.sense.logtail import LogTail
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.journal import Journal
from vllm_watchdog.tell.store import Store


def test_without_haste_nobody_waits() -> None:
    haste = Haste(time.monotonic)
    began = time.monotonic()
    for _ in range(100):
        haste.give_way()
    assert time.monotonic() - began < HASTE_S


def test_haste_ends_with_the_start_that_it_was_for() -> None:
    haste = Haste(Clock())      # whose time stands still: only `end` ends it
    haste.begin()
    waiter = threading.Thread(target=haste.give_way)
    waiter.start()
    assert waiter.is_alive()
    haste.end()
    waiter.join(HASTE_S / 2)
    assert not waiter.is_alive()


def test_haste_that_nobody_ends_is_over_soon_and_for_good() -> None:
    haste = Haste(time.monotonic)
    began = time.monotonic()
    haste.begin()
    haste.give_way()
    assert time.monotonic() - began >= HASTE_S
    began = time.monotonic()
    haste.give_way()
    assert time.monotonic() - began < HASTE_S


class Gate:
    """Stands in for `give_way`."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(10)


def journal(folder: Path, gate: Gate) -> tuple[Callable[[], object], Callable[[], object], Callable[[], bool]]:
    made = Journal(folder, Clock(), lambda: WALL, give_way=gate)
    made.start()
    return lambda: made.say("hello"), lambda: made.stop(10), lambda: b"hello" in b"".join(
        path.read_bytes() for path in folder.glob("*.jsonl"))


def store(folder: Path, gate: Gate) -> tuple[Callable[[], object], Callable[[], object], Callable[[], bool]]:
    made = Store(folder / "state.json", Clock(), Said(), give_way=gate)
    made.start()
    return (lambda: made.save(Memory(boot_id="this one")), lambda: made.stop(10),
            lambda: (folder / "state.json").exists() and "this one" in (folder / "state.json").read_text())


def history(folder: Path, gate: Gate) -> tuple[Callable[[], object], Callable[[], object], Callable[[], bool]]:
    made = History(folder / "history.db", Clock(), lambda: WALL, Said(), give_way=gate)
    made.start()
    return lambda: made.record(incident(1)), lambda: made.stop(10), lambda: (folder / "history.db").exists()


def place(folder: Path, gate: Gate) -> tuple[Callable[[], object], Callable[[], object], Callable[[], bool]]:
    """The log's end is told first; only the place in it waits."""
    path, events = folder / "primary.log", list[object]()
    path.write_text("a line\n")
    made = LogTail("primary", path, folder / "primary.offset", events.append, time.monotonic, give_way=gate)
    made.start()
    made.follow(mark("primary#1"))
    until((folder / "primary.offset").exists)
    with path.open("a") as file:
        file.write("its last\n")

    def kept() -> bool:
        assert events, "the gate was reached before the end was told"
        return json.loads((folder / "primary.offset").read_text())["offset"] == path.stat().st_size

    return lambda: made.drain(mark("primary#1")), lambda: made.stop(10), kept


@pytest.mark.parametrize("writer", [journal, store, history, place], ids=lambda writer: writer.__name__)
def test_whoever_writes_gives_way_first(tmp_path: Path, writer: Callable[..., tuple[Callable[[], object], ...]]) -> None:
    gate = Gate()
    write, stop, written = writer(tmp_path, gate)
    try:
        write()
        assert gate.reached.wait(10)
        assert not written()
    finally:
        gate.open.set()
        stop()
    assert written()


def test_a_finding_that_comes_before_the_end_holds_nobody_up(tmp_path: Path) -> None:
    """The drain, which a start waits for, may be the next order."""
    path, kept = tmp_path / "primary.log", tmp_path / "primary.offset"
    events, waited = list[LogRead](), list[int]()
    path.write_text("")
    made = LogTail("primary", path, kept, events.append, time.monotonic, give_way=lambda: waited.append(len(events)))
    made.start()
    try:
        made.follow(mark("primary#1"))
        until(kept.exists)
        with path.open("a") as file:
            file.write(OOM)
        until(lambda: events)
        made.drain(mark("primary#1"))
        until(lambda: waited)
    finally:
        made.stop(10)
    assert [(bool(read.findings), read.drained) for read in events] == [(True, False), (False, True)]
    assert waited == [2]


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.002)
