"""The loop: wait for an event until the nearest deadline, decide, hand each command on without waiting, publish.

It opens no file and no socket and takes no lock that somebody else holds.  systemd is told `WATCHDOG=1` at the end of a
turn, from here only, so that a loop that hangs is noticed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import filterfalse
from pathlib import Path
from queue import Empty, SimpleQueue

from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.commands import Command, Kill, Quit, Spawn, Term
from vllm_watchdog.core.events import Booted, ClockSet, Event, Tick
from vllm_watchdog.core.totals import Totals, count
from vllm_watchdog.core.world import World, next_deadline

IDLE_S = 1.0            # the longest wait: the wall clock is compared, and systemd is told, at least this often
STEPPED_S = 0.5         # a wall clock that moved by more than this against the monotonic one was stepped
HANDS = (Spawn, Term, Kill)     # carried out first: what tells of it and what proves it takes a moment
START_S = 0.003         # the most that the rest of a turn waits for a start: only one thread of Python runs at a time
KEEP_UP = 200           # events taken in one go before the world is published again


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where a turn's results go.  None of them may block."""

    journal: Callable[[Event], None]
    execute: Callable[[Command], None]
    publish: Callable[[World], None]
    alive: Callable[[], None]


class Loop:
    def __init__(self, inbox: SimpleQueue[Event], outlets: Outlets,
                 clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._inbox, self._outlets, self._clock, self._wall = inbox, outlets, clock, wall
        self._early: list[Event] = []       # came while an engine was started
        self.world = World()
        self.totals = Totals()

    def run(self, booted: Booted) -> None:
        """Until the world says Quit."""
        over = self._turn(booted)
        self._tell()
        while not over:
            over = any(self._turn(event) for event in self._next())
            self._tell()

    def _tell(self) -> None:
        """Before each wait; the first time too, since page and socket have nothing to say until then."""
        self._outlets.publish(self.world)
        self._outlets.alive()

    def _next(self) -> list[Event]:
        """The events that are there, oldest first; a Tick when none came before the nearest deadline."""
        wait_s = min(max(next_deadline(self.world) - self._clock(), 0.0), IDLE_S)
        events, self._early = self._early or self._wait(wait_s) or [Tick(self._clock())], []
        while len(events) < KEEP_UP and not self._inbox.empty():
            events.append(self._inbox.get())
        offset = self._wall() - self._clock()
        if abs(offset - self.world.wall_offset) > STEPPED_S:
            events.append(ClockSet(self._clock(), offset))
        return events

    def _wait(self, seconds: float) -> list[Event]:
        """One event, or none."""
        try:
            return [self._inbox.get(timeout=seconds)]
        except Empty:
            return []

    def _turn(self, event: Event) -> bool:
        """One event.  Threads stamp their events themselves, so one may be older than the last: time never runs back."""
        event = replace(event, at=max(event.at, self.world.at))
        before = self.world
        self.world, commands = advance(before, event)
        self._outlets.journal(event)
        for command in filter(_is_for_hands, commands):
            self._outlets.execute(command)
        if before.engines and any(isinstance(command, Spawn) for command in commands):     # the first world is told at once
            self._early += self._wait(START_S)
        for command in filterfalse(_is_for_hands, commands):
            self._outlets.execute(command)
        self.totals = count(self.totals, before, event, self.world, commands)
        return any(isinstance(command, Quit) for command in commands)


def _is_for_hands(command: Command) -> bool:
    return isinstance(command, HANDS)


def boot_id() -> str:
    """The kernel's id of this boot; monotonic instants mean something only within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def host_seed() -> int:
    """Differs from host to host, and stays the same on one."""
    return sum(os.uname().nodename.encode()) % 1000
