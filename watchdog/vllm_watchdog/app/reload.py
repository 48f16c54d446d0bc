"""Reading the configuration again: what changes at once, what waits for an engine's next start, what for the daemon's.

Blocks its caller on small local files, so it runs in a thread of whoever asks (a control connection, or one that SIGHUP
starts), never in the loop.  An invalid file changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_watchdog.app.announce import Announcer
from vllm_watchdog.config import Settings
from vllm_watchdog.config_problems import ConfigError
from vllm_watchdog.config_sections import Gateway
from vllm_watchdog.core.events import Survivor
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.launch import Launch, fingerprint
from vllm_watchdog.say import Say

# Of an engine: what its process was started with, and what the daemon's threads were made for.
STARTED_WITH = ("command", "model", "args", "env", "api_key", "memory_max_gib")
OTHER = "settings that changed before this daemon"
WHOLE = ("daemon", "retention")     # tables that only a start reads
FIXED = ("host", "port", "gpus", "backup_for", "standby")


@dataclass(frozen=True, slots=True)
class Changes:
    """Keys as people write them, no values.  `pending`: by engine, until its next start; `fixed`: until the daemon's;
    `stuck`: engines of which nothing is taken over until then."""

    pending: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fixed: tuple[str, ...] = ()
    stuck: frozenset[str] = frozenset()
    gateway: bool = False

    def told(self) -> str:
        """One sentence an operator reads."""
        said = ["thresholds, limits, rules and alerts are applied"]
        said += [f"{name} gets {', '.join(keys)} at its next start (llm-watchdog restart {name})"
                 for name, keys in self.pending]
        said += [f"{', '.join(self.fixed)}: after a restart of the daemon"] if self.fixed else []
        said += ["gateway: after a restart of the gateway"] if self.gateway else []
        return "; ".join(said)


def changes(began: Settings, started: dict[str, Settings], asked: Settings) -> Changes:
    """`began`: what the daemon was started with; `started`: by engine, what its last start went by."""
    stuck = set(began.engines) ^ set(asked.engines)
    fixed = [key for table in WHOLE for key in _differing(table, getattr(began, table).model_dump(),
                                                          getattr(asked, table).model_dump())]
    fixed += [f"engines.{name}" for name in sorted(stuck)]
    pending = []
    for name in sorted(set(began.engines) & set(asked.engines)):
        was, now = started[name].engine(name).model_dump(), asked.engine(name).model_dump()
        moved = [key for key in FIXED if was[key] != now[key]]
        keys = tuple(each for key in STARTED_WITH for each in _differing(key, was[key], now[key]))
        if moved:
            stuck.add(name)
            fixed += [f"engines.{name}.{key}" for key in (*moved, *keys)]
        elif keys:
            pending.append((name, keys))
    fixed += [] if rules_hold(began, asked) else ["gateway.rules"]
    return Changes(tuple(pending), tuple(fixed), frozenset(stuck), _gateways_own(began) != _gateways_own(asked))


def rules_hold(began: Settings, asked: Settings) -> bool:
    """Do they name only services that this daemon runs?"""
    services = {name for name, engine in began.engines.items() if engine.backup_for is None}
    return {rule.engine for rule in asked.gateway.rules} <= services


def _gateways_own(settings: Settings) -> Gateway:
    """What only its start reads: rules come with the route."""
    return settings.gateway.model_copy(update={"rules": (), "keys": {}})


def _differing(path: str, was: Any, now: Any) -> Iterator[str]:
    """The dotted keys of what differs, as deep as both are tables."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from _differing(f"{path}.{key}", was.get(key), now.get(key))
    elif was != now:
        yield path


class Reload:
    """`again` reads the file; `running` is the plan in force; `apply` takes what is valid now."""

    def __init__(self, began: Settings, again: Callable[[], Settings], running: Callable[[], Plan],
                 apply: Callable[[Settings, Plan], None], announcer: Announcer, say: Say) -> None:
        self._began, self._again, self._running, self._apply = began, again, running, apply
        self._announcer, self._say = announcer, say
        self._started = dict.fromkeys(began.engines, began)
        self._asked = began
        self._other: set[str] = set()       # adopted engines that an earlier daemon started by another configuration
        self._lock = threading.Lock()       # one at a time; the loop never takes it
        self.changes = Changes()

    def __call__(self) -> tuple[bool, str]:
        with self._lock:
            self._announcer.reloading()
            try:
                return self._read()
            finally:
                self._announcer.reloaded()

    def _read(self) -> tuple[bool, str]:
        try:
            asked = self._again()
        except ConfigError as error:
            self._say("config.refused", why="; ".join(error.problems))
            return False, "\n".join(("nothing was changed:", *error.problems))
        found = self._with_others(changes(self._began, self._started, asked))
        self._apply(asked, self._plan(asked, found))
        self._asked, self.changes = asked, found
        self._say("config.read", changes=found.told())
        return True, found.told()

    def adopt(self, survivors: tuple[Survivor, ...]) -> None:
        """At the start, before anybody reloads: which engines run by what they would not be started by now."""
        launches = self._began.launches()
        for survivor in survivors:
            launch = launches.get(survivor.mark.engine)
            if launch and survivor.launch and survivor.launch != fingerprint(launch):
                self._other.add(survivor.mark.engine)
        self.changes = self._with_others(self.changes)

    def _with_others(self, found: Changes) -> Changes:
        known = dict(found.pending) | dict.fromkeys(found.stuck)
        others = tuple((name, (OTHER,)) for name in sorted(self._other) if name not in known)
        return replace(found, pending=(*found.pending, *others))

    def _plan(self, asked: Settings, found: Changes) -> Plan:
        """Without the engines that wait for the daemon's start; levels that follow from their shares wait too."""
        running = self._running()
        plan = asked.plan(running.seed)
        if not found.stuck:
            return plan
        levels = running.thresholds
        kept = replace(plan.thresholds, vram_warn=levels.vram_warn, vram_degrade=levels.vram_degrade)
        engines = tuple(engine for engine in plan.engines if engine.name not in found.stuck)
        return replace(plan, engines=engines, thresholds=kept)

    def start_of(self, name: str) -> Launch | None:
        """What an engine that starts now is started by, where that is not what it was before."""
        asked, found = self._asked, self.changes
        if name not in dict(found.pending):
            return None
        self._started[name] = asked
        self._other.discard(name)
        self.changes = replace(found, pending=tuple(each for each in found.pending if each[0] != name))
        return asked.launches()[name]

    def profile(self, name: str) -> dict[str, Any]:
        """Of its last start; anybody may ask."""
        return self._started[name].profile(name)

    def report(self) -> dict[str, Any]:
        return {"pending": {name: list(keys) for name, keys in self.changes.pending}, "fixed": list(self.changes.fixed)}
