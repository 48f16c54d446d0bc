from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.fakes.house import WRITER
from tests.fakes.tell import WALL, incident

from vllm_watchdog.config_channels import NAMES
from vllm_watchdog.core.catalog import CATALOG, Action, Text
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.core.incidents import Entry, Urgency, resolved
from vllm_watchdog.tell.deeds import deeds
from vllm_watchdog.tell.payload import Language, Templates, _facts, key, trial
from vllm_watchdog.tell.phrases import EN, ZH

FOLDER = f"/var/log/llm-watchdog/incidents/{incident().id}"
WORDS = replace(WRITER, language=Language.EN)


def after(*entries, over=None):
    """The incident with a timeline of (at, what, text), `at` seconds after it opened."""
    one = incident()
    one = replace(one, timeline=(*one.timeline, *(Entry(one.opened_at + at, what, text) for at, what, text in entries)))
    return one if over is None else resolved(one, one.opened_at + over, one.wall_opened + over, "calm")


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
        "Cause: oom_runtime: CUDA out of memory", "Done: it will be restarted"]
    assert lines[3].startswith("Next: Lower --max-num-batched-tokens")
    assert lines[4:] == ["Engine: primary (service primary)", "Opened: 2026-11-29 21:53:21Z", f"Evidence: {FOLDER}"]


def test_the_end_says_what_was_done_and_how_long_nobody_was_served():
    over = after((0.5, "phase", "primary: serving -> stopping"), (1.0, "action", "starting primary#4"),
                 (13.0, "ready", "primary#4 serves"), over=60.0)
    payload = WORDS.payload(Alert("resolved", over), WALL)
    assert payload["text"].splitlines() == [
        "[RESOLVED] GPU out of memory while serving: primary on gpu-1",
        "Cause: oom_runtime: CUDA out of memory", "Done: starting primary#4", "Gap: no engine served for 12.5 s",
        "Engine: primary (service primary)", "Opened: 2026-11-29 21:53:21Z", "Resolved: 2026-11-29 21:54:21Z, after 60 s",
        f"Evidence: {FOLDER}"]
    assert payload["gap_s"] == 12.5 and payload["actions"] == ["starting primary#4"]


def test_a_page_says_why_a_human_is_needed_and_promises_nothing():
    held = replace(incident(urgency=Urgency.PAGE), page="primary is held: 6 failures within 3600 s", reminders=2)
    text = WORDS.payload(Alert("reminder", held), WALL)["text"]
    assert text.startswith("[STILL OPEN, human needed] ") and "restarted" not in text
    assert "A human is needed: primary is held: 6 failures within 3600 s" in text
    assert "Done" not in text
    assert "A human is needed" not in WORDS.payload(Alert("resolved", held), WALL)["text"]


def test_what_is_told_once_has_an_id_of_its_own():
    one = incident(urgency=Urgency.PAGE)
    assert [key(Alert(kind, replace(one, reminders=3))) for kind in ("opened", "worsened", "reminder", "resolved")] == [
        "opened", "worsened-page", "reminder-3", "resolved"]
    assert trial(1.0).incident.id != trial(2.0).incident.id


@pytest.mark.parametrize(("entries", "over", "gap"), [
    ((), 5.0, (0.0, None)),                                                                     # it never left
    (((1, "phase", "primary: serving -> suspect"), (3, "phase", "primary: suspect -> serving")), None, (0.0, None)),
    (((1, "phase", "primary: suspect -> dumping"),), None, (0.0, 52.0)),                        # still down, since then
    (((1, "phase", "primary: draining -> backoff"), (9, "ready", "primary#4 serves")), None, (9.0, None)),   # from the start
    (((1, "phase", "primary: serving -> stopping"), (2, "phase", "backup: waking -> serving"),
      (5, "phase", "backup: serving -> stopping"), (9, "ready", "primary#4 serves")), 20.0, (5.0, None)),
    (((1, "phase", "primary: serving -> stopping"), (1, "failover", "primary -> backup, because: ready")), 20.0,
     (None, None)),
])
def test_the_gap_is_read_from_the_timeline(entries, over, gap):
    done = deeds(after(*entries, over=over))
    down_at = None if gap[1] is None else gap[1]
    assert (done.gap_s, done.down_at) == (gap[0], down_at)


def test_a_gap_that_goes_on_says_since_when():
    text = WORDS.payload(Alert("worsened", after((2.0, "phase", "primary: serving -> stopping"))), WALL)["text"]
    assert "Gap: no engine has served since 2026-11-29 21:53:23Z" in text
    assert "Gap" not in WORDS.payload(Alert("resolved", after(
        (1, "phase", "primary: serving -> held"), (1, "failover", "primary -> backup, because: x"), over=9)), WALL)["text"]


# -- templates

def test_own_texts_take_the_place_of_ours():
    templates = Templates("$urgency: $title @ $host [$class]", "what: $cause\n\ngap: $gap\nfolder: $folder costs $$5")
    payload = replace(WORDS, templates=templates).payload(Alert("opened", incident()), WALL)
    assert payload["headline"] == "critical: GPU out of memory while serving @ gpu-1 [oom_runtime]"
    assert [line for _, line in payload["lines"]] == [
        "what: oom_runtime: CUDA out of memory", "gap: ", f"folder: {FOLDER} costs $5"]


@pytest.mark.parametrize("tongue", [EN, ZH])
def test_every_name_that_check_config_allows_is_given_and_every_table_is_whole(tongue):
    facts = _facts(tongue, "opened", incident(), Text("a", "b"), WRITER)
    assert set(facts) - {"code", "who"} == NAMES
    assert set(tongue.urgencies) == set(Urgency) and set(tongue.plans) == set(Action) - {Action.IGNORE}
    assert set(tongue.kinds) == {"opened", "worsened", "reminder", "resolved", "test"}
    assert set(tongue.labels) >= {"cause", "human", "action", "gap", "next", "engine", "opened", "resolved", "folder"}


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
