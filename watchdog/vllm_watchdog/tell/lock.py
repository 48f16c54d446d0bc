"""One daemon for one state folder: an flock on `state_dir/lock`, which holds the daemon's PID.

The kernel releases it however the daemon dies, and engines do not inherit it, so a lock that is held is a daemon that
lives.  Never waits.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vllm_watchdog.tell.files import open_owner_only


class Busy(Exception):  # noqa: N818 - it reads as what it says
    """Another daemon holds the lock; `pid` is 0 where it has not said who it is."""

    def __init__(self, pid: int, path: Path) -> None:
        who = f"PID {pid}" if pid else "another process"
        super().__init__(f"{path}: held by {who}: a watchdog of this state folder already runs")
        self.pid = pid


class Lock:
    """Made by `acquire`; `release` removes the file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def acquire(cls, path: Path) -> Lock:
        """Raises Busy, OSError."""
        while True:
            descriptor = open_owner_only(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(descriptor, 20, 0)
                os.close(descriptor)
                raise Busy(int(pid) if pid.strip().isdigit() else 0, path) from None
            if _still_there(path, descriptor):
                break
            os.close(descriptor)    # its last holder removed it between our open and our flock
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(path, descriptor)

    def release(self) -> None:
        """Removed while it is still held, so that nobody can hold a removed file for long."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
