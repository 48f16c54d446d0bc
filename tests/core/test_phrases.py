from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from vllm_watchdog.core import causes, journal_phrases, phrases, remedies
from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.failover import Hint
from vllm_watchdog.core.journal_phrases import EVENTS, worded
from vllm_watchdog.core.phrases import BECAUSE, DEEDS, filled, joined
from vllm_watchdog.core.policy import Phase


def texts() -> dict[str, Text]:
    found: dict[str, Text] = {}
    for module in (causes, journal_phrases, phrases, remedies):
        for name, value in vars(module).items():
            for key, text in (value.items() if isinstance(value, dict) else [("", value)]):
                if isinstance(text, Text):
                    found[f"{name} {key}"] = text
    return found


def blanks(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("name", texts())
def test_both_languages_have_the_same_blanks(name: str) -> None:
    text = texts()[name]
    assert blanks(text.en) == blanks(text.zh)
    assert text.en == text.zh or re.search("[\u3001\u4e00-\u9fff\uff1a\uff1b]|→", text.zh), "not said in Chinese"


def test_every_phase_has_a_word() -> None:
    assert {phase: text.en for phase, text in causes.PHASES.items()} == {phase.value: phase.value for phase in Phase}


def test_every_line_of_a_timeline_is_named() -> None:
    """`what` as `incidents.noted` and `Turn.note` are given it; sides are changed by the word of the side."""
    said = {"opened", "symptom", "resolved", "failover", "failback", *DEEDS}
    for path in Path(phrases.__file__).parent.glob("*.py"):
        said |= set(re.findall(r'(?:note|noted)\([^"\n]*, "([a-z ]+)"', path.read_text("utf-8")))
    assert {"cleared", "phase", "in flight", "waited"} <= said <= set(causes.STEPS), said - set(causes.STEPS)


def test_every_reason_of_a_change_of_sides_has_words() -> None:
    assert set(BECAUSE) == {hint.value for hint in Hint} - {""}


def test_a_blank_that_nobody_fills_stays_empty() -> None:
    assert filled(Text("{a} and {b}", "{b} 和 {a}"), a=1) == Text("1 and ", " 和 1")


def test_a_sentence_in_a_blank_is_said_in_its_own_language() -> None:
    told = filled(DEEDS["failover"], leaving="primary", to="backup", because=BECAUSE["failures"])
    assert told.en == "failover from primary to backup, because it failed more than after_failures times"
    assert told.zh == "故障切换：primary → backup，原因：失败次数超过 after_failures"


def test_several_sentences_are_one() -> None:
    assert joined([Text("a", "甲"), Text("b", "乙")]) == Text("a; b", "甲；乙")
    assert joined([]) == Text("", "")


def test_an_event_becomes_a_sentence() -> None:
    fields = {"engine": "primary#2", "was": "loading", "now": "serving", "because": "well", "say": "engine.phase"}
    assert worded("engine.phase", fields).en == "primary#2: loading -> serving (well)"
    assert worded("engine.woke", {"engine": "b#1", "took_s": "0.20"}).en == "b#1 woke in 0.20 s"
    assert worded("no.such", {}) is None
    lowered = {"service": "p", "to": 4, "because": "kv_pressure of p", "because_zh": "p 的 kv_pressure"}
    assert worded("service.lowered", lowered) == Text(
        "p: the gateway lets 4 requests through at a time (kv_pressure of p)", "p：网关并发降到 4（p 的 kv_pressure）")


def test_every_event_that_the_core_and_its_adapters_say_has_a_phrase() -> None:
    """Those of the gateway's own process go to its own log."""
    root = Path(phrases.__file__).parents[1]
    said = set()
    for room in ("core", "act", "sense", "tell", "app"):
        for path in (root / room).glob("*.py"):
            said |= set(re.findall(r'say\(\s*"([a-z]+\.[a-z_]+)"', path.read_text("utf-8")))
    assert len(said) > 25
    assert said <= set(EVENTS), said - set(EVENTS)
