from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.fakes.house import WRITER
from tests.fakes.tell import WALL, incident

from vllm_watchdog.config_channels import NAMES
from vllm_watchdog.core.catalog import CATALOG, Action
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import HOST, Entry, Need, Urgency, down, failed, joined, noted, opened, resolved, up
from vllm_watchdog.tell.payload import Language, Templates, _facts, key, trial
from vllm_watchdog.tell.phrases import EN, ZH

FOLDER = f"/var/log/llm-watchdog/incidents/{incident().id}"
WORDS = replace(WRITER, language=Language.EN)


def after(*changes, over=None, one=None):
    """The incident after the changes, each (seconds since it opened, function of `incidents`, more arguments)."""
    one = one or incident()
    for at, change, *more, facts in changes:
        one = change(one, one.opened_at + at, *more, **facts)
    return one if over is None else resolved(one, one.opened_at + over, one.wall_opened + over, "calm")


REPLACED = ((0.5, down, {}), (0.6, noted, "stopped", "primary#3", {"engine": "primary#3"}),
            (1.0, noted, "started", "starting primary#4", {"engine": "primary#4"}), (13.0, up, {}))


@pytest.mark.parametrize("class_", CATALOG)
@pytest.mark.parametrize("language", Language)
def test_every_class_has_words_in_both_languages_and_fits(class_, language):
    long = replace(incident(), class_=class_, text="x" * 10_000,
                   timeline=tuple(Entry(1.0, "action", "y" * 10_000) for _ in range(300)))
    payload = replace(WRITER, language=language).payload(Alert("opened", long), WALL)
    assert len(json.dumps(payload)) < 32 << 10
    assert all(payload["title"].values())
    assert ("OPENED" in payload["text"]) is (language != "zh") and ("故障" in payload["text"]) is (language != "en")


def test_the_payload_says_what_where_and_what_to_change():
    payload = WORDS.payload(Alert("opened", incident()), WALL)
    expected = {"version": 1, "kind": "opened", "incident": incident().id, "service": "primary", "engine": "primary",
                "class": "oom_runtime", "urgency": "critical", "host": "gpu-1", "id": f"{incident().id}/opened",
                "opened": "2026-11-29T21:53:21.000Z", "resolved": None}
    assert payload | expected == payload
    assert payload["at"] == "2026-11-29T21:53:20.000Z" and payload["folder"] == FOLDER
    assert payload["title"]["en"] == "GPU out of memory while serving"
    assert "max-num-batched-tokens" in payload["advice"][0]
    lines = payload["text"].splitlines()
    assert lines[:3] == [
        "[OPENED, critical] GPU out of memory while serving: primary on gpu-1",
        "Cause: oom_runtime: CUDA out of memory",
        "State: An engine serves, nothing must be done now; resolved when it has stayed calm for a while."]
    assert lines[3] == "Done: it will be restarted"
    assert lines[4].startswith("Next: Lower --max-num-batched-tokens")
    assert lines[5:] == ["Engine: primary (service primary)", "Opened: 2026-11-29 21:53:21Z", f"Evidence: {FOLDER}"]


def test_the_end_says_what_was_done_and_how_long_nobody_was_served():
    payload = WORDS.payload(Alert("resolved", after(*REPLACED, over=60.0)), WALL)
    assert payload["text"].splitlines() == [
        "[RESOLVED] GPU out of memory while serving: primary on gpu-1", "Cause: oom_runtime: CUDA out of memory",
        "State: Resolved after 60.0 s; nothing more must be done now.",
        "Done: primary#3 was told to stop; primary#4 was started", "Gap: No engine served for 12.5 s, until 21:53:34Z.",
        "Engine: primary (service primary)", "Opened: 2026-11-29 21:53:21Z", "Resolved: 2026-11-29 21:54:21Z, after 60 s",
        f"Evidence: {FOLDER}"]
    assert payload["gap_s"] == 12.5
    assert payload["actions"] == ["primary#3 was told to stop", "primary#4 was started"]


