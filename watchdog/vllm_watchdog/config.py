"""The settings: one frozen tree, with defaults in one place and every problem told at once.

`load` reads file, secret files and environment, and checks all of it; daemon and `check-config` both call it.  It
starts nothing, creates nothing and writes nothing.  What the core reads of it is `Settings.plan`; what hands start is
`Settings.launches`.  Relative paths are relative to the current directory.  Blocks only on small local files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vllm_watchdog import config_checks
from vllm_watchdog.config_fields import Name
from vllm_watchdog.config_levels import card_shares, levels, share_of
from vllm_watchdog.config_problems import ConfigError, place, sentence
from vllm_watchdog.config_sections import (
    GIB,
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
from vllm_watchdog.config_sources import (
    Path_,
    Source,
    UnreadableError,
    dashed,
    from_credentials,
    from_environment,
    from_file,
    strangers,
)
from vllm_watchdog.core.plan import EnginePlan, FailoverPlan, Limits, Plan, Standby, Thresholds
from vllm_watchdog.gateway_plan import MIB, GatewayPlan
from vllm_watchdog.launch import UNSET, Arg, Launch, command_line, environment, most_at_once, served_names

__all__ = ["ConfigError", "Launch", "Settings", "load", "misspelt"]

ROUTE_FILE = "route.json"       # in state_dir: the daemon writes it, the gateway reads it
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}        # without it vLLM has no /sleep and no /wake_up
PROFILE = ("max-model-len", "max-num-seqs", "max-num-batched-tokens", "gpu-memory-utilization", "tensor-parallel-size",
           "quantization", "kv-cache-dtype", "enforce-eager")
SIZING_FLAGS = frozenset({
    "api-server-count", "cpu-offload-gb", "enable-chunked-prefill", "gpu-memory-utilization", "kv-cache-dtype",
    "max-model-len", "max-num-batched-tokens", "max-num-seqs", "swap-space",
})
SEARCHED = (Path("config.toml"), Path("/etc/llm-watchdog/config.toml"))


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
                          most_at_once(args), _sizing(args))

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
        )

    def gateway_plan(self) -> GatewayPlan:
        """What the gateway runs by."""
        asked, state = self.gateway, self.daemon.state_dir
        return GatewayPlan(
            host=asked.host, port=asked.port, control=self.daemon.socket, route_file=state / ROUTE_FILE,
            admin=state / "gateway.sock", hold_s=asked.hold_s, hold_requests=asked.hold_requests,
            hold_bytes=asked.hold_mib * MIB, max_body_bytes=asked.max_body_mib * MIB,
            max_connections=asked.max_connections, suspect_tokens=asked.suspect_tokens, refuse_s=asked.refuse_s,
            drain_s=asked.drain_s,
        )

    def warnings(self) -> tuple[str, ...]:
        """What can be meant, but seldom is: `key.path: what`, one line each."""
        return tuple(f"{'.'.join(map(str, path))}: {what}" for path, what in config_checks.doubts(self))


def _sizing(args: Mapping[str, Arg]) -> tuple[tuple[str, str], ...]:
    """The flags that advice may name; no other, since one might hold a secret."""
    return tuple((name, str(value)) for name, value in args.items() if name in SIZING_FLAGS and not isinstance(value, list))


def _set(args: Mapping[str, Arg]) -> dict[str, Arg]:
    return {name: value for name, value in args.items() if value != UNSET}


def load(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings of `path` (None: ./config.toml, else /etc/llm-watchdog/config.toml), checked.

    Raises ConfigError with all that is wrong.
    """
    folder = environ.get("CREDENTIALS_DIRECTORY")
    return _checked(_sources(path, environ, Path(folder) if folder else None))


