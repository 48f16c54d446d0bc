from __future__ import annotations

from typing import Any

from vllm_watchdog.app.voice import Voice


def test_only_lines_in_words_are_told_and_to_all_who_listen() -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    voice = Voice(first.append)
    voice.listeners.append(second.append)
    voice.line({"_": "Tick", "at": 1.0})
    voice.line({"say": "engine.ready"})
    assert first == second == [{"say": "engine.ready"}]


def test_what_came_of_alerts_is_counted() -> None:
    voice = Voice()
    for name in ("alert.delivered", "alert.failed", "alert.delivered", "engine.ready"):
        voice.line({"say": name})
    assert voice.alerts == {"delivered": 2, "failed": 1}
