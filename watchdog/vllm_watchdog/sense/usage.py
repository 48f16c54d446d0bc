"""What one process uses, from small files of `/proc`: psutil's answers in a tenth of its time.

Never waits.  What the kernel will not tell (gone, or another user's) is None.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from vllm_watchdog.proc import ProcId
from vllm_watchdog.procfs import TICKS_PER_S, read

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Usage:
    """`comm`: the kernel's name for it, 15 bytes at most; `cpu_s`: user and system time so far."""

    comm: bytes
    cpu_s: float
    threads: int
    rss_bytes: int


def usage(who: ProcId) -> Usage | None:
    raw = read(who.pid, "stat")
    closing = raw.rfind(b")")       # comm may itself hold blanks and parentheses
    fields = raw[closing + 2 :].split(b" ", 23)
    if len(fields) < 23 or int(fields[19]) != who.start or fields[0] in (b"Z", b"X"):
        return None
    ticks = int(fields[11]) + int(fields[12])
    return Usage(raw[raw.find(b"(") + 1 : closing], ticks / TICKS_PER_S, int(fields[17]), int(fields[21]) * PAGE)


def io_bytes(pid: int) -> int | None:
    """Moves whenever anything is read or written: by a call (also from the page cache) or by a page fault of a mapped
    model.  What a call reads from the disk counts twice: it is a sign of work, not a volume."""
    lines = read(pid, "io").splitlines()        # rchar wchar syscr syscw read_bytes write_bytes ...
    return sum(int(lines[at].split()[1]) for at in (0, 1, 4, 5)) if len(lines) > 5 else None


def open_files(pid: int) -> int | None:
    """How many descriptors it has.  The kernel says so at once from 6.2 on; an older one lists them."""
    folder = f"/proc/{pid}/fd"
    try:
        return os.stat(folder).st_size or len(os.listdir(folder))       # noqa: PTH116, PTH208 - each second
    except OSError:
        return None


def file_limit(pid: int) -> int | None:
    try:
        return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
    except OSError:
        return None
