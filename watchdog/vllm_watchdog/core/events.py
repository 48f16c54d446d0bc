"""Everything that can happen.  `at` is CLOCK_MONOTONIC in seconds; wall time is told by `ClockSet` alone."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core.memory import Memory
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.core.readings import Gpu, Health, Holder, Host, InFlight, Mark, Metrics, Tree, Unknown, Wait
from vllm_watchdog.core.verdict import Finding


@dataclass(frozen=True, slots=True)
class Event:
    at: float


@dataclass(frozen=True, slots=True)
class Survivor:
    """Processes of ours that a new daemon found running.  `leader` is False when only orphans of it are left; `launch` is
    the fingerprint of what it was started by, empty where that is not known."""

    mark: Mark
    pid: int
    leader: bool
    age_s: float
    launch: str = ""


# -- the daemon itself

@dataclass(frozen=True, slots=True)
class Booted(Event):
    """First event of every daemon.  `wall_offset` + `at` is epoch seconds; `memory` is None on a first start; `supervised`:
    systemd started this one, and will start the next."""

    plan: Plan
    wall_offset: float
    boot_id: str
    memory: Memory | None = None
    survivors: tuple[Survivor, ...] = ()
    supervised: bool = True


@dataclass(frozen=True, slots=True)
class ClockSet(Event):
    """The wall clock was stepped."""

    wall_offset: float


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed: whatever deadline lies at or before `at` is due."""


@dataclass(frozen=True, slots=True)
class StopAsked(Event):
    """SIGTERM or SIGINT: stop every engine, then leave."""

    by: str


@dataclass(frozen=True, slots=True)
class Reloaded(Event):
    """The configuration was read again and is valid."""

    plan: Plan


# -- what hands report

@dataclass(frozen=True, slots=True)
class Spawned(Event):
    mark: Mark
    pid: int
    lost_log: str = ""      # why its output goes nowhere; empty: it goes to its log


@dataclass(frozen=True, slots=True)
class SpawnFailed(Event):
    """Nothing runs.  `class_` is a word of the catalogue: spawn_failed, port_stranger."""

    mark: Mark
    class_: str
    why: str


@dataclass(frozen=True, slots=True)
class Exited(Event):
    """The leader is gone.  `code` as in subprocess (negative: signal), None where it was not our child."""

    mark: Mark
    code: int | None
    oom_kills: int = 0      # processes of its control group that the kernel ended for memory


@dataclass(frozen=True, slots=True)
class MemberDied(Event):
    """A process that the engine can't live without is gone, and its leader is there.  `name`: the title vLLM gave it."""

    mark: Mark
    pid: int
    name: str


@dataclass(frozen=True, slots=True)
class Emptied(Event):
    """No process of this generation is left.  `killed`: the orphans that had to be ended after their leader."""

    mark: Mark
    killed: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Dumped(Event):
    """An evidence bundle is finished, or as finished as its deadline allowed; `missing` names the parts it lacks."""

    mark: Mark | None
    incident: str
    folder: str
    missing: tuple[str, ...] = ()


# -- what senses report

@dataclass(frozen=True, slots=True)
class Probed(Event):
    """`/health`, and who listens on the port (asked when the answer is OK)."""

    mark: Mark
    health: Health
    owners: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered(Event):
    """The one-token completion: True answered, False not within its deadline, Unknown: it could not prove anything."""

    mark: Mark
    answer: bool | Unknown
    took_s: float


@dataclass(frozen=True, slots=True)
class Slept(Event):
    """`why` empty: it sleeps; else what went wrong."""

    mark: Mark
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Woke(Event):
    """`why` empty: it is awake, and a token came; else what went wrong."""

    mark: Mark
    why: str
    took_s: float


@dataclass(frozen=True, slots=True)
class Scraped(Event):
    mark: Mark
    metrics: Metrics | Unknown


@dataclass(frozen=True, slots=True)
class GpusSampled(Event):
    gpus: tuple[Gpu, ...] | Unknown


@dataclass(frozen=True, slots=True)
class HostSampled(Event):
    host: Host | Unknown
    trees: tuple[Tree, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRead(Event):
    """What one reading of an engine's log held.  `drained`: this generation is dead and the file was read to its end;
    `last_words` are its last lines."""

    mark: Mark
    findings: tuple[Finding, ...] = ()
    drained: bool = False
    last_words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelRead(Event):
    """Findings of the kernel log; `pid` of a finding is in its details."""

    findings: tuple[Finding, ...] | Unknown


@dataclass(frozen=True, slots=True)
class Casualties(Event):
    """The gateway's word on a death.  `in_flight` counts all; `requests` are the suspects and the largest."""

    mark: Mark
    in_flight: int
    requests: tuple[InFlight, ...] = ()


@dataclass(frozen=True, slots=True)
class Waited(Event):
    """The gateway's word on a hold that has ended: how long the clients of a service waited."""

    service: str
    wait: Wait


@dataclass(frozen=True, slots=True)
class Drilled(Event):
    """A drill's word on an open incident: it was brought about on purpose.  Told there, and without any other effect."""

    incident: str
    fault: str


# -- what people ask

@dataclass(frozen=True, slots=True)
class Asked(Event):
    """An operator's wish; `ref` names whom to answer.  `verb`: restart failover failback pause resume snapshot
    handover."""

    ref: int
    verb: str
    engine: str | None = None
    text: str = ""