def test_a_chinese_alert_says_in_chinese_how_it_stands_what_was_done_and_who_was_not_served():
    writer = replace(WRITER, language=Language.ZH)
    lines = writer.payload(Alert("opened", after(*REPLACED[:3])), WALL)["text"].splitlines()
    assert lines[2:5] == ["现状: 未恢复：21:53:21Z 起无引擎提供服务，watchdog 正在替换。",
                          "已采取的动作: 要求 primary#3 停止；启动 primary#4", "中断: 21:53:21Z 起无引擎提供服务。"]
    payload = writer.payload(Alert("resolved", after(*REPLACED, over=60.0)), WALL)
    assert payload["text"].splitlines()[2:5] == [
        "现状: 已恢复，历时 60.0 s；目前无需处理。", "已采取的动作: 要求 primary#3 停止；启动 primary#4",
        "中断: 无引擎提供服务共 12.5 s，至 21:53:34Z。"]
    assert (payload["state"], payload["actions"]) == (
        ["已恢复，历时 60.0 s；目前无需处理。"], ["要求 primary#3 停止", "启动 primary#4"])


def test_in_both_languages_each_sentence_is_said_twice():
    payload = WRITER.payload(Alert("resolved", after(*REPLACED, over=60.0)), WALL)
    assert payload["actions"] == [
        "primary#3 was told to stop", "primary#4 was started", "要求 primary#3 停止", "启动 primary#4"]
    assert len(payload["state"]) == 2 and len(payload["advice"]) % 2 == 0


def test_what_got_worse_is_told_by_its_new_cause():
    warned = opened("primary", "primary", 3, "vram_high", Urgency.WARNING, "GPU 0: 93 % in use", 50.0, WALL)
    worse = joined(warned, "engine_hang", Urgency.CRITICAL, "no token for 70 s", 60.0)
    lines = WORDS.payload(Alert("worsened", worse), WALL)["text"].splitlines()
    assert lines[0] == f"[WORSE, critical] {CATALOG['engine_hang'].title.en}: primary on gpu-1"
    assert lines[1] == "Cause: engine_hang: no token for 70 s"
    paged = replace(joined(worse, "budget_spent", Urgency.PAGE, "primary is held: 6 failures", 70.0),
                    needs=(Need("primary", "budget_spent", "primary is held: 6 failures", "…"),))
    assert "State: Not resolved, a human is needed: primary is held: 6 failures." in (
        WORDS.payload(Alert("worsened", paged), WALL)["text"].splitlines())


def test_a_page_says_why_a_human_is_needed_and_promises_nothing():
    held = replace(incident(urgency=Urgency.PAGE), reminders=2,
                   needs=(Need("primary", "budget_spent", "primary is held: 6 failures within 3600 s", "…"),))
    text = WORDS.payload(Alert("reminder", held), WALL)["text"]
    assert text.startswith("[STILL OPEN, human needed] ") and "restarted" not in text
    assert "State: Not resolved, a human is needed: primary is held: 6 failures within 3600 s." in text
    assert "Done" not in text
    over = resolved(held, 80.0, WALL + 30, "the backup serves")
    assert "a human is still needed: primary is held" in WORDS.payload(Alert("resolved", over), WALL)["text"]


def test_what_is_told_once_has_an_id_of_its_own():
    one = incident(urgency=Urgency.PAGE)
    assert [key(Alert(kind, replace(one, reminders=3))) for kind in ("opened", "worsened", "reminder", "resolved")] == [
        "opened", "worsened-page", "reminder-3", "resolved"]
    assert trial(1.0).incident.id != trial(2.0).incident.id


def test_a_gap_that_goes_on_says_since_when_and_none_is_news_only_at_the_end():
    assert "Gap: No engine serves since 21:53:23Z." in WORDS.payload(Alert("worsened", after((2.0, down, {}))), WALL)["text"]
    payload = WORDS.payload(Alert("opened", incident()), WALL)
    assert "Gap" not in payload["text"] and payload["gap_s"] == 0.0
    payload = WORDS.payload(Alert("resolved", incident(over=True)), WALL)
    assert "Gap: The service was never without an engine." in payload["text"]
    host = replace(incident(over=True), service=HOST, engine=HOST)
    payload = WORDS.payload(Alert("resolved", host), WALL)
    assert "Gap" not in payload["text"] and payload["gap_s"] is None


