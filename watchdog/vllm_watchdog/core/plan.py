"""What the configuration asks for, as the core reads it: every number resolved, every unit in the name.

`config.Settings.plan()` makes it; the journal's `Booted` carries it, so that a journal replays without the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Failback(StrEnum):
    WHEN_IDLE = "when-idle"
    AUTO = "auto"
    MANUAL = "manual"


class Planned(StrEnum):
    """When an engine that leaks is restarted before its limit is met."""

    OFF = "off"
    WHEN_IDLE = "when-idle"     # once a day at most, while no request runs or waits


class Standby(StrEnum):
    """What a backup is while the primary serves."""

    COLD = "cold"           # nothing: started when it is needed
    SLEEPING = "sleeping"   # booted first, then put to sleep: it keeps its weights in host memory, and hardly any VRAM
    HOT = "hot"             # serves all the time, on cards or a share of its own


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each phase of an engine's life may last, and how often it may fail."""

    spawn_s: float = 15             # fork and exec take milliseconds; longer means the host is in trouble
    load_s: float = 3600            # 48 minutes of kernel autotuning were seen on a healthy engine
    load_idle_s: float = 600        # no CPU, no disk, no log line for this long while loading: stuck
    suspect_s: float = 60           # a hang is believed after this much more silence
    suspect_blind_s: float = 300    # the same, when the engine publishes no counters to tell busy from hung
    dump_s: float = 10              # a kill waits this long for evidence
    stop_s: float = 30
    condemned_s: float = 2          # the same for one that has failed: it has last words to write, and no answer to finish
    kill_s: float = 30              # longer than any exit but that of a process stuck in the driver
    sleep_s: float = 120            # the first sleep pins host memory: 10.8 s for 13 GiB on an H200, later ones 0.3 s
    wake_s: float = 30              # 0.11 s for 1 B, 0.5 s for 7 B; then one token proves it
    settle_s: float = 5             # reading the rest of a dead engine's log
    release_s: float = 60           # GPU memory was back 0.43 s after SIGKILL on an H200; then we name who holds it
    backoff_s: float = 2
    backoff_max_s: float = 60
    budget: int = 5                 # more failures than this ...
    window_s: float = 3600          # ... within this long, and we stop trying
    still_s: float = 10             # counters that stand still this long earn a one-token probe
    probe_s: float = 10             # ... which must be answered within this long
    dead_s: float = 10              # /health refused or 5xx for this long while serving: dead


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine.  `gpus` empty: no card is assigned.  `vram_share`: of each card, None where args do not say.

    `max_seqs`: requests that run at a time, None where args do not say.  `max_concurrent`, `max_concurrent_tokens` (of
    prompts): what the gateway lets through at a time; None: all that comes.
    """

    name: str
    port: int
    gpus: tuple[int, ...] = ()
    vram_share: float | None = None
    backup_for: str | None = None
    standby: Standby = Standby.COLD
    limits: Limits = Limits()
    max_seqs: int | None = None
    args: tuple[tuple[str, str], ...] = ()      # vLLM's sizing flags as configured, for advice; never a secret
    max_concurrent: int | None = None
    max_concurrent_tokens: int | None = None

    @property
    def at_once(self) -> int | None:
        """Requests that run at a time, None where nothing says."""
        return min((each for each in (self.max_seqs, self.max_concurrent) if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares are 0..1.  `vram_warn`/`vram_degrade` by card index; a card that is not listed is only shown."""

    vram_warn: tuple[tuple[int, float], ...] = ()
    vram_degrade: tuple[tuple[int, float], ...] = ()
    degrade_after_s: float = 120    # over it this long: fewer requests at a time; and again, in vain: the backup
    vram_growth: float = 0.05       # of the card, over the level after warm-up
    warm_up_s: float = 300          # torch's cache still grows in the first minutes after ready
    kv_cache: float = 0.95
    kv_cache_after_s: float = 120   # full, and requests wait, for this long: fewer requests at a time
    rss_bytes: int | None = None
    rss_slope_mib_per_min: float | None = None
    leak_within_s: float = 86400    # a leak is told when its limit would be met within this long; 0: never
    preemptions_per_min: float = 10
    engine_down_s: float = 30       # no engine serves for this long, and nobody planned it
    oom_rate: int = 2               # more than this many within OOM_RATE_S
    crash_loop: int = 3             # more failures than this within a day
    disk_free_bytes: int = 2 << 30
    hysteresis: float = 0.02        # of full scale, below the threshold before a symptom may clear
    clear_after_s: float = 120      # ... and for this long


@dataclass(frozen=True, slots=True)
class FailoverPlan:
    after_failures: int = 1         # failures answered by a restart; one more goes to the backup
    failback: Failback = Failback.WHEN_IDLE
    stable_s: float = 600
    idle_s: float = 10              # no request running or waiting for this long is idle


@dataclass(frozen=True, slots=True)
class Plan:
    engines: tuple[EnginePlan, ...] = ()
    thresholds: Thresholds = Thresholds()
    failover: FailoverPlan = FailoverPlan()
    planned: Planned = Planned.OFF
    sample_s: float = 1.0
    confirm_s: float = 30           # an incident ends when its service has served this long
    remind_s: float = 4 * 3600      # while only a human can help, that is said again this often; 0: never
    bundle_interval_s: float = 600  # at most one evidence bundle a symptom in this long; a kill always takes one
    seed: int = 0                   # spreads the backoff of hosts that fail together

    def engine(self, name: str) -> EnginePlan:
        """Raises KeyError for a name that is not configured."""
        for plan in self.engines:
            if plan.name == name:
                return plan
        raise KeyError(name)

    def service_of(self, name: str) -> str:
        """The service an engine belongs to: its primary's name."""
        return self.engine(name).backup_for or name
