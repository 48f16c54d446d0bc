"""From the death of a child to its successor, beside other supervisors in the same run.

    python -m tests.bench.restart [ours|floor|runit|systemd|circus|supervisord|monit]... [--kills 20]

Each runs the same child, a shell that says through a pipe that it runs, and becomes `sleep`.  The time is from our SIGKILL
to that word: it holds the supervisor's notice, its decision, fork and exec, and a millisecond of shell.  All are set to
restart at once (systemd: RestartSec=0; supervisord: startsecs=0; monit and circus: cycles of 1 s, their shortest).

`ours` is the whole daemon on its real path, and nothing is left out of it: a kill, a look for orphans, the rest of the
log, the incident, the memory gate, the port.  The kills are further apart than `window_s`, so that each is a first
failure, which is not delayed; evidence of an engine that is dead already is written while the next one starts.
`floor` is a bare Python that waits for a pidfd and calls Popen.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median

import psutil
from tests.bench.peers import AbsentError, running, wanted
from tests.bench.table import Row, show, spread
from tests.system.harness import Watchdog, free_port
from tests.systemd.box import Box, missing

APART_S = 1.2               # between kills: runit lets a child that lived for less than a second wait for one
WITHIN_S = 15.0
SLEEPS = 1_000_000_000      # the seconds that each contender's child sleeps tell whose it is
Context = AbstractContextManager[object]


class Board:
    """The pipe that children write to, in a place that a box shares."""

    def __init__(self, number: int) -> None:
        self.path = Path("/dev/shm") / f"bench-restart-{os.getpid()}-{number}"
        self.sleep = str(SLEEPS + os.getpid() * 10 + number)
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self.shell = f"echo >{self.path}; exec sleep {self.sleep}"
        self.command = ["/bin/sh", "-c", self.shell]

    def wait(self) -> float:
        """When the next child has said that it runs, monotonic seconds."""
        if not select.select([self._fd], [], [], WITHIN_S)[0]:
            raise SystemExit(f"no child within {WITHIN_S:.0f} s")
        at = time.monotonic()
        os.read(self._fd, 4096)
        return at

    def child(self) -> int:
        """Its PID, when it sleeps."""
        for _ in range(500):
            for process in psutil.process_iter(["cmdline"]):
                if process.info["cmdline"] == ["sleep", self.sleep]:
                    return process.pid
            time.sleep(0.005)
        raise SystemExit("the child does not sleep")

    def close(self) -> None:
        os.close(self._fd)
        self.path.unlink()
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] == ["sleep", self.sleep]:     # of a supervisor that lets its children live
                process.kill()


# -- the contenders


@contextmanager
def ours(folder: Path, board: Board) -> Iterator[None]:
    engines = {"primary": {"command": board.command, "model": "stand-in", "port": free_port()}}
    watchdog = Watchdog(folder, engines, restart={"budget": 1000, "window_s": APART_S / 3},
                        daemon={"sample_s": 1.0})
    watchdog.start()
    try:
        yield
        watchdog.finish()
    finally:
        watchdog.clear()


FLOOR = """
import os, select, subprocess, sys
while True:
    child = subprocess.Popen(sys.argv[1:])
    select.select([os.pidfd_open(child.pid)], [], [])
    child.wait()
"""


def floor(_: Path, board: Board) -> Context:
    return running([sys.executable, "-c", FLOOR, *board.command])


def runit(folder: Path, board: Board) -> Context:
    folder.mkdir()
    run = folder / "run"
    run.write_text(f"#!/bin/sh\n{board.shell}\n")
    run.chmod(0o755)
    return running([wanted("runsv"), str(folder)])


def supervisord(folder: Path, board: Board) -> Context:
    folder.mkdir()
    ini = folder / "supervisord.conf"
    ini.write_text(f"""[supervisord]
nodaemon=true
logfile={folder}/log
pidfile={folder}/pid
[program:child]
command=/bin/sh -c "{board.shell}"
autorestart=true
startsecs=0
""")
    return running([wanted("supervisord"), "-c", str(ini)])


def circus(folder: Path, board: Board) -> Context:
    folder.mkdir()
    ini = folder / "circus.ini"
    ini.write_text(f"""[circus]
check_delay = 1
endpoint = ipc://{folder}/endpoint
pubsub_endpoint = ipc://{folder}/pubsub
[watcher:child]
cmd = /bin/sh -c "{board.shell}"
warmup_delay = 0
graceful_timeout = 1
max_retry = -1
""")
    return running([wanted("circusd"), str(ini)])


def monit(folder: Path, board: Board) -> Context:
    folder.mkdir()
    start = folder / "start"
    start.write_text(f"#!/bin/sh\nsh -c '{board.shell}' &\necho $! >{folder}/child.pid\n")
    start.chmod(0o755)
    rc = folder / "monitrc"
    rc.write_text(f"""set daemon 1
set pidfile {folder}/pid
set idfile {folder}/id
set statefile {folder}/state
set logfile {folder}/log
check process child with pidfile {folder}/child.pid
  start program = "{start}"
""")
    rc.chmod(0o600)
    return running([wanted("monit"), "-I", "-c", str(rc)])


@contextmanager
def systemd(_: Path, board: Board) -> Iterator[None]:
    if why := missing():
        raise AbsentError(why)
    box = Box()
    try:
        box.write("/run/systemd/system/child.service", f"""[Unit]
StartLimitIntervalSec=0
[Service]
ExecStart=/bin/sh -c "{board.shell}"
Restart=always
RestartSec=0
""")
        box.ok("systemctl", "daemon-reload")
        box.ok("systemctl", "start", "child")
        yield
    finally:
        box.stop()


CONTENDERS: dict[str, Callable[[Path, Board], Context]] = {
    "ours": ours, "floor": floor, "runit": runit, "systemd": systemd, "circus": circus, "supervisord": supervisord,
    "monit": monit,
}


def measured(name: str, number: int, folder: Path, kills: int) -> list[float]:
    """Milliseconds of each kill.  Raises AbsentError."""
    board = Board(number)
    try:
        with CONTENDERS[name](folder, board):
            board.wait()
            return [_one(board) for _ in range(kills)]
    finally:
        board.close()


def _one(board: Board) -> float:
    time.sleep(APART_S)
    pid = board.child()
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return (board.wait() - at) * 1e3


def rows(names: list[str], kills: int, folder: Path) -> Iterator[Row]:
    found: dict[str, float] = {}
    for number, name in enumerate(names):
        try:
            times = measured(name, number, folder / name, kills)
        except AbsentError as error:
            yield name, f"left out: {error}", "", None
            continue
        found[name] = median(times)
        yield f"{name}: SIGKILL to the next child, {kills} times", spread(times, "ms"), "", None
    for peer, most in (("systemd", 0.5), ("runit", 1.0)):
        if {"ours", peer} <= set(found):
            ratio = found["ours"] / found[peer]
            yield f"ours / {peer}", f"{ratio:.2f}", f"<= {most}", ratio <= most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(CONTENDERS))
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    if unknown := set(options.names) - set(CONTENDERS):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(CONTENDERS)}")
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        return show(rows(options.names or list(CONTENDERS), options.kills, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
