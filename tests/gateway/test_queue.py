"""Who waits, whose turn it is, and what an engine has at once: the rules that admission is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_watchdog.gateway import queue as module
from vllm_watchdog.gateway.breaker import Breaker, State, failures, open_max_s, open_s
from vllm_watchdog.gateway.pace import Pace
from vllm_watchdog.gateway.queue import ANSWER_TOKENS, KEYS_LIMIT, Queue, Turns
from vllm_watchdog.gateway.seats import NO_LIMITS, Block, Claim, Limits, Seats
from vllm_watchdog.gateway.throttle import Throttle, answers_least, window_s

LONG = 8000


def claim(tokens: int = 100, key: str = "", size: int = 1) -> Claim:
    return Claim(size, tokens, key, tokens >= LONG)


def free(_: Claim) -> None:
    """Nothing is in anybody's way."""


def taken(queue: Queue[str], blocked: Callable[[Claim], Block | None] = free, alone: bool = True) -> list[str]:
    found: list[str] = []
    while (item := queue.take(blocked, alone)) is not None:
        found.append(item)
    return found


# -- one key, nothing but time and room


def test_the_queue_is_first_in_first_out_and_bounded() -> None:
    queue: Queue[str] = Queue(3, 100, 10.0)
    asked = (("a", 40), ("b", 40), ("c", 40), ("d", 10), ("e", 1))
    assert [queue.put(name, claim(size=size), 0.0) for name, size in asked] == [(), (), ("c",), (), ("e",)]
    assert (len(queue), queue.bytes) == (3, 90)
    assert queue.remove("b")
    assert not queue.remove("b")
    assert taken(queue) == ["a", "d"]
    assert (len(queue), queue.bytes) == (0, 0)


def test_what_comes_back_goes_first_and_fits_always() -> None:
    queue: Queue[str] = Queue(1, 10, 10.0)
    assert queue.put("new", claim(size=10), 0.0) == ()
    queue.put_back([("a", claim(size=50), False), ("b", claim(size=50), True), ("c", claim(size=50), False)], 1.0)
    assert taken(queue, alone=False) == ["a", "c", "new"]
    assert queue.take(free, alone=True) == "b"


def test_nobody_waits_longer_than_the_limit() -> None:
    queue: Queue[str] = Queue(10, 100, 5.0)
    queue.put("a", claim(), 0.0)
    queue.put("b", claim(), 2.0)
    queue.put_back([("a again", claim(), False)], 3.0)
    assert (queue.expire(4.9), queue.expire(5.0), queue.expire(7.9), queue.expire(8.0)) == ((), ("a",), ("b",), ("a again",))
    assert Queue[str](10, 100, 0.0).put("a", claim(), 0.0) == ("a",), "no time at all: not held"


def test_what_needs_no_seat_waits_only_while_nobody_serves() -> None:
    queue: Queue[str] = Queue(10, 100, 5.0)
    queue.put("generation", claim(), 0.0)
    queue.put("read", Claim(1, seat=False), 1.0)
    full = Seats()
    full.enter(claim())
    assert taken(queue, lambda one: full.blocked(one, Limits(requests=1))) == ["read"]


# -- keys, and long beside short


def test_a_key_that_floods_leaves_another_its_turns() -> None:
    queue: Queue[str] = Queue(100, 1000, 60.0)
    for number in range(50):
        queue.put(f"flood {number}", claim(key="flood"), 0.0)
    for number in range(3):
        queue.put(f"other {number}", claim(key="other"), 1.0)
    assert taken(queue)[:6] == ["flood 0", "other 0", "flood 1", "other 1", "flood 2", "other 2"]


def test_turns_go_by_tokens_not_by_requests() -> None:
    queue: Queue[str] = Queue(1000, 1000, 60.0)
    for number in range(20):
        queue.put(f"large {number}", claim(4000 - ANSWER_TOKENS, "large"), 0.0)
    for number in range(200):
        queue.put(f"small {number}", claim(400 - ANSWER_TOKENS, "small"), 0.0)
    counted = Counter(name.split()[0] for name in taken(queue)[:110])
    assert counted["large"] in (9, 10, 11)


