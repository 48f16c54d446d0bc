"""The processes that an engine can't live without: its cores, workers and servers, known by the titles that vLLM gives them.

Each is held by a pidfd, so that its death is known at once, while the leader may need half a second to say so.  Looks at
`/proc` only when a sample shows a title that is not held yet; never signals, never waits.  Whatever has another title
(a resource tracker, a compiler, all of V0) may come and go as it likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from vllm_watchdog.core.readings import Process
from vllm_watchdog.proc import hold, read_stat, title

TITLE = "VLLM::"
WORKER = "VLLM::Worker"
MOST = 64       # of one engine; eight cards have some 30

Titled = frozenset[tuple[int, str]]


def titled(processes: Iterable[Process]) -> Titled:
    """PID and title of those that vLLM named."""
    return frozenset((process.pid, process.name) for process in processes if process.name.startswith(TITLE))


def ends_with_its_core(member: tuple[int, str]) -> bool:
    """A worker does, and may be seen to be dead before the core, whose files close before it has ended."""
    return member[1].startswith(WORKER)


class Members:
    """Of one generation.  For one thread."""

    def __init__(self) -> None:
        self._seen: Titled = frozenset()
        self._held: dict[int, tuple[int, str]] = {}     # by pidfd

    @property
    def fds(self) -> tuple[int, ...]:
        """Readable when dead."""
        return tuple(self._held)

    def learn(self, seen: Titled, session: int) -> None:
        """Holds what is new in a sample, and lives in the session that the leader began."""
        new, self._seen = seen - self._seen, seen
        for pid, name in sorted(new):
            held = {pid: (fd, known) for fd, (pid, known) in self._held.items()}
            if pid in held:
                fd, known = held[pid]
                self._held[fd] = pid, max(known, name, key=len)     # it was seen before it had its whole name
            elif len(held) < MOST and (new_fd := _member(pid, session)) is not None:
                self._held[new_fd] = pid, name

    def died(self, ready: set[int]) -> tuple[tuple[int, str], ...]:
        """PID and title of those whose pidfds are `ready`, which it lets go of."""
        dead = {fd: who for fd, who in self._held.items() if fd in ready}
        for fd in dead:
            os.close(fd)
            del self._held[fd]
        return tuple(dead.values())

    def close(self) -> None:
        self.died(set(self._held))
        self._seen = frozenset()


def _member(pid: int, session: int) -> int | None:
    """A pidfd; None where it is gone, a stranger by now, or only a fork: that shows its parent's title until its exec."""
    stat = read_stat(pid)
    if stat is None or not stat.alive or stat.session != session:
        return None
    named = title(pid)
    return hold(stat.who) if named.startswith(TITLE) and named != title(stat.ppid) else None
