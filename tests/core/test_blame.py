from __future__ import annotations

import pytest

from vllm_watchdog.core.blame import OWN, specificity
from vllm_watchdog.core.catalog import CATALOG


def test_no_class_says_nothing_and_an_unknown_one_hardly_anything() -> None:
    assert (specificity(""), specificity("never_heard_of")) == (0, 1)


@pytest.mark.parametrize(("cause", "consequence"), [
    ("oom_runtime", "engine_dead_v1"),
    ("engine_dead_v1", "unexpected_exit"),
    ("cuda_hw", "engine_dead_v1"),
    ("host_oom_kill", "worker_died"),
    ("xid_node", "cuda_fault"),
    ("bad_args", "unexpected_exit"),
    ("startup_kv_insufficient", "startup_failed"),
    ("port_stranger", "api_unreachable"),
    ("engine_hang", "api_unreachable"),
    ("unexpected_exit", "budget_spent"),
])
def test_a_cause_says_more_than_its_consequence(cause: str, consequence: str) -> None:
    assert specificity(cause) > specificity(consequence)


def test_every_class_that_we_see_for_ourselves_has_an_entry_for_humans() -> None:
    assert set(OWN) - set(CATALOG) == set()
