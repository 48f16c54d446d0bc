from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import GIB, gpu, mark, tree

from vllm_watchdog.core.readings import Holder, Process, Tree


def test_a_mark_is_written_as_people_say_it() -> None:
    assert str(mark("primary#3")) == "primary#3"


@pytest.mark.parametrize(("holder", "text"), [
    (Holder(7, "nginx"), "PID 7 (nginx)"),
    (Holder(0, ""), "a process we may not look at"),
    (Holder(9, "vllm", mark("primary#1")), "PID 9 (vllm), ours: primary#1"),
])
def test_a_holder_is_named_as_far_as_it_is_known(holder: Holder, text: str) -> None:
    assert str(holder) == text


def test_the_used_share_of_a_card_without_memory_is_nothing() -> None:
    assert gpu(25).used_share == 0.25
    assert replace(gpu(25), total_bytes=0).used_share == 0.0


def test_a_tree_is_the_sum_of_its_processes() -> None:
    leader = tree(mark("e#1"), 2, cpu=0.5).processes[0]
    both = Tree(mark("e#1"), (leader, Process(101, "core", GIB, None, None, 1, None), replace(leader, cpu=1.5)))
    assert (both.rss_bytes, both.cpu) == (5 * GIB, 2.0)