def test_long_and_short_ones_share_by_tokens_whoever_floods() -> None:
    queue: Queue[str] = Queue(1000, 1000, 60.0)
    for number in range(20):
        queue.put(f"long {number}", claim(10_000 - ANSWER_TOKENS), 0.0)
    for number in range(200):
        queue.put(f"short {number}", claim(1000 - ANSWER_TOKENS), 0.0)
    counted = Counter(name.split()[0] for name in taken(queue)[:110])
    assert counted["long"] in (9, 10, 11)


def test_a_key_that_comes_back_is_owed_nothing_for_its_absence() -> None:
    queue: Queue[str] = Queue(1000, 1000, 60.0)
    for number in range(40):
        queue.put(f"busy {number}", claim(key="busy"), 0.0)
    assert [queue.take(free, False) for _ in range(20)] == [f"busy {number}" for number in range(20)]
    for number in range(20):
        queue.put(f"late {number}", claim(key="late"), 1.0)
    counted = Counter(name.split()[0] for name in taken(queue)[:10])
    assert counted["busy"] in (4, 5, 6)


def test_a_steady_flow_of_short_ones_leaves_a_long_one_its_room() -> None:
    """Each that ends is followed by a new one, so that there would never be room for 30,000 tokens by itself."""
    queue: Queue[str] = Queue(100, 1000, 60.0)
    limits, seats, short = Limits(tokens=40_000), Seats(), claim(7000)
    for _ in range(5):
        seats.enter(short)
    queue.put("long", claim(30_000), 0.0)
    for step in range(20):
        queue.put(f"short {step}", short, 0.0)
        seats.leave(short)
        while (item := queue.take(lambda one: seats.blocked(one, limits), False)) is not None:
            if item == "long":
                return
            seats.enter(short)
    raise AssertionError("it starves")


def test_long_ones_that_wait_for_long_ones_let_the_short_pass() -> None:
    queue: Queue[str] = Queue(100, 1000, 60.0)
    limits, seats = Limits(requests=4, tokens=40_000), Seats()
    seats.enter(claim(15_000))
    queue.put("long", claim(15_000), 0.0)
    for number in range(3):
        queue.put(f"short {number}", claim(), 0.0)
    assert taken(queue, lambda one: seats.blocked(one, limits)) == ["short 0", "short 1", "short 2"]


def test_who_waits_most_makes_room_for_who_waits_less() -> None:
    queue: Queue[str] = Queue(4, 1000, 60.0)
    for number in range(4):
        assert queue.put(f"flood {number}", claim(key="flood"), 0.0) == ()
    assert queue.put("flood 4", claim(key="flood"), 0.0) == ("flood 4",)
    assert queue.put("other 0", claim(key="other"), 0.0) == ("flood 3",)
    assert queue.put("other 1", claim(key="other"), 0.0) == ("flood 2",)
    assert queue.put("other 2", claim(key="other"), 0.0) == ("other 2",)
    assert sorted(queue) == ["flood 0", "flood 1", "other 0", "other 1"]


def test_what_came_back_from_a_death_makes_room_for_nobody() -> None:
    queue: Queue[str] = Queue(2, 1000, 60.0)
    queue.put_back([(f"back {number}", claim(key="flood"), False) for number in range(3)], 0.0)
    assert queue.put("other", claim(key="other"), 0.0) == ("other",)


def test_more_keys_than_are_told_apart_share_a_turn_and_wait_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_LIMIT", 10)
    queue: Queue[str] = Queue(100, 1 << 20, 60.0)
    for number in range(30):
        assert queue.put(str(number), claim(key=f"key {number}"), 0.0) == ()
    assert len(queue._short.flows) == 11
    assert sorted(map(int, taken(queue))) == list(range(30))


def test_what_is_remembered_of_keys_that_have_gone_is_bounded() -> None:
    turns: Turns[int] = Turns()
    for number in range(10 * KEYS_LIMIT):
        turns.join(number)
        turns.charge(number, 10.0 * number)
    assert len(turns._had) <= 2 * KEYS_LIMIT + 1


