"""What a soak notes of what should not be, so that its cause can be found later: when, under which faults, and what the
daemon and the gateway said meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.failover import Loss

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.procfs import ProcId, age_s, read, read_stat, title

BEFORE_S = 15.0         # of faults that may have to do with it
LINES = 40              # of each log
LOGS = ("daemon.log", "gateway.log")    # each line begins with the time, UTC
SILENT = "TimeoutError"         # a request that nobody answered: who is killed resets his connections


@dataclass(frozen=True)
class Struck:
    """Epoch seconds: when it was struck, and, where it ends the gateway, when clients were answered again."""

    at: float
    fault: str
    answered: float = 0.0

    def had(self, loss: Loss) -> bool:
        """Was it this fault that ended the gateway which had that request, or had none to answer it?"""
        return loss.outcome != SILENT and loss.asked <= self.answered and self.at <= loss.over


def told(loss: Loss, struck: Iterable[Struck], folder: Path) -> str:
    """The first line says it, the others are what was said from when it was asked until it was given up."""
    near = ", ".join(f"{each.fault} at {utc(each.at)}" for each in struck if loss.asked - BEFORE_S <= each.at <= loss.over)
    kind = "stream" if loss.stream else "request"
    waited = f"{loss.outcome} after {loss.over - loss.asked:.1f} s"
    head = f"{waited} of a {kind} asked at {utc(loss.asked)}; faults: {near or 'none'}"
    return "\n".join([head, *said(folder, loss.asked, loss.over)])


def said(folder: Path, since: float, until: float) -> Iterator[str]:
    """Of both logs, the lines of a time."""
    first, last = utc(since), utc(until)
    for name in LOGS:
        lines = [line for line in (folder / name).read_text("utf-8", "replace").splitlines() if first <= line[:19] <= last]
        yield f"{name}, {len(lines)} lines:"
        yield from (f"  {line}" for line in lines[:LINES])


def utc(at: float) -> str:
    """As both logs begin their lines."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def process(mark: Mark, who: ProcId) -> str:
    """A process that should not be, with what may say why it is."""
    stat = read_stat(who.pid)
    words = read(who.pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:200]
    state = "alive" if stat and stat.alive else "dead by now"
    seen = f"{state}, its parent {stat.ppid}, its session {stat.session}" if stat else "gone by now"
    return f"{mark} {who.pid}, {age_s(who):.1f} s old, {seen}: {words or title(who.pid)}"
