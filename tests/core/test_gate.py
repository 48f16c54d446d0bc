from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from tests.core.scenes import GIB, gpu, mark

from vllm_watchdog.core.gate import (
    DEFAULT_SHARE,
    FRESH_SHARE,
    SLACK,
    SMALL_BYTES,
    TOGETHER,
    blind,
    fit_together,
    holders,
    in_the_way,
    loads_there,
    others_on,
    rivals,
    share_a_card,
    shortage,
    told,
)
from vllm_watchdog.core.plan import EnginePlan, Standby
from vllm_watchdog.core.policy import HAS_CHILD, Phase
from vllm_watchdog.core.readings import GpuProcess, Holder, Unknown

PRIMARY = EnginePlan("primary", 8100, (0,), 0.5)
BACKUP = EnginePlan("backup", 8101, (0,), 0.5, backup_for="primary")
OTHER = EnginePlan("other", 8200, (0,), 0.3)


@pytest.mark.parametrize("phase", Phase)
def test_a_rival_is_whoever_of_the_service_has_a_process_awake_on_the_card(phase: Phase) -> None:
    rival = phase in HAS_CHILD - {Phase.ASLEEP}
    assert rivals(BACKUP, [(PRIMARY, phase), (BACKUP, Phase.SERVING)]) == (("primary",) if rival else ())
    assert rivals(PRIMARY, [(BACKUP, phase)]) == (("backup",) if rival else ())


@pytest.mark.parametrize("phase", Phase)
def test_an_engine_of_another_service_is_a_rival_only_while_it_loads_on_the_card(phase: Phase) -> None:
    loading = phase in (Phase.STARTING, Phase.LOADING)
    assert rivals(PRIMARY, [(OTHER, phase)]) == (("other",) if loading else ())
    assert rivals(PRIMARY, [(replace(OTHER, gpus=(1,)), phase), (replace(OTHER, gpus=()), phase)]) == ()
    assert loads_there(PRIMARY, [(PRIMARY, phase), (OTHER, phase)]) is loading
    assert not loads_there(PRIMARY, [(PRIMARY, phase), (replace(OTHER, gpus=(1,)), phase)])


def test_where_both_fit_they_still_load_one_after_the_other() -> None:
    other = replace(BACKUP, vram_share=0.4)
    assert [rivals(PRIMARY, [(other, phase)]) for phase in (Phase.LOADING, Phase.SERVING)] == [("backup",), ()]


def test_an_engine_on_another_card_is_no_rival() -> None:
    assert rivals(replace(BACKUP, gpus=(1,)), [(PRIMARY, Phase.SERVING)]) == ()


@pytest.mark.parametrize(("changes", "fit"), [
    ({"vram_share": 0.45}, True), ({"vram_share": 0.46}, False), ({"vram_share": 0.03}, True), ({"vram_share": None}, False),
    ({"vram_share": 0.9, "gpus": (1,)}, True), ({"vram_share": 0.9, "gpus": ()}, False),
    ({"vram_share": 0.9, "standby": Standby.HOT}, True), ({"vram_share": 0.9, "standby": Standby.SLEEPING}, False)])
def test_two_engines_fit_together_on_cards_of_their_own_or_by_their_shares_or_as_a_hot_pair(
        changes: dict[str, object], fit: bool) -> None:
    other = replace(BACKUP, **changes)
    assert fit_together(PRIMARY, other) is fit and fit_together(other, PRIMARY) is fit
    assert rivals(other, [(PRIMARY, Phase.SERVING)]) == (() if fit else ("primary",))


def test_without_a_share_two_engines_are_taken_at_vllms_own_default() -> None:
    wide, narrow = replace(PRIMARY, vram_share=None), replace(BACKUP, vram_share=0.03)
    assert TOGETHER == 0.95 and fit_together(wide, narrow)
    assert not fit_together(wide, replace(narrow, vram_share=0.04))


def test_only_a_sensor_that_has_said_so_is_blind() -> None:
    assert blind(Unknown(1.0, "no driver"), 1.0)
    assert not blind(Unknown(0.0, "not sampled yet"), -inf) and not blind((gpu(1),), 1.0)


def test_what_a_sleeper_keeps_is_its_own_room() -> None:
    card = gpu(51, (1, "core", mark("backup#1"), 2), (2, "x", mark("backup#1"), None), (3, "core", mark("primary#1"), 49))
    assert shortage(BACKUP, (card,), mark("backup#1")) == ()
    ((_, missing),) = shortage(BACKUP, (card,))
    assert missing == 2 * GIB
    assert told(BACKUP, (card,))[0].en.startswith("GPU 0 lacks 2.0 GiB") and told(BACKUP, (card,), mark("backup#1")) == ()