@given(st.integers(0, 10**6), st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), min_size=1, max_size=20))
def test_no_stream_of_new_keys_keeps_back_one_that_has_had_much(debt: int, others: list[tuple[bool, int]]) -> None:
    queue: Queue[str] = Queue(10_000, 1 << 30, 60.0)
    queue.put("before", claim(min(debt, LONG - 1), "victim"), 0.0)
    queue.put("witness", claim(1, "witness"), 0.0)
    assert queue.take(free, False) == "before"
    queue.put("victim", claim(1, "victim"), 0.0)
    for number in range(400):
        new, tokens = others[number % len(others)]
        queue.put(f"other {number}", claim(tokens, f"new {number}" if new else "one"), 0.0)
        if queue.take(free, False) == "victim":
            return
    raise AssertionError("it starves")


# -- what an engine has at once


def test_long_ones_together_leave_their_share_to_the_short() -> None:
    limits, seats = Limits(requests=4, tokens=100_000), Seats()
    for _ in range(2):
        assert seats.blocked(claim(20_000), limits) is None
        seats.enter(claim(20_000))
    assert seats.blocked(claim(9000), limits) is Block.KIND, "two of four seats"
    assert seats.blocked(claim(100), limits) is None
    seats.leave(claim(20_000))
    assert seats.blocked(claim(31_000), limits) is Block.KIND, "half of the tokens"
    assert seats.blocked(claim(30_000), limits) is None
    assert seats.blocked(claim(81_000), Limits(tokens=100_000, long_share=1.0)) is Block.KIND


def test_what_is_larger_than_all_goes_when_nobody_is_there() -> None:
    limits, seats = Limits(tokens=1000), Seats()
    assert seats.blocked(claim(50_000), limits) is None
    seats.enter(claim(100))
    assert seats.blocked(claim(50_000), limits) is Block.ALL
    assert seats.blocked(claim(900), limits) is None


def test_a_key_has_its_limit_at_an_engine() -> None:
    limits, seats = Limits(key_requests=1), Seats()
    seats.enter(claim(key="a"))
    assert (seats.blocked(claim(key="a"), limits), seats.blocked(claim(key="b"), limits)) == (Block.KEY, None)
    seats.leave(claim(key="a"))
    assert seats.blocked(claim(key="a"), limits) is None and not seats.keys
    assert seats.blocked(claim(10**9), NO_LIMITS) is None


CLAIMS = st.builds(
    claim, st.sampled_from([0, 10, 500, 7999, 8000, 30_000, 90_000]), st.sampled_from("abcd"), st.integers(0, 40)
)


