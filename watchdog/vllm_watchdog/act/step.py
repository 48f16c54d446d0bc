"""The step between the daemon and an engine: a few words of shell that become the engine.

Between fork and exec a process with threads can do nothing safely, and Python has no call that starts a process in a group.
So the daemon starts a shell, whose text is constant and whose arguments are the rest: it enters the control group before
the engine's first instruction (so that no child is ever born outside of it), takes off the daemon's place in the order of
the OOM killer, and executes the command in its place: same PID.  It is up in less than a millisecond, where a Python needs
ten.  What a shell would do differently is seen to before: a program that can't be run is refused here, by its name.
Blocks for fork and exec (milliseconds; longer on a hung file system).
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_watchdog.launch import Launch

SHELL, ENV = "/bin/sh", "/usr/bin/env"
# GROUP CWD COMMAND...: an empty GROUP is none; without it the engine starts all the same, and its log says why.
BECOME = """
[ -z "$1" ] || echo 0 >"$1/cgroup.procs"
read -r score </proc/self/oom_score_adj && [ "$score" -ge 0 ] || echo 0 >/proc/self/oom_score_adj
cd "$2" && shift 2 && exec "$@"
"""
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)      # by Python; an exec would hand that on


class RefusedError(Exception):
    """Nothing was started.  Its text is one sentence for people, `class_` a word of the catalogue."""

    def __init__(self, why: str, class_: str = "spawn_failed") -> None:
        super().__init__(why)
        self.class_ = class_


def start(launch: Launch, env: Mapping[str, str], log: str, group: Path | None) -> int:
    """The PID of the process that is, or in a moment becomes, the engine: a child of ours in a session of its own.

    Raises RefusedError.
    """
    _refuse_what_cannot_run(launch, env.get("PATH", os.defpath))
    odd = [f"{name}={env[name]}" for name in env if not NAME.fullmatch(name)]      # which some shells drop
    command = (*(ENV, *odd), *launch.argv) if odd else launch.argv
    files = ((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
             (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640),
             (os.POSIX_SPAWN_DUP2, 1, 2))
    _keep_descriptors()
    try:
        with _ordinary_priority():
            return os.posix_spawn(SHELL, ("sh", "-c", BECOME, "sh", str(group or ""), str(launch.cwd), *command), env,
                                  file_actions=files, setsid=True, setsigmask=(), setsigdef=IGNORED)
    except OSError as error:
        raise RefusedError(f"cannot start a process: {error.strerror}") from None


def _keep_descriptors() -> None:
    """Python's own end at an exec; what the daemon was started with, or a library opened, may not."""
    for fd in map(int, os.listdir("/proc/self/fd")):        # noqa: PTH208
        if fd > 2:
            with suppress(OSError):     # the one that the list was read from
                os.set_inheritable(fd, False)


@contextmanager
def _ordinary_priority() -> Iterator[None]:
    """Of this thread, which a child inherits."""
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    if ours >= 0:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, ours)


def _refuse_what_cannot_run(launch: Launch, path: str) -> None:
    try:
        os.close(os.open(launch.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        if not os.access(launch.cwd, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RefusedError(f"cannot enter the working directory {launch.cwd}: {error.strerror}") from None
    try:
        _look_for_interpreter(_program(launch.argv[0], launch.cwd, path), launch.cwd)
    except OSError as error:
        raise RefusedError(f"cannot run {launch.argv[0]}: {error.strerror}") from None


def _program(name: str, cwd: Path, path: str) -> Path:
    """As exec finds it."""
    denied = False
    for folder in ("",) if "/" in name else path.split(os.pathsep):
        found = cwd / folder / name
        if os.path.isfile(found):       # noqa: PTH113 - no error for a folder that may not be entered: the next one is looked at
            if os.access(found, os.X_OK):
                return found
            denied = True
    number = errno.EACCES if denied else errno.ENOENT
    raise OSError(number, os.strerror(number))


def _look_for_interpreter(program: Path, cwd: Path) -> None:
    """A script without its interpreter (a virtual environment that is being replaced) is no program yet."""
    with suppress(PermissionError), program.open("rb") as file:
        first = file.readline(256)
        if first.startswith(b"#!") and (words := first[2:].split()):
            (cwd / os.fsdecode(words[0])).stat()
