"""Everything we can do.  A command is a value: deciding makes it, an adapter carries it out and answers by an event."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.readings import Mark


@dataclass(frozen=True, slots=True)
class Spawn:
    """-> Spawned | SpawnFailed, later Exited.  Refused where the port is taken."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Adopt:
    """Watch a leader that an earlier daemon started, and read its log on.  -> Exited."""

    mark: Mark
    pid: int


@dataclass(frozen=True, slots=True)
class Term:
    """Ask the leader, then (after a short grace without effect) its whole group, to leave.  -> Exited."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL whatever carries the mark, again and again until nothing is left.  -> Emptied."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Drain:
    """Read the rest of a dead generation's log.  -> LogRead(drained=True)."""

    mark: Mark


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the one-token completion.  -> Answered."""

    mark: Mark
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Put it to sleep at level 1: weights to host memory, VRAM given back.  -> Slept."""

    mark: Mark
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake it, and have it prove that by one token.  -> Woke."""

    mark: Mark
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SampleGpus:
    """Take a GPU sample now.  -> GpusSampled."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Write an evidence bundle into the incident's folder.  -> Dumped, within `deadline_s`.

    `stacks`: the generation still runs, so dump its stacks too.
    """

    incident: str
    mark: Mark | None
    reason: str
    stacks: bool
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Record:
    """Write the incident into the history and its folder."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Alert:
    """Tell people.  `kind`: opened, worsened, reminder, resolved, test.  Delivered at least once, by (incident id, kind).

    `again`: an earlier daemon owed it, too, and may have ended before it was written down.
    """

    kind: str
    incident: Incident
    again: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer an operator: what was done, or why not."""

    ref: int
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Say:
    """One line for log and journal: `name` is a dotted event name, `fields` its figures."""

    name: str
    fields: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave: everything is stopped, or the next daemon takes it over."""


Command = Spawn | Adopt | Term | Kill | Drain | Ask | Sleep | Wake | SampleGpus | Dump | Record | Alert | Answer | Say | Quit