class Admitted(RuleBasedStateMachine):
    """Requests come, wait, go, end, leave, are sent back; nobody is lost, and no bound is ever exceeded."""

    limits = Limits(requests=4, tokens=100_000, key_requests=2)

    def __init__(self) -> None:
        super().__init__()
        self.queue: Queue[int] = Queue(6, 100, 10.0)
        self.seats, self.at, self.next = Seats(), 0.0, 0
        self.waiting: dict[int, Claim] = {}
        self.here: dict[int, Claim] = {}
        self.returned: set[int] = set()
        self.answered: set[int] = set()

    def blocked(self, one: Claim) -> Block | None:
        return self.seats.blocked(one, self.limits)

    @rule(asked=CLAIMS)
    def put(self, asked: Claim) -> None:
        self.next += 1
        self.waiting[self.next] = asked
        gone = self.queue.put(self.next, asked, self.at)
        assert not self.returned & set(gone), "what was admitted is not pushed out"
        for each in gone:
            del self.waiting[each]
            self.answered.add(each)

    @rule()
    def take(self) -> None:
        item = self.queue.take(self.blocked, alone=True)
        if item is not None:
            self.here[item] = self.waiting.pop(item)
            self.returned.discard(item)
            self.seats.enter(self.here[item])

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.here)))
        self.seats.leave(self.here.pop(item))
        self.answered.add(item)

    @precondition(lambda self: self.here)
    @rule(alone=st.booleans())
    def die(self, alone: bool) -> None:
        back = sorted(self.here.items())
        for _, one in back:
            self.seats.leave(one)
        self.queue.put_back([(item, one, alone) for item, one in back], self.at)
        self.waiting |= self.here
        self.returned |= self.here.keys()
        self.here = {}

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(item)
        del self.waiting[item]
        self.returned.discard(item)
        self.answered.add(item)

    @rule(passed_s=st.sampled_from([0.0, 1.0, 6.0]))
    def time_passes(self, passed_s: float) -> None:
        self.at += passed_s
        for item in self.queue.expire(self.at):
            del self.waiting[item]
            self.returned.discard(item)
            self.answered.add(item)

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        assert set(self.queue) == set(self.waiting)
        assert sum(self.queue.depths().values()) == len(self.queue)
        assert set(range(1, self.next + 1)) == self.waiting.keys() | self.here.keys() | self.answered
        assert self.queue.bytes == sum(one.size for one in self.waiting.values())

    @invariant()
    def the_queue_holds_no_more_than_it_may(self) -> None:
        new = [one for item, one in self.waiting.items() if item not in self.returned]
        assert len(new) <= 6 and sum(one.size for one in new) <= 100

    @invariant()
    def the_engine_has_no_more_than_it_may(self) -> None:
        here, long = list(self.here.values()), [one for one in self.here.values() if one.long]
        assert len(here) <= 4 and max(Counter(one.key for one in here).values(), default=0) <= 2
        assert len(here) == 1 or sum(one.tokens for one in here) <= 100_000
        assert len(long) <= 2 and (len(long) == 1 or sum(one.tokens for one in long) <= 50_000)

    def teardown(self) -> None:
        """Whoever still waits gets there, if those who are there leave one after the other."""
        for _ in range(10 * (len(self.waiting) + 1)):
            self.take()
            if self.here and not (set(self.queue) and self.queue.take(lambda _: Block.ALL, alone=False)):
                item = min(self.here)
                self.seats.leave(self.here.pop(item))
                self.answered.add(item)
        assert not self.waiting
        self.everybody_is_somewhere_once()