def load_to_ask(path: Path | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Where the daemon is, and in which language to tell of it, for whoever only asks: nothing else of it is read, since
    the rest may need secrets that the daemon alone can read.  Raises ConfigError."""
    sources = _sources(path, environ, None)
    for source in sources:
        alerts = source.tree.get("alerts")
        language = {"language": alerts["language"]} if isinstance(alerts, dict) and "language" in alerts else {}
        daemon = {"daemon": source.tree["daemon"]} if "daemon" in source.tree else {}
        source.tree = daemon | ({"alerts": language} if language else {})
    try:
        return _settled(sources)
    except ValidationError as error:
        said: dict[Path_, str] = {}
        for item in error.errors(include_url=False):
            _say(said, sources, place(item), sentence(item, Settings))
        raise ConfigError(said.values()) from None


def _sources(path: Path | None, environ: Mapping[str, str], secrets: Path | None) -> tuple[Source, ...]:
    """One for each place; `secrets`: the folder with their files.  Raises ConfigError."""
    found = path or _first()
    origin = str(found or SEARCHED[0])
    sections = tuple(Settings.model_fields)
    try:
        Path.cwd()      # every relative path hangs on it
        sources = tuple(
            Source(Settings, name, tree)
            for name, tree in (
                ("environment", from_environment(environ, sections)),
                (str(secrets or ""), from_credentials(secrets, sections)),
                (origin, from_file(found) if found else {}),
            )
        )
    except UnreadableError as error:
        raise ConfigError([str(error)]) from None
    except FileNotFoundError:
        raise ConfigError([f"{origin}: the current directory is gone, expected one that exists"]) from None
    if not found and not any(source.tree for source in sources):
        raise ConfigError([f"{origin}: not there, nor is {SEARCHED[1]}, expected one of them, or --config PATH"])
    return sources


def misspelt(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """A sentence for each variable that looks like a key and is not read."""
    return tuple(strangers(environ, tuple(Settings.model_fields)))


def _first() -> Path | None:
    """The first of the usual files; one that we may not look at counts, since reading it says why."""
    for path in SEARCHED:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return path
        return path
    return None


def _checked(sources: tuple[Source, ...]) -> Settings:
    """Look, drop what is wrong, and look again, so that one mistake does not hide the next."""
    said: dict[Path_, str] = {}
    for source in sources:
        for path in dashed(source.tree):
            _say(said, sources, path, "written twice, with - and with _, expected once")
    while True:
        try:
            settings = _settled(sources)
            break
        except ValidationError as error:
            items = error.errors(include_url=False)
            for item in items:
                _say(said, sources, place(item), sentence(item, Settings))
            if not _drop(sources, [place(item) for item in items]):
                raise ConfigError(said.values()) from None
    for path, what in config_checks.problems(settings):
        _say(said, sources, path, what)
    if said:
        raise ConfigError(said.values())
    return settings


def _settled(sources: tuple[Source, ...]) -> Settings:
    class Settled(Settings):
        @classmethod
        def settings_customise_sources(cls, *_: Any, **__: Any) -> tuple[PydanticBaseSettingsSource, ...]:
            return sources

    return Settled()


def _say(said: dict[Path_, str], sources: tuple[Source, ...], path: Path_, what: str) -> None:
    """Once a key, in the words of the source that it is from; a key that nobody wrote belongs into the file."""
    source = next((source for source in sources if source.holds(path)), sources[-1])
    said.setdefault(path, f"{source.origin}: {source.name_of(path)}: {what}")


def _drop(sources: tuple[Source, ...], paths: Iterable[Path_]) -> bool:
    """Forget each value wherever it is written; where a value is missing, forget the table that it should be in."""
    dropped: set[Path_] = set()
    for path in paths:
        ways = [path[:length] for length in range(len(path), 0, -1)]
        if dropped.isdisjoint(ways):
            dropped.update(_deepest(sources, ways))
    return bool(dropped)


def _deepest(sources: tuple[Source, ...], ways: Iterable[Path_]) -> tuple[Path_, ...]:
    for way in ways:
        if sum(source.drop(way) for source in sources):     # from each of them, so no short cut
            return (way,)
    return ()
