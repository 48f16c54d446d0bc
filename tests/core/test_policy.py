"""The policy table, walked: every reachable state, every sign; then any order of signs against a one-bit model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_watchdog.core.plan import Limits
from vllm_watchdog.core.policy import (
    ALIVE,
    AT_REST,
    HAS_CHILD,
    NAPPING,
    ONLY_WHEN_ACTIVE,
    TABLE,
    Do,
    Event,
    Phase,
    Sign,
    State,
    backoff,
    patience,
    read,
    remember,
    step,
)

P, S = Phase, Sign
QUICK = Limits(spawn_s=4, load_s=20, suspect_s=10, dump_s=3, stop_s=5, condemned_s=1, kill_s=6, settle_s=2, release_s=7,
               sleep_s=9, wake_s=8,
               backoff_s=1, backoff_max_s=8, budget=2, window_s=300)
WAITS = {P.RELEASING: 7, P.STARTING: 4, P.LOADING: 20, P.SUSPECT: 10, P.DUMPING: 3, P.STOPPING: 5, P.KILLING: 6,
         P.SETTLING: 2, P.DOZING: 9, P.WAKING: 8}
DEAD_HUMAN = {P.STOPPED, P.HELD, P.WEDGED, P.SERVING, P.ASLEEP}       # phases that nothing but an event ends
OUTER = (S.WANT, S.START, S.UNWANT, S.FORGIVE, S.AGAIN, S.CLEAR, S.SPAWNED, S.WELL, S.ILL, S.FAULT, S.DUMPED, S.EXIT,
         S.EMPTY, S.SETTLED, S.REST, S.SLEPT, S.ROUSE, S.WOKE, S.RENEW)
ROAD_TO_WEDGED = (S.WANT, S.CLEAR, S.SPAWNED, S.WELL, S.ILL, S.TIMEOUT, S.TIMEOUT, S.TIMEOUT, S.TIMEOUT)


def signs(state: State) -> Iterator[Event]:
    """Everything that can happen in a state: leaders exit and marks empty only where there is a child."""
    for sign in OUTER:
        if sign not in (S.EXIT, S.EMPTY) or state.phase in HAS_CHILD:
            yield Event(0, sign)
    yield Event(0, S.FAULT, doom="bad_args")
    if state.deadline < inf:
        yield Event(state.deadline, S.TIMEOUT)


def walk(limits: Limits) -> Iterator[tuple[State, Event, State, tuple[Do, ...]]]:
    """Every reachable (phase, wanted, charged, again, doomed, failures so far), and every event there."""
    seen, todo = set(), [State()]
    while todo:
        state = todo.pop()
        key = (state.phase, state.wanted, state.charged, state.again, bool(state.doom),
               min(len(state.failures), limits.budget + 2))
        if key in seen:
            continue
        seen.add(key)
        for event in signs(state):
            after, actions = step(state, event, limits)
            yield state, event, after, actions
            todo.append(after)


WALK = list(walk(QUICK))
REACHED = {before.phase: before for before, _, _, _ in WALK}


def named(before: State, event: Event) -> tuple[Phase, Sign]:
    return before.phase, read(remember(before, event, QUICK), event, QUICK)


# -- the exhaustive walk

def test_every_row_is_reached() -> None:
    """A row that nothing reaches is dead: delete it."""
    assert set(TABLE) - {named(before, event) for before, event, _, _ in WALK} == set()


def test_every_phase_is_reached() -> None:
    assert set(REACHED) == set(Phase)


def test_only_a_spawn_makes_a_child_and_only_emptiness_ends_it() -> None:
    for before, event, after, actions in WALK:
        had, has = before.phase in HAS_CHILD, after.phase in HAS_CHILD
        assert has == (Do.SPAWN in actions or (had and event.sign is not S.EMPTY)), (before, event, after)


@pytest.mark.parametrize("phase", sorted(HAS_CHILD))
def test_when_nothing_is_left_the_rest_of_the_log_is_read_before_anything_is_decided(phase: Phase) -> None:
    for wanted in (True, False):
        after, actions = step(State(phase, wanted), Event(5, S.EMPTY), QUICK)
        assert (after.phase, actions) == (P.SETTLING, (Do.DRAIN,))


@pytest.mark.parametrize("phase", [P.LOADING, P.SUSPECT, P.DOZING, P.WAKING])
def test_patience_that_is_at_its_end_takes_evidence_first(phase: Phase) -> None:
    after, actions = step(State(phase, wanted=True, deadline=9), Event(9, S.TIMEOUT), QUICK)
    assert (after.phase, actions, after.charged) == (P.DUMPING, (Do.DUMP,), True)


def test_a_standby_sleeps_and_wakes_and_is_told_so_only_where_it_can() -> None:
    road = [(S.REST, P.DOZING, (Do.SLEEP,)), (S.SLEPT, P.ASLEEP, ()), (S.ROUSE, P.WAKING, (Do.WAKE,)),
            (S.WOKE, P.SERVING, ())]
    state = State(P.SERVING, wanted=True)
    for sign, phase, does in road:
        state, actions = step(state, Event(5, sign), QUICK)
        assert (state.phase, actions) == (phase, does)
    for before, event, _, actions in WALK:
        assert Do.SLEEP not in actions or (before.phase, event.sign) == (P.SERVING, S.REST)
        assert Do.WAKE not in actions or (before.phase, event.sign) == (P.ASLEEP, S.ROUSE)


def test_a_sleeper_does_not_wake_by_itself() -> None:
    for before, event, after, _ in WALK:
        if before.phase in NAPPING and after.phase in (P.SERVING, P.SUSPECT):
            assert (before.phase, event.sign) == (P.WAKING, S.WOKE)


def test_a_spawn_that_is_never_answered_is_killed_whatever_it_became() -> None:
    after, actions = step(State(P.STARTING, wanted=True, deadline=9), Event(9, S.TIMEOUT), QUICK)
    assert (after.phase, actions, after.charged) == (P.KILLING, (Do.KILL,), True)


def test_an_engine_whose_budget_is_spent_is_held_when_it_is_wanted_and_not_started() -> None:
    spent = State(failures=(0.0,) * (QUICK.budget + 1))
    after, actions = step(spent, Event(QUICK.window_s - 1, S.WANT), QUICK)
    assert (after.phase, actions) == (P.HELD, (Do.PAGE,))
    assert step(spent, Event(QUICK.window_s, S.WANT), QUICK)[0].phase is P.RELEASING, "the window is over"
    assert step(spent, Event(1, S.START), QUICK)[0].phase is P.RELEASING, "a human has forgiven it"


@pytest.mark.parametrize("phase", [P.RELEASING, P.BACKOFF])
def test_a_wait_for_what_nobody_wants_is_given_up(phase: Phase) -> None:
    assert step(State(phase, wanted=True, deadline=9), Event(5, S.UNWANT), QUICK) == (State(), ())


def test_a_second_engine_is_never_spawned_beside_the_first() -> None:
    for before, event, _, actions in WALK:
        assert not (before.phase in HAS_CHILD and Do.SPAWN in actions), (before, event)


def test_a_spawn_needs_a_clear_card_and_a_wish() -> None:
    for before, event, after, actions in WALK:
        if Do.SPAWN in actions:
            assert before.phase is P.RELEASING and event.sign is S.CLEAR and after.wanted


def test_a_spawn_forgets_the_generation_before() -> None:
    for _, _, after, actions in WALK:
        if Do.SPAWN in actions:
            assert (after.charged, after.again, after.doom) == (False, False, "")


def test_term_kill_and_stacks_are_sent_to_a_child_only() -> None:
    for before, event, _, actions in WALK:
        if {Do.TERM, Do.KILL, Do.DUMP} & set(actions):
            assert before.phase in HAS_CHILD, (before, event, actions)


def test_a_kill_follows_every_exit_because_orphans_may_live() -> None:
    for before, event, after, actions in WALK:
        if event.sign is S.EXIT and before.phase in HAS_CHILD - {P.KILLING, P.WEDGED}:
            assert after.phase is P.KILLING and actions == (Do.KILL,)


def test_only_waiting_phases_have_a_deadline() -> None:
    for _, event, after, _ in WALK:
        if after.phase is P.BACKOFF:
            assert event.at <= after.deadline < inf
        else:
            assert (after.deadline < inf) == (after.phase in WAITS), after


@pytest.mark.parametrize(("phase", "wait_s"), WAITS.items())
def test_each_waiting_phase_lasts_as_long_as_its_own_limit(phase: Phase, wait_s: float) -> None:
    assert patience(phase, State(), QUICK) == wait_s
    entered = [(event, after) for before, event, after, _ in WALK if after.phase is phase and before.phase is not phase]
    assert entered
    unhurried = [pair for pair in entered if phase is not P.STOPPING or not pair[1].charged]
    assert all(after.deadline == event.at + wait_s for event, after in unhurried)


def test_an_engine_that_failed_is_killed_soon_after_its_evidence_and_one_that_was_asked_to_leave_has_its_time() -> None:
    stops = [(before, event, after) for before, event, after, actions in WALK if Do.TERM in actions]
    for before, event, after in stops:
        condemned = before.phase is P.DUMPING
        assert after.charged == condemned and after.deadline == event.at + (1 if condemned else 5), (before, event)
    assert {before.phase is P.DUMPING for before, _, _ in stops} == {True, False}


def test_a_stop_that_is_short_by_configuration_is_no_longer_for_an_engine_that_failed() -> None:
    assert patience(P.STOPPING, State(charged=True), replace(QUICK, stop_s=0.5)) == 0.5


@pytest.mark.parametrize("phase", sorted(DEAD_HUMAN))
def test_a_phase_that_nobody_waits_in_lasts_for_ever(phase: Phase) -> None:
    assert patience(phase, State(), QUICK) == inf


def test_a_deadline_ends_every_phase_that_has_one() -> None:
    for before, event, after, actions in WALK:
        if event.sign is S.TIMEOUT:
            assert after.phase is not before.phase or (before.phase is P.RELEASING and Do.PAGE in actions), before


def test_a_timeout_before_its_deadline_changes_nothing() -> None:
    for before, _, _, _ in WALK:
        if before.deadline > 0:
            assert step(before, Event(min(before.deadline, 1e9) - 0.5, S.TIMEOUT), QUICK) == (before, ())


def settled(state: State) -> State:
    """A cooperative world: the leader goes when asked, nothing is left of it, its log is read."""
    for sign in (S.EXIT, S.EMPTY, S.SETTLED):
        if state.phase in HAS_CHILD or sign is S.SETTLED:
            state, _ = step(state, Event(0, sign), QUICK)
    return state


def test_a_stop_always_ends_at_rest() -> None:
    for before, _, _, _ in WALK:
        state, actions = step(before, Event(0, S.UNWANT), QUICK)
        if before.phase in ALIVE:
            assert actions == (Do.TERM,)
        assert state.phase not in ALIVE
        ended = settled(state)
        assert ended.phase in AT_REST and not ended.wanted, (before, state, ended)


def test_a_stop_that_nobody_answers_ends_at_rest_or_wedged() -> None:
    for before, _, _, _ in WALK:
        state, _ = step(before, Event(0, S.UNWANT), QUICK)
        for _ in range(6):
            if state.deadline < inf:
                state, _ = step(state, Event(state.deadline, S.TIMEOUT), QUICK)
        assert state.phase in AT_REST | {P.WEDGED}, before


def serves_after(state: State) -> bool:
    at = 0.0
    for _ in range(12):
        sign = {P.RELEASING: S.CLEAR, P.STARTING: S.SPAWNED, P.LOADING: S.WELL, P.SUSPECT: S.WELL, P.SETTLING: S.SETTLED,
                P.DUMPING: S.DUMPED, P.STOPPING: S.EXIT, P.KILLING: S.EMPTY, P.WEDGED: S.EMPTY,
                P.DOZING: S.SLEPT, P.ASLEEP: S.ROUSE, P.WAKING: S.WOKE}.get(state.phase)
        if state.phase is P.BACKOFF:
            sign, at = S.TIMEOUT, state.deadline
        if sign is None:
            break
        state, _ = step(state, Event(at, sign), QUICK)
    return state.phase is P.SERVING


def test_a_planned_restart_asks_the_engine_to_leave() -> None:
    state, actions = step(State(P.SERVING, wanted=True), Event(10, S.RENEW), QUICK)
    assert (state.phase, actions) == (P.STOPPING, (Do.TERM,))


def test_a_planned_restart_is_neither_charged_nor_forgives() -> None:
    state = State(P.SERVING, wanted=True, failures=(1.0,))
    for event in (Event(10, S.RENEW), Event(11, S.EXIT), Event(12, S.EMPTY), Event(13, S.SETTLED)):
        state, _ = step(state, event, QUICK)
    assert (state.phase, state.failures, state.charged, state.wanted) == (P.RELEASING, (1.0,), False, True)


@pytest.mark.parametrize("wish", [S.START, S.AGAIN])
def test_a_humans_wish_always_ends_serving(wish: Sign) -> None:
    for before, _, _, _ in WALK:
        after, _ = step(before, Event(0, wish), QUICK)
        assert after.wanted and after.failures == () and not after.doom, before
        assert serves_after(after), (before, after)


def test_a_humans_restart_stops_a_running_engine_and_starts_a_stopped_one() -> None:
    for before, event, after, actions in WALK:
        if event.sign is S.AGAIN and before.phase in ALIVE:
            assert after.phase is P.STOPPING and actions == (Do.TERM,)
        if event.sign is S.AGAIN and before.phase in AT_REST | {P.BACKOFF}:
            assert after.phase is P.RELEASING and actions == (Do.LOOK,)


def test_a_restart_that_was_asked_for_is_not_followed_by_another() -> None:
    for _, _, after, _ in WALK:
        assert not (after.again and after.phase in (P.STARTING, *ALIVE)), after


def test_what_dooms_a_generation_ends_it_held_with_a_page() -> None:
    for before, event, after, actions in WALK:
        if before.phase is P.SETTLING and event.sign in (S.SETTLED, S.TIMEOUT) and before.doom:
            assert after.phase is P.HELD and actions == (Do.SNAP, Do.PAGE), before
        if event.doom and before.phase in ALIVE:
            assert after.doom, "the reason is kept until the engine is gone"


def test_a_reason_that_comes_after_the_exit_still_dooms() -> None:
    state = replace(REACHED[P.KILLING], doom="")
    state, _ = step(state, Event(1, S.FAULT, "bad_args"), QUICK)
    assert state.doom == "bad_args"
    state, _ = step(state, Event(1, S.FAULT, "cuda_hw"), QUICK)
    assert state.doom == "bad_args", "the first reason stands"


def test_a_reason_given_to_an_engine_at_rest_is_ignored() -> None:
    assert step(State(), Event(0, S.FAULT, "bad_args"), QUICK) == (State(), ())


def test_an_engine_at_rest_is_started_by_a_wish_and_by_nothing_else() -> None:
    for before, event, after, _ in WALK:
        if before.phase in AT_REST and after.phase is not before.phase:
            assert event.sign in (S.START, S.AGAIN, S.FORGIVE) or (before.phase is P.STOPPED and event.sign is S.WANT)


def test_a_failure_is_charged_once_a_generation_and_only_while_alive() -> None:
    for before, event, after, _ in WALK:
        if len(after.failures) > len(before.failures):
            assert before.phase in ALIVE and not before.charged and after.charged
            assert event.sign in (S.FAULT, S.EXIT, S.EMPTY, S.TIMEOUT)
        if before.phase in ALIVE and event.sign in (S.FAULT, S.EXIT, S.EMPTY, S.TIMEOUT):
            assert after.charged
            assert len(after.failures) == len(before.failures) + (not before.charged)


def test_failures_that_left_the_window_are_forgotten() -> None:
    state = State(P.SERVING, wanted=True, failures=(0.0, 100.0, 250.0))
    after, _ = step(state, Event(400.0, S.EXIT), QUICK)
    assert after.failures == (250.0, 400.0), "the window is open at its old end"


def test_one_failure_more_than_the_budget_is_held_with_a_page() -> None:
    for spent, expected in ((QUICK.budget, (P.BACKOFF, (Do.SNAP,))), (QUICK.budget + 1, (P.HELD, (Do.SNAP, Do.PAGE)))):
        state = State(P.SETTLING, wanted=True, charged=True, failures=(0.0,) * spent)
        after, actions = step(state, Event(0, S.SETTLED), QUICK)
        assert (after.phase, actions) == expected


def test_a_planned_stop_that_is_wanted_again_starts_at_once() -> None:
    for state in (State(P.SETTLING, wanted=True), State(P.SETTLING, wanted=True, charged=True, again=True)):
        after, actions = step(state, Event(0, S.SETTLED), QUICK)
        assert (after.phase, actions) == (P.RELEASING, (Do.LOOK,))


def test_a_dead_engine_that_nobody_wants_stays_stopped_with_its_evidence() -> None:
    after, actions = step(State(P.SETTLING, wanted=False, charged=True), Event(0, S.SETTLED), QUICK)
    assert (after.phase, actions) == (P.STOPPED, (Do.SNAP,))


def test_a_log_that_is_read_to_its_end_means_nothing_while_the_engine_lives() -> None:
    for before, event, after, actions in WALK:
        if event.sign is S.SETTLED and before.phase is not P.SETTLING:
            assert (after, actions) == (before, ()), before


def test_unwanted_while_failing_is_not_started_again() -> None:
    for before, event, after, _ in WALK:
        if not after.wanted:
            assert after.phase not in (P.RELEASING, P.STARTING, P.BACKOFF), (before, event, after)


def test_what_pause_suspends_are_the_waits_whose_end_is_an_automatic_action() -> None:
    assert {P.LOADING, P.SUSPECT, P.DOZING, P.WAKING, P.BACKOFF} == ONLY_WHEN_ACTIVE
    assert {P.DUMPING, P.STOPPING, P.KILLING, P.WEDGED} == HAS_CHILD - ALIVE
    assert not HAS_CHILD & (AT_REST | {P.RELEASING, P.SETTLING, P.BACKOFF})


# -- backoff

def test_the_first_restart_is_at_once_and_the_next_ones_wait_twice_as_long_each() -> None:
    limits = Limits(backoff_s=2, backoff_max_s=1000)
    assert [backoff(n, limits, "x") for n in (0, 1)] == [0.0, 0.0]
    for n in range(2, 8):
        assert 0.8 <= backoff(n, limits, "x") / (2 * 2 ** (n - 2)) < 1.2


def test_backoff_never_waits_longer_than_its_limit() -> None:
    limits = Limits(backoff_s=2, backoff_max_s=9)
    assert {backoff(n, limits, str(seed)) for n in range(6, 40) for seed in range(9)} == {9.0}


def test_backoff_spreads_over_hosts_and_is_the_same_in_a_replay() -> None:
    waits = [backoff(3, Limits(backoff_max_s=1000), f"{host}/primary") for host in range(200)]
    assert waits == [backoff(3, Limits(backoff_max_s=1000), f"{host}/primary") for host in range(200)]
    assert max(waits) / min(waits) > 1.4
    assert 3.2 <= min(waits) < max(waits) < 4.8


def test_a_journal_of_any_version_is_folded_with_the_same_waits() -> None:
    assert [backoff(n, Limits(), "0/primary") for n in (2, 3, 4)] == pytest.approx([2.0216, 3.7136, 8.5824])


def test_a_phase_waits_with_the_seed_it_was_given() -> None:
    state = State(P.SETTLING, wanted=True, charged=True, failures=(0.0, 1.0))
    after, _ = step(state, Event(10, S.SETTLED), QUICK, "host-7/primary")
    assert after.deadline == 10 + backoff(2, QUICK, "host-7/primary") != 10 + backoff(2, QUICK, "host-8/primary")


def test_the_default_budget_allows_five_failures_an_hour() -> None:
    state = State(P.SERVING, wanted=True, failures=(0.0,) * 4)
    for at, phase in ((10.0, P.BACKOFF), (20.0, P.HELD)):
        for sign in (S.EXIT, S.EMPTY, S.SETTLED):
            state, _ = step(state, Event(at, sign), Limits())
        assert state.phase is phase
        state = replace(state, phase=P.SERVING, charged=False, deadline=inf)


# -- any order of events, against one bit: is there a child or not

class PolicyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.state, self.child, self.leader = 0.0, State(), False, False
        self.journal: list[Event] = []

    @initialize(budget=st.integers(0, 2), steps=st.integers(0, len(ROAD_TO_WEDGED)))
    def set_the_scene(self, budget: int, steps: int) -> None:
        """Start anywhere on the longest road, so that deep phases are as likely as shallow ones."""
        self.limits = replace(QUICK, budget=budget)
        for sign in ROAD_TO_WEDGED[:steps]:
            self.now = self.state.deadline if sign is S.TIMEOUT else self.now + 1
            self.feed(sign)

    def feed(self, sign: Sign, doom: str = "") -> None:
        event = Event(self.now, sign, doom)
        self.journal.append(event)
        self.state, actions = step(self.state, event, self.limits, "seed")
        for action in actions:
            if action is Do.SPAWN:
                assert not self.child, "two engines on the same GPUs"
                assert len(self.state.failures) <= self.limits.budget, "restarted past the budget"
                self.child = self.leader = True
            elif action in (Do.TERM, Do.KILL, Do.DUMP):
                assert self.child, f"{action} sent to nobody"

    @rule(sign=st.sampled_from([S.WELL, S.ILL, S.CLEAR, S.SPAWNED, S.DUMPED, S.SETTLED, S.REST, S.SLEPT, S.ROUSE, S.WOKE]))
    def the_world_speaks(self, sign: Sign) -> None:
        self.feed(sign)

    @rule(doom=st.sampled_from(["", "", "bad_args"]))
    def a_failure_is_seen(self, doom: str) -> None:
        self.feed(S.FAULT, doom)

    @rule(sign=st.sampled_from([S.WANT, S.WANT, S.START, S.AGAIN, S.UNWANT, S.RENEW]))
    def somebody_wishes(self, sign: Sign) -> None:
        self.feed(sign)

    @rule(wait=st.integers(1, 30))
    def time_passes(self, wait: int) -> None:
        self.now += wait
        self.feed(S.TIMEOUT)

    @precondition(lambda self: self.leader)
    @rule()
    def the_leader_exits(self) -> None:
        self.leader = False
        self.feed(S.EXIT)

    @precondition(lambda self: self.child)
    @rule()
    def the_last_process_is_gone(self) -> None:
        if self.leader:
            self.the_leader_exits()
        self.child = False
        self.feed(S.EMPTY)

    @invariant()
    def there_is_a_child_exactly_when_the_phase_says_so(self) -> None:
        assert self.child == (self.state.phase in HAS_CHILD)

    @invariant()
    def only_waiting_phases_have_a_deadline(self) -> None:
        assert (self.state.deadline < inf) == (self.state.phase in {*WAITS, P.BACKOFF})

    @invariant()
    def a_stop_always_ends_at_rest(self) -> None:
        state, _ = step(self.state, Event(self.now, S.UNWANT), self.limits)
        assert settled(state).phase in AT_REST

    @invariant()
    def a_humans_wish_always_ends_serving(self) -> None:
        state, _ = step(self.state, Event(self.now, S.AGAIN), self.limits)
        assert serves_after(state)

    def teardown(self) -> None:
        state = State()
        for event in self.journal:
            state, _ = step(state, event, self.limits, "seed")
        assert state == self.state, "folding the journal again must give the same state"


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_held_engine_that_is_forgiven_rests_until_it_is_wanted() -> None:
    held = State(P.HELD, failures=(1.0, 2.0), doom="bad_args")
    forgiven, actions = step(held, Event(3, S.FORGIVE), QUICK)
    assert (forgiven, actions) == (State(P.STOPPED), ())
