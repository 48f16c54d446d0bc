"""The whole of `advance` against a small model of the world: processes that live and die, hands that answer or do not,
sensors that lie, operators, crashes of the daemon and of the host, in any order.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.core import scenes
from tests.core.scenes import finding, gpu, host, metrics, tree

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core import gate
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.failover import Side
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import EnginePlan, Failback, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.core.policy import AT_REST, HAS_CHILD, Phase
from vllm_watchdog.core.readings import Gpu, Health, Holder, Mark, Unknown
from vllm_watchdog.core.report import report
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.core.standby import READY
from vllm_watchdog.core.world import World, next_deadline, remembered

LIMITS = Limits(load_s=100, load_idle_s=50, suspect_s=20, suspect_blind_s=40, budget=2, backoff_max_s=10)
LEVELS = Thresholds(vram_warn=((0, 0.90),), vram_degrade=((0, 0.95),), degrade_after_s=30, rss_bytes=8 * scenes.GIB,
                    kv_cache_after_s=20)
FAILOVER = FailoverPlan(stable_s=60)
FEWER = {"seqs": 64, "backup_seqs": 16}
SLEEPING, HOT = Standby.SLEEPING, Standby.HOT
PLANS = (
    scenes.plan(backup=False, limits=LIMITS),
    scenes.plan(limits=LIMITS, failover=FAILOVER),
    scenes.plan(gpus=(0,), share=0.6, limits=LIMITS, thresholds=LEVELS, failover=FAILOVER),
    scenes.plan(gpus=(0,), share=0.6, limits=LIMITS, thresholds=LEVELS, failover=FAILOVER, **FEWER),
    scenes.plan(gpus=(0,), share=0.6, backup_gpus=(1,), limits=LIMITS, failover=FAILOVER),
    Plan((EnginePlan("primary", 8100, (0,), 0.6, limits=LIMITS), EnginePlan("other", 8200, (0,), 0.3, limits=LIMITS),
          EnginePlan("backup", 8101, (0,), 0.6, backup_for="primary", limits=LIMITS)), LEVELS,
         FailoverPlan(failback=Failback.AUTO, stable_s=60)),
    scenes.plan(limits=LIMITS, failover=FAILOVER, standby=SLEEPING),
    scenes.plan(gpus=(0,), share=0.6, limits=LIMITS, thresholds=LEVELS, failover=FAILOVER, standby=SLEEPING, **FEWER),
    scenes.plan(gpus=(0,), share=0.6, backup_gpus=(1,), limits=LIMITS, failover=FAILOVER, standby=SLEEPING),
    scenes.plan(gpus=(0,), share=0.4, limits=LIMITS, thresholds=LEVELS, failover=FAILOVER, standby=HOT, **FEWER),
    scenes.plan(limits=LIMITS, failover=FAILOVER, standby=HOT),
)
CLASSES = ("oom_runtime", "engine_dead_v1", "bad_args", "cuda_hw", "startup_kv_insufficient", "compile_failure", "shm_stall",
           "startup_vram_busy")
NAMES = ("primary", "backup", "other")


@dataclass
class Proc:
    """A generation's processes: the leader, and what it leaves behind."""

    pid: int
    leader: bool = True
    killable: bool = True
    hung: bool = False
    asleep: bool = False


class WorldMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.world = 0.0, World()
        self.procs: dict[Mark, Proc] = {}
        self.pending: list[c.Command] = []
        self.journal: list[e.Event] = []
        self.alerts: dict[str, list[str]] = {}
        self.issued: set[Mark] = set()
        self.boots, self.tokens, self.neighbour_gib, self.quit, self.wall = 0, 0.0, 0.0, False, scenes.WALL

    @initialize(plan=st.integers(0, len(PLANS) - 1))
    def set_the_scene(self, plan: int) -> None:
        self.plan = PLANS[plan]
        self.boot()

    # -- the loop, and what is carried out at once

    def feed(self, event: e.Event) -> None:
        self.now = event.at
        self.journal.append(CODEC.decode(json.loads(json.dumps(encode(event)))))
        assert self.journal[-1] == event
        self.world, commands = advance(self.world, event)
        for command in commands:
            assert CODEC.decode(json.loads(json.dumps(encode(command)))) == command
            self.carry_out(command)
        assert next_deadline(self.world) > self.world.at, "what is due was not done: the loop would spin"

    def carry_out(self, command: c.Command) -> None:
        mark = getattr(command, "mark", None)
        if mark is not None and not isinstance(command, c.Spawn):
            assert mark in self.issued, f"{command} names a generation that was never launched"
        match command:
            case c.Spawn(mark):
                self.spawn(mark)
            case c.Adopt(mark, pid):
                assert self.procs[mark].leader and self.procs[mark].pid == pid
            case c.Alert(kind, incident):
                self.alert(kind, incident.id)
            case c.Ask(mark):
                assert command not in self.pending, "two probes at once"
                self.pending.append(command)
            case c.Wake(mark):
                assert mark in self.procs
                for other in self.awake():
                    assert mark == other or not self.on_one_card(mark, other), f"{mark} is woken beside {other}"
                self.pending.append(command)
            case c.Term() | c.Kill() | c.Drain() | c.Dump() | c.SampleGpus() | c.Sleep():
                self.pending.append(command)
            case c.Quit():
                assert all(c.Kill(mark) in self.pending for mark in self.procs), f"left {self.procs}"
                self.quit = True

    def spawn(self, mark: Mark) -> None:
        engine = self.world.engine(mark.engine)
        assert mark not in self.issued, "a mark names one launch for ever"
        assert not self.world.stopping
        assert len(engine.life.failures) <= LIMITS.budget, "restarted past the budget"
        assert not gate.shortage(engine.plan, self.world.gpus), "started into memory that somebody holds"
        for other in self.awake():
            assert not self.on_one_card(mark, other), f"{mark} beside {other}"
        self.issued.add(mark)
        self.procs[mark] = Proc(pid=1000 + len(self.issued))
        self.pending.append(c.Spawn(mark))

    def awake(self) -> list[Mark]:
        return [mark for mark, proc in self.procs.items() if not proc.asleep]

    def on_one_card(self, one: Mark, other: Mark) -> bool:
        """Of one service, on a card that is too small for both."""
        same = self.plan.service_of(one.engine) == self.plan.service_of(other.engine)
        plans = self.plan.engine(one.engine), self.plan.engine(other.engine)
        return same and (one.engine == other.engine or not gate.fit_together(*plans))

    def alert(self, kind: str, incident: str) -> None:
        """The outbox tells each kind once an incident; a new daemon tells what is open again, in case it was lost."""
        told = self.alerts.setdefault(incident, [])
        if kind == "opened" and kind in told:
            assert self.journal[-1].__class__ is e.Booted, "opened twice"
            return
        assert "resolved" not in told, f"{kind} after resolved"
        assert told or kind == "opened", f"{kind} before opened"
        told.append(kind)

    # -- what answers commands

    def answer(self, command: c.Command) -> None:
        """As a cooperative world does."""
        self.pending.remove(command)
        match command:
            case c.Spawn(mark):
                if mark in self.procs:
                    self.feed(e.Spawned(self.now, mark, self.procs[mark].pid))
            case c.Term(mark):
                self.leader_goes(mark, 0)
            case c.Kill(mark):
                if (proc := self.procs.pop(mark, None)) and proc.leader:
                    self.feed(e.Exited(self.now, mark, -9))
                self.feed(e.Emptied(self.now, mark))
            case c.Drain(mark):
                self.feed(e.LogRead(self.now, mark, drained=True))
            case c.Dump(incident, mark):
                self.feed(e.Dumped(self.now, mark, incident, f"incidents/{incident}"))
            case c.Ask(mark):
                proc = self.procs.get(mark)
                self.feed(e.Answered(self.now, mark, proc is not None and proc.leader and not proc.hung, 0.1))
            case c.Sleep(mark) | c.Wake(mark):
                self.nap(command, mark)
            case c.SampleGpus():
                self.feed(e.GpusSampled(self.now, self.cards()))

    def nap(self, command: c.Sleep | c.Wake, mark: Mark, why: str = "") -> None:
        """A hung engine does not answer; one that is gone refuses."""
        proc = self.procs.get(mark)
        if proc is None or not proc.leader:
            why = "connection refused"
        elif proc.hung:
            why = "no whole answer in time"
        if proc and not why:
            proc.asleep = isinstance(command, c.Sleep)
        kind = e.Slept if isinstance(command, c.Sleep) else e.Woke
        self.feed(kind(self.now, mark, why, 0.2))

    def leader_goes(self, mark: Mark, code: int) -> None:
        proc = self.procs.get(mark)
        if proc and proc.leader:
            proc.leader = False
            self.feed(e.Exited(self.now, mark, code))

    def cards(self) -> tuple[Gpu, ...]:
        """60 GiB an engine, on the cards of its plan; the neighbour sits on card 0."""
        rows: dict[int, list[tuple[int, str, Mark | None, float | None]]] = {0: [], 1: []}
        if self.neighbour_gib:
            rows[0].append((7, "python", None, self.neighbour_gib))
        for mark, proc in self.procs.items():
            engine = self.plan.engine(mark.engine)
            for card in engine.gpus:
                held = 1 if proc.asleep else 100 * (engine.vram_share or 0.6) - 2
                rows[card].append((proc.pid, "VLLM::EngineCore", mark, held))
        return tuple(gpu(sum(row[3] or 0 for row in found), *found, index=card) for card, found in rows.items())

    def living(self) -> list[Mark]:
        return [engine.mark for engine in self.world.engines if engine.phase in HAS_CHILD and engine.mark in self.procs]

    # -- rules

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 99))
    def hands_answer(self, which: int) -> None:
        command = self.pending[which % len(self.pending)]
        proc = self.procs.get(getattr(command, "mark", None) or Mark("", 0))
        if isinstance(command, c.Kill | c.Term) and proc and not proc.killable:
            return
        self.answer(command)

    @precondition(lambda self: self.pending)
    @rule()
    def hands_answer_everything(self) -> None:
        for _ in range(20):
            able = [it for it in self.pending if not isinstance(it, c.Kill | c.Term)
                    or self.procs.get(it.mark, Proc(0)).killable]
            if able:
                self.answer(able[0])

    @precondition(lambda self: any(isinstance(it, c.Spawn) for it in self.pending))
    @rule(class_=st.sampled_from(["port_stranger", "spawn_failed"]))
    def a_spawn_fails(self, class_: str) -> None:
        command = next(it for it in self.pending if isinstance(it, c.Spawn))
        self.pending.remove(command)
        if self.procs.pop(command.mark, None):
            self.feed(e.SpawnFailed(self.now, command.mark, class_, "no"))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 99))
    def an_answer_never_comes(self, which: int) -> None:
        """TERM may be ignored, a bundle or a rest of a log be lost; an Ask and a Kill are always answered in the end."""
        command = self.pending[which % len(self.pending)]
        if isinstance(command, c.Term | c.Dump | c.Drain | c.SampleGpus | c.Sleep | c.Wake):
            self.pending.remove(command)

    @precondition(lambda self: any(isinstance(it, c.Sleep | c.Wake) for it in self.pending))
    @rule(done=st.booleans())
    def a_nap_fails(self, done: bool) -> None:
        """Refused; or done, and its proof is missing: the token does not come."""
        command = next(it for it in self.pending if isinstance(it, c.Sleep | c.Wake))
        self.pending.remove(command)
        if command.mark in self.procs:
            if done:
                self.procs[command.mark].asleep = isinstance(command, c.Sleep)
            self.nap(command, command.mark, "answered 500")

    @rule(wait=st.sampled_from([0.05, 0.5, 1, 5, 12, 31, 61, 130, 700]))
    def time_passes(self, wait: float) -> None:
        self.feed(e.Tick(self.now + wait))

    @rule(times=st.integers(1, 4))
    def the_next_deadline_comes(self, times: int) -> None:
        for _ in range(times):
            if next_deadline(self.world) < inf:
                self.feed(e.Tick(next_deadline(self.world)))

    @precondition(lambda self: self.procs)
    @rule(which=st.integers(0, 9), kind=st.sampled_from(["exits", "exits", "hangs", "wedges", "vanishes"]))
    def a_process_fails(self, which: int, kind: str) -> None:
        mark = list(self.procs)[which % len(self.procs)]
        proc = self.procs[mark]
        if kind == "hangs":
            proc.hung = True
        elif kind == "wedges":
            proc.killable = False
        elif proc.killable and not any(it == c.Spawn(mark) for it in self.pending):
            self.leader_goes(mark, 1)
            if kind == "vanishes" and mark in self.procs:
                del self.procs[mark]        # no orphan: the Kill that follows will find nothing

    @rule(health=st.sampled_from([Health.OK, Health.OK, Health.OK, Health.DEAD, Health.REFUSED, Health.SILENT]),
          stranger=st.sampled_from([False, False, False, False, True]))
    def probes_look(self, health: Health, stranger: bool) -> None:
        for mark in self.living():
            owners = (Holder(7, "nginx"),) if stranger else (Holder(self.procs[mark].pid, "vllm", mark),)
            seen = health if self.procs[mark].leader else Health.REFUSED
            self.feed(e.Probed(self.now, mark, seen, owners if seen is Health.OK else ()))

    @rule(how=st.sampled_from(["moves", "moves", "still", "blind", "full", "unknown"]))
    def counters_are_read(self, how: str) -> None:
        self.tokens += how in ("moves", "full")
        for mark in self.living():
            full = how == "full"
            seen = metrics(None if how == "blind" else self.tokens, 1.0, float(full), 0.99 if full else 0.2)
            self.feed(e.Scraped(self.now, mark, Unknown(self.now, "no answer") if how == "unknown" else seen))

    @rule(neighbour=st.sampled_from([0.0, 0.0, 30.0, 40.0]))
    def gpus_are_sampled(self, neighbour: float) -> None:
        self.neighbour_gib = neighbour
        self.feed(e.GpusSampled(self.now, self.cards()))

    @rule(neighbour=st.sampled_from([0.0, 40.0]), full=st.booleans(), times=st.sampled_from([4, 8]))
    def memory_is_short_or_not_for_a_while(self, neighbour: float, full: bool, times: int) -> None:
        self.neighbour_gib = neighbour
        for _ in range(times):
            self.feed(e.Tick(self.now + 5))
            self.feed(e.GpusSampled(self.now, self.cards()))
            self.tokens += 1
            for mark in self.living():
                self.feed(e.Scraped(self.now, mark, metrics(self.tokens, 1.0, float(full), 0.99 if full else 0.2)))

    @precondition(lambda self: all(proc.killable for proc in self.procs.values()))
    @rule(times=st.integers(3, 5))
    def the_world_cooperates_for_a_while(self, times: int) -> None:
        for _ in range(times):
            self.settle()

    @rule()
    def gpus_fall_silent(self) -> None:
        self.feed(e.GpusSampled(self.now, Unknown(self.now, "no answer")))

    @rule(free=st.sampled_from([50.0, 0.5]), rss=st.sampled_from([1.0, 9.0]), cpu=st.sampled_from([0.0, 1.0]))
    def the_host_is_sampled(self, free: float, rss: float, cpu: float) -> None:
        trees = tuple(tree(mark, rss, cpu) for mark in self.living())
        self.feed(e.HostSampled(self.now, host(free), trees))

    @rule(which=st.integers(0, 9), class_=st.sampled_from(CLASSES))
    def a_log_says_something(self, which: int, class_: str) -> None:
        if living := self.living():
            self.feed(e.LogRead(self.now, living[which % len(living)], (finding(class_),)))

    @rule(class_=st.sampled_from(["xid_node", "xid_app", "xid_other"]))
    def the_kernel_says_something(self, class_: str) -> None:
        self.feed(e.KernelRead(self.now, (finding(class_, pci="0000:3b:00"),)))

    @rule(verb=st.sampled_from(["restart", "failover", "failback", "pause", "resume", "resume", "snapshot", "dance"]),
          engine=st.sampled_from([None, *NAMES]))
    def a_human_asks(self, verb: str, engine: str | None) -> None:
        self.feed(e.Asked(self.now, 1, verb, engine))

    @rule(by=st.sampled_from([-3600.0, 3600.0]))
    def the_wall_clock_is_set(self, by: float) -> None:
        self.wall += by
        self.feed(e.ClockSet(self.now, self.wall))

    @rule()
    def the_daemon_is_replaced(self) -> None:
        """Killed at any moment: what hands were told and had not done is lost, processes live on."""
        self.now += 1
        self.boot()

    @rule()
    def the_host_reboots(self) -> None:
        self.procs.clear()
        self.wall += self.now - 5
        self.now, self.boots = 5.0, self.boots + 1
        self.boot()

    @precondition(lambda self: len(self.journal) > 15)
    @rule(once=st.sampled_from([False, False, False, True]))
    def the_daemon_is_stopped(self, once: bool) -> None:
        if once:
            self.feed(e.StopAsked(self.now, "SIGTERM"))

    def boot(self) -> None:
        self.pending.clear()
        self.quit = False
        memory = remembered(self.world) if self.journal else None
        survivors = tuple(e.Survivor(mark, proc.pid, proc.leader, 50.0) for mark, proc in self.procs.items())
        self.feed(e.Booted(self.now, self.plan, self.wall, f"boot-{self.boots}", memory, survivors))

    # -- what must hold after whatever happened

    @invariant()
    def two_generations_never_share_a_card(self) -> None:
        """Unless one sleeps, or both fit."""
        marks = self.awake()
        assert not any(self.on_one_card(one, other) for one in marks for other in marks if one != other)
        assert len({mark.engine for mark in self.procs}) == len(self.procs), "two generations of one engine"

    @invariant()
    def every_process_is_known(self) -> None:
        for mark in self.procs:
            engine = self.world.engine(mark.engine)
            assert mark in self.world.strays or (engine.mark == mark and engine.phase in HAS_CHILD), mark

    @invariant()
    def a_service_has_at_most_one_open_incident_and_every_one_is_open_or_resolved(self) -> None:
        services = [incident.service for incident in self.world.incidents]
        assert len(services) == len(set(services))
        open_ = {incident.id for incident in self.world.incidents}
        assert open_ == {id_ for id_, told in self.alerts.items() if "resolved" not in told}

    @invariant()
    def whoever_is_wanted_serves_or_stands_by_or_comes_back_beside(self) -> None:
        for service in self.world.services:
            pair = [engine for engine in self.world.engines if service.name in (engine.name, engine.plan.backup_for)]
            wanted = {engine.name for engine in pair if engine.life.wanted}
            both = service.standby is not Standby.COLD or gate.fit_together(pair[0].plan, pair[-1].plan)
            assert both or wanted <= {service.wanted}

    @invariant()
    def only_a_primary_is_lowered_and_only_to_what_its_backup_takes(self) -> None:
        for service in self.world.services:
            assert service.lowering.to is None or (service.side is Side.PRIMARY and service.lowering.to == 16)
            assert service.lowering.to is None or self.world.stopping or self.world.incident(service.name)

    @invariant()
    def who_sleeps_is_known_to_sleep(self) -> None:
        """An engine that sleeps would look as if it served."""
        for engine in self.world.engines:
            proc = self.procs.get(engine.mark)
            if engine.phase in (Phase.SERVING, Phase.SUSPECT) and proc and proc.leader:
                assert not proc.asleep or self.world.service(engine.name).wanted != engine.name, engine.mark

    @invariant()
    def the_report_can_always_be_written(self) -> None:
        json.dumps(report(self.world), allow_nan=False)

    # -- the end

    def teardown(self) -> None:
        if not self.journal:
            return
        self.replays()
        if not self.world.stopping:
            self.calm()
        self.stop()
        self.replays()

    def replays(self) -> None:
        world = World()
        for event in self.journal:
            world, _ = advance(world, event)
        assert world == self.world, "folding the journal again must give the same world"

    def settle(self) -> None:
        """The world cooperates for a while: hands answer, sensors see, tokens flow."""
        for _ in range(40):
            if not self.pending:
                break
            self.answer(self.pending[0])
        for mark in self.living():
            if self.procs[mark].leader:
                self.feed(e.Probed(self.now, mark, Health.OK, (Holder(self.procs[mark].pid, "vllm", mark),)))
                self.tokens += 1
                self.feed(e.Scraped(self.now, mark, metrics(self.tokens, running=1.0)))
        self.feed(e.GpusSampled(self.now, self.cards()))
        trees = tuple(tree(mark) for mark in self.living())
        self.feed(e.HostSampled(self.now, host(), trees))
        self.feed(e.Tick(min(max(next_deadline(self.world), self.now + 0.1), self.now + 10)))

    def calm(self) -> None:
        self.neighbour_gib = 0.0
        for proc in self.procs.values():
            proc.killable, proc.hung = True, False
        if self.world.paused:
            self.feed(e.Asked(self.now, 1, "resume"))
        for _ in range(400):
            self.settle()
            if all(map(self.in_order, self.world.services)):
                break
        else:
            phases = {engine.name: engine.phase for engine in self.world.engines}
            raise AssertionError(f"no order after a long calm: {phases}, {self.world.incidents}, {self.pending}")

    def in_order(self, service: object) -> bool:
        """Served by one engine, with no incident open; or held, and somebody was called."""
        name = service.name
        pair = [engine for engine in self.world.engines if name in (engine.name, engine.plan.backup_for)]
        wanted, others = self.world.engine(service.wanted), [one for one in pair if one.name != service.wanted]
        incident = self.world.incident(name)
        ready = AT_REST | READY[service.standby]
        if any(other.phase not in ready for other in others):
            return False
        if wanted.phase is Phase.HELD:
            return incident is not None and incident.urgency is Urgency.PAGE
        return wanted.phase is Phase.SERVING and incident is None

    def stop(self) -> None:
        for proc in self.procs.values():
            proc.killable = True
        self.feed(e.StopAsked(self.now, "SIGTERM"))
        for _ in range(200):
            if self.quit:
                break
            self.settle()
        assert self.quit, "a stop must end"


TestWorldMachine = WorldMachine.TestCase
TestWorldMachine.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_more_histories_keep_the_same_rules() -> None:
    run_state_machine_as_test(WorldMachine, settings=settings(max_examples=100, stateful_step_count=30))
