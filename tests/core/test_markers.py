from __future__ import annotations

from pathlib import Path

import pytest

from vllm_watchdog.core.markers import Mark, mark_of, stats_of
from vllm_watchdog.core.records import parse


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        ("INFO:     Application startup complete.", Mark.READY),
        ("INFO 05-06 02:29:07 [api_server.py:1] Starting vLLM API server 0 on http://0.0.0.0:8000", Mark.READY),
        ("INFO 05-06 02:29:07 [entry.py:1] Starting vLLM server on http://0.0.0.0:8000", Mark.READY),
        ("INFO 05-06 02:29:07 [logger.py:1] Starting vLLM server on http://0.0.0.0:8000", None),
        ("INFO 05-06 02:29:07 [any.py:1] Resolved architecture: X", Mark.LOADING),
        ('  File "/x/worker.py", line 9, in profile_run', Mark.LOADING),
        ("see profile_run, in profile_run", None),
        ("ERROR 05-06 02:29:07 [core.py:1] EngineCore failed to start.", Mark.START_FAILED),
        ("INFO 05-06 02:29:07 [core.py:1] EngineCore failed to start.", None),
        ("INFO:     Shutting down", Mark.UVICORN_STOP),
        ('INFO:     1.2.3.4:5 - "GET /Shutting HTTP/1.1" 200 OK', None),
    ],
)
def test_a_milestone_counts_only_where_vllm_prints_it(line: str, mark: Mark | None) -> None:
    assert mark_of(parse(line)[0]) is mark


def stats(text: str, where: str = "[loggers.py:1]", level: str = "INFO") -> str:
    return (
        f"{level} 05-06 02:29:07 {where} Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, "  # noqa: E501
        f"{text}, GPU KV cache usage: 1.0%"
    )


def test_waiting_without_running_is_a_deadlock_and_deferred_requests_wait_too() -> None:
    found = stats_of(parse(stats("Running: 0 reqs, Waiting: 2 reqs, Deferred: 3 reqs, Preemptions: 4"))[0])
    assert found and found.deadlocked and not found.silent
    assert (found.waiting, found.preemptions) == (5, 4)


def test_only_v0_is_believed_when_it_runs_and_says_nothing() -> None:
    v0 = stats_of(parse(stats("Running: 1 reqs, Swapped: 0 reqs, Pending: 0 reqs"))[0])
    v1 = stats_of(parse(stats("Running: 1 reqs, Waiting: 0 reqs"))[0])
    assert v0 and v1 and v0.silent and not v1.silent


@pytest.mark.parametrize(
    "line", ["Avg prompt throughput: 1", stats("x"), stats("Running: 0 reqs, Waiting: 2 reqs", "[logger.py:1]")]
)
def test_other_lines_are_no_stats(line: str) -> None:
    assert stats_of(parse(line)[0]) is None


MILESTONES = [
    line.split("\t") for line in (Path(__file__).parents[1] / "fixtures" / "milestones.tsv").read_text().splitlines()
]


@pytest.mark.parametrize(("mark", "line"), MILESTONES, ids=[line for _, line in MILESTONES])
def test_every_milestone_is_known(mark: str, line: str) -> None:
    assert mark_of(parse(line)[0]) == mark
    assert mark_of(parse(f"INFO 05-06 02:29:07 [request_logger.py:39] prompt: {line}")[0]) is None
