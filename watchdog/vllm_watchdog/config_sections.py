"""The tables of the settings, one class each: every key with its type, limits and default.

Defaults that the core knows are the core's (`core.plan`); nothing is said twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from vllm_watchdog.config_channels import Kind
from vllm_watchdog.config_fields import (
    OFF,
    READ,
    Args,
    Cards,
    Command,
    Count,
    Env,
    Folder,
    Gib,
    Header,
    Hours,
    Level,
    Line,
    Listen,
    Location,
    Name,
    Number,
    Page,
    Pattern,
    Plain,
    Port,
    Seconds,
    Secret,
    Section,
    Share,
    Token,
    Tokens,
    TokensOrAuto,
    Url,
    Words,
)
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.plan import Failback, FailoverPlan, Limits, Plan, Planned, Standby, Thresholds
from vllm_watchdog.core.units import DAY_S, GIB, MIB
from vllm_watchdog.gateway_plan import GatewayPlan
from vllm_watchdog.gateway_rules import WhenDown
from vllm_watchdog.prompt_plan import Over, PromptPlan

GATE = GatewayPlan(host="", port=0, control=Path(), route_file=Path())
LIMITS, LEVELS, FAILOVER, PLAN, PROMPT = Limits(), Thresholds(), FailoverPlan(), Plan(), PromptPlan()


class Daemon(Section):
    state_dir: Folder = Path("logs/state")
    log_dir: Folder = Path("logs")
    sample_s: Annotated[float, READ, Field(strict=True, ge=0.1, le=60)] = PLAN.sample_s
    socket: Location = Path("control.sock")
    listen: Page = "127.0.0.1:9178"
    token: Token | None = None
    ready: Literal["watching", "serving"] = "watching"

    @field_validator("socket")
    @classmethod
    def _in_state_dir(cls, value: Path, info: ValidationInfo) -> Path:
        folder: Path = info.data.get("state_dir", Path.cwd())
        return folder / value

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """0: there is no page."""
        return int(self.listen.rpartition(":")[2]) if self.listen not in OFF else 0


class Engine(Section):
    """As written.  What a backup inherits is laid under it by `Settings.engine`."""

    command: Command = ("vllm", "serve")
    model: Line = ""                    # empty: missing, or the primary's
    host: Plain = "127.0.0.1"
    port: Annotated[Port, Field(validate_default=False)] = 0    # 0: missing
    gpus: Cards = ()
    args: Args = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    api_key: Secret | None = None
    backup_for: Line | None = None
    standby: Standby = Standby.COLD
    load_timeout_s: Seconds = LIMITS.load_s
    load_idle_s: Seconds = LIMITS.load_idle_s
    stop_timeout_s: Seconds = LIMITS.stop_s
    memory_max_gib: Gib | None = None
    prompt_limit: TokensOrAuto = "auto"
    over_limit: Over = PROMPT.over
    media_tokens: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 20)] = PROMPT.media_tokens
    vram_share: Share | None = PROMPT.vram_share
    max_concurrent: Annotated[int, READ, Field(strict=True, ge=1, le=100_000)] | None = None
    max_concurrent_tokens: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 40)] | None = None


class Levels(Section):
    """`core.plan.Thresholds` as written."""

    vram_warn: Level = "auto"
    vram_degrade: Level = "auto"
    degrade_after_s: Seconds = LEVELS.degrade_after_s
    vram_growth: Share = LEVELS.vram_growth
    warm_up_s: Seconds = LEVELS.warm_up_s
    kv_cache: Share = LEVELS.kv_cache
    kv_cache_after_s: Seconds = LEVELS.kv_cache_after_s
    rss_gib: Gib | None = None
    rss_slope_mib_per_min: Annotated[float, READ, Number, Field(le=1 << 20)] | None = LEVELS.rss_slope_mib_per_min
    leak_within_s: Annotated[float, READ, Field(strict=True, ge=0, le=DAY_S)] = LEVELS.leak_within_s
    preemptions_per_min: Annotated[float, READ, Number, Field(le=1e6)] = LEVELS.preemptions_per_min
    engine_down_s: Seconds = LEVELS.engine_down_s
    oom_rate: Count = LEVELS.oom_rate
    crash_loop: Count = LEVELS.crash_loop
    disk_free_gib: Gib = LEVELS.disk_free_bytes / GIB


class Hang(Section):
    still_s: Seconds = LIMITS.still_s
    probe_s: Seconds = LIMITS.probe_s
    patience_s: Seconds = LIMITS.suspect_s
    patience_blind_s: Seconds = LIMITS.suspect_blind_s
    dead_s: Seconds = LIMITS.dead_s


class Restart(Section):
    backoff_s: Seconds = LIMITS.backoff_s
    backoff_max_s: Seconds = LIMITS.backoff_max_s
    budget: Count = LIMITS.budget
    window_s: Annotated[float, READ, Number, Field(le=7 * DAY_S)] = LIMITS.window_s
    planned: Planned = PLAN.planned


class Failover(Section):
    after_failures: Count = FAILOVER.after_failures
    failback: Failback = FAILOVER.failback
    stable_s: Seconds = FAILOVER.stable_s


class Evidence(Section):
    deadline_s: Annotated[float, READ, Number, Field(le=120)] = LIMITS.dump_s      # the outage lasts that much longer
    min_interval_s: Seconds = PLAN.bundle_interval_s
    max_bundles: Annotated[int, READ, Field(strict=True, ge=1, le=10_000)] = 100
    max_gib: Gib = 2


class Retention(Section):
    """How long what we write is kept.  Bundles have limits of their own in `[evidence]`."""

    days: Annotated[float, READ, Field(strict=True, ge=1, le=3650)] = 30
    journal_gib: Gib = 1


class Rule(Section):
    """`gateway_rules.Rule` as written; `api_key`: a name of `gateway.keys`."""

    engine: Line = ""                   # empty: missing
    prompt_tokens_min: Tokens = 0
    prompt_tokens_max: Tokens | None = None
    model: Pattern | None = None
    path: Pattern | None = None
    header: Header | None = None
    api_key: Line | None = None
    when_down: WhenDown = WhenDown.WAIT


class Gateway(Section):
    """What the data plane may hold, and for how long; its own defaults are the gateway's."""

    listen: Listen = "0.0.0.0:8000"
    hold_s: Seconds = GATE.hold_s
    hold_requests: Annotated[int, READ, Field(strict=True, ge=1, le=100_000)] = GATE.hold_requests
    hold_mib: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 20)] = GATE.hold_bytes // MIB
    max_body_mib: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 20)] = GATE.max_body_bytes // MIB
    max_connections: Annotated[int, READ, Field(strict=True, ge=1, le=1_000_000)] = GATE.max_connections
    suspect_tokens: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 30)] = GATE.suspect_tokens
    refuse_s: Seconds = GATE.refuse_s
    drain_s: Seconds = GATE.drain_s
    coalesce_chars: Annotated[int, READ, Field(strict=True, ge=0, le=8192)] = GATE.coalesce_chars
    coalesce_s: Annotated[float, READ, Number, Field(le=10)] = GATE.coalesce_s
    keys: dict[Name, Secret] = Field(default_factory=dict, max_length=1000)
    rules: Annotated[tuple[Rule, ...], READ, Field(max_length=100)] = ()
    long_tokens: Annotated[int, READ, Field(strict=True, ge=1, le=1 << 30)] = GATE.long_tokens
    long_share: Annotated[float, READ, Field(strict=True, ge=0.05, le=0.95)] = GATE.long_share
    key_concurrent: Annotated[int, READ, Field(strict=True, ge=1, le=100_000)] | None = GATE.key_concurrent
    first_token_s: Seconds | None = GATE.first_token_s

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])


class Channel(Section):
    type: Kind | None = None            # None: by the address
    url: Url
    secret: Secret | None = None
    headers: dict[Plain, Secret] = Field(default_factory=dict)
    timeout_s: Annotated[float, READ, Number, Field(le=120)] = 10
    min_severity: Urgency = Urgency.WARNING
    quiet_hours: Hours | None = None
    max_per_hour: Count = 30


class Templates(Section):
    title: Words = ""
    text: Words = ""


class Alerts(Section):
    language: Literal["en", "zh", "both"] = "en"
    remind_s: Annotated[float, READ, Field(strict=True, ge=0, le=7 * DAY_S, allow_inf_nan=False)] = PLAN.remind_s
    templates: Templates = Templates()
    channels: dict[Name, Channel] = Field(default_factory=dict)
