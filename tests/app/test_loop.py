from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
from tests.core.scenes import plan

from vllm_watchdog.app.loop import Loop, Outlets
from vllm_watchdog.core.commands import Command, Dump, Kill, Spawn
from vllm_watchdog.core.events import (
    Booted,
    Emptied,
    Event,
    Exited,
    GpusSampled,
    LogRead,
    Probed,
    Spawned,
    SpawnFailed,
    StopAsked,
)
from vllm_watchdog.core.readings import Health, Holder, Mark, Unknown
from vllm_watchdog.core.world import World


class Waits(Exception):
    """The loop waits for an event."""


class Inbox(SimpleQueue[Any]):
    def get(self, *_: object, **__: object) -> Any:
        raise Waits


def test_the_first_world_is_told_before_the_loop_waits() -> None:
    """Until then page and socket have nothing to answer with."""
    told: list[World] = []
    alive: list[None] = []
    outlets = Outlets(lambda _: None, lambda _: None, told.append, lambda: alive.append(None))
    loop = Loop(Inbox(), outlets, clock=lambda: 0.0, wall=lambda: 0.0)
    with pytest.raises(Waits):
        loop.run(Booted(0.0, plan(), 0.0, "boot-1"))
    assert [[engine.name for engine in world.engines] for world in told] == [["primary", "backup"]]
    assert len(alive) == 1


def test_what_starts_and_ends_engines_is_carried_out_first() -> None:
    """What tells of it and what proves it takes a moment, and would take the interpreter from it."""
    done: list[Command] = []
    inbox = SimpleQueue[Event]()
    outlets = Outlets(lambda _: None, done.append, lambda _: None, lambda: None)
    loop = Loop(inbox, outlets, clock=lambda: 0.0, wall=lambda: 0.0)
    one = Mark("primary", 1)
    for event in (GpusSampled(0.1, Unknown(0.1, "no NVIDIA driver")), Spawned(0.2, one, 100),
                  Probed(1.0, one, Health.OK, (Holder(100, "vllm", one),)), Exited(2.0, one, 1), Emptied(2.1, one),
                  LogRead(2.2, one, (), True), StopAsked(3.0, "SIGTERM"), SpawnFailed(3.1, Mark("primary", 2), "x", "x"),
                  LogRead(3.2, Mark("primary", 2), (), True)):
        inbox.put(event)
    loop.run(Booted(0.0, plan(backup=False), 0.0, "boot-1"))
    kinds = [type(command) for command in done]
    restart = kinds.index(Spawn, kinds.index(Kill))
    assert kinds.index(Dump) > restart      # of one turn


def test_the_rest_of_a_turn_waits_for_the_start_in_it() -> None:
    """What the hands tell of the start comes while the rest waits, and is the next event all the same."""
    done: list[str] = []
    one, two = Mark("primary", 1), Mark("primary", 2)
    inbox = Watched(done)
    outlets = Outlets(lambda event: done.append(type(event).__name__), lambda command: carry_out(command),
                      lambda _: None, lambda: None)

    def carry_out(command: Command) -> None:
        done.append(type(command).__name__)
        if command == Spawn(two):
            inbox.put(Spawned(2.3, two, 200))
            inbox.put(StopAsked(2.4, "SIGTERM"))
            inbox.put(SpawnFailed(2.5, two, "x", "x"))
            inbox.put(LogRead(2.6, two, (), True))

    loop = Loop(inbox, outlets, clock=lambda: 0.0, wall=lambda: 0.0)
    for event in (GpusSampled(0.1, Unknown(0.1, "no NVIDIA driver")), Spawned(0.2, one, 100),
                  Probed(1.0, one, Health.OK, (Holder(100, "vllm", one),)), Exited(2.0, one, 1), Emptied(2.1, one),
                  LogRead(2.2, one, (), True)):
        inbox.put(event)
    loop.run(Booted(0.0, plan(backup=False), 0.0, "boot-1"))
    start = done.index("Spawn", done.index("Kill"))
    assert done[start + 1] == "took Spawned"
    assert done.index("Dump", start) < done.index("Spawned", start), "its turn comes after"


class Watched(SimpleQueue[Event]):
    """Notes what is taken from it, and when."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def get(self, *args: Any, **more: Any) -> Event:
        event = super().get(*args, **more)
        self._done.append(f"took {type(event).__name__}")
        return event
