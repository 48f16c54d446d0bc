"""`llm-watchdog check-config`: what would be started, in full, or everything that is wrong.

Starts no engine, creates nothing; blocks only on reading the configuration, and on Apprise looking at its addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from vllm_watchdog.app import rules_table
from vllm_watchdog.app.channels import unusable
from vllm_watchdog.config import Settings
from vllm_watchdog.config_channels import address
from vllm_watchdog.config_levels import card_parts, told
from vllm_watchdog.config_load import load, misspelt
from vllm_watchdog.config_problems import ConfigError
from vllm_watchdog.core.lowering import limit
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.core.units import GIB
from vllm_watchdog.launch import Launch, masked, masked_env

OK, BAD = 0, 2


def check(path: Path | None, out: TextIO, err: TextIO) -> int:
    """Prints the checked configuration to `out`, or a line for each problem to `err`.  Returns the exit status."""
    try:
        settings = load(path)
    except ConfigError as error:
        print(*error.problems, sep="\n", file=err)
        return BAD
    if refused := unusable(settings):
        print(*(f"alerts.channels.{name}.url: {why}" for name, why in refused.items()), sep="\n", file=err)
        return BAD
    print(*_lines(settings), sep="\n", file=out)
    return OK


def _lines(settings: Settings) -> Iterator[str]:
    plan = settings.plan(seed=0)
    for name, launch in settings.launches().items():
        yield from _engine(settings, name, launch)
    yield from _thresholds(plan)
    yield from _limits(settings, plan)
    yield from _lowering(plan)
    yield from rules_table.told(settings)
    yield f"clients: the gateway listens on {settings.gateway.listen}; status page and metrics: {settings.daemon.listen}"
    channels = (f"{name} ({address(channel).kind})" for name, channel in settings.alerts.channels.items())
    yield f"alerts: {', '.join(channels) or 'no channel, nobody is told'}"
    yield f"state in {settings.daemon.state_dir}, logs in {settings.daemon.log_dir}"
    yield "whether each vLLM knows its flags is not asked here: `llm-watchdog doctor` does"
    yield from (f"warning: {line}" for line in (*settings.warnings(), *misspelt()))


def _engine(settings: Settings, name: str, launch: Launch) -> Iterator[str]:
    primary = settings.engines[name].backup_for
    role = f", {settings.engine(name).standby} backup for {primary}" if primary else ""
    yield f"engine {name}{role}: port {launch.port}, {_cards(launch.gpus)}, log {launch.log_path}"
    yield f"  {masked(launch.argv)}"
    if launch.env:
        yield f"  environment: {masked_env(launch.env)}"
    yield ""


def _cards(gpus: tuple[int, ...]) -> str:
    return f"GPU {', '.join(map(str, gpus))}" if gpus else "no GPU assigned"


def _thresholds(plan: Plan) -> Iterator[str]:
    levels = plan.thresholds
    warn, degrade = dict(levels.vram_warn), dict(levels.vram_degrade)
    for gpu, parts in card_parts(plan.engines).items():
        yield (
            f"GPU {gpu}: engines take {told(parts)} of its memory, warn at {warn[gpu]:g}, "
            f"degrade over {degrade[gpu]:g} for {levels.degrade_after_s:g} s"
        )
    yield f"growth over the level {levels.warm_up_s:g} s after ready: warn at {levels.vram_growth:g} of a card"
    yield f"KV cache: warn over {levels.kv_cache:g} for {levels.kv_cache_after_s:g} s"
    if levels.leak_within_s:
        yield f"a leak: warn when its limit would be met within {levels.leak_within_s / 3600:g} h"
    if levels.rss_bytes is not None:
        yield f"RSS of an engine: warn at {levels.rss_bytes / GIB:g} GiB"
    if levels.rss_slope_mib_per_min is not None:
        yield f"RSS of an engine: warn when it grows by {levels.rss_slope_mib_per_min:g} MiB a minute"
    yield f"disk of the logs: warn under {levels.disk_free_bytes / GIB:g} GiB free"


def _limits(settings: Settings, plan: Plan) -> Iterator[str]:
    """What the gateway lets through at a time where an engine has a limit."""
    asked = settings.gateway
    for engine in plan.engines:
        most = [f"{engine.max_concurrent} requests"] if engine.max_concurrent is not None else []
        if engine.max_concurrent_tokens is not None:
            most.append(f"{engine.max_concurrent_tokens} tokens of prompts")
        if most:
            yield (f"{engine.name}: the gateway lets {' and '.join(most)} through at a time, {asked.long_share:g} of that "
                   f"to prompts of {asked.long_tokens} tokens or more")


def _lowering(plan: Plan) -> Iterator[str]:
    """What is done first when a primary's memory stays over its thresholds."""
    for backup in plan.engines:
        if backup.backup_for is not None:
            to = limit(plan.engine(backup.backup_for), backup)
            done = f"the gateway lets {to} requests through at a time" if to is not None else \
                f"nothing but an alert, or failover: {backup.name} has no lower max-num-seqs"
            yield f"when VRAM or KV cache of {backup.backup_for} stay over them: {done}"
