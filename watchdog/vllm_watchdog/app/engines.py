"""The adapters of every engine (hands, log, probes, sleeper), and what a command to one engine means to them.

The loop calls `do`: it sets attributes and enqueues, and never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vllm_watchdog.act.hands import Hands
from vllm_watchdog.act.sleeper import Sleeper
from vllm_watchdog.app.haste import Haste
from vllm_watchdog.cgroup import Groups
from vllm_watchdog.core import commands as c
from vllm_watchdog.core.events import Event, Exited, MemberDied, Spawned, SpawnFailed
from vllm_watchdog.core.policy import HAS_CHILD
from vllm_watchdog.core.readings import Tree
from vllm_watchdog.core.world import World
from vllm_watchdog.launch import Launch
from vllm_watchdog.sense.logtail import LogTail
from vllm_watchdog.sense.probe import ProbeSense

HEALTH_TIMEOUT_S = 5.0      # a server with a thousand new requests was seen to need seconds for /health


class Engines:
    """`part` takes what must be started and stopped; `newer`: what an engine is to be started by, if that changed."""

    def __init__(self, launches: dict[str, Launch], instance: str, state_dir: Path, groups: Groups | None,
                 make_room: Callable[[int], None], post: Callable[[Event], None], part: Callable[[Any], Any],
                 world: Callable[[], World], newer: Callable[[str], Launch | None], haste: Haste) -> None:
        clock = time.monotonic
        self.launches = launches
        self._instance, self._groups, self._post, self._part = instance, groups, post, part
        self._make_room, self._haste = make_room, haste
        self._world, self._newer = world, newer
        self._probes: dict[str, ProbeSense] = {
            name: part(ProbeSense(launch, post, clock, instance, HEALTH_TIMEOUT_S)) for name, launch in launches.items()}
        self._tails: dict[str, LogTail] = {
            name: part(LogTail(name, launch.log_path, state_dir / f"{name}.offset", post, clock, give_way=haste.give_way))
            for name, launch in launches.items()}
        self._hands = {name: self._hands_of(launch) for name, launch in launches.items()}
        self._sleepers = {name: Sleeper(launch, post, clock) for name, launch in launches.items()}
        self.do: dict[type[c.Command], Callable[[Any], None]] = {
            c.Spawn: self._spawn, c.Adopt: self._adopt, c.Term: self._term, c.Kill: self._kill,
            c.Drain: lambda command: self._tails[command.mark.engine].drain(command.mark),
            c.Ask: lambda command: self._probes[command.mark.engine].ask(command.mark, command.deadline_s),
            c.Sleep: lambda command: self._sleepers[command.mark.engine].do(command),
            c.Wake: lambda command: self._sleepers[command.mark.engine].do(command),
        }

    def _hands_of(self, launch: Launch) -> Hands:
        hands: Hands = self._part(Hands(launch, self._instance, self._heard, time.monotonic, groups=self._groups,
                                        make_room=self._make_room, begins=self._tails[launch.name].begins))
        return hands

    def _heard(self, event: Event) -> None:
        """From hands.  What a process wrote before it died is told before its death."""
        if isinstance(event, Exited):
            self._haste.begin()
        elif isinstance(event, Spawned | SpawnFailed):
            self._haste.end()
        if isinstance(event, MemberDied):
            self._tails[event.mark.engine].member_died(event)
        else:
            self._post(event)

    def sampled(self, trees: Iterable[Tree]) -> None:
        """In the sensor's thread."""
        for tree in trees:
            if tree.mark.engine in self._hands:
                self._hands[tree.mark.engine].watch(tree.mark, tree.processes)

    def wake_probes(self) -> None:
        for engine in self._world().engines:
            if engine.pid and engine.phase in HAS_CHILD:
                self._probes[engine.name].wake(engine.mark)

    def _spawn(self, command: c.Spawn) -> None:
        name = command.mark.engine
        if launch := self._newer(name):
            self.launches[name] = self._hands[name].launch = self._probes[name].launch = self._sleepers[name].launch = launch
        self._tails[name].follow(command.mark)
        self._hands[name].do(command)

    def _adopt(self, command: c.Adopt) -> None:
        self._tails[command.mark.engine].follow(command.mark)
        self._hands[command.mark.engine].adopt(command.mark, command.pid)

    def stage(self, name: str) -> str:
        """What its log says that it loads; anybody may ask."""
        return self._tails[name].stage if name in self._tails else ""

    def _term(self, command: c.Term) -> None:
        self._tails[command.mark.engine].asked_to_stop(command.mark)
        self._hands[command.mark.engine].do(command)

    def _kill(self, command: c.Kill) -> None:
        """A stray of an engine's older generation, or of one that is configured no more, gets hands of its own."""
        mark = command.mark
        if mark in self._world().strays or mark.engine not in self._hands:
            hands = self._hands_of(next(iter(self.launches.values())))
            hands.start()
            hands.do(command)
        else:
            self._hands[mark.engine].do(command)
