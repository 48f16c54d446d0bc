"""What a new daemon finds: leaders and orphans, told apart."""

from __future__ import annotations

import pytest

from vllm_watchdog.act.survey import survey
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MarkIndex, ProcId, Stat

ONE, TWO = Mark("primary", 1), Mark("backup", 2)
LEADER, CHILD, APART, OTHER = 9_999_001, 9_999_002, 9_999_003, 9_999_004


def stat(pid: int, session: int, alive: bool = True, start: int | None = None) -> Stat:
    return Stat(ProcId(pid, start or pid), "python", alive, 1, session, session, False)


def found(*members: tuple[Stat, Mark]) -> list[tuple[Mark, int, bool]]:
    index = MarkIndex("i", lambda _: [member for member, _ in members])
    for member, mark in members:
        index.learn(member.who, mark)
    return [(survivor.mark, survivor.pid, survivor.leader) for survivor in survey("i", index)]


def test_nothing_running_is_no_survivor() -> None:
    assert found() == []


def test_a_whole_engine_is_one_survivor_with_its_leader() -> None:
    whole = (stat(LEADER, LEADER), ONE), (stat(CHILD, LEADER), ONE), (stat(APART, APART), ONE)
    assert found(*whole) == [(ONE, LEADER, True)]


def test_orphans_are_told_as_such() -> None:
    assert found((stat(CHILD, LEADER), ONE)) == [(ONE, CHILD, False)]


def test_a_zombie_leader_is_no_leader() -> None:
    assert found((stat(LEADER, LEADER, alive=False), ONE), (stat(CHILD, LEADER), ONE)) == [(ONE, CHILD, False)]


@pytest.mark.parametrize("start", [1, 9_999_999])
def test_an_orphan_with_a_session_of_its_own_is_not_taken_for_the_leader(start: int) -> None:
    members = sorted([stat(APART, APART, start=start), stat(CHILD, LEADER)], key=lambda one: one.who.start)
    assert [leader for _, _, leader in found(*((one, ONE) for one in members))] == [False]


def test_each_generation_is_told_apart() -> None:
    assert found((stat(LEADER, LEADER), ONE), (stat(OTHER, OTHER), TWO)) == [(ONE, LEADER, True), (TWO, OTHER, True)]
