from __future__ import annotations

import pytest

from vllm_watchdog.core.loading import LINES, NEEDLES, Stage, stage_of
from vllm_watchdog.sim.loading import PHASES

AT = "(EngineCore pid=7) INFO 11-29 02:29:07 [gpu_worker.py:331] "


@pytest.mark.parametrize(("text", "stage"), LINES)
def test_each_line_begins_its_stage(text: str, stage: Stage) -> None:
    assert stage_of(AT + text + " and more") is stage


@pytest.mark.parametrize("line", [
    "", "INFO:     Application startup complete.",
    'INFO:     127.0.0.1:5 - "GET /v1/x?q=Starting to load model HTTP/1.1" 200 OK'])
def test_any_other_line_begins_none(line: str) -> None:
    assert stage_of(line) is None


def test_a_start_as_the_stand_in_writes_it_goes_through_the_stages_in_order() -> None:
    seen = [stage for _, _, text in PHASES if (stage := stage_of(AT + text))]
    assert seen == [Stage.WEIGHTS, Stage.PROFILING, Stage.KV_CACHE, Stage.KV_CACHE, Stage.SERVER]


def test_no_line_is_named_twice() -> None:
    assert len(set(NEEDLES)) == len(NEEDLES)
