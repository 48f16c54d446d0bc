"""What must survive the daemon: written whenever it changes, read once by the next one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.lowering import Lowering


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """`failures` are monotonic instants: they mean something only within one boot of the host."""

    name: str
    generation: int
    wanted: bool
    failures: tuple[float, ...] = ()
    held: str = ""                      # why another try would fail, or its last failure; empty: it is not held
    why: str = ""
    why_zh: str = ""
    asleep: bool = False                # or on its way there or back
    served: bool = False                # when this was written, or failed since and no incident says so yet
    renewed_at: float = -inf            # last planned restart
    unlogged: bool = False              # the output of this generation is lost
    since: float = inf                  # when it began to serve, or to be a suspect; inf: it did not serve
    ready_at: float = inf               # inf: this generation has not served yet


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """`turned_at`: the last change of sides; failures of before have had their answer."""

    name: str
    on_backup: bool
    turned_at: float
    patience: float = 1.0
    lowering: Lowering = Lowering()


@dataclass(frozen=True, slots=True)
class Memory:
    """`boot_id` is the kernel's: after a reboot no process, deadline or failure of before counts."""

    boot_id: str
    engines: tuple[EngineMemory, ...] = ()
    services: tuple[ServiceMemory, ...] = ()
    incidents: tuple[Incident, ...] = ()
    paused: bool = False
    restarts: tuple[float, ...] = ()    # of the last day, the newest ones; epoch seconds, so that they outlive a reboot
