"""Memory, disk and load of the host, and what every process of ours uses.

Posts HostSampled, one a wake.  Blocks its own thread only: in `/proc`, where a process that is stuck in the driver may
hold its memory lock, and in statvfs of the log disk.  The unique set size walks page tables (4 ms and more a process),
so it is taken once in USS_S a process, one process a wake, and not of a process in D state.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from vllm_watchdog.cgroup import Groups
from vllm_watchdog.core.events import Event, HostSampled
from vllm_watchdog.core.readings import Host, Mark, Process, Tree, Unknown
from vllm_watchdog.proc import MarkIndex, ProcId
from vllm_watchdog.sense import memory_limit

USS_S = 30.0

T = TypeVar("T")
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess)


@dataclass(slots=True)
class Kept:
    """A process we watch: psutil's object, and what must be remembered from one sample to the next."""

    process: psutil.Process
    cpu_s: float | None = None      # user and system time so far, at `at`
    at: float = 0.0
    uss: int | None = None
    uss_due: float = 0.0


class HostSense:
    """`disk`: a path on the disk that holds the logs."""

    def __init__(self, post: Callable[[Event], None], clock: Callable[[], float], index: MarkIndex, disk: Path,
                 groups: Groups | None = None):
        self._groups = groups
        self._post, self._clock, self._index, self._disk = post, clock, index, disk
        self._kept: dict[ProcId, Kept] = {}
        self._blind_since: float | None = None
        self._woken, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sense-host", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, deadline_s: float) -> None:
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():     # a daemon that could not even begin stops what it never started
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.wait(timeout=60) and not self._stopping.is_set():
                self._woken.clear()
                host, trees = self._host(), self._trees()
                self._post(HostSampled(self._clock(), host, trees))

    def _host(self) -> Host | Unknown:
        try:
            memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(self._disk))
            load = os.getloadavg()[0]
        except OSError as error:
            self._blind_since = self._blind_since or self._clock()
            return Unknown(self._blind_since, f"{error.filename or self._disk}: {error.strerror}")
        self._blind_since = None
        total, available = memory_limit.memory() or (None, None)
        return Host(memory.total, memory.available, disk.total, disk.free, load, total, available)

    def _trees(self) -> tuple[Tree, ...]:
        marked = self._index.marked()
        members = {who for group in marked.values() for who in group}
        self._kept = {who: kept for who, kept in self._kept.items() if who in members}
        self._take_uss()
        return tuple(tree for mark, group in marked.items() if (tree := self._tree(mark, group)))

    def _tree(self, mark: Mark, group: tuple[ProcId, ...]) -> Tree | None:
        """The oldest member is the leader.  None: all of it ended while we looked."""
        rows = [row for who in group if (row := self._row(who))]
        if not rows:
            return None
        told = [io for _, io in rows if io is not None]
        held = self._groups.find(mark) if self._groups else None
        charged = held.memory_bytes if held else None
        return Tree(mark, tuple(process for process, _ in rows), sum(told) if told else None, charged)

    def _row(self, who: ProcId) -> tuple[Process, int | None] | None:
        """One process, and the bytes it read and wrote."""
        try:
            kept = self._kept.get(who) or Kept(psutil.Process(who.pid))
            self._kept[who] = kept
            with kept.process.oneshot():
                row = Process(
                    who.pid, kept.process.name(), kept.process.memory_info().rss, kept.uss, self._cpu(kept),
                    kept.process.num_threads(), _told(kept.process.num_fds),
                    _told(lambda: int(kept.process.rlimit(psutil.RLIMIT_NOFILE)[0])),
                )
                return row, _told(lambda: _io(kept.process))
        except GONE:
            return None

    def _cpu(self, kept: Kept) -> float | None:
        """Cores used since the sample before; None in the first."""
        times, at = kept.process.cpu_times(), self._clock()
        spent, before, since = times.user + times.system, kept.cpu_s, kept.at
        kept.cpu_s, kept.at = spent, at
        return None if before is None or at <= since else max(0.0, spent - before) / (at - since)

    def _take_uss(self) -> None:
        """Of the process that waits longest, if it is due."""
        at = self._clock()
        kept = min(self._kept.values(), key=lambda one: one.uss_due, default=None)
        if kept is None or kept.uss_due > at:
            return
        kept.uss_due = at + USS_S
        try:
            if kept.process.status() != psutil.STATUS_DISK_SLEEP:
                kept.uss = _told(lambda: kept.process.memory_full_info().uss)
        except GONE:
            kept.uss = None


def _io(process: psutil.Process) -> int:
    """Moves whenever anything is read or written: by a call (also from the page cache) or by a page fault of a mapped
    model.  What a call reads from the disk counts twice: it is a sign of work, not a volume."""
    counters = process.io_counters()
    return int(counters.read_chars + counters.write_chars + counters.read_bytes + counters.write_bytes)


def _told(ask: Callable[[], T]) -> T | None:
    """None where the kernel does not tell us (another user's process)."""
    try:
        return ask()
    except psutil.AccessDenied:
        return None
