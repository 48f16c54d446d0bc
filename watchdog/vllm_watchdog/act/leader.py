"""The first process of a launch: started here or adopted, held by a pidfd, and reaped when its group is empty.

Its pidfd tells of its death at once.  A dead leader of ours is left a zombie until `release`: as long as it is there
its PID, and with it the number of its group, can't be given to a stranger, so that a signal to the group is safe.
It is never waited for: `spawn` blocks as long as fork and exec do (milliseconds; longer on a hung file system).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from vllm_watchdog.act.step import RefusedError, start
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.launch import Launch, fingerprint
from vllm_watchdog.proc import LAUNCH_ENV, MARK_ENV, MarkIndex, ProcId, deliver, hold, identify, mark_value, read_stat

# What systemd tells its own child, and our own settings with their secrets, are not an engine's business.
OURS_ALONE = frozenset((
    "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "INVOCATION_ID",
    "JOURNAL_STREAM", "MAINPID", "MANAGERPID", "SYSTEMD_EXEC_PID", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE",
    "CREDENTIALS_DIRECTORY", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "LOGS_DIRECTORY", "CACHE_DIRECTORY",
    "CONFIGURATION_DIRECTORY",
))
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
LOG_ROOM = 16 << 20     # with less, the engine's own prints would fail soon, and a progress bar that can't print ends a load
ROOM = 256 << 20        # asked for, so that it lasts for some hours of logs
OUR_PREFIX, SIM_PREFIX = "LLM_WATCHDOG_", "LLM_WATCHDOG_SIM_"


class Leader:
    """One leader, alive or dead, until `release`.  For one thread."""

    def __init__(self, mark: Mark, who: ProcId, fd: int, lost_log: str = "") -> None:
        self.mark, self.who, self.fd = mark, who, fd
        self.lost_log = lost_log    # why its output goes nowhere; empty: it goes to its log

    def code(self) -> int | None:
        """Exit code as in subprocess (negative: signal).  None: still alive, or not our child."""
        return self._wait(os.WNOWAIT)

    def send(self, sig: signal.Signals) -> bool:
        return deliver(self.fd, sig)

    def send_group(self, sig: signal.Signals) -> bool:
        """Signals its process group, where the group is surely still its own.  False: nobody was signalled."""
        stat = read_stat(self.who.pid)
        if stat is None or stat.who != self.who or stat.group != self.who.pid:
            return False
        try:
            os.killpg(self.who.pid, sig)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def release(self) -> None:
        """Reaps it, where it is dead and our child, and lets go of the pidfd."""
        self._wait(0)
        os.close(self.fd)

    def _wait(self, flags: int) -> int | None:
        try:
            status = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG | flags)
        except ChildProcessError:
            return None
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def spawn(launch: Launch, mark: Mark, instance: str, make_room: Callable[[int], None], group: Path | None = None) -> Leader:
    """Starts the engine in a session and process group of its own, and in a control group.  Raises RefusedError.

    A full disk costs the log, never the service: `make_room` is asked for some bytes, and then it runs without one.
    """
    log, lost_log = _open_log(launch, mark, make_room)
    pid = start(launch, environment(os.environ, launch, mark, instance), log, group)
    who = identify(pid)
    if who is None:  # an unreaped child of ours always has a stat
        raise RuntimeError(f"no /proc entry for our own child {pid}")
    return Leader(mark, who, os.pidfd_open(pid), lost_log)


def adopt(mark: Mark, pid: int, index: MarkIndex) -> Leader | None:
    """Holds a leader that an earlier daemon started; None where it is gone, or not the one that was meant."""
    for who in index.marked().get(mark, ()):
        if who.pid == pid and (fd := hold(who)) is not None:
            return Leader(mark, who, fd)
    return None


def environment(base: Mapping[str, str], launch: Launch, mark: Mark, instance: str) -> dict[str, str]:
    """The engine's environment: ours without what is ours alone, then what the launch adds, then the mark."""
    env = {name: value for name, value in base.items() if not _ours(name)}
    # setproctitle writes the title over the environment, mark included, unless it is told not to.
    ours = {MARK_ENV: mark_value(mark, instance), LAUNCH_ENV: fingerprint(launch)}
    return env | {"SPT_NOENV": "1"} | dict(launch.env) | ours


def _ours(name: str) -> bool:
    return name in OURS_ALONE or (name.startswith(OUR_PREFIX) and not name.startswith(SIM_PREFIX))


def _open_log(launch: Launch, mark: Mark, make_room: Callable[[int], None]) -> tuple[str, str]:
    """The log's path, or /dev/null and why.  Raises RefusedError where it is not room that the log lacks."""
    try:
        return _begin_log(launch, mark), ""
    except OSError as error:
        if error.errno not in FULL:
            raise RefusedError(f"cannot open the log {launch.log_path}: {error.strerror}") from None
    make_room(ROOM)
    try:
        return _begin_log(launch, mark), ""
    except OSError as error:
        return os.devnull, f"{launch.log_path}: {error.strerror}"


def _begin_log(launch: Launch, mark: Mark) -> str:
    """Begins with a line that says where this generation starts: which also proves that the disk takes writes."""
    line = f"\n# llm-watchdog: {mark} starts at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n"
    log = os.open(launch.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        _want_room(log)
        os.write(log, line.encode())
    finally:
        os.close(log)
    return str(launch.log_path)


def _want_room(fd: int) -> None:
    disk = os.fstatvfs(fd)
    if disk.f_bavail * disk.f_frsize < LOG_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
