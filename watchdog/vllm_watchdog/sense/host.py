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

import psutil

from vllm_watchdog.cgroup import Groups
from vllm_watchdog.core.events import Event, HostSampled
from vllm_watchdog.core.readings import Host, Mark, Process, Tree, Unknown
from vllm_watchdog.proc import MarkIndex, ProcId, Stat, alive, title
from vllm_watchdog.sense import memory_limit
from vllm_watchdog.sense.usage import file_limit, io_bytes, open_files

USS_S = 30.0
CUT = 15        # bytes of comm: a longer name is cut off there


@dataclass(slots=True)
class Kept:
    """What must be remembered of a process from one sample to the next."""

    comm: str = ""
    name: str = ""
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
        at, groups = self._clock(), self._index.members()
        members = {stat.who for group in groups.values() for stat in group}
        self._kept = {who: kept for who, kept in self._kept.items() if who in members}
        self._take_uss()
        return tuple(tree for mark, group in groups.items() if (tree := self._tree(mark, group, at)))

    def _tree(self, mark: Mark, group: list[Stat], at: float) -> Tree | None:
        """The oldest member is the leader.  None: all of it ended while we looked."""
        rows = [row for stat in group if (row := self._row(stat, at))]
        if not rows:
            return None
        told = [io for _, io in rows if io is not None]
        held = self._groups.find(mark) if self._groups else None
        charged = held.memory_bytes if held else None
        return Tree(mark, tuple(process for process, _ in rows), sum(told) if told else None, charged)

    def _row(self, stat: Stat, at: float) -> tuple[Process, int | None] | None:
        """One process as it was at `at`, and the bytes it read and wrote.  None: it ended since."""
        pid, kept = stat.who.pid, self._kept.setdefault(stat.who, Kept())
        files, io = open_files(pid), io_bytes(pid)
        if files is None and io is None and not alive(stat.who):
            return None
        if stat.comm != kept.comm or (len(stat.comm.encode()) >= CUT and kept.name == stat.comm):
            # vLLM names its processes while they come up, comm first
            kept.comm, kept.name = stat.comm, title(pid) or stat.comm
        return Process(pid, kept.name, stat.rss_bytes, kept.uss, self._cpu(kept, stat.cpu_s, at), stat.threads, files,
                       file_limit(pid)), io

    def _cpu(self, kept: Kept, spent: float, at: float) -> float | None:
        """Cores used since the sample before; None in the first."""
        before, since = kept.cpu_s, kept.at
        kept.cpu_s, kept.at = spent, at
        return None if before is None or at <= since else max(0.0, spent - before) / (at - since)

    def _take_uss(self) -> None:
        """Of the process that waits longest, if it is due."""
        at = self._clock()
        who, kept = min(self._kept.items(), key=lambda item: item[1].uss_due, default=(None, None))
        if who is None or kept is None or kept.uss_due > at:
            return
        kept.uss_due = at + USS_S
        try:
            process = psutil.Process(who.pid)
            if process.status() != psutil.STATUS_DISK_SLEEP:
                kept.uss = process.memory_full_info().uss
        except psutil.Error:        # gone, or another user's
            kept.uss = None
