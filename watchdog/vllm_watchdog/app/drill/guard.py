"""What we stop goes on again, however we end: a small process of its own waits for the end of its input, then sends SIGCONT.

    python -m vllm_watchdog.app.drill.guard PID START       START as in /proc/PID/stat: a PID alone lies after reuse

It holds nothing else, and outlives a drill that is killed by no more than a moment.
"""

from __future__ import annotations

import signal
import subprocess
import sys

from vllm_watchdog.proc import ProcId, deliver, holding

READY = b"ready\n"
RELEASE_S = 10.0


class Guard:
    """Of one process, from before it is stopped until `release`."""

    def __init__(self, who: ProcId) -> None:
        self._who = who
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_watchdog.app.drill.guard", str(who.pid), str(who.start)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)      # no Ctrl-C reaches it
        if not (self._process.stdout and self._process.stdout.readline() == READY):
            raise OSError(f"no guard for PID {who.pid}, so it is not stopped")

    def release(self) -> None:
        """It goes on, if it lives."""
        continued(self._who)
        self._process.communicate(timeout=RELEASE_S)


def continued(who: ProcId) -> None:
    with holding(who) as fd:
        if fd is not None:
            deliver(fd, signal.SIGCONT)


if __name__ == "__main__":
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    continued(ProcId(int(sys.argv[1]), int(sys.argv[2])))
