"""The settings: one frozen tree with defaults in one place, and what each part of the house gets of it.

What the core reads is `Settings.plan`; what hands start is `Settings.launches`; what the gateway runs by is
`Settings.gateway_plan`.  Relative paths are relative to the current directory.  Reads nothing: config_load does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from vllm_watchdog import config_checks, config_rules
from vllm_watchdog.config_fields import Name
from vllm_watchdog.config_levels import card_shares, levels, share_of
from vllm_watchdog.config_sections import (
    Alerts,
    Daemon,
    Engine,
    Evidence,
    Failover,
    Gateway,
    Hang,
    Levels,
    Restart,
    Retention,
)
from vllm_watchdog.config_sources import dotted
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.core.units import GIB, MIB
from vllm_watchdog.gateway_plan import GatewayPlan
from vllm_watchdog.gateway_rules import Rule
from vllm_watchdog.launch import UNSET, Arg, Launch, command_line, environment, most_at_once, served_names
from vllm_watchdog.prompt_plan import PromptPlan, context_of, hub_of, is_text

ROUTE_FILE = "route.json"       # in state_dir: the daemon writes it, the gateway reads it
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}        # without it vLLM has no /sleep and no /wake_up
PROFILE = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "tensor-parallel-size",
           "quantization", "kv-cache-dtype", "enforce-eager")
SIZING_FLAGS = frozenset({
    "api-server-count", "cpu-offload-gb", "enable-chunked-prefill", "enforce-eager", "gpu-memory-utilization",
    "kv-cache-dtype", "max-model-len", "max-num-batched-tokens", "max-num-seqs", "swap-space",
})


class Settings(BaseSettings):
    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    daemon: Daemon = Field(default_factory=Daemon)  # not before load(): its folders follow the current directory
    engines: dict[Name, Engine] = {}
    thresholds: Levels = Levels()
    hang: Hang = Hang()
    restart: Restart = Restart()
    failover: Failover = Failover()
    evidence: Evidence = Evidence()
    retention: Retention = Retention()
    alerts: Alerts = Alerts()
    gateway: Gateway = Gateway()

    def engine(self, name: str) -> Engine:
        """One engine with all that it inherits.  Raises KeyError for a name that is not configured."""
        own = self.engines[name]
        primary = self.engines.get(own.backup_for or "")
        if primary is None:
            return own
        given = {key: getattr(own, key) for key in own.model_fields_set}
        laid = {"port": own.port, "args": primary.args | own.args, "env": primary.env | own.env}
        return primary.model_copy(update=given | laid)

    def plan(self, seed: int) -> Plan:
        """What the core reads.  `seed` spreads the backoff of hosts that fail together."""
        engines = tuple(self._engine_plan(name) for name in self.engines)
        return Plan(
            engines=engines,
            thresholds=self._thresholds(engines),
            failover=FailoverPlan(self.failover.after_failures, self.failover.failback, self.failover.stable_s),
            planned=self.restart.planned,
            sample_s=self.daemon.sample_s,
            remind_s=self.alerts.remind_s,
            bundle_interval_s=self.evidence.min_interval_s,
            seed=seed,
        )

    def _engine_plan(self, name: str) -> EnginePlan:
        engine = self.engine(name)
        limits = Limits(
            load_s=engine.load_timeout_s,
            load_idle_s=engine.load_idle_s,
            stop_s=engine.stop_timeout_s,
            suspect_s=self.hang.patience_s,
            suspect_blind_s=self.hang.patience_blind_s,
            still_s=self.hang.still_s,
            probe_s=self.hang.probe_s,
            dead_s=self.hang.dead_s,
            dump_s=self.evidence.deadline_s,
            backoff_s=self.restart.backoff_s,
            backoff_max_s=self.restart.backoff_max_s,
            budget=self.restart.budget,
            window_s=self.restart.window_s,
        )
        args = _set(engine.args)
        return EnginePlan(name, engine.port, engine.gpus, share_of(args), engine.backup_for, engine.standby, limits,
                          most_at_once(args), _sizing(args), engine.max_concurrent, engine.max_concurrent_tokens)

    def profile(self, name: str) -> dict[str, Any]:
        """What tells one engine's setting from another's: its model, and those of PROFILE that its args give."""
        engine = self.engine(name)
        return {"model": engine.model} | {key: engine.args[key] for key in PROFILE if key in engine.args}

    def _thresholds(self, engines: tuple[EnginePlan, ...]) -> Thresholds:
        asked = self.thresholds
        warn, degrade = (None if level == "auto" else level for level in (asked.vram_warn, asked.vram_degrade))
        cards = {gpu: levels(share, warn, degrade) for gpu, share in card_shares(engines).items()}
        return Thresholds(
            vram_warn=tuple((gpu, low) for gpu, (low, _) in cards.items()),
            vram_degrade=tuple((gpu, high) for gpu, (_, high) in cards.items()),
            degrade_after_s=asked.degrade_after_s,
            vram_growth=asked.vram_growth,
            warm_up_s=asked.warm_up_s,
            kv_cache=asked.kv_cache,
            kv_cache_after_s=asked.kv_cache_after_s,
            rss_bytes=None if asked.rss_gib is None else int(asked.rss_gib * GIB),
            rss_slope_mib_per_min=asked.rss_slope_mib_per_min,
            leak_within_s=asked.leak_within_s,
            preemptions_per_min=asked.preemptions_per_min,
            engine_down_s=asked.engine_down_s,
            oom_rate=asked.oom_rate,
            crash_loop=asked.crash_loop,
            disk_free_bytes=int(asked.disk_free_gib * GIB),
        )

    def launches(self) -> dict[str, Launch]:
        """By engine's name, what hands start."""
        return {name: self._launch(name) for name in self.engines}

    def _launch(self, name: str) -> Launch:
        engine = self.engine(name)
        args, env = _set(engine.args), engine.env
        if engine.standby is Standby.SLEEPING:
            args, env = args | {"enable-sleep-mode": True}, env | DEV_MODE
        return Launch(
            name=name,
            argv=command_line(engine.command, engine.model, engine.host, engine.port, args),
            env=environment(env, engine.gpus, engine.api_key),
            cwd=Path.cwd(),
            host=engine.host,
            port=engine.port,
            models=served_names(engine.model, args),
            api_key=engine.api_key,
            log_path=self.daemon.log_dir / f"{name}.log",
            gpus=engine.gpus,
            memory_max=None if engine.memory_max_gib is None else int(engine.memory_max_gib * GIB),
            prompt=_prompt(engine, args),
        )

    def gateway_plan(self) -> GatewayPlan:
        """What the gateway runs by."""
        asked, state = self.gateway, self.daemon.state_dir
        return GatewayPlan(
            host=asked.host, port=asked.port, control=self.daemon.socket, route_file=state / ROUTE_FILE,
            admin=state / "gateway.sock", hold_s=asked.hold_s, hold_requests=asked.hold_requests,
            hold_bytes=asked.hold_mib * MIB, max_body_bytes=asked.max_body_mib * MIB,
            max_connections=asked.max_connections, suspect_tokens=asked.suspect_tokens, refuse_s=asked.refuse_s,
            coalesce_chars=asked.coalesce_chars, coalesce_s=asked.coalesce_s,
            drain_s=asked.drain_s, long_tokens=asked.long_tokens, long_share=asked.long_share,
            key_concurrent=asked.key_concurrent, first_token_s=asked.first_token_s,
        )

    def rules(self) -> tuple[Rule, ...]:
        """What the gateway learns with the route."""
        return config_rules.rules(self)

    def warnings(self) -> tuple[str, ...]:
        """What can be meant, but seldom is: `key.path: what`, one line each."""
        return tuple(f"{dotted(path)}: {what}" for path, what in config_checks.doubts(self))


