"""The step between the daemon and an engine: a program of its own that becomes the engine.

    python -I -S -c TEXT REPORT <ORDERS

The daemon reads this text once, so that engines start though its package was replaced or is gone.  It may be started before
it is needed: orders that end without a word are none.  They are, each ended by a NUL: LOG GROUP CWD, the number of words of
ARGV, these, and the environment, `NAME=VALUE`.  Enters the control group before the engine's first instruction (so that no
child is ever born outside of it), takes off what is the daemon's alone (its priority, its place in the order of the OOM
killer), and executes ARGV.  What fails is told on the descriptor REPORT, `cwd ERRNO`, `group ERRNO` or `exec ERRNO` a line;
a successful exec closes it.  Without the group the engine starts all the same.
"""

import os
import sys
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal  # type: ignore[import-not-found]  # `signal` imports enum: 5 ms


def main() -> None:
    report = int(sys.argv[1])
    os.set_inheritable(report, False)
    with open(0, "rb", closefd=False) as orders:
        said = orders.read().split(b"\0")
    if len(said) < 5:
        return
    log, group, cwd, count, *rest = said[:-1]
    argv, env = rest[: int(count)], rest[int(count) :]
    try:
        os.chdir(cwd)
    except OSError as error:
        fail(report, b"cwd", error)
    put(os.open(os.devnull, os.O_RDWR), 0)
    put(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640), 1, 2)
    if group:
        try:
            with open(group + b"/cgroup.procs", "w") as members:        # noqa: PTH123 - pathlib takes as long as all this
                members.write("0")
        except OSError as error:
            os.write(report, b"group %d\n" % (error.errno or 0))
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with open("/proc/self/oom_score_adj", "r+") as score:       # noqa: PTH123
            if int(score.read()) < 0:
                score.seek(0)
                score.write("0")
    except OSError:
        pass
    for ignored in (SIGPIPE, SIGXFSZ):      # by this Python; an exec would hand that on
        signal(ignored, SIG_DFL)
    try:
        os.execvpe(argv[0], argv, dict(pair.split(b"=", 1) for pair in env))    # noqa: S606 - no shell is meant
    except OSError as error:
        fail(report, b"exec", error)


def put(fd: int, *places: int) -> None:
    for place in places:
        os.dup2(fd, place)
    os.close(fd)


def fail(report: int, what: bytes, error: OSError) -> None:
    os.write(report, b"%b %d\n" % (what, error.errno or 0))
    sys.exit(127)


if __name__ == "__main__":
    main()
