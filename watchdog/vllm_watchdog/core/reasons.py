"""Why a phase is overdue, and why only a human can help: one sentence each, for the incident and its alert."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from vllm_watchdog.core import causes, gate
from vllm_watchdog.core import phrases as p
from vllm_watchdog.core.catalog import CATALOG, Text
from vllm_watchdog.core.findings import Finding
from vllm_watchdog.core.phrases import filled, joined
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.world import Engine, World

LAST_LINE = 200         # characters of it in a sentence
# Class and sentence of a phase that lasted too long, and for how long.
OVERDUE: dict[Phase, tuple[str, Text, Callable[[Engine, float], float]]] = {
    Phase.STARTING: ("spawn_failed", causes.NOT_SPAWNED, lambda engine, _: engine.plan.limits.spawn_s),
    Phase.LOADING: ("load_timeout", causes.NOT_READY, lambda engine, _: engine.plan.limits.load_s),
    Phase.DOZING: ("sleep_failed", causes.NOT_ASLEEP, lambda engine, _: engine.plan.limits.sleep_s),
    Phase.WAKING: ("wake_failed", causes.NOT_AWAKE, lambda engine, _: engine.plan.limits.wake_s),
    Phase.SUSPECT: ("engine_hang", causes.NO_TOKEN, lambda engine, at: at - engine.pulse.sign_at),
}


def overdue(engine: Engine, at: float) -> tuple[str, Text]:
    """Class and sentence of an engine whose phase, one of OVERDUE, has lasted too long by `at`."""
    class_, text, lasted = OVERDUE[engine.phase]
    return class_, filled(text, s=f"{lasted(engine, at):.0f}")


def doubt(engine: Engine, at: float, paused: bool) -> Text | None:
    """Why an engine that is routed to is suspected, and how long it still has; None: it is not.  Pausing stops its clock."""
    if engine.phase is not Phase.SUSPECT:
        return None
    _, text = overdue(engine, at)
    left_s = engine.life.deadline - at
    return text if paused or not isfinite(left_s) else filled(causes.DOUBTED, why=text, s=f"{max(left_s, 0.0):.0f}")


def why(engine: Engine) -> Text:
    """What proves its failure: what was seen, else how it ended."""
    return engine.words if engine.why else ended(engine.exit_code, engine.last_words)


def ended(code: int | None, words: tuple[str, ...] = ()) -> Text:
    """Of a generation that ended unasked, and the last line of its log; None: it was not our child."""
    if code is None:
        how = causes.END_UNSEEN
    else:
        how = filled(causes.END_SIGNAL, code=-code) if code < 0 else filled(causes.END_CODE, code=code)
    return filled(causes.LAST_LINE, how=how, line=words[-1][:LAST_LINE]) if words else how


def unseen(mark: Mark) -> Text:
    return filled(causes.END_UNWATCHED, mark=mark)


def last_words(words: tuple[str, ...]) -> tuple[Finding, ...]:
    """The end of its log, as all that there is to prove an exit that nothing explains."""
    entry = CATALOG["unexpected_exit"]
    return tuple(Finding("unexpected_exit", entry.severity, entry.action, 0, text) for text in words)


def _held(engine: Engine) -> tuple[str, Text]:
    limits = engine.plan.limits
    if engine.life.doom:
        return engine.life.doom, filled(p.HELD_ALIKE, engine=engine.name, why=engine.words)
    return "budget_spent", filled(p.HELD_OFTEN, engine=engine.name, failures=len(engine.life.failures),
                                  window=f"{limits.window_s:.0f}", budget=limits.budget, blame=engine.blame)


def no_room(world: World, engine: Engine) -> tuple[Text, ...]:
    """What is in the way of its start, or of its being woken: rivals, strays, and who holds the memory that it lacks."""
    others = gate.rivals(engine.plan, ((e.plan, e.phase) for e in world.engines))
    strays = gate.in_the_way(engine.plan, world.strays, world.plan.engines)
    return (*(filled(p.RIVAL_LEFT, engine=name) for name in others),
            *(filled(p.STRAY_LEFT, engine=mark) for mark in strays),
            *gate.told(engine.plan, world.gpus, engine.mark))


def _no_room(world: World, engine: Engine) -> tuple[str, Text]:
    what = p.NO_WAKE if engine.phase is Phase.ASLEEP else p.NO_START
    return "vram_held", filled(what, engine=engine.name, why=joined(no_room(world, engine) or [p.NO_SAMPLE]))


def _wedged(engine: Engine) -> tuple[str, Text]:
    return "wedged", filled(p.UNKILLABLE, engine=engine.mark, after=f"{engine.plan.limits.kill_s:.0f}", pid=engine.pid)


# Class and sentence of a page.
PAGES: dict[Phase, Callable[[World, Engine], tuple[str, Text]]] = {
    Phase.HELD: lambda _, engine: _held(engine),
    Phase.RELEASING: _no_room,
    Phase.ASLEEP: _no_room,
    Phase.WEDGED: lambda _, engine: _wedged(engine),
}