def _prompt(engine: Engine, args: Mapping[str, Arg]) -> PromptPlan:
    template = str(args.get("chat-template", ""))
    return PromptPlan(
        tokenizer=str(args.get("tokenizer", engine.model)) if args.get("tokenizer-mode", "auto") in ("auto", "hf") else "",
        hub=str(hub_of(os.environ | engine.env)),
        revision=str(args.get("tokenizer-revision", args.get("revision", ""))),
        template=template if not template or is_text(template) else str(Path.cwd() / template),
        template_format=str(args.get("chat-template-content-format", "auto")),
        kv_dtype=str(args.get("kv-cache-dtype", "auto")),
        context=context_of(args),
        limit=None if engine.prompt_limit == "auto" else engine.prompt_limit,
        over=engine.over_limit,
        media_tokens=engine.media_tokens,
        vram_share=engine.vram_share,
    )


def _sizing(args: Mapping[str, Arg]) -> tuple[tuple[str, str], ...]:
    """The flags that advice may name; no other, since one might hold a secret."""
    return tuple((name, str(value)) for name, value in args.items() if name in SIZING_FLAGS and not isinstance(value, list))


def _set(args: Mapping[str, Arg]) -> dict[str, Arg]:
    return {name: value for name, value in args.items() if value != UNSET}
