from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import pytest
from tests.fakes.tell import WALL, Clock, Said, incident

from vllm_watchdog.core.catalog import Action, Severity
from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.memory import EngineMemory, Memory, ServiceMemory
from vllm_watchdog.core.verdict import Finding
from vllm_watchdog.tell import store
from vllm_watchdog.tell.store import Store, load


def memory(generation: int = 1) -> Memory:
    finding = Finding("oom_runtime", Severity.FATAL, Action.RESTART, 7, "显存 \udcff",
                      (("free_bytes", 12), ("others", ((4, 5),))))
    engine = EngineMemory("primary", generation, True, (1.5, 2.0), "bad_args", "why")
    service = ServiceMemory("primary", True, 1.0)
    return Memory("boot", (engine,), (service,), (replace(incident(), findings=(finding,)),), True)


def clean(value: Memory) -> object:
    return json.loads(json.dumps(encode(value), ensure_ascii=False).encode("utf-8", "replace"))


@pytest.fixture
def said():
    return Said()


def test_what_was_saved_is_what_the_next_daemon_loads(tmp_path, said):
    path = tmp_path / "state" / "memory.json"
    keep = Store(path, Clock(), said)
    keep.start()
    keep.save(memory())
    assert keep.flush(5) and keep.stop(5)
    assert encode(load(path, WALL, said)) == clean(memory())
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in path.parent.iterdir()] == ["memory.json"]


def test_a_first_start_knows_nothing_and_says_nothing(tmp_path, said):
    assert load(tmp_path / "memory.json", WALL, said) is None
    assert said.lines == []


@pytest.mark.parametrize("text", [
    "", "{", "[1]", "null", "[" * 100_000, '{"_":"Memory"}', '{"_":"Memory","boot_id":7}',
    '{"_":"EngineMemory","name":"a"}',
    '{"_":"EngineMemory","name":"a","generation":1,"wanted":true}', '{"_":"Memory","boot_id":"b","later":1}',
    '{"_":"Memory","boot_id":"b","paused":{}}', "\udcff",
])
def test_a_file_that_cannot_be_read_is_set_aside_and_said(tmp_path, said, text):
    path = tmp_path / "memory.json"
    path.write_text(text, errors="surrogateescape")
    assert load(path, WALL, said) is None
    (line,) = said.of("file.set_aside")
    assert line["aside"] == f"{path}.corrupt-20261129T215320Z" and line["why"]
    assert not path.exists() and os.path.exists(line["aside"])


def test_the_latest_value_wins_and_what_was_overtaken_is_not_written(tmp_path, said, monkeypatch):
    written, held, go = [], threading.Event(), threading.Event()

    def slow(path, data):
        written.append(json.loads(data)["engines"][0]["generation"])
        held.set()
        assert go.wait(10)

    monkeypatch.setattr(store, "replace_whole", slow)
    keep = Store(tmp_path / "memory.json", Clock(), said)
    keep.start()
    keep.save(memory(1))
    assert held.wait(5)
    for generation in range(2, 50):
        keep.save(memory(generation))
    assert not keep.flush(0.05)
    go.set()
    assert keep.flush(5) and keep.stop(5)
    assert written == [1, 49]


def test_a_disk_that_refuses_is_said_once_a_minute_and_tried_again(tmp_path, said, monkeypatch):
    monkeypatch.setattr(store, "retry_s", 0.01)
    folder = tmp_path / "state"
    folder.write_text("in the way")
    clock = Clock()
    keep = Store(folder / "memory.json", clock, said)
    keep.start()
    keep.save(memory())
    said.wait("store.failed")
    clock.at += store.complain_s
    said.wait("store.failed", 2)
    folder.unlink()
    assert keep.flush(5) and keep.stop(5)
    assert len(said.of("store.failed")) == 2
    assert load(folder / "memory.json", WALL, said) is not None


def test_a_stop_does_not_wait_for_a_disk_that_refuses(tmp_path, said):
    (tmp_path / "state").write_text("in the way")
    keep = Store(tmp_path / "state" / "memory.json", Clock(), said)
    keep.start()
    keep.save(memory())
    assert not keep.stop(5)
    assert said.of("store.failed")


def test_half_a_file_left_by_a_power_cut_does_not_hide_the_last_whole_one(tmp_path, said):
    path = tmp_path / "memory.json"
    keep = Store(path, Clock(), said)
    keep.start()
    keep.save(memory())
    assert keep.stop(5)
    path.with_name("memory.json.new").write_text('{"_":"Mem')
    assert load(path, WALL, said) is not None


def test_what_must_be_on_disk_before_is(tmp_path, said):
    """The state must not forget an incident whose "resolved" is not written down yet."""
    path, go, seen = tmp_path / "memory.json", threading.Event(), []
    keep = Store(path, Clock(), said, first=lambda: seen.append((go.wait(10), path.exists())))
    keep.start()
    keep.save(memory())
    assert not keep.flush(0.05) and not path.exists()
    go.set()
    assert keep.flush(5) and keep.stop(5)
    assert seen == [(True, False)] and path.exists()
