from __future__ import annotations

from math import inf

import pytest
from tests.core.scenes import metrics

from vllm_watchdog.core.liveness import Life, Pulse, answered, asked, due, judge, scraped
from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.readings import Unknown

LIMITS = Limits(still_s=10)
UNSEEN = Unknown(0.0, "no answer")
SEEN = scraped(Pulse(since=0.0), 1.0, metrics(5))


def test_counters_seen_for_the_first_time_have_not_moved() -> None:
    assert SEEN.moved_at == -inf and SEEN.counted


def test_counters_that_moved_are_a_sign_of_life() -> None:
    pulse = scraped(SEEN, 7.0, metrics(6))
    assert pulse.moved_at == pulse.sign_at == 7.0


def test_counters_that_fell_have_moved_too() -> None:
    assert scraped(SEEN, 7.0, metrics(4)).moved_at == 7.0


def test_counters_that_stand_still_keep_their_last_move() -> None:
    pulse = scraped(scraped(SEEN, 7.0, metrics(6)), 8.0, metrics(6))
    assert pulse.moved_at == 7.0


def test_a_long_prefill_moves_only_the_kv_cache_and_is_alive() -> None:
    pulse = scraped(SEEN, 7.0, metrics(5, kv=0.3))
    assert pulse.moved_at == 7.0


def test_gauges_of_requests_say_nothing_of_life() -> None:
    assert scraped(SEEN, 7.0, metrics(5, running=3.0, waiting=4.0)).moved_at == -inf


def test_a_scrape_that_failed_changes_nothing() -> None:
    assert scraped(SEEN, 7.0, UNSEEN) == SEEN


def test_an_engine_without_counters_is_not_counted() -> None:
    assert not scraped(SEEN, 7.0, metrics(None)).counted


def test_a_probe_is_due_when_nothing_moved_for_long_enough() -> None:
    pulse = Pulse(since=100.0)
    assert not due(pulse, 109.9, LIMITS)
    assert due(pulse, 110.0, LIMITS)


@pytest.mark.parametrize("pulse", [Pulse(since=5.0), Pulse(moved_at=5.0), Pulse(answered_at=5.0)])
def test_every_proof_of_life_puts_the_next_probe_off(pulse: Pulse) -> None:
    assert pulse.sign_at == 5.0
    assert not due(pulse, 14.0, LIMITS)
    assert due(pulse, 15.0, LIMITS)


def test_two_probes_are_never_out_at_once() -> None:
    assert not due(asked(Pulse(), 50.0), 1000.0, LIMITS)


def test_a_probe_that_is_refused_at_once_is_not_repeated_at_once() -> None:
    pulse = answered(asked(Pulse(), 50.0), 50.01, False)
    assert not due(pulse, 59.9, LIMITS)
    assert due(pulse, 60.0, LIMITS)


def test_an_answered_probe_proves_life() -> None:
    missed = answered(asked(Pulse(unprovable="404"), 10.0), 20.0, False)
    pulse = answered(asked(missed, 20.0), 21.0, True)
    assert judge(pulse) is Life.ALIVE
    assert (pulse.answered_at, pulse.missed_at, pulse.asked_at, pulse.unprovable) == (21.0, None, None, "")


def test_an_unanswered_probe_with_frozen_counters_is_quiet() -> None:
    pulse = answered(asked(SEEN, 12.0), 22.0, False)
    assert pulse.missed_at == 12.0 and pulse.asked_at is None
    assert judge(pulse) is Life.QUIET


def test_an_unanswered_probe_without_counters_is_blind() -> None:
    assert judge(answered(asked(Pulse(), 12.0), 22.0, False)) is Life.BLIND


def test_an_unanswered_probe_while_counters_move_is_busy() -> None:
    moving = scraped(asked(SEEN, 12.0), 12.0, metrics(6))
    assert judge(answered(moving, 22.0, False)) is Life.BUSY


def test_a_quiet_engine_whose_counters_move_again_is_busy() -> None:
    quiet = answered(asked(SEEN, 12.0), 22.0, False)
    assert judge(scraped(quiet, 30.0, metrics(6))) is Life.BUSY


def test_an_engine_that_freezes_after_being_busy_is_quiet_from_its_next_missed_probe() -> None:
    busy = scraped(answered(asked(SEEN, 12.0), 22.0, False), 30.0, metrics(6))
    frozen = answered(asked(busy, 40.0), 50.0, False)
    assert frozen.missed_at == 40.0 and judge(frozen) is Life.QUIET


def test_silence_is_counted_from_the_first_missed_probe() -> None:
    once = answered(asked(SEEN, 12.0), 22.0, False)
    assert answered(asked(once, 22.0), 32.0, False).missed_at == 12.0


def test_a_miss_at_the_very_instant_of_a_move_starts_anew() -> None:
    pulse = Pulse(counted=True, moved_at=12.0, missed_at=12.0, asked_at=20.0)
    assert answered(pulse, 30.0, False).missed_at == 20.0


def test_a_probe_that_proves_nothing_leaves_what_was_missed_missed() -> None:
    quiet = answered(asked(SEEN, 12.0), 22.0, False)
    pulse = answered(asked(quiet, 22.0), 23.0, Unknown(23.0, "404"))
    assert judge(pulse) is Life.QUIET and pulse.unprovable == "404" and pulse.asked_at is None
    assert pulse.sign_at == quiet.sign_at


def test_a_probe_that_proves_nothing_is_no_miss() -> None:
    assert judge(answered(asked(SEEN, 12.0), 13.0, Unknown(13.0, "401"))) is Life.ALIVE


def test_an_answer_that_nobody_asked_for_is_no_miss() -> None:
    assert judge(answered(SEEN, 22.0, False)) is Life.ALIVE