TestAdmitted = Admitted.TestCase
TestAdmitted.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 5, 10]))
def test_floods_of_both_kinds_each_get_their_half(longs: int, shorts: int, most: int) -> None:
    """Closed loops of both, each request a step for a thousand tokens: what each kind gets of the tokens that both want."""
    queue: Queue[int] = Queue(1000, 1 << 20, 1e9)
    limits, seats = Limits(requests=most), Seats()
    kinds = [claim(10_000, f"long {n}") for n in range(longs)] + [claim(1000, f"short {n}") for n in range(shorts)]
    left: dict[int, int] = {}
    done = Counter[bool]()
    for client, one in enumerate(kinds):
        queue.put(client, one, 0.0)
    for _ in range(600):
        while (client := queue.take(lambda one: seats.blocked(one, limits), alone=False)) is not None:
            seats.enter(kinds[client])
            left[client] = kinds[client].tokens // 1000
        for client in list(left):
            left[client] -= 1
            if not left[client]:
                del left[client]
                seats.leave(kinds[client])
                done[kinds[client].long] += kinds[client].tokens
                queue.put(client, kinds[client], 0.0)
    total = 600 * min(most, longs + shorts) * 1000
    for long, clients in ((True, longs), (False, shorts)):
        can = min(clients, max(1, most // 2)) / min(most, longs + shorts)
        assert done[long] >= 0.85 * total * min(0.5, can) - 20_000, done


# -- the breaker


def tripped(at: float = 0.0) -> Breaker:
    breaker = Breaker()
    assert [breaker.failed(n, f"content {n}", at) for n in range(failures)] == [False] * (failures - 1) + [True]
    return breaker


def test_different_failures_in_a_row_open_the_breaker_and_one_trial_closes_it() -> None:
    breaker = tripped()
    assert (breaker.state(0.5), breaker.allows(0.5)) == (State.OPEN, False)
    assert (breaker.state(open_s), breaker.allows(open_s)) == (State.HALF_OPEN, True)
    breaker.went(9)
    assert not breaker.allows(open_s + 0.1), "one is on trial"
    assert breaker.answered()
    assert (breaker.state(open_s + 0.2), breaker.allows(open_s + 0.2)) == (State.CLOSED, True)


def test_a_client_that_repeats_what_fails_opens_nothing() -> None:
    breaker = Breaker()
    assert not any(breaker.failed(n, "the same", 0.0) for n in range(100))
    for n in range(100):
        assert not breaker.failed(n, f"content {n}", 0.0)
        assert not breaker.answered(), "an answer between them starts the count anew"


def test_each_failed_trial_waits_twice_as_long_up_to_a_limit() -> None:
    breaker, at, waited = tripped(), 0.0, []
    for n in range(100, 110):
        wait_s = next(s for s in range(1, 100) if breaker.allows(at + s))
        waited.append(wait_s)
        at += wait_s
        breaker.went(n)
        assert breaker.failed(n, f"content {n}", at)
    assert waited == [1, 2, 4, 8, 16, *[open_max_s] * 5]


def test_who_was_under_way_before_decides_nothing_by_failing_and_a_trial_whose_client_left_is_none() -> None:
    breaker = tripped()
    breaker.went(7)
    assert not breaker.failed(3, "old", open_s + 1)
    assert not breaker.allows(open_s + 1)
    breaker.withdrew(3)
    assert not breaker.allows(open_s + 1)
    breaker.withdrew(7)
    assert breaker.allows(open_s + 1)


# -- the throttle


def late(throttle: Throttle, seconds: float, count: int = answers_least) -> None:
    for _ in range(count):
        throttle.first_token(seconds)


def test_late_first_tokens_cut_the_limit_and_calm_gives_it_back() -> None:
    throttle, at = Throttle(1.0), 0.0
    throttle.observe(20, at)
    late(throttle, 3.0)
    at += window_s
    assert throttle.observe(20, at)
    assert throttle.limit == 14
    assert throttle.why == "first tokens took 3.0 s, 1 s are wanted"
    seen = []
    while throttle.limit is not None:
        at += window_s
        late(throttle, 0.5)
        throttle.observe(throttle.limit, at)
        seen.append(throttle.limit)
    assert seen == [15, 16, 17, 18, 19, 20, None]


def test_preemptions_cut_too_and_never_under_an_eighth() -> None:
    throttle, at, count = Throttle(), 0.0, 1000
    throttle.preempted(count)
    throttle.observe(64, at)
    for _ in range(20):
        count += 10
        throttle.preempted(count)
        at += window_s
        throttle.observe(throttle.limit or 64, at)
    assert throttle.limit == 8
    assert throttle.why == "10 requests were preempted within 5 s"


def test_what_happens_to_a_healthy_engine_cuts_nothing() -> None:
    throttle = Throttle(1.0)
    throttle.observe(20, 0.0)
    throttle.preempted(500)
    throttle.preempted(501)
    late(throttle, 9.0, answers_least - 1)
    assert not throttle.observe(20, window_s) and throttle.limit is None
    late(throttle, 9.0)
    throttle.observe(1, 2 * window_s - 0.1)
    assert Throttle(None).limit is None
    idle = Throttle(1.0)
    idle.observe(1, 0.0)
    late(idle, 9.0)
    assert not idle.observe(1, window_s), "one at a time is the least"


def test_a_limit_that_nobody_meets_is_not_raised() -> None:
    throttle = Throttle(1.0)
    throttle.observe(20, 0.0)
    late(throttle, 3.0)
    throttle.observe(5, window_s)
    assert throttle.limit == 14
    throttle.observe(5, 2 * window_s)
    throttle.observe(5, 3 * window_s)
    assert throttle.limit == 14


# -- how long to wait


def test_who_finds_no_room_is_told_when_the_line_has_moved_on() -> None:
    pace = Pace()
    assert pace.retry_after_s(100, 0.0) == 5, "nothing is known"
    for tenth in range(300):
        pace.ended(tenth / 10)      # ten a second
    assert pace.retry_after_s(49, 30.0) == pytest.approx(5, abs=1)
    assert pace.retry_after_s(0, 30.0) == 1
    assert pace.retry_after_s(100_000, 30.0) == 60
    assert pace.retry_after_s(10, 100.0) == 5, "nothing has ended lately"
