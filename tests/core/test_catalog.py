from __future__ import annotations

from vllm_watchdog.core.catalog import CATALOG, Action, Severity
from vllm_watchdog.core.findings import KERNEL_RANK

SAMPLED = {
    "vram_high",
    "vram_degrade",
    "vram_growth",
    "rss_high",
    "rss_leak",
    "kv_pressure",
    "engine_hang",
    "port_stranger",
    "load_timeout",
    "unexpected_exit",
    "exit_stuck",
    "wedged",
    "vram_held",
    "budget_spent",
    "gpu_driver_unresponsive",
    "disk_low",
    "spawn_failed",
}


def test_every_sampled_symptom_and_kernel_class_has_an_entry() -> None:
    assert set(CATALOG) >= SAMPLED | set(KERNEL_RANK)


def test_every_class_is_told_in_both_languages() -> None:
    for class_, entry in CATALOG.items():
        for text in (entry.title, *entry.advice):
            assert text.en.isascii() or "→" in text.en, class_
            assert any("\u4e00" <= letter <= "\u9fff" for letter in text.zh), class_


def test_every_failure_comes_with_advice() -> None:
    assert all(entry.advice for class_, entry in CATALOG.items() if class_ != "none")


def test_nothing_wrong_is_ignored_and_a_warning_never_acts() -> None:
    none = CATALOG["none"]
    assert (none.severity, none.action) == (Severity.NONE, Action.IGNORE)
    assert all(entry.action is Action.ALERT_ONLY for entry in CATALOG.values() if entry.severity is Severity.WARNING)
