from __future__ import annotations

import re

import pytest

from vllm_watchdog.core import remedies
from vllm_watchdog.core.catalog import CATALOG, Action, Severity, Text
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
    assert all(entry.advice for class_, entry in CATALOG.items() if entry.severity is not Severity.NONE)


def test_nothing_wrong_is_ignored_and_a_warning_never_acts() -> None:
    none = CATALOG["none"]
    assert (none.severity, none.action) == (Severity.NONE, Action.IGNORE)
    assert all(entry.action is Action.ALERT_ONLY for entry in CATALOG.values() if entry.severity is Severity.WARNING)


# What vLLM's signatures say of each class, by their sources: is it fatal, and would another try help?
SIGNATURES = {
    "restart": "engine_dead_v1 engine_dead_v0 engine_proc_died worker_died oom_runtime host_oom_kill step_timeout "
               "engine_stall scheduler_deadlock cuda_fault nccl_timeout nccl_error xid_app startup_timeout hf_network "
               "wake_failed",
    "failover": "cuda_hw cuda_init xid_reset xid_node",
    "config-error-stop": "startup_kv_insufficient startup_oom port_in_use model_not_found hf_auth bad_args compile_failure "
                         "fs_error",
    "wait-vram": "startup_vram_busy startup_profile_race",
    "alert-only": "kv_pressure shm_stall rss_leak xid_other orphan_procs shutdown_stuck",
}


@pytest.mark.parametrize(("action", "classes"), SIGNATURES.items())
def test_severity_and_action_are_those_of_the_signatures(action: str, classes: str) -> None:
    for class_ in classes.split():
        entry = CATALOG[class_]
        assert entry.action == action, class_
        assert (entry.severity is Severity.WARNING) == (action == "alert-only"), class_


def test_flags_in_advice_are_flags_of_todays_vllm() -> None:
    """Or are said to be of another version, or belong to another program."""
    others = {"gpu-reset", "shm-size", "ipc", "help", "enable-log-requests", "structured-outputs-config",
              "max-cudagraph-capture-size", "swap-space", "no-enable-chunked-prefill"}
    texts = [text for entry in CATALOG.values() for text in (entry.title, *entry.advice)]
    texts += [value for value in vars(remedies).values() if isinstance(value, Text)] + list(remedies.REMOVED_FLAGS.values())
    named = {flag for text in texts for line in (text.en, text.zh) for flag in re.findall(r"--([a-z][a-z-]+)", line)}
    assert named <= set(remedies.KNOWN_FLAGS) | others, named - set(remedies.KNOWN_FLAGS)


def test_a_text_is_said_in_the_language_that_is_asked_for() -> None:
    assert (Text("a", "b").of("zh"), Text("a", "b").of("en"), Text("a", "b").of("both")) == ("b", "a", "a")
