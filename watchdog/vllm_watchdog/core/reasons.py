"""Why a phase is overdue, and why only a human can help: one sentence each, for the incident and its alert."""

from __future__ import annotations

from collections.abc import Callable

from vllm_watchdog.core import gate
from vllm_watchdog.core.policy import Phase
from vllm_watchdog.core.world import Engine, World

# Class and sentence of a phase that lasted too long.
OVERDUE = {
    Phase.STARTING: ("spawn_failed", "it was not started within {limits.spawn_s:.0f} s"),
    Phase.LOADING: ("load_timeout", "not ready after {limits.load_s:.0f} s"),
    Phase.DOZING: ("sleep_failed", "it did not fall asleep within {limits.sleep_s:.0f} s"),
    Phase.WAKING: ("wake_failed", "it was not awake, with a token, within {limits.wake_s:.0f} s"),
    Phase.SUSPECT: ("engine_hang", "no token for {still:.0f} s: the counters stand still and a one-token request "
                                   "is not answered"),
}



def exited(code: int) -> str:
    return f"it was ended by signal {-code}, which we did not send" if code < 0 else f"it exited with code {code}"


def _held(engine: Engine) -> tuple[str, str]:
    limits = engine.plan.limits
    if engine.life.doom:
        return engine.life.doom, f"{engine.name} is held: another try would fail alike ({engine.why})"
    failures = len(engine.life.failures)
    return "budget_spent", (f"{engine.name} is held: {failures} failures within {limits.window_s:.0f} s, "
                            f"{limits.budget} are allowed; the last was {engine.blame}")


def _no_room(world: World, engine: Engine) -> tuple[str, str]:
    others = gate.rivals(engine.plan, ((e.plan, e.phase) for e in world.engines))
    strays = gate.in_the_way(engine.plan, world.strays, world.plan.engines)
    why = [f"{name} still has processes" for name in others] + [f"{mark} is not gone yet" for mark in strays]
    if held := gate.told(engine.plan, world.gpus, engine.mark):
        why.append(held)
    doing = "woken" if engine.phase is Phase.ASLEEP else "started"
    return "vram_held", f"{engine.name} can't be {doing}: " + ("; ".join(why) or "no GPU sample has come")


def _wedged(engine: Engine) -> tuple[str, str]:
    return "wedged", (f"{engine.mark} survived SIGKILL for {engine.plan.limits.kill_s:.0f} s (PID {engine.pid}); no second "
                      "engine is started on its GPUs; the driver or a reboot must free them")


PAGES: dict[Phase, Callable[[World, Engine], tuple[str, str]]] = {
    Phase.HELD: lambda _, engine: _held(engine),
    Phase.RELEASING: _no_room,
    Phase.ASLEEP: _no_room,
    Phase.WEDGED: lambda _, engine: _wedged(engine),
}