@pytest.mark.parametrize(("one", "other", "shared"), [
    ((0,), (0,), True), ((0, 1), (1, 2), True), ((0,), (1,), False), ((), (1,), True), ((0,), (), True), ((), (), True)])
def test_cards_that_nobody_named_may_be_any(one: tuple[int, ...], other: tuple[int, ...], shared: bool) -> None:
    assert share_a_card(replace(PRIMARY, gpus=one), replace(BACKUP, gpus=other)) is shared


def test_strays_are_in_the_way_on_shared_cards_and_where_nobody_knows_their_cards() -> None:
    plans = (PRIMARY, BACKUP, replace(OTHER, gpus=(1,)))
    strays = (mark("primary#1"), mark("other#2"), mark("forgotten#3"))
    assert in_the_way(PRIMARY, strays, plans) == (mark("primary#1"), mark("forgotten#3"))
    assert in_the_way(plans[2], strays, plans) == (mark("other#2"), mark("forgotten#3"))


def test_a_card_with_the_engines_share_and_some_slack_free_has_room() -> None:
    assert shortage(PRIMARY, (gpu(49),)) == ()
    ((card, missing),) = shortage(PRIMARY, (gpu(50),))
    assert card.index == 0 and missing == GIB


def test_other_cards_do_not_matter() -> None:
    assert shortage(PRIMARY, (gpu(0), gpu(99, index=1))) == ()


def test_each_of_its_cards_must_have_room() -> None:
    plan = replace(PRIMARY, gpus=(0, 1))
    assert [card.index for card, _ in shortage(plan, (gpu(60), gpu(0, index=2), gpu(99, index=1)))] == [0, 1]


def test_an_engine_that_wants_the_whole_card_is_content_with_an_empty_one() -> None:
    """Nobody can free what the driver itself keeps: a share of 0.99 would wait for ever."""
    plan = replace(PRIMARY, vram_share=0.99)
    assert shortage(plan, (gpu(2),)) == ()
    assert shortage(plan, (gpu(2.1),)) != ()
    assert FRESH_SHARE == 0.98


def test_without_a_share_vllms_own_default_counts() -> None:
    plan = replace(PRIMARY, vram_share=None)
    assert (DEFAULT_SHARE, SLACK) == (0.92, 0.01)
    assert shortage(plan, (gpu(6.9),)) == ()
    assert shortage(plan, (gpu(7.1),)) != ()


def test_a_blind_sensor_is_no_shortage() -> None:
    assert shortage(PRIMARY, Unknown(0, "no driver")) == ()
    assert told(PRIMARY, Unknown(0, "no driver")) == ()


def test_others_on_its_cards_are_named_unless_they_are_small_or_its_own() -> None:
    mine, small = mark("primary#3"), SMALL_BYTES / GIB
    cards = (gpu(50, (1, "core", mine, 40), (2, "python", None, 9), (3, "Xorg", None, small), (4, "hidden", None, None),
                 (5, "old", mark("primary#2"), small + 0.01)), gpu(50, (6, "far", None, 50), index=1))
    assert [row.holder.pid for row in others_on(PRIMARY, cards, mine)] == [2, 5]


def test_half_a_gibibyte_is_small() -> None:
    """A display server or a bare CUDA context."""
    assert SMALL_BYTES == GIB // 2


def test_holders_are_told_the_largest_first() -> None:
    card = gpu(9, (1, "a", None, 1), (2, "b", None, None), (3, "c", None, 5))
    assert [row.holder.pid for row in holders(card)] == [3, 1, 2]


def test_the_sentence_says_which_card_lacks_how_much_and_who_holds_it() -> None:
    card = gpu(60, (7, "python", None, 60))
    (text,) = told(PRIMARY, (card,))
    assert text.en == "GPU 0 lacks 11.0 GiB, held by PID 7 (python) 60.0 GiB"
    assert text.zh == "GPU 0 还缺 11.0 GiB，占用者：PID 7 (python) 60.0 GiB"


def test_the_sentence_names_five_holders_at_most() -> None:
    card = gpu(60, *((pid, "p", None, 9) for pid in range(1, 9)))
    assert told(PRIMARY, (card,))[0].en.count("PID") == 5


def test_a_holder_that_the_driver_does_not_name_is_said() -> None:
    assert told(PRIMARY, (gpu(60),))[0].en == "GPU 0 lacks 11.0 GiB, held by a process that the driver does not name"


def test_a_process_of_unknown_size_is_told_without_one() -> None:
    card = replace(gpu(60), processes=(GpuProcess(Holder(0, ""), None),))
    assert "a process we may not look at 0.0 GiB" in told(PRIMARY, (card,))[0].en


def test_a_card_with_room_is_not_told() -> None:
    assert told(PRIMARY, (gpu(1),)) == ()
