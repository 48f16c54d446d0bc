from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
from tests.core.scenes import plan

from vllm_watchdog.app.loop import Loop, Outlets
from vllm_watchdog.core.events import Booted
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
