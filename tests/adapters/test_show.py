"""What a terminal shows of the history and the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.adapters.test_page import whole

from vllm_watchdog.app import show
from vllm_watchdog.core import incidents
from vllm_watchdog.core.failures import Failure


def row(**more: Any) -> dict[str, Any]:
    return {"id": "20261129T215321Z-primary-oom_runtime", "engine": "primary", "class": "oom_runtime", "urgency": "critical",
            "wall_opened": 1_795_989_201.0, "wall_resolved": None} | more


def test_incidents_are_listed_in_plain_words() -> None:
    lines = show.incidents([
        row(), row(urgency="page"), row(wall_resolved=1_795_989_279.0), row(wall_resolved=1_795_992_801.0),
        row(**{"class": "snapshot"}, wall_resolved=1_795_989_201.0), row(**{"class": "no_such"}),
    ]).splitlines()
    assert lines[0].split() == ["WHEN", "LASTED", "STATE", "ENGINE", "WHAT", "ID"]
    assert [(line[22:30].strip(), line[30:49].strip(), line[58:].split("  ")[0]) for line in lines[1:]] == [
        ("open", "open", "GPU out of memory while serving"),
        ("open", "A HUMAN IS NEEDED", "GPU out of memory while serving"),
        ("78.0 s", "resolved", "GPU out of memory while serving"),
        ("60 min", "resolved", "GPU out of memory while serving"),
        ("0.0 s", "-", "A snapshot that an operator asked for"),
        ("open", "open", "no_such"),
    ]
    assert show.incidents([]) == "no incidents"
    assert "服务中显存不足" in show.incidents([row()], "zh")


def test_one_incident_begins_with_what_to_do_and_ends_with_its_timeline() -> None:
    text = show.incident(whole(), Path("logs/incidents"))
    order = ["GPU out of memory while serving: primary", "Resolved after", "What to change", "how it ended",
             "What proves it", "What was in flight", "Memory at the time", "What was done",
             f"Files: logs/incidents/{whole().id}", "Timeline"]
    assert [text.index(each) for each in order] == sorted(text.index(each) for each in order)
    assert "当时的请求" in show.incident(whole(), Path("x"), ("zh",))
    both = show.incident(whole(), Path("x"), ("en", "zh"))
    assert both.index("What was in flight") < both.index("当时的请求") and both.count("Timeline") == 1


def test_several_failures_are_told_before_what_to_change() -> None:
    made = incidents.failed(whole(), Failure(70.0, "primary#4", "engine_hang", "no token for 12 s", folder="x/dump-2"))
    text = show.incident(made, Path("x"))
    assert text.index("failures\n  1. ") < text.index("  2. 21:53:40Z primary#4") < text.index("What to change")
    assert "  The engine hangs: no token comes, and its counters stand still (engine_hang; the files" in text


def test_columns_are_as_wide_as_a_terminal_shows_them() -> None:
    assert show.table(("A", "B"), [("服务", "1"), ("ok", "2")]) == ["A     B", "服务  1", "ok    2"]


def test_an_event_without_a_sentence_is_shown_with_its_fields() -> None:
    line = {"wall": "2026-11-29T14:41:57.123Z", "at": 1.0, "say": "no.such", "decided": True, "why": "a b", "n": 1}
    assert show.event(line) == '2026-11-29T14:41:57.123Z no.such why="a b" n=1'
    line = {"wall": "2026-11-29T14:41:57.123Z", "say": "symptom.cleared", "symptom": "vram_high", "subject": "gpu0"}
    assert show.event(line) == "2026-11-29T14:41:57.123Z vram_high of gpu0 is over"
    assert show.event(line, "zh").endswith("gpu0 的 vram_high 已消除")
