"""What the core's tests are set with: plans, readings, and a world that is driven one event at a time."""

from __future__ import annotations

from typing import Any

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.findings import Finding
from vllm_watchdog.core.memory import Memory
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import (
    Gpu,
    GpuProcess,
    Health,
    Holder,
    Host,
    Mark,
    Metrics,
    Process,
    Progress,
    Tree,
    Unknown,
)
from vllm_watchdog.core.world import Engine, World

GIB = 1 << 30
WALL = 1_795_000_000.0      # epoch seconds at monotonic 0: 2026-11-18T05:46:40Z


def mark(text: str) -> Mark:
    """`primary#1`"""
    name, _, generation = text.partition("#")
    return Mark(name, int(generation))


def plan(backup: bool = True, gpus: tuple[int, ...] = (), share: float | None = None,
         backup_gpus: tuple[int, ...] | None = None, limits: Limits | None = None,
         thresholds: Thresholds | None = None, failover: FailoverPlan | None = None, standby: Standby = Standby.COLD,
         backup_share: float | None = None, seqs: int | None = None, backup_seqs: int | None = None, **more: Any) -> Plan:
    limits = limits or Limits()
    engines = [EnginePlan("primary", 8100, gpus, share, limits=limits, max_seqs=seqs)]
    if backup:
        cards = gpus if backup_gpus is None else backup_gpus
        engines.append(EnginePlan("backup", 8101, cards, backup_share or share, "primary", standby, limits, backup_seqs))
    return Plan(tuple(engines), thresholds or Thresholds(), failover or FailoverPlan(), **more)


def gpu(used_gib: float, *rows: tuple[int, str, Mark | None, float | None], index: int = 0, total_gib: float = 100,
        bus_id: str = "0000:3b:00") -> Gpu:
    """`rows`: PID, name, mark, GiB."""
    processes = tuple(
        GpuProcess(Holder(pid, name, whose), None if gib is None else int(gib * GIB)) for pid, name, whose, gib in rows
    )
    return Gpu(index, f"GPU-{index}", "card", int(used_gib * GIB), int(total_gib * GIB), 1, 40, 0, processes, bus_id)


def metrics(tokens: float | None = 0.0, running: float | None = 0.0, waiting: float | None = 0.0,
            kv: float | None = 0.0) -> Metrics:
    """`tokens` None: no counters are published."""
    progress = None if tokens is None else Progress(tokens, tokens, tokens, tokens)
    return Metrics(progress, running, waiting, kv, 0.0)


def tree(whose: Mark, rss_gib: float = 1, cpu: float | None = 1.0, io: int | None = 0, pid: int = 100) -> Tree:
    return Tree(whose, (Process(pid, "vllm", int(rss_gib * GIB), None, cpu, 8, 20),), io)


def host(free_gib: float = 50) -> Host:
    return Host(64 * GIB, 32 * GIB, 100 * GIB, int(free_gib * GIB), 0.5)


def finding(class_: str, text: str = "", **details: Any) -> Finding:
    entry = CATALOG[class_]
    return Finding(class_, entry.severity, entry.action, 1, text or f"the log says {class_}", tuple(details.items()))


class Scene:
    """A world, and every command that came of the events so far."""

    def __init__(self, plan: Plan, at: float = 0.0, memory: Memory | None = None, survivors: tuple[e.Survivor, ...] = (),
                 boot_id: str = "boot-1", wall: float = WALL) -> None:
        self.world = World()
        self.told: list[c.Command] = []
        self.latest: tuple[c.Command, ...] = ()
        self.now = at
        self.feed(e.Booted(at, plan, wall, boot_id, memory, survivors))

    def feed(self, event: e.Event) -> tuple[c.Command, ...]:
        self.now = event.at
        self.world, self.latest = advance(self.world, event)
        self.told += self.latest
        return self.latest

    def at(self, at: float) -> tuple[c.Command, ...]:
        return self.feed(e.Tick(at))

    # -- shorthands for what the world answers

    def engine(self, name: str = "primary") -> Engine:
        return self.world.engine(name)

    def phase(self, name: str = "primary") -> Phase:
        return self.engine(name).phase

    def phases(self) -> dict[str, Phase]:
        return {engine.name: engine.phase for engine in self.world.engines}

    def ok(self, name: str = "primary", at: float | None = None, *owners: Holder) -> tuple[c.Command, ...]:
        engine = self.engine(name)
        mine = owners or (Holder(engine.pid, "vllm", engine.mark),)
        return self.feed(e.Probed(self.now if at is None else at, engine.mark, Health.OK, mine))

    def serve(self, name: str = "primary", pid: int = 100) -> Scene:
        """From STARTING to SERVING, at once; a sleeper goes to sleep then."""
        self.feed(e.Spawned(self.now, self.engine(name).mark, pid))
        self.ok(name)
        assert self.phase(name) in (Phase.SERVING, Phase.DOZING)
        return self

    def sleep(self, name: str = "backup", why: str = "") -> tuple[c.Command, ...]:
        return self.feed(e.Slept(self.now, self.engine(name).mark, why, 0.3))

    def wake(self, name: str = "backup", why: str = "") -> tuple[c.Command, ...]:
        return self.feed(e.Woke(self.now, self.engine(name).mark, why, 0.2))

    def bury(self, name: str = "primary", *findings: Finding) -> tuple[c.Command, ...]:
        """Nothing of the generation is left, and its log is read."""
        whose = self.engine(name).mark
        self.feed(e.Emptied(self.now, whose))
        return self.feed(e.LogRead(self.now, whose, findings, drained=True))

    def crash(self, name: str = "primary", at: float | None = None, *findings: Finding) -> tuple[c.Command, ...]:
        self.now = self.now if at is None else at
        self.feed(e.Exited(self.now, self.engine(name).mark, 1))
        return self.bury(name, *findings)

    def scrape(self, tokens: float | None, name: str = "primary", at: float | None = None, **gauges: Any) -> None:
        self.feed(e.Scraped(self.now if at is None else at, self.engine(name).mark, metrics(tokens, **gauges)))

    def ask(self, verb: str, engine: str | None = None, text: str = "") -> c.Answer:
        self.feed(e.Asked(self.now, 7, verb, engine, text))
        return self.only(c.Answer)

    def snapshot(self, engine: str | None = None, text: str = "") -> tuple[c.Command, ...]:
        """Asked for; it is answered when it is written."""
        return self.feed(e.Asked(self.now, 7, "snapshot", engine, text))

    def gpus(self, at: float, *cards: Gpu) -> tuple[c.Command, ...]:
        return self.feed(e.GpusSampled(at, cards))

    def blind(self, at: float, why: str = "GPU driver unresponsive") -> tuple[c.Command, ...]:
        return self.feed(e.GpusSampled(at, Unknown(at, why)))

    # -- what was commanded

    def only(self, kind: type[Any]) -> Any:
        """The one command of a kind in the latest turn."""
        found = [command for command in self.latest if isinstance(command, kind)]
        assert len(found) == 1, (kind.__name__, self.latest)
        return found[0]

    def all(self, kind: type[Any]) -> list[Any]:
        """Every command of a kind so far."""
        return [command for command in self.told if isinstance(command, kind)]

    def said(self, name: str) -> list[dict[str, str]]:
        """The fields of each line, but for what is the same in Chinese."""
        return [{key: value for key, value in say.fields if not key.endswith("_zh")}
                for say in self.all(c.Say) if say.name == name]

    def alerts(self) -> list[tuple[str, str]]:
        return [(alert.kind, alert.incident.class_) for alert in self.all(c.Alert)]
