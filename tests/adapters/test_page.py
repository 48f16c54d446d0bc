from __future__ import annotations

import errno
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.tell import WALL, Clock, Said, incident

from vllm_watchdog.core import incidents
from vllm_watchdog.core.failures import Ended, Failure
from vllm_watchdog.core.incidents import Flight, Incident
from vllm_watchdog.core.levels import CardLevels, Levels
from vllm_watchdog.core.readings import InFlight, Wait
from vllm_watchdog.tell import page as module
from vllm_watchdog.tell.page import Pages, page, plotted, timeline
from vllm_watchdog.tell.plot import Marked, Point, plot

GIB = 1 << 30


def whole() -> Incident:
    """An incident of which everything is known."""
    made = incident(over=True)
    largest = InFlight(1, 240_000, 1.2, False, "0123456789abcdef", 60_000, "suspect")
    card = CardLevels(0, "NVIDIA A10", 22 * GIB, 23 * GIB, 18 * GIB, 20 * GIB, 0.95)
    made = incidents.up(incidents.down(made, 52.0), 100.2)
    made = incidents.waited(incidents.flown(made, Flight("primary#3", 3, 1, (largest,))), Wait(2, 48.2, 47.0, 1, 2))
    made = incidents.noted(made, 53.0, "evidence", "x", folder="x")
    return replace(made, levels=Levels(50.0, (card,), 3 * GIB, 2 * GIB, 0.98, 4, 12),
                   failures=(Failure(50.0, "primary#3", "oom_runtime", "CUDA out of memory", Ended("primary#3", 0, False)),),
                   args=(("max-num-batched-tokens", "8192"),))