# -- templates

def test_own_texts_take_the_place_of_ours():
    templates = Templates("$urgency: $title @ $host [$class]", "what: $cause\n\ngap: $gap\nfolder: $folder costs $$5")
    payload = replace(WORDS, templates=templates).payload(Alert("opened", incident()), WALL)
    assert payload["headline"] == "critical: GPU out of memory while serving @ gpu-1 [oom_runtime]"
    assert [line for _, line in payload["lines"]] == [
        "what: oom_runtime: CUDA out of memory", "gap: ", f"folder: {FOLDER} costs $5"]


@pytest.mark.parametrize("tongue", [EN, ZH])
def test_every_name_that_check_config_allows_is_given_and_every_table_is_whole(tongue):
    facts = _facts(tongue, "opened", incident(), WRITER)
    assert set(facts) - {"code", "who"} == NAMES
    assert set(tongue.urgencies) == set(Urgency) and set(tongue.plans) == set(Action) - {Action.IGNORE}
    assert set(tongue.kinds) == {"opened", "worsened", "reminder", "resolved", "test"}
    assert set(tongue.labels) >= {"cause", "state", "action", "gap", "next", "engine", "opened", "resolved", "folder"}


# -- several in one

def test_a_group_says_how_many_and_which_and_holds_them_all():
    payloads = [WORDS.payload(Alert("opened", incident(n)), WALL) for n in (1, 2, 3)]
    payloads.append(WORDS.payload(Alert("resolved", incident(2, over=True)), WALL))
    group = WORDS.group(payloads)
    assert group["text"].splitlines() == [
        "[4 ALERTS] 3 OPENED, 1 RESOLVED on gpu-1",
        f"OPENED: GPU out of memory while serving, critical ({incident(1).id})",
        f"OPENED, RESOLVED: GPU out of memory while serving, critical ({incident(2).id})",
        f"OPENED: GPU out of memory while serving, critical ({incident(3).id})"]
    assert (group["kind"], group["count"], group["urgency"], group["over"]) == ("group", 4, "critical", False)
    assert group["alerts"] == payloads
    assert WORDS.group(payloads[1:2] + payloads[3:]) == payloads[3]      # of one incident the newest tells all
    assert WORDS.group([payloads[3], WORDS.payload(Alert("resolved", incident(4, over=True)), WALL)])["over"]


# -- several failures in one incident

def failing(*classes):
    made = incident()
    for number, class_ in enumerate(classes, 1):
        made = failed(made, Failure(50.0 + 10 * number, f"primary#{number}", class_, f"proof {number}"))
    return made


def test_a_second_failure_is_named_with_its_proof_and_its_advice_comes_first():
    worse = noted(failing("oom_runtime", "engine_hang"), 70.0, "failover", leaving="primary", to="backup", because="held")
    text = WORDS.payload(Alert("worsened", worse), WALL)["text"]
    assert "Failures: 2 failures: 2. 21:53:40Z primary#2: The engine hangs" in text and "proof 2" in text
    assert "Done: failover from primary to backup" in text
    assert "Next: Read stacks.txt" in text
    over = WORDS.payload(Alert("resolved", resolved(worse, 90.0, WALL + 40, "calm")), WALL)["text"]
    assert "Failures: 2 failures: 1. 21:53:30Z primary#1" in over and "2. 21:53:40Z primary#2" in over
    assert "Failures" not in WORDS.payload(Alert("opened", failing("oom_runtime")), WALL)["text"]


def test_each_further_failure_and_each_further_engine_has_an_alert_of_its_own():
    needs = tuple(Need(name, "bad_args", "held", "…") for name in ("primary", "backup"))
    held = replace(failing("oom_runtime"), needs=needs)
    assert [key(Alert("worsened", one)) for one in (failing("a"), failing("a", "b"), failing("a", "b", "c"), held)] == [
        "worsened-critical-1", "worsened-critical-2", "worsened-critical-3", "worsened-critical-1-backup-primary"]
