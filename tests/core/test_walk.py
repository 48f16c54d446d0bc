"""`advance` walked exhaustively: every state of a service with a cold backup that can be reached, every event in each.

States are taken as what decides (phases, wishes, counts up to their limits, sides), not as instants and texts.  Hands are
a model of two bits an engine: has it processes, and does its leader live.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from tests.core.scenes import finding

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Thresholds
from vllm_watchdog.core.policy import AT_REST, HAS_CHILD, Phase
from vllm_watchdog.core.readings import Health, Holder, Metrics, Progress
from vllm_watchdog.core.world import Engine, World, next_deadline

LIMITS = Limits(window_s=1e9, dead_s=0.5)
STRANGER = Holder(7, "nginx")
STILL = Metrics(Progress(1, 1, 1, 1), running=1, waiting=0, kv_usage=0.5)
FULL = replace(STILL, waiting=1, kv_usage=1.0)
JUDGED = (Phase.SERVING, Phase.SUSPECT)
ENOUGH = 2_000_000


def plan(budget: int) -> Plan:
    limits = replace(LIMITS, budget=budget)
    return Plan(
        engines=(EnginePlan("primary", 1, limits=limits, max_seqs=64),
                 EnginePlan("backup", 2, backup_for="primary", limits=limits, max_seqs=16)),
        thresholds=Thresholds(kv_cache_after_s=0, clear_after_s=10),    # lowered by one sample
        failover=FailoverPlan(after_failures=1),
        confirm_s=1e9,      # when incidents end has tests of its own; here it would only multiply the states
    )


@dataclass(frozen=True)
class Scene:
    world: World
    children: frozenset[str]    # engines that have processes
    leaders: frozenset[str]     # ... whose leader lives


def key(scene: Scene) -> object:
    world = scene.world

    def of(engine: Engine) -> object:
        life, pulse = engine.life, engine.pulse
        return (life.phase, life.wanted, min(len(life.failures), 2), life.charged, life.again, bool(life.doom),
                engine.phase in JUDGED and (pulse.asked_at is not None, pulse.missed_at is not None, pulse.counted))

    service = world.services[0]
    return (tuple(of(engine) for engine in world.engines), service.side, service.lowering.to, world.stopping,
            scene.children, scene.leaders)


def happenings(scene: Scene) -> Iterator[e.Event]:
    """What hands, senses, people and the clock may say now."""
    world = scene.world
    at = world.at + 1.0
    if (due := next_deadline(world)) < at + 1e6:
        yield e.Tick(max(due, world.at))
    yield e.Tick(world.at + LIMITS.still_s)
    for engine in world.engines:
        yield from _of(engine, scene, at)
    for verb in ("failover", "failback"):
        yield e.Asked(at, 1, verb)
    yield e.Asked(at, 1, "restart", "primary")
    yield e.StopAsked(at, "SIGTERM")


def _of(engine: Engine, scene: Scene, at: float) -> Iterator[e.Event]:
    mark, own = engine.mark, (Holder(9, "vllm", engine.mark),)
    if engine.phase is Phase.STARTING:
        yield e.Spawned(at, mark, 9)
        yield e.SpawnFailed(at, mark, "spawn_failed", "no room")
    if engine.name in scene.leaders:
        yield e.Exited(at, mark, 0)
    elif engine.name in scene.children:
        yield e.Emptied(at, mark)
    if engine.phase is Phase.SETTLING:
        yield e.LogRead(at, mark, (), drained=True)
        yield e.LogRead(at, mark, (finding("bad_args"),), drained=True)
    if engine.bundles:
        yield e.Dumped(at, mark, "x", "/x")
    if engine.name in scene.leaders:
        yield e.LogRead(at, mark, (finding("oom_runtime"),))
        yield e.MemberDied(at, mark, 10, "VLLM::EngineCore")
        yield e.Probed(at, mark, Health.OK, own)
        yield e.Probed(at, mark, Health.OK, (STRANGER,))
        yield e.Probed(at, mark, Health.REFUSED)
    if engine.phase in JUDGED:
        yield e.Scraped(at, mark, STILL)
        yield e.Scraped(at, mark, FULL)
    if engine.pulse.asked_at is not None and engine.phase in JUDGED:
        yield e.Answered(at, mark, True, 0.1)
        yield e.Answered(at, mark, False, 1.0)


def done(scene: Scene, event: e.Event) -> tuple[Scene, tuple[c.Command, ...]]:
    world, commands = advance(scene.world, event)
    children, leaders = set(scene.children), set(scene.leaders)
    match event:
        case e.Exited(mark=mark):
            leaders.discard(mark.engine)
        case e.Emptied(mark=mark) | e.SpawnFailed(mark=mark):
            children.discard(mark.engine)
            leaders.discard(mark.engine)
    for command in commands:
        if isinstance(command, c.Spawn):
            children.add(command.mark.engine)
            leaders.add(command.mark.engine)
    return Scene(world, frozenset(children), frozenset(leaders)), commands


def check(before: Scene, event: e.Event, after: Scene, commands: tuple[c.Command, ...]) -> None:
    world = after.world
    for command in commands:
        if isinstance(command, c.Spawn):
            assert not before.children - ({event.mark.engine} if isinstance(event, e.Emptied | e.SpawnFailed) else set())
            assert not world.stopping, "started while the daemon stops"
        elif isinstance(command, c.Term | c.Kill | c.Drain | c.Ask):
            assert command.mark in {engine.mark for engine in world.engines}
        elif isinstance(command, c.Quit):
            assert not after.children or {engine.phase for engine in world.engines} & {Phase.WEDGED}
    assert len(after.children) <= 1, "two engines on one card"
    for engine in world.engines:
        assert (engine.phase in HAS_CHILD) == (engine.name in after.children), (engine.name, engine.phase)
        budget = engine.plan.limits.budget
        assert len(engine.life.failures) <= budget + 1 or engine.phase in AT_REST or engine.phase in HAS_CHILD
    service, was = world.services[0], before.world.services[0].lowering.to
    assert service.lowering.to is None or (service.side is Side.PRIMARY and service.lowering.to == 16)
    if service.lowering.to is not None and was is None:
        assert not any(isinstance(command, c.Term | c.Kill | c.Spawn) for command in commands), "lowering restarts nothing"
    if isinstance(event, e.Tick):
        assert next_deadline(world) > event.at, "the loop would spin"


def walk(budget: int) -> int:
    world, commands = advance(World(), e.Booted(0.0, plan(budget), 1e9, "boot"))
    first = Scene(world, frozenset({"primary"}), frozenset({"primary"}))
    assert any(isinstance(command, c.Spawn) for command in commands)
    seen, todo, steps = {key(first)}, [first], 0
    while todo:
        scene = todo.pop()
        for event in happenings(scene):
            after, commands = done(scene, event)
            check(scene, event, after, commands)
            steps += 1
            assert steps < ENOUGH
            if (taken := key(after)) not in seen:
                seen.add(taken)
                todo.append(replace(after, world=replace(after.world, incidents=(), watches=(), restarts=())))
    assert {engine[0] for state in seen for engine in state[0]} >= HAS_CHILD - {Phase.DOZING, Phase.ASLEEP, Phase.WAKING}
    assert {state[2] for state in seen} == {None, 16}
    return steps


@pytest.mark.parametrize("budget", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_reachable_state_of_a_service_answers_every_event_rightly(budget: int) -> None:
    """A restart out of the budget more than doubles the states."""
    assert walk(budget) > 15_000 * (1 + budget)
