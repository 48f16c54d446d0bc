"""One `Kill` in progress: SIGKILL to whatever is of a generation, again and again, until a walk finds nothing left.

The group first (nothing forks out of a signal to a group), then every process by its own pidfd: also those that
re-parented, began a session of their own, or lost their leader; and the generation's control group, where it has one,
as a whole.  A round takes one walk of `/proc` (about a millisecond in a small container) and waits for nothing; between
rounds the caller polls `fds`, which tell of each death at once, for at most `wait_s`.  What survives SIGKILL (D state in
the driver) is looked for for ever, ever more rarely.
"""

from __future__ import annotations

import os
import signal

from vllm_watchdog.act.leader import Leader
from vllm_watchdog.cgroup import Group
from vllm_watchdog.core.readings import Holder, Mark
from vllm_watchdog.proc import MarkIndex, Owned, ProcId, deliver, hold

FIRST_WAIT_S = 0.02  # a process with a big address space takes tens of milliseconds to die
LAST_WAIT_S = 1.0  # a process in D state may last for hours; one walk a second costs next to nothing
GROWTH = 1.5


class Purge:
    """`leader` is None where only orphans are left; `wait_s` grows from round to round.  For one thread."""

    def __init__(self, mark: Mark, leader: Leader | None, index: MarkIndex, group: Group | None = None) -> None:
        self.mark = mark
        self._group = group
        self.wait_s = FIRST_WAIT_S
        self._leader = leader
        self._index = index
        self.nothing_left = False  # the last walk has shown no other generation of this engine either
        self._held: dict[ProcId, int] = {}
        self._struck: dict[ProcId, str] = {}

    @property
    def fds(self) -> tuple[int, ...]:
        """Pidfds of those that were alive in the last round: readable when dead."""
        return tuple(self._held.values())

    @property
    def struck(self) -> tuple[Holder, ...]:
        """Whom it signalled, by the kernel's name for them: reading a longer one may hang with a stuck process."""
        return tuple(Holder(who.pid, name, self.mark) for who, name in self._struck.items())

    def all_died(self, ready: set[int]) -> bool:
        """Lets go of those whose pidfds are `ready`.  True: the last one struck is dead, so a walk is due."""
        dead = {who for who, fd in self._held.items() if fd in ready}
        self._let_go(dead)
        return bool(dead) and not self._held

    def round(self) -> bool:
        """Signals all that is left.  True: nothing was."""
        # Looked for before the first blow: a child that wiped its environment is known by its living parent alone.
        engine = [owned for owned in self._index.owned() if owned.mark.engine == self.mark.engine]
        ours = [owned for owned in engine if owned.mark == self.mark]
        left = {owned.stat.who: owned.stat.comm for owned in ours if owned.stat.alive}
        self.nothing_left = not any(owned.stat.alive for owned in engine)
        self._let_go(set(self._held) - set(left))
        if not left and not (self._group and self._group.populated):
            reap(ours, self._leader)
            if self._group:
                self._group.remove()
            return True
        if self._leader:
            self._leader.send_group(signal.SIGKILL)
        for who, name in left.items():
            self._strike(who, name)
        if self._group:
            self._group.kill()
        self.wait_s = min(self.wait_s * GROWTH, LAST_WAIT_S)
        return False

    def close(self) -> None:
        self._let_go(set(self._held))

    def _strike(self, who: ProcId, name: str) -> None:
        fd = self._held.get(who) or hold(who)
        if fd is not None:
            self._held[who] = fd
            self._struck[who] = name
            deliver(fd, signal.SIGKILL)

    def _let_go(self, dead: set[ProcId]) -> None:
        for who in dead:
            os.close(self._held.pop(who))


def ended_children() -> bool:
    """Has this process a zombie, which alone `reap` is after?  One call into the kernel, for a walk of all of `/proc`."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def reap(ours: list[Owned], leader: Leader | None) -> None:
    """Reaps zombies of ours that came to us as their subreaper.

    Only what is surely an engine's, and never a leader, whose status `Exited` needs; the watchdog's own children are
    left to the `subprocess` objects that wait for them.
    """
    for owned in ours:
        stat = owned.stat
        if not stat.alive and stat.ppid == os.getpid() and not (leader and leader.who == stat.who):
            try:
                os.waitid(os.P_PID, stat.who.pid, os.WEXITED | os.WNOHANG)
            except ChildProcessError:
                continue  # somebody was quicker
