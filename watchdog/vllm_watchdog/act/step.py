"""The step between the daemon and an engine: a few words of shell that become the engine.

Between fork and exec a process with threads can do nothing safely, and Python has no call that starts a process in a group.
So the daemon starts a shell, whose text is constant and whose arguments are the rest: it enters the control group before
the engine's first instruction (so that no child is ever born outside of it), takes off the daemon's place in the order of
the OOM killer, and executes the command in its place: same PID.  It is up in less than a millisecond, where a Python needs
ten.  What can't be run is refused before, as far as that can be seen; names of the environment that a shell drops or has a
use for go round it.  Blocks for fork and exec (milliseconds; longer on a hung file system).
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from vllm_watchdog.launch import Launch

SHELL, ENV = "/bin/sh", "/usr/bin/env"
NOT_EXECUTED = 125      # the end of this shell where exec failed: 126 and 127 are the word of a shell that is the command
# GROUP SCORE CWD COMMAND...: an empty GROUP or SCORE is none; without them the engine starts all the same, and its log says
# why.  A failed exec ends bash at once, unless it is told not to, and dash by way of the trap.
BECOME = f"""
[ -z "$1" ] || echo 0 >"$1/cgroup.procs"
[ -z "$2" ] || echo "$2" >/proc/self/oom_score_adj
trap 'exit {NOT_EXECUTED}' EXIT
shopt -s execfail 2>/dev/null
cd "$3" && shift 3 && exec "$@"
"""
EXEC = 'exec "$@"'
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
SHELLS_OWN = frozenset((
    "IFS", "OPTIND", "OPTARG", "PPID", "PS4", "LINENO", "RANDOM", "SECONDS", "UID", "EUID", "SHELLOPTS", "BASHOPTS",
))
IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)      # by Python; an exec would hand that on
SCRIPTS = 4             # interpreters of interpreters that are looked at; the kernel follows five


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
    round_it = [name for name in env if name in SHELLS_OWN or not NAME.fullmatch(name)]
    words = ("sh", "-c", BECOME, "sh", str(group or ""), _score(), str(launch.cwd),
             *_with(launch.argv, [f"{name}={env[name]}" for name in round_it]))
    plain = {name: value for name, value in env.items() if name not in round_it}
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            files = ((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
                     (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2))
            _keep_descriptors()
            return _at_ordinary_priority(lambda: os.posix_spawn(
                SHELL, words, plain, file_actions=files, setsid=True, setsigmask=(), setsigdef=IGNORED))
        finally:
            os.close(output)
    except OSError as error:
        raise RefusedError(f"cannot start a process: {error.strerror}") from None


def _with(argv: tuple[str, ...], pairs: list[str]) -> tuple[str, ...]:
    """The command with these in its environment.  A path that holds a `=` would be one of them to `env`."""
    if not pairs:
        return argv
    return (ENV, "--", *pairs, *((SHELL, "-c", EXEC, "sh") if "=" in argv[0] else ()), *argv)


def _score() -> str:
    """What an engine's place before the OOM killer is to be, where ours is not for it; empty: it stays."""
    try:
        return "0" if int(Path("/proc/self/oom_score_adj").read_text("ascii")) < 0 else ""
    except OSError:
        return ""


def _keep_descriptors() -> None:
    """Python's own end at an exec; what the daemon was started with, or a library opened, may not."""
    for fd in map(int, os.listdir("/proc/self/fd")):        # noqa: PTH208
        if fd > 2:
            with suppress(OSError):     # the one that the list was read from
                os.set_inheritable(fd, False)


def _at_ordinary_priority(spawn: Callable[[], int]) -> int:
    """A child inherits the priority of the thread that starts it, which, once given up, may not be had again: so where ours
    is a higher one, another thread does it.  Raises OSError."""
    if os.getpriority(os.PRIO_PROCESS, 0) >= 0:
        return spawn()
    came: list[int | OSError] = []

    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        try:
            came.append(spawn())
        except OSError as error:
            came.append(error)

    thread = threading.Thread(target=lower, name="start")
    thread.start()
    thread.join()
    if isinstance(came[0], OSError):
        raise came[0]
    return came[0]


def _refuse_what_cannot_run(launch: Launch, path: str) -> None:
    try:
        os.close(os.open(launch.cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        _executable(launch.cwd)
    except OSError as error:
        raise RefusedError(f"cannot enter the working directory {launch.cwd}: {error.strerror}") from None
    try:
        program: Path | None = _program(launch.argv[0], launch.cwd, path)
        for _ in range(SCRIPTS):
            program = program and _interpreter(program, launch.cwd)
    except OSError as error:
        raise RefusedError(f"cannot run {launch.argv[0]}: {error.strerror}") from None


def _executable(path: Path) -> None:
    path.stat()
    if not os.access(path, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _program(name: str, cwd: Path, path: str) -> Path:
    """As exec finds it."""
    number = errno.ENOENT
    for folder in ("",) if "/" in name else path.split(os.pathsep):
        found = cwd / folder / name
        if os.path.isfile(found):       # noqa: PTH113 - no error for a folder that may not be entered: the next one is looked at
            if os.access(found, os.X_OK):
                return found
            number = errno.EACCES
    raise OSError(number, os.strerror(number))


def _interpreter(program: Path, cwd: Path) -> Path | None:
    """A script without its interpreter, or a file without a byte, is no program yet: an upgrade may be at work on it."""
    try:
        with program.open("rb") as file:
            first = file.readline(256)
    except PermissionError:     # it can be executed, though
        return None
    if not first:
        raise OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC))
    words = first[2:].split() if first.startswith(b"#!") else ()
    if not words:
        return None
    found = cwd / os.fsdecode(words[0])
    _executable(found)
    return found
