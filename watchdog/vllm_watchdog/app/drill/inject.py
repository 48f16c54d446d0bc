"""How each fault is injected that touches the service's own processes only: on a running service as in a sandbox.

A function a fault: it acts at once and returns what takes it back.  `NotHereError` says why it can't be done.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from vllm_watchdog.app.drill.guard import Guard
from vllm_watchdog.app.drill.perform import Undo
from vllm_watchdog.app.drill.site import NotHereError, Site, Victim
from vllm_watchdog.core.drills import Part


def nothing() -> None:
    """What the watchdog has mended needs no taking back."""


def struck(site: Site, part: Part, number: signal.Signals) -> Victim:
    victim = site.victim(part)
    strike(site, victim, number)
    return victim


def strike(site: Site, victim: Victim, number: signal.Signals) -> None:
    """Raises NotHereError."""
    if not site.signalled(victim, number):
        raise NotHereError(f"{victim.name} has gone, or may not be signalled by us")


def kill(part: Part, number: signal.Signals = signal.SIGKILL) -> Callable[[Site], Undo]:
    def inject(site: Site) -> Undo:
        if part in (Part.DAEMON, Part.GATEWAY):
            site.supervised(part)
        struck(site, part, number)
        return nothing

    return inject


def stop(part: Part) -> Callable[[Site], Undo]:
    def inject(site: Site) -> Undo:
        victim = site.victim(part)
        guard = Guard(victim.who)
        strike(site, victim, signal.SIGSTOP)
        return guard.release

    return inject


def both(first: Part, second: Part) -> Callable[[Site], Undo]:
    """Two at once: both victims are known before the first dies.  What is timed begins with the second."""
    def inject(site: Site) -> Undo:
        site.supervised(first)
        victims = site.victim(first), site.victim(second)
        for victim in victims:
            strike(site, victim, signal.SIGKILL)
        return nothing

    return inject


OURS: Mapping[str, Callable[[Site], Undo]] = {
    "api-server-kill": kill(Part.API), "api-server-stop": stop(Part.API),
    "engine-core-kill": kill(Part.CORE), "engine-core-stop": stop(Part.CORE),
    "worker-kill": kill(Part.WORKER), "worker-stop": stop(Part.WORKER),
    "engine-core-segv": kill(Part.CORE, signal.SIGSEGV),
    "daemon-kill": kill(Part.DAEMON), "daemon-stop": stop(Part.DAEMON),
    "gateway-kill": kill(Part.GATEWAY), "gateway-stop": stop(Part.GATEWAY),
    "nvml-hung": stop(Part.HELPER),
    "core-and-daemon-kill": both(Part.DAEMON, Part.CORE), "core-and-gateway-kill": both(Part.GATEWAY, Part.CORE),
}
