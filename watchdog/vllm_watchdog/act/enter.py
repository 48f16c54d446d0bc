"""The step between the daemon and an engine: a program of its own that becomes the engine.

    python -I -S -c TEXT REPORT GROUP ARGV...

The daemon reads this text once, so that engines start though its package was replaced or is gone.  Enters the control
group before the engine's first instruction (so that no child is ever born outside of it), takes off what is the daemon's
alone (its priority, its place in the order of the OOM killer), and executes ARGV.  What fails is
told on the descriptor REPORT, `group ERRNO` or `exec ERRNO` a line; a successful exec closes it.  Without the group the
engine starts all the same.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    report, group, *argv = sys.argv[1:]
    pipe = int(report)
    os.set_inheritable(pipe, False)
    if group:
        try:
            with open(f"{group}/cgroup.procs", "w") as members:     # noqa: PTH123 - pathlib takes longer than all of this
                members.write("0")
        except OSError as error:
            os.write(pipe, b"group %d\n" % (error.errno or 0))
    with suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, 0) < 0:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        with open("/proc/self/oom_score_adj", "r+") as score:       # noqa: PTH123
            if int(score.read()) < 0:
                score.seek(0)
                score.write("0")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):        # by this Python; an exec would hand that on
        signal.signal(ignored, signal.SIG_DFL)
    with open("/proc/self/environ", "rb") as environ:       # noqa: PTH123 - as it was given: this Python may add LC_CTYPE
        given = dict(pair.split(b"=", 1) for pair in environ.read().split(b"\0") if b"=" in pair)
    try:
        os.execvpe(argv[0], argv, given)    # noqa: S606 - no shell is meant
    except OSError as error:
        os.write(pipe, b"exec %d\n" % (error.errno or 0))
        sys.exit(127)


if __name__ == "__main__":
    main()
