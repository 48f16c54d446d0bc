"""One engine's life: when to start, stop, kill, restart and give up.  A table and four small functions.

`read` names what happened, so that the table needs no conditions; `remember` keeps facts, so that it needs no memory;
`patience` gives each phase one deadline, so that there is no timer to cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto
from math import inf
from zlib import crc32

from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.plan import Limits


class Phase(StrEnum):
    STOPPED = auto()    # nobody wants it
    RELEASING = auto()  # wanted; waits until its GPUs have room and no rival runs there
    STARTING = auto()   # told to spawn
    LOADING = auto()    # a process, not serving yet
    SERVING = auto()
    SUSPECT = auto()    # does not answer; may recover
    DOZING = auto()     # told to sleep
    ASLEEP = auto()     # its weights in host memory, its VRAM given back
    WAKING = auto()     # told to wake, and to prove it by a token
    DUMPING = auto()    # condemned; evidence is taken before the kill
    STOPPING = auto()   # asked to leave
    KILLING = auto()    # told to leave, its orphans too
    WEDGED = auto()     # survived SIGKILL: only a reboot or the driver can help
    SETTLING = auto()   # gone; the rest of its log is read before we decide
    BACKOFF = auto()    # dead, next try is on the clock
    HELD = auto()       # another try would fail alike, or there were too many; waits for a human


class Sign(StrEnum):
    WANT = auto()       # failover wants it
    START = auto()      # a human wants it: the slate is wiped
    UNWANT = auto()
    FORGIVE = auto()    # a human lets a held one try again, when it is wanted next
    AGAIN = auto()      # a human wants it stopped and started
    RENEW = auto()      # it leaks, and nobody uses it now: stopped and started, uncharged and unforgiven
    CLEAR = auto()      # its GPUs have room
    SPAWNED = auto()
    WELL = auto()
    ILL = auto()
    REST = auto()       # it is the backup's turn to sleep
    SLEPT = auto()
    ROUSE = auto()      # it is needed, and its GPUs have room
    WOKE = auto()
    FAULT = auto()      # a failure that waiting does not mend
    DUMPED = auto()
    EXIT = auto()       # the leader is gone, its orphans may not be
    EMPTY = auto()      # nothing of this generation is left
    SETTLED = auto()    # its log is read to the end; `read` turns this into one of the next four
    GONE = auto()
    DIED = auto()
    GAVE_OUT = auto()
    DOOMED = auto()
    TIMEOUT = auto()


class Do(StrEnum):
    LOOK = auto()       # sample the GPUs now
    SPAWN = auto()
    DUMP = auto()       # evidence with stacks; answered by DUMPED
    SNAP = auto()       # evidence of a failure that left us no time for a dump, while we go on
    TERM = auto()
    KILL = auto()
    SLEEP = auto()
    WAKE = auto()
    DRAIN = auto()
    PAGE = auto()


@dataclass(frozen=True, slots=True)
class Event:
    """`doom`: why another try would fail alike (a class of the catalogue); empty: it might not."""

    at: float
    sign: Sign
    doom: str = ""


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase = Phase.STOPPED
    wanted: bool = False
    deadline: float = inf
    failures: tuple[float, ...] = ()
    charged: bool = False       # this generation's failure is counted already
    again: bool = False         # a planned stop: start at once, uncharged
    doom: str = ""


P, S = Phase, Sign
NAPPING = frozenset({P.DOZING, P.ASLEEP, P.WAKING})
ALIVE = frozenset({P.STARTING, P.LOADING, P.SERVING, P.SUSPECT}) | NAPPING
HAS_CHILD = ALIVE | {P.DUMPING, P.STOPPING, P.KILLING, P.WEDGED}
AT_REST = frozenset({P.STOPPED, P.HELD})
ONLY_WHEN_ACTIVE = frozenset({P.LOADING, P.SUSPECT, P.DOZING, P.WAKING, P.BACKOFF})     # whose deadlines `pause` suspends

Row = tuple[Phase, *tuple[Do, ...]]
_SHARED: dict[Sign, Row] = {     # of every phase with a process that nobody has condemned yet
    S.FAULT:   (P.DUMPING, Do.DUMP),
    S.EXIT:    (P.KILLING, Do.KILL),
    S.EMPTY:   (P.SETTLING, Do.DRAIN),
    S.UNWANT:  (P.STOPPING, Do.TERM),
    S.AGAIN:   (P.STOPPING, Do.TERM),
}
TABLE: dict[tuple[Phase, Sign], Row] = {
    (P.STOPPED,   S.WANT):     (P.RELEASING, Do.LOOK),
    (P.STOPPED,   S.GAVE_OUT): (P.HELD, Do.PAGE),
    (P.RELEASING, S.CLEAR):    (P.STARTING, Do.SPAWN),
    (P.RELEASING, S.TIMEOUT):  (P.RELEASING, Do.PAGE),
    (P.RELEASING, S.UNWANT):   (P.STOPPED,),
    (P.STARTING,  S.SPAWNED):  (P.LOADING,),
    (P.STARTING,  S.TIMEOUT):  (P.KILLING, Do.KILL),
    (P.LOADING,   S.WELL):     (P.SERVING,),
    (P.LOADING,   S.TIMEOUT):  (P.DUMPING, Do.DUMP),
    (P.SERVING,   S.ILL):      (P.SUSPECT,),
    (P.SUSPECT,   S.WELL):     (P.SERVING,),
    (P.SUSPECT,   S.TIMEOUT):  (P.DUMPING, Do.DUMP),
    (P.SERVING,   S.RENEW):    (P.STOPPING, Do.TERM),
    (P.SERVING,   S.REST):     (P.DOZING, Do.SLEEP),
    (P.DOZING,    S.SLEPT):    (P.ASLEEP,),
    (P.DOZING,    S.TIMEOUT):  (P.DUMPING, Do.DUMP),
    (P.ASLEEP,    S.ROUSE):    (P.WAKING, Do.WAKE),
    (P.WAKING,    S.WOKE):     (P.SERVING,),
    (P.WAKING,    S.TIMEOUT):  (P.DUMPING, Do.DUMP),
    (P.DUMPING,   S.DUMPED):   (P.STOPPING, Do.TERM),
    (P.DUMPING,   S.TIMEOUT):  (P.STOPPING, Do.TERM),
    (P.DUMPING,   S.EXIT):     (P.KILLING, Do.KILL),
    (P.DUMPING,   S.EMPTY):    (P.SETTLING, Do.DRAIN),
    (P.STOPPING,  S.EXIT):     (P.KILLING, Do.KILL),
    (P.STOPPING,  S.EMPTY):    (P.SETTLING, Do.DRAIN),
    (P.STOPPING,  S.TIMEOUT):  (P.KILLING, Do.KILL),
    (P.KILLING,   S.EMPTY):    (P.SETTLING, Do.DRAIN),
    (P.KILLING,   S.TIMEOUT):  (P.WEDGED, Do.PAGE),
    (P.WEDGED,    S.EMPTY):    (P.SETTLING, Do.DRAIN),
    (P.SETTLING,  S.GONE):     (P.STOPPED, Do.SNAP),
    (P.SETTLING,  S.AGAIN):    (P.RELEASING, Do.LOOK),
    (P.SETTLING,  S.DIED):     (P.BACKOFF, Do.SNAP),
    (P.SETTLING,  S.GAVE_OUT): (P.HELD, Do.SNAP, Do.PAGE),
    (P.SETTLING,  S.DOOMED):   (P.HELD, Do.SNAP, Do.PAGE),
    (P.BACKOFF,   S.TIMEOUT):  (P.RELEASING, Do.LOOK),
    (P.BACKOFF,   S.START):    (P.RELEASING, Do.LOOK),
    (P.BACKOFF,   S.UNWANT):   (P.STOPPED,),
    (P.STOPPED,   S.START):    (P.RELEASING, Do.LOOK),
    (P.HELD,      S.START):    (P.RELEASING, Do.LOOK),
    (P.HELD,      S.FORGIVE):  (P.STOPPED,),
    **{(phase, sign): row for phase in P if phase in ALIVE for sign, row in _SHARED.items()},
}


def step(state: State, event: Event, limits: Limits, seed: str = "") -> tuple[State, tuple[Do, ...]]:
    """The next state, and what to do.  A pair the table does not list changes only what we remember."""
    if event.sign is S.TIMEOUT and event.at < state.deadline:
        return state, ()                                        # a deadline set for a phase we have left
    state = remember(state, event, limits)
    row = TABLE.get((state.phase, read(state, event, limits)))
    if row is None:
        return state, ()
    phase, *actions = row
    state = replace(state, phase=phase, deadline=event.at + patience(phase, state, limits, seed))
    if phase is P.STARTING:
        state = replace(state, charged=False, again=False, doom="")
    return state, tuple(actions)


def remember(state: State, event: Event, limits: Limits) -> State:
    """What is wanted, and when it failed.  A failure is charged when it happens, once a generation."""
    match event.sign:
        case S.WANT:
            return replace(state, wanted=True)
        case S.START:
            return replace(state, wanted=True, failures=(), doom="")    # a human's start wipes the slate
        case S.AGAIN:
            return replace(state, wanted=True, failures=(), doom="", again=True)
        case S.UNWANT:
            return replace(state, wanted=False, again=False)
        case S.FORGIVE:
            return replace(state, failures=(), doom="")
        case S.FAULT | S.EXIT | S.EMPTY | S.TIMEOUT if state.phase in ALIVE:
            return charge(state, event, limits)
        case S.FAULT if event.doom and state.phase not in AT_REST:
            return replace(state, doom=state.doom or event.doom)        # the reason may come after the exit
    return state


def charge(state: State, event: Event, limits: Limits) -> State:
    """Count one failure of this generation, and forget those that left the window."""
    recent = tuple(at for at in state.failures if at > event.at - limits.window_s)
    failures = recent if state.charged else (*recent, event.at)
    return replace(state, failures=failures, charged=True, doom=state.doom or event.doom)


def read(state: State, event: Event, limits: Limits) -> Sign:
    """Name what just happened, so that the table needs no conditions."""
    if event.sign is S.AGAIN and state.phase in AT_REST | {P.BACKOFF}:
        return S.START                                          # nothing to stop
    recent = sum(at > event.at - limits.window_s for at in state.failures)
    if event.sign is S.WANT and state.phase is P.STOPPED and recent > limits.budget:
        return S.GAVE_OUT                                       # a daemon that died before it could decide
    if state.phase is not P.SETTLING or event.sign not in (S.SETTLED, S.TIMEOUT):
        return event.sign
    if state.doom:
        return S.DOOMED                                         # even if nobody wants it now: failback must not try it
    if not state.wanted:
        return S.GONE
    if state.again or not state.charged:
        return S.AGAIN                                          # we stopped it ourselves, and it is wanted again
    return S.GAVE_OUT if len(state.failures) > limits.budget else S.DIED


def patience(phase: Phase, state: State, limits: Limits, seed: str = "") -> float:
    """Seconds that a phase may last before the table hears TIMEOUT; inf: for ever."""
    match phase:
        case P.BACKOFF:
            return backoff(len(state.failures), limits, seed)
        case P.RELEASING:
            return limits.release_s
        case P.STARTING:
            return limits.spawn_s
        case P.LOADING:
            return limits.load_s
        case P.SUSPECT:
            return limits.suspect_s
        case P.DOZING:
            return limits.sleep_s
        case P.WAKING:
            return limits.wake_s
        case P.DUMPING:
            return limits.dump_s
        case P.STOPPING:
            return min(limits.stop_s, limits.condemned_s) if state.charged else limits.stop_s
        case P.KILLING:
            return limits.kill_s
        case P.SETTLING:
            return limits.settle_s
    return inf


def backoff(failures: int, limits: Limits, seed: str) -> float:
    """Seconds before the next try: none after the first failure, then doubling up to `backoff_max_s`.

    ±20 % by `seed` and count, so that hosts which fail together do not come back together, and a replay is the same.
    """
    if failures <= 1:
        return 0.0
    spread = 0.8 + 0.4 * (crc32(f"{seed}/{failures}".encode()) % 1000) / 1000
    return float(min(limits.backoff_s * 2.0 ** (failures - 2) * spread, limits.backoff_max_s))
