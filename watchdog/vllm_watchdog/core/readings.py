"""What a sensor saw.  Missing is a value: `Unknown(since, why)` is a reading, not an exception, and never a zero."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reading that could not be taken: `since` (monotonic seconds) and `why`, one short sentence."""

    since: float
    why: str


@dataclass(frozen=True, slots=True)
class Mark:
    """The identity a launched process carries in its environment, and hands on to its children."""

    engine: str
    generation: int

    def __str__(self) -> str:
        return f"{self.engine}#{self.generation}"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds something we need: a port, or GPU memory.  `mark` is None for a stranger.

    `pid` is 0 and `name` empty when the kernel would not tell us (another user's process).
    """

    pid: int
    name: str
    mark: Mark | None = None

    def __str__(self) -> str:
        who = f"PID {self.pid} ({self.name})" if self.pid else "a process we may not look at"
        return f"{who}, ours: {self.mark}" if self.mark else who


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """One row of NVML's process list.  `used_bytes` is None where the driver does not tell (MIG, vGPU, WSL)."""

    holder: Holder
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card.  Memory in bytes, utilization in percent, temperature in °C; None: this card does not tell."""

    index: int
    uuid: str
    name: str
    used_bytes: int
    total_bytes: int
    utilization: int | None = None
    temperature_c: int | None = None
    ecc_uncorrected: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    bus_id: str = ""                    # PCI address as the kernel log writes it: 0000:3b:00

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Process:
    """One process of an engine.  Memory in bytes; `cpu` in cores (1.5 = one and a half); None: not readable."""

    pid: int
    name: str
    rss_bytes: int
    uss_bytes: int | None
    cpu: float | None
    threads: int
    fds: int | None
    fd_limit: int | None = None     # RLIMIT_NOFILE


@dataclass(frozen=True, slots=True)
class Tree:
    """Every live process of one generation, the leader first; `io_bytes` read and written by all since their start;
    `charged_bytes` of its control group, page cache included."""

    mark: Mark
    processes: tuple[Process, ...]
    io_bytes: int | None = None
    charged_bytes: int | None = None

    @property
    def rss_bytes(self) -> int:
        return sum(process.rss_bytes for process in self.processes)

    @property
    def cpu(self) -> float:
        return sum(process.cpu or 0.0 for process in self.processes)


@dataclass(frozen=True, slots=True)
class Host:
    """The machine: memory and the disk that holds the logs, in bytes; one-minute load average.

    `cgroup_*`: of the tightest memory limit that we and our engines run under; None: there is none.
    """

    memory_total: int
    memory_available: int
    disk_total: int
    disk_free: int
    load: float
    cgroup_total: int | None = None
    cgroup_available: int | None = None


class Health(StrEnum):
    """What `/health` said.  OK proves only that the API server's own loop answers."""

    OK = auto()         # 200
    DEAD = auto()       # 5xx: the API server has noticed that its engine died
    REFUSED = auto()    # nobody listens: loading, or gone
    SILENT = auto()     # connected, no whole answer within the deadline
    ODD = auto()        # any other status


@dataclass(frozen=True, slots=True)
class Progress:
    """The counters that move while tokens flow; None where the engine does not publish one."""

    prompt_tokens: float | None
    generation_tokens: float | None
    iterations: float | None
    finished: float | None


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape.  `progress` is None with `--disable-log-stats`; gauges may be stale: never judge life by them."""

    progress: Progress | None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None       # 0..1
    preemptions: float | None = None


@dataclass(frozen=True, slots=True)
class InFlight:
    """A request that was there when an engine died, as the gateway tells it; never its text; `hash` tells a repeat."""

    id: int
    bytes: int
    age_s: float
    begun: bool         # its response had begun
    hash: str
    tokens_estimated: int
    verdict: str        # replayed, held, suspect, refused, cut


@dataclass(frozen=True, slots=True)
class Wait:
    """What the gateway's clients waited while no engine served.  `failed` got no answer: refused, or they left."""

    requests: int       # that got their answer after waiting
    longest_s: float
    median_s: float
    failed: int = 0
    replayed: int = 0   # of the requests: sent to a second engine


@dataclass(frozen=True, slots=True)
class ServiceLoad:
    """What waits in the gateway for one service, and what its engine has.  None: nobody serves; there is no such limit."""

    service: str
    waiting: int
    waiting_long: int           # of them: long prompts, and those that must go alone
    engine: str | None = None
    requests: int = 0           # there now
    max_concurrent: int | None = None
    prompt_tokens: int = 0
    max_tokens: int | None = None
    throttled: str | None = None    # why fewer are let through than it could take
    breaker: str = "closed"     # open, half_open: it is asked by nobody, or by one request that tries it


@dataclass(frozen=True, slots=True)
class GatewayLoad:
    """`connections`: of clients; `quarantined`: prompts that are refused because engines died of them."""

    connections: int
    quarantined: int
    services: tuple[ServiceLoad, ...]
