from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest

from vllm_watchdog.app.console import Console, journald, priority
from vllm_watchdog.app.show import worded


@pytest.mark.parametrize(("line", "level"), [
    ({"say": "incident.opened", "urgency": "page"}, 2), ({"say": "incident.opened", "urgency": "critical"}, 3),
    ({"say": "incident.worsened", "urgency": "warning"}, 4), ({"say": "engine.spawn_failed"}, 3),
    ({"say": "alert.given_up"}, 3), ({"say": "config.refused"}, 3), ({"say": "kernel.unknown"}, 4),
    ({"say": "symptom.raised"}, 4),
    ({"say": "incident.resolved"}, 5), ({"say": "engine.ready"}, 5), ({"say": "engine.phase"}, 6),
])
def test_what_matters_more_has_the_smaller_number(line: dict[str, str], level: int) -> None:
    assert priority(line) == level


def test_a_line_begins_with_its_priority_only_under_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"wall": "2026-11-29T14:41:57.123Z", "at": 1.0, "say": "engine.stray", "decided": True, "engine": "a#1"}
    Console(prefix=True).line(line)
    Console(prefix=False).line(line)
    plain = "2026-11-29T14:41:57.123Z engine.stray engine=a#1\n"
    assert capsys.readouterr().err == f"<4>{plain}{plain}"


def test_the_journals_own_stream_is_known_by_its_inode(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        stat = os.fstat(stream.fileno())
        told = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}
        assert journald(told, stream.fileno())
        assert not journald({}, stream.fileno())
        assert not journald({"JOURNAL_STREAM": "1:1"}, stream.fileno())
        closed = stream.fileno()
    assert not journald(told, closed)


class HungUp(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_a_terminal_that_hung_up_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", HungUp())
    Console(prefix=False).line({"say": "engine.ready"})


def test_one_line_stays_one_line() -> None:
    said = worded({"wall": "now", "say": "x", "text": "two\nlines", "empty": "", "quoted": 'a"b', "pair": "k=v"})
    assert said == 'now x text="two\\nlines" empty= quoted="a\\"b" pair="k=v"'


def test_a_say_of_the_gateway_has_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    Console(prefix=False).say("gateway.ready", port=8000)
    assert capsys.readouterr().err.split(" ", 1)[1] == "gateway.ready port=8000\n"
