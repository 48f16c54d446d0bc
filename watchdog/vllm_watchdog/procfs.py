"""What `/proc` says of processes.  Reads small files that the kernel makes up: never waits for a process or a disk.

What it will not tell (the process is gone, or another user's) is None or empty, never an error.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

KERNEL_THREAD = 0x00200000  # PF_KTHREAD of the kernel's sched.h
KTHREADD = 2
WHOLE_S = 10.0  # a PID is given again only when all others were
TICKS_PER_S, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcId:
    """A process that can't be mistaken for another.  `start`: field 22 of its stat, clock ticks since boot."""

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Stat:
    """One line of `/proc/PID/stat`.  `alive` is False for a zombie none of whose threads is left; `comm`: the kernel's name
    for it, 15 bytes at most; `cpu_s`: user and system time so far."""

    who: ProcId
    comm: str
    alive: bool
    ppid: int
    group: int
    session: int
    kernel: bool
    cpu_s: float = 0.0
    threads: int = 1
    rss_bytes: int = 0


def identify(pid: int) -> ProcId | None:
    stat = read_stat(pid)
    return stat.who if stat else None


def alive(who: ProcId) -> bool:
    """Still the same process, and not a zombie."""
    stat = read_stat(who.pid)
    return stat is not None and stat.who == who and stat.alive


def age_s(who: ProcId) -> float:
    """Seconds since it was forked, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - who.start / TICKS_PER_S


def title(pid: int) -> str:
    """The name people know it by: vLLM's own process title, which is longer than comm's 15 bytes, else comm."""
    first = read(pid, "cmdline").split(b"\0", 1)[0].decode(errors="replace")
    if first.startswith("VLLM::"):
        return first.strip()
    return read(pid, "comm").decode(errors="replace").strip()


def read_stat(pid: int) -> Stat | None:
    raw = read(pid, "stat")
    if not raw:
        return None
    opening, closing = raw.index(b"("), raw.rindex(b")")  # comm may itself hold blanks and parentheses
    fields = raw[closing + 2 :].split(b" ", 22)
    threads = int(fields[17])
    # A zombie leader may have threads left, stuck in the driver and holding the GPU: that process is not dead.
    return Stat(
        ProcId(pid, int(fields[19])),
        raw[opening + 1 : closing].decode(errors="replace"),
        alive=fields[0] not in (b"Z", b"X") or threads > 1,
        ppid=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        kernel=bool(int(fields[6]) & KERNEL_THREAD),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        threads=threads,
        rss_bytes=int(fields[21]) * PAGE,
    )


def walk() -> list[Stat]:
    """Every process of the host but kernel threads, the oldest first: a parent comes before its children."""
    threads = _kernel_threads()
    stats = [stat for pid in pids() if pid not in threads and (stat := read_stat(pid))]
    return sorted((stat for stat in stats if not stat.kernel), key=_age)


class Glance:
    """`walk` for who looks each second and kills nobody: whoever is `settled`, a stranger for sure, is shown as before for
    WHOLE_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, Stat] = {}        # by PID; kernel threads, too
        self._whole_at = 0.0

    def __call__(self, settled: Callable[[ProcId], bool]) -> list[Stat]:
        if self._clock() >= self._whole_at:
            self._whole_at = self._clock() + WHOLE_S
            self._seen = {}
        before, self._seen = self._seen, {}
        for pid in pids():
            stat = before.get(pid)
            if stat is None or not (stat.kernel or settled(stat.who)):
                stat = read_stat(pid)
            if stat is not None:
                self._seen[pid] = stat
        return sorted((stat for stat in self._seen.values() if not stat.kernel), key=_age)


def _age(stat: Stat) -> tuple[int, int]:
    """Its order: a parent comes before its children."""
    return stat.who.start, stat.who.pid


def _kernel_threads() -> frozenset[int]:
    """The children of kthreadd in one read; on a small host they are most of what there is in `/proc`."""
    parent = read_stat(KTHREADD)
    if parent is None or not parent.kernel:  # in a container PID 2 is anybody
        return frozenset()
    return frozenset(map(int, read(KTHREADD, f"task/{KTHREADD}/children").split())) | {KTHREADD}


def pids() -> list[int]:
    with os.scandir("/proc") as entries:
        return [int(entry.name) for entry in entries if entry.name.isdecimal()]


def read(pid: int, name: str) -> bytes:
    """A file of `/proc/PID`; empty where the process is gone, a zombie, or another user's."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 65536):
            parts.append(part)
            if name == "stat":
                break  # one read holds it all, and a second would cost as much again
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)
