from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.core.scenes import Scene, finding, plan

from vllm_watchdog.core import story
from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.commands import Record
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.web.incident import classes, told


def failed() -> Incident:
    scene = Scene(plan(backup=False)).serve()
    wrong = replace(finding("bad_args", "1 validation error"), details=(
        ("field", "gpu_memory_utilization"), ("problem", "Input should be less than or equal to 1"), ("value", "80.0")))
    scene.crash("primary", 10.0, wrong)
    return scene.world.incidents[0]


def row(incident: Incident) -> dict[str, Any]:
    return {"id": incident.id, "class": incident.class_, "incident": encode(incident)}


def test_an_incident_is_told_in_its_own_words_not_the_catalogue_s() -> None:
    incident = failed()
    whole = told(row(incident))
    assert whole["title"] == {"en": "vLLM refuses its arguments", "zh": "vLLM 拒绝启动参数"}
    assert whole["advice"][0]["en"].startswith("Set gpu-memory-utilization otherwise: Input should be")
    assert "llm-watchdog restart primary" in whole["advice"][-1]["zh"]
    assert whole["state"]["en"].startswith("Not resolved, a human is needed") and whole["state"]["zh"].startswith("未恢复")
    assert whole["gap"]["en"].startswith("No engine serves since")
    assert [each["at"] for each in whole["actions"]] == [story.wall(incident, step.at) for step in story.actions(incident)]


def test_cause_and_timeline_are_told_in_both_languages() -> None:
    scene = Scene(plan(backup=False)).serve()
    scene.crash("primary", 10.0)
    whole = told(row(scene.all(Record)[-1].incident))
    assert whole["cause"] == {"en": "unexpected_exit: it exited with code 1", "zh": "unexpected_exit：以退出码 1 退出"}
    opened = whole["timeline"][0]
    assert (opened["what"], opened["zh"]) == ({"en": "opened", "zh": "发生"}, "unexpected_exit：以退出码 1 退出")
    assert opened["at"] == whole["incident"]["wall_opened"]
    assert [(line["what"]["zh"], line["zh"]) for line in whole["timeline"][1:]] == [
        ("阶段", "primary：等待重启 → 等待显存"), ("阶段", "primary：等待显存 → 启动中"), ("启动", "正在启动 primary#2")]


def test_one_that_can_not_be_read_has_the_catalogue_s_words() -> None:
    for unreadable in (None, {"_": "Incident", "new": 1}, encode(finding("bad_args"))):
        whole = told(row(failed()) | {"incident": unreadable})
        assert whole["title"]["en"] == "vLLM refuses its arguments" and "llm-watchdog doctor" in whole["advice"][0]["en"]
        assert (whole["state"], whole["gap"], whole["actions"]) == (None, None, [])
    unknown = told({"id": "x", "class": "of_tomorrow"})
    assert (unknown["title"], unknown["advice"]) == (None, [])


def test_every_class_is_named() -> None:
    assert all(text["en"] and text["zh"] for text in classes().values())
