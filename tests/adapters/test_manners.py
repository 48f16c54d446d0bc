from __future__ import annotations

import time
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.tell.manners import GROUP_MOST, Hours, Limits, Manners, Waiting, choice, slept_through

W, C, PAGE = Urgency.WARNING, Urgency.CRITICAL, Urgency.PAGE
NIGHT = Hours(22 * 60, 7 * 60)
ALL, EACH = Manners(together=True), Manners()


def wait(name, urgency=C, due_at=0.0, **rest):
    """`a/opened` is an alert of incident a."""
    incident, kind = name.split("/")
    return Waiting(incident, kind, urgency, due_at, inf, **rest)


def chosen(waiting, now=10.0, limits=None, manners=ALL):
    letters, at = choice(waiting, now, limits or Limits(), manners)
    return [f"{letter.incident}/{letter.kind}" for letter in letters] or at


def test_nothing_waits_nothing_goes():
    assert chosen([]) == inf


def test_a_program_gets_each_by_itself_and_in_order():
    waiting = [wait("a/opened", due_at=20.0), wait("a/resolved"), wait("b/opened", due_at=5.0)]
    assert chosen(waiting, manners=EACH) == ["b/opened"]
    assert chosen(waiting[:2], manners=EACH) == 20.0        # "resolved" is due, but "opened" goes first
    assert chosen(waiting[:2], 20.0, manners=EACH) == ["a/opened"]


def test_people_get_what_is_due_with_what_is_just_coming():
    waiting = [wait("a/opened", due_at=9.0), wait("b/opened", due_at=11.5), wait("c/opened", due_at=13.0),
               wait("d/opened", due_at=11.0, attempts=1)]
    assert chosen(waiting) == ["a/opened", "b/opened"]
    assert chosen(waiting, 8.0) == 9.0


def test_a_message_holds_twenty_incidents_at_most():
    waiting = [wait(f"i{n}/opened") for n in range(50)]
    assert chosen(waiting) == [f"i{n}/opened" for n in range(GROUP_MOST)]


def test_what_was_refused_goes_alone_and_is_in_nobodys_way():
    waiting = [wait("a/opened", alone=True, due_at=8.0), wait("b/opened", due_at=9.0), wait("c/opened", due_at=9.0)]
    assert chosen(waiting) == ["a/opened"]
    assert chosen([wait("a/opened", alone=True, due_at=9.5), *waiting[1:]]) == ["b/opened", "c/opened"]


def test_the_quiet_keeps_warnings_and_nothing_else():
    limits = Limits(quiet_s=100.0)
    assert chosen([wait("a/opened", W)], limits=limits) == 110.0
    assert chosen([wait("a/opened", W), wait("b/opened", C)], limits=limits) == ["b/opened"]
    worse = [wait("a/opened", W), wait("a/worsened-critical", C)]
    assert chosen(worse, limits=limits) == ["a/opened", "a/worsened-critical"]


def test_over_the_hours_limit_everything_waits_but_for_a_page_and_then_goes_with_it():
    limits = Limits(full_until=50.0)
    waiting = [wait("a/opened"), wait("b/opened", W)]
    assert chosen(waiting, limits=limits) == 50.0
    assert chosen(waiting, 50.0, limits) == ["a/opened", "b/opened"]
    assert chosen([*waiting, wait("c/opened", PAGE)], limits=limits) == ["a/opened", "b/opened", "c/opened"]


def test_a_receivers_wish_holds_all_of_it_pages_too():
    assert chosen([wait("a/opened", PAGE)], limits=Limits(asked_until=99.0)) == 99.0
    assert chosen([wait("a/opened", PAGE)], limits=Limits(asked_until=99.0), manners=EACH) == 99.0


def test_who_sleeps_hears_of_what_goes_on_in_the_morning_only():
    over = [wait("a/opened", W), wait("a/resolved", W)]
    rest = [wait("b/opened", W), wait("c/opened", W, attempts=1), wait("c/resolved", W), wait("d/resolved", W),
            wait("e/opened", C), wait("e/resolved", C)]
    assert slept_through([*over, *rest]) == tuple(over)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([W, C, PAGE]), st.floats(0, 100), st.integers(0, 2),
                          st.booleans()), max_size=12, unique_by=lambda it: it[0] + str(it[2])),
       st.floats(0, 120), st.floats(0, 50), st.floats(0, 150), st.floats(0, 150), st.booleans())
def test_something_always_goes_in_the_end_and_of_each_incident_the_oldest_first(rows, now, quiet_s, asked, full, together):
    waiting = [Waiting(name, str(n), urgency, due, inf, tries, alone)
               for n, (name, urgency, due, tries, alone) in enumerate(rows)]
    manners, limits = Manners(together=together), Limits(quiet_s, asked, full)
    letters, at = choice(waiting, now, limits, manners)
    assert bool(letters) or (at > now and (at < inf) is bool(waiting))
    for letter in letters:
        assert letter is next(each for each in waiting if each.incident == letter.incident) or letters[0] is not letter
        older = [each for each in waiting if each.incident == letter.incident and int(each.kind) < int(letter.kind)]
        assert all(each in letters for each in older)
    rest = waiting
    for _ in range(len(waiting)):      # a day later nothing holds it any more
        went, _ = choice(rest, now + 1e6, Limits(), manners)
        rest = [letter for letter in rest if letter not in went]
    assert rest == []


@pytest.mark.parametrize(("hours", "now", "left_s"), [
    (NIGHT, "23:00:00", 8 * 3600), (NIGHT, "06:59:30", 30), (NIGHT, "07:00:00", 0), (NIGHT, "21:59:59", 0),
    (NIGHT, "22:00:00", 9 * 3600), (Hours(0, 60), "00:30:00", 1800), (Hours(0, 60), "12:00:00", 0),
])
def test_quiet_hours_may_run_over_midnight(hours, now, left_s):
    assert hours.left_s(time.strptime(now, "%H:%M:%S")) == left_s
    assert Manners(quiet=hours).quiet_s(0.0, lambda _: time.strptime(now, "%H:%M:%S")) == left_s
    assert Manners().quiet_s(0.0, time.localtime) == 0