def points(first: float = WALL - 300, count: int = 400) -> list[Point]:
    return [Point(first + second, ((0, (20 + second // 100) * GIB),), 3 * GIB, 0.5) for second in range(count)]


@pytest.fixture
def pages(tmp_path: Path, said: Said) -> Pages:
    made = Pages(tmp_path / "incidents", Clock(), said, "gpu-07")
    made.start()
    return made


@pytest.fixture
def said() -> Said:
    return Said()


# -- what stands on it

def test_the_page_alone_tells_a_newcomer_what_happened_and_what_to_do() -> None:
    english, chinese = page(whole(), "gpu-07", has_plot=True).split("\n---\n")
    for wanted in (
        "# GPU out of memory while serving: primary",
        "to engine primary (generation 3) of service primary on host gpu-07",
        "**Resolved after",
        "## What to change\n\n1. A prompt of about 60000 tokens was in flight",
        "Set --max-num-batched-tokens 4096 (it is 8192)",
        "| when | 2026-11-29 21:53:21 UTC", "| cause | oom_runtime |",
        "exit code 0, which means nothing",
        "No engine served for 48.2 s",
        "2 requests that waited in the gateway",
        "```text\nCUDA out of memory\n```",
        "requests in flight on primary#3: 3",
        "| GPU 0 NVIDIA A10 | 22.0 GiB / 23.0 GiB (96%) | threshold 95%; the engine 18.0 GiB; 20.0 GiB after warm-up |",
        "![Memory at the time](memory.svg)",
        "evidence saved", "timeline.jsonl",
    ):
        assert wanted in english, wanted
    for wanted in ("# 服务中显存不足：primary", "## 建议", "设 --max-num-batched-tokens 4096（现为 8192）", "## 当时的内存",
                   "已保存证据"):
        assert wanted in chinese, wanted
    assert english.index("What to change") < english.index("What proves it") < english.index("What was done")


def test_the_page_fits_two_screens() -> None:
    english, _ = page(whole(), "gpu-07", has_plot=True).split("\n---\n")
    assert len(english.splitlines()) < 60


def test_of_several_failures_the_page_begins_with_each_and_says_for_each_what_to_change() -> None:
    made = incidents.failed(whole(), Failure(70.0, "primary#4", "engine_hang", "no token for 12 s", folder="x/dump-2"))
    english, chinese = page(made).split("\n---\n")
    head = english[:english.index("## What to change")]
    assert "2 failures:\n\n1. " in head and "\n2. 21:53:40Z primary#4: The engine hangs" in head
    assert "proof: no token for 12 s; evidence: dump-2/" in head
    todo = english[english.index("## What to change"):english.index("| when |")]
    assert "### GPU out of memory while serving (oom_runtime)\n\n1. " in todo
    assert "(engine_hang; the files named here lie in dump-2/)\n\n" in todo and "stacks.txt" in todo
    assert "how it ended" not in english[english.index("| when |"):], "each failure says it"
    assert "共 2 次故障：" in chinese


def test_a_page_of_which_hardly_anything_is_known_is_whole_too() -> None:
    text = page(incident())
    assert "**An engine serves" in text and "Nothing was done: it is only watched." in text
    assert "![" not in text and "## Memory" not in text and "in flight" not in text


def test_a_snapshot_says_that_nothing_was_wrong() -> None:
    text = page(replace(incident(over=True), class_="snapshot"))
    assert "Nothing was wrong" in text and "What was done" not in text and "没有故障" in text


def test_log_lines_can_neither_end_their_block_nor_a_table() -> None:
    made = replace(whole(), text="``` | # x", failures=(Failure(1.0, "a|b", "x", "y", Ended("a|b", 3, False)),))
    text = page(made)
    assert "''' | # x" in text and r"a\|b: exit code 3" in text


def test_local_time_carries_its_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Shanghai")
    time.tzset()
    try:
        assert module.when(WALL) == "2026-11-29 21:53:20 UTC (2026-11-30 05:53:20 CST+0800)"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_timeline_is_json_with_times_and_figures_by_name() -> None:
    lines = [json.loads(line) for line in timeline(whole()).splitlines()]
    assert lines[0] | {"time": ""} == {"time": "", "what": "opened", "text": "oom_runtime: CUDA out of memory"}
    assert lines[-1]["folder"] == "x" and lines[-1]["time"].endswith("Z")


# -- the plot

def test_the_plot_is_an_svg_with_a_pane_for_each_reading_and_the_threshold() -> None:
    text = plotted(whole(), points())
    root = ET.fromstring(text)
    titles = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"GPU memory, GiB", "host memory of the engine (RSS), GiB", "KV cache, % in use", "GPU 0"} <= set(titles)
    notes = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert notes == ["threshold 21.8 GiB", "the incident"]
    assert len(text) < 40_000
    assert not re.search(r'fill="(#000|black|#fff|white)', text), "it must be seen on white and on black"


def test_a_line_of_a_plot_keeps_its_last_point_and_stays_inside() -> None:
    text = plotted(whole(), points(count=650))
    (first, *_) = re.findall(r'<polyline points="([^"]+)"', text)
    across = [float(pair.split(",")[0]) for pair in first.split()]
    assert len(across) <= 302
    assert min(across) >= 70 and max(across) <= 740


def test_what_was_not_sampled_is_not_drawn() -> None:
    assert plot([], Marked(0.0)) == "" == plot([Point(1.0)], Marked(0.0))
    assert plot([Point(1.0), Point(2.0)], Marked(0.0)) == ""
    text = plot([Point(1.0, ((0, GIB), (1, GIB))), Point(2.0, ((1, 2 * GIB),)), Point(3.0, (), None, 0.5)], Marked(9.0))
    assert text.count("<polyline") == 2 and "KV" not in text and "<title>" not in text


def test_an_empty_card_and_an_empty_host_are_drawn_at_the_bottom() -> None:
    text = plot([Point(1.0, ((0, 0),), 0), Point(2.0, ((0, 0),), 0)], Marked(1.5))
    assert text.count("<polyline") == 2 and "nan" not in text


def test_points_that_begin_after_the_incident_leave_the_earlier_plot(pages: Pages, tmp_path: Path) -> None:
    made = whole()
    assert plotted(made, points(first=made.wall_opened + 1)) == ""
    pages.write(made, lambda: tuple(points()))
    pages.stop(5.0)
    drawn = (tmp_path / "incidents" / made.id / "memory.svg").read_text()
    again = Pages(tmp_path / "incidents", Clock(), Said())
    again.start()
    again.write(made, lambda: tuple(points(first=made.wall_opened + 1)))
    again.stop(5.0)
    assert (tmp_path / "incidents" / made.id / "memory.svg").read_text() == drawn
    assert "memory.svg" in (tmp_path / "incidents" / made.id / "README.md").read_text("utf-8")


# -- how it is written

def test_the_files_are_the_owners_alone_and_the_newest_version_stays(pages: Pages, tmp_path: Path) -> None:
    for text in ("first", "second"):
        pages.write(replace(whole(), text=text))
    pages.stop(5.0)
    folder = tmp_path / "incidents" / whole().id
    assert {path.name for path in folder.iterdir()} == {"README.md", "timeline.jsonl"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.iterdir()))
    assert "second" in (folder / "README.md").read_text("utf-8")


def test_a_full_disk_costs_the_page_and_is_said_once_a_minute(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def put(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(module, "replace_whole", put)
    clock = Clock()
    pages = Pages(tmp_path / "incidents", clock, said)
    pages.start()
    pages.write(incident(1))
    assert said.wait("page.failed")[0]["why"] == "No space left on device"
    pages.write(incident(2))
    full = False
    pages.write(incident(3))
    pages.stop(5.0)
    assert len(said.of("page.failed")) == 1
    assert (tmp_path / "incidents" / incident(3).id / "README.md").exists()


def test_what_is_never_started_stops_too(tmp_path: Path) -> None:
    Pages(tmp_path, Clock(), Said()).stop(1.0)
