"""The first process of a launch: started here or adopted, held by a pidfd, and reaped when its group is empty.

Its pidfd tells of its death at once.  A dead leader of ours is left a zombie until `release`: as long as it is there
its PID, and with it the number of its group, can't be given to a stranger, so that a signal to the group is safe.
It is never waited for: `spawn` blocks as long as fork and exec do (milliseconds; longer on a hung file system).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

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
ENTER = Path(__file__).with_name("enter.py").read_text("utf-8")      # once: an upgrade may take the package away
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
LOG_ROOM = 16 << 20     # with less, the engine's own prints would fail soon, and a progress bar that can't print ends a load
ROOM = 256 << 20        # asked for, so that it lasts for some hours of logs
OUR_PREFIX, SIM_PREFIX = "LLM_WATCHDOG_", "LLM_WATCHDOG_SIM_"


class RefusedError(Exception):
    """Nothing was started.  Its text is one sentence for people, `class_` a word of the catalogue."""

    def __init__(self, why: str, class_: str = "spawn_failed") -> None:
        super().__init__(why)
        self.class_ = class_


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
    report, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        child = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", ENTER, str(theirs), str(group or ""), *launch.argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=launch.cwd,
            env=environment(os.environ, launch, mark, instance),
            pass_fds=(theirs,),
            start_new_session=True,  # a group of its own too; and no terminal's hang-up reaches it
        )
    except OSError as error:
        os.close(report)
        raise RefusedError(_why(error, launch)) from None
    finally:
        os.close(theirs)
        os.close(log)
    if number := _failed_exec(report):
        child.wait()    # it is on its way out
        raise RefusedError(f"cannot run {launch.argv[0]}: {os.strerror(number)}")
    child.returncode = 0  # the pidfd is what we wait on: Popen must neither reap it nor complain that it outlives us
    who = identify(child.pid)
    if who is None:  # an unreaped child of ours always has a stat
        raise RuntimeError(f"no /proc entry for our own child {child.pid}")
    return Leader(mark, who, os.pidfd_open(child.pid), lost_log)


def _failed_exec(report: int) -> int:
    """The error number of an exec that failed, 0 after one that did not: then the end of the pipe is closed."""
    with os.fdopen(report) as lines:
        said = dict(line.split() for line in lines)
    return int(said.get("exec", 0))


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


def _open_log(launch: Launch, mark: Mark, make_room: Callable[[int], None]) -> tuple[int, str]:
    """The log, or /dev/null and why.  Raises RefusedError where it is not room that the log lacks."""
    try:
        return _begin_log(launch, mark), ""
    except OSError as error:
        if error.errno not in FULL:
            raise RefusedError(f"cannot open the log {launch.log_path}: {error.strerror}") from None
    make_room(ROOM)
    try:
        return _begin_log(launch, mark), ""
    except OSError as error:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), f"{launch.log_path}: {error.strerror}"


def _begin_log(launch: Launch, mark: Mark) -> int:
    """Begins with a line that says where this generation starts: which also proves that the disk takes writes."""
    line = f"\n# llm-watchdog: {mark} starts at {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n"
    log = os.open(launch.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        _want_room(log)
        os.write(log, line.encode())
    except OSError:
        os.close(log)
        raise
    return log


def _want_room(fd: int) -> None:
    disk = os.fstatvfs(fd)
    if disk.f_bavail * disk.f_frsize < LOG_ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(error: OSError, launch: Launch) -> str:
    if str(error.filename) == str(launch.cwd):
        return f"cannot enter the working directory {launch.cwd}: {error.strerror}"
    return f"cannot start {launch.argv[0]}: {error.strerror}"       # no room for a process
