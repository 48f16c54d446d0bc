from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core import excerpts as x

from vllm_watchdog.core.catalog import Action, Severity
from vllm_watchdog.core.verdict import CONTEXT_LIMIT, HEAD_LINES, Phase, Reader, Stream, classify

CORPUS = sorted((Path(__file__).parents[1] / "fixtures" / "logs").glob("*.json"))


@pytest.mark.parametrize("sidecar", CORPUS, ids=lambda path: path.stem)
def test_a_recorded_excerpt_gets_its_class_and_action(sidecar: Path) -> None:
    expected = json.loads(sidecar.read_text())
    text = sidecar.with_suffix(".log").read_bytes().decode("utf-8", "replace")
    verdict = classify(text.split("\n"))
    assert (verdict.class_, verdict.action) == (expected["expected_class"], expected["expected_action"])
    assert bool(verdict.evidence) == (verdict.class_ != "none")


@pytest.mark.parametrize(
    ("name", "class_", "action", "text"), x.FAILURES + x.KERNEL, ids=[each[0] for each in x.FAILURES + x.KERNEL]
)
def test_a_failure_is_named(name: str, class_: str, action: str, text: str) -> None:
    verdict = classify(text.split("\n"))
    assert (verdict.class_, verdict.action) == (class_, action)


@pytest.mark.parametrize(("name", "text"), x.BENIGN, ids=[each[0] for each in x.BENIGN])
def test_no_benign_excerpt_is_a_failure(name: str, text: str) -> None:
    verdict = classify(text.split("\n"))
    assert (verdict.class_, verdict.severity, verdict.action) == ("none", Severity.NONE, Action.IGNORE)


def feed(reader: Reader, *lines: str) -> list[str]:
    return [found.class_ for line in lines if (found := reader.feed(line))]


def test_a_live_tail_hears_of_each_class_once_and_of_a_cause_when_it_is_confirmed() -> None:
    reader = Reader(Stream.ENGINE, Phase.STARTUP)
    assert (
        feed(reader, x.READY, x.worker("WorkerProc hit an exception."), x.worker(f"torch.OutOfMemoryError: {x.OOM}")) == []
    )
    assert feed(reader, x.v33(x.HEAD), x.v33(x.TRACE), x.api(x.DEAD), x.v33(x.HEAD)) == ["oom_runtime"]
    assert reader.verdict().evidence[0][0] == 3


def test_after_our_own_stop_nothing_is_a_symptom_until_the_next_start() -> None:
    reader = Reader(Stream.ENGINE, Phase.SERVING)
    reader.stop_requested()
    assert feed(reader, x.v33(x.HEAD), x.api(x.DEAD), x.OK) == []
    assert reader.verdict().class_ == "none"
    reader.started()
    assert feed(reader, x.v33("EngineCore failed to start.")) == ["startup_failed"]


def test_a_start_without_an_introduction_begins_a_new_incident() -> None:
    init = x.v33("Initializing a V1 LLM engine (v0.20.2) with config: model='m'", "core.py:110", "INFO")
    reader = Reader(Stream.ENGINE, Phase.SERVING)
    feed(reader, x.v33(x.HEAD), init)
    assert reader.phase is Phase.STARTUP and reader.verdict().class_ == "engine_dead_v1"
    reader.stop_requested()
    feed(reader, init)
    assert reader.phase is Phase.STARTUP
    fresh = Reader()
    feed(fresh, init)
    assert fresh.phase is Phase.STARTUP
    feed(fresh, init)
    assert fresh.phase is Phase.STARTUP


def test_ready_after_a_stop_is_a_new_life() -> None:
    reader = Reader(Stream.ENGINE, Phase.SHUTDOWN)
    assert feed(reader, x.READY, x.v33(x.HEAD)) == ["engine_dead_v1"]
    assert Reader(Stream.ENGINE, Phase.SERVING).feed(x.READY) is None


def test_a_failed_start_after_a_stop_is_still_part_of_the_stop() -> None:
    reader = Reader(Stream.ENGINE, Phase.SHUTDOWN)
    assert feed(reader, x.v33("EngineCore failed to start.")) == [] and reader.phase is Phase.SHUTDOWN


def test_the_kernel_tail_ignores_engine_lines_and_tells_each_xid() -> None:
    reader = Reader(Stream.KERNEL)
    xid = "4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=VLLM::EngineCor"
    assert feed(reader, x.v33(x.HEAD), xid, xid) == ["xid_app", "xid_app"]
    assert Reader(Stream.KERNEL).verdict().phase == "any"


def test_open_headlines_are_bounded() -> None:
    reader = Reader(Stream.ENGINE, Phase.SERVING)
    for pid in range(CONTEXT_LIMIT * 2):
        reader.feed(f"(Worker pid={pid}) ERROR 11-25 03:00:00 [multiproc_executor.py:962] WorkerProc hit an exception.")
    assert len(reader._open) == CONTEXT_LIMIT


def test_a_finding_carries_its_line_its_text_and_its_facts() -> None:
    reader = Reader(Stream.ENGINE, Phase.SERVING)
    reader.feed(x.OK)
    found = reader.feed(x.v33(f"torch.OutOfMemoryError: {x.OOM_OTHER}"))
    assert found and (found.line, found.phase, found.severity) == (2, Phase.SERVING, Severity.FATAL)
    assert dict(found.details)["other_processes"] == ((88121, 19756849561),)


def test_skipped_lines_keep_their_numbers() -> None:
    found = Reader(Stream.ENGINE).feed(x.v33(x.HEAD), 4711)
    assert found and found.line == 4711


def test_the_stream_is_told_from_the_head_of_the_text() -> None:
    lines = [x.OK] * HEAD_LINES + ["[1.0] Out of memory: Killed process 1 (vllm) total-vm:1kB"]
    assert classify(lines).class_ == "none"
    assert classify(lines, Stream.KERNEL).class_ == "host_oom_kill"


@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from(x.QUOTES)), max_size=20))
def test_prompts_never_make_a_failure(prompts: list[str]) -> None:
    reader = Reader(Stream.ENGINE, Phase.SERVING)
    for prompt in prompts:
        for part in prompt.split("\n"):
            assert reader.feed(f"INFO 05-06 02:29:07 [logger.py:39] Received request cmpl-1: prompt: '{part}'") is None
    assert reader.verdict().class_ == "none"
