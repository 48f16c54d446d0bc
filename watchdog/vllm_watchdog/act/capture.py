"""Runs other people's programs (nvidia-smi, py-spy) for their output, all at once, under one deadline.

It blocks for `deadline_s` at most.  A program that overruns is killed and never waited for: one that is stuck in the
driver can't be killed, so a second one is never started beside it.  Output over `LIMIT` bytes is cut.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

LEAVE_S = 0.5
LIMIT = 4 << 20  # `nvidia-smi -q` of eight cards is 0.1 MiB


class OverrunError(Exception):
    """A program did not end in time; its text is one clause for people."""


@dataclass(slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    output: bytearray = field(default_factory=bytearray)
    ended: bool = False


class Capture:
    """Remembers what it had to kill, so that it is reaped once it dies and not doubled while it lives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._killed: list[subprocess.Popen[bytes]] = []

    def run(self, argvs: Sequence[Sequence[str]], deadline_s: float) -> list[bytes | OverrunError]:
        """Standard output and error of each, in order.  Raises OSError where a program can't be run."""
        until = time.monotonic() + deadline_s
        self._refuse_a_double({argv[0] for argv in argvs})
        running: list[_Running] = []
        try:
            for argv in argvs:
                running.append(_Running(_popen(argv)))
            _read(running, until)
        finally:
            self._end(running)
        return [
            bytes(run.output) if run.ended else OverrunError(f"{argv[0]} gave no whole answer in {deadline_s:g} s")
            for run, argv in zip(running, argvs, strict=True)
        ]

    def _refuse_a_double(self, programs: set[str]) -> None:
        with self._lock:
            self._killed = [process for process in self._killed if process.poll() is None]
            for process in self._killed:
                program = process.args[0] if isinstance(process.args, Sequence) else process.args
                if program in programs:
                    raise OverrunError(f"an earlier {program} (PID {process.pid}) was killed and still hangs")

    def _end(self, running: list[_Running]) -> None:
        for run in running:
            if run.process.stdout:
                run.process.stdout.close()
            if not (run.ended and _gone(run.process)) and run.process.poll() is None:
                # The group is its own and its number can't be reused: the leader is our child and not yet reaped.
                os.killpg(run.process.pid, signal.SIGKILL)
        with self._lock:
            self._killed += [run.process for run in running if not _gone(run.process)]


def _gone(process: subprocess.Popen[bytes]) -> bool:
    """What has closed its output is about to leave."""
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _popen(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )


def _read(running: list[_Running], until: float) -> None:
    """Reads all of them until each has closed its output, or the deadline."""
    with selectors.DefaultSelector() as selector:
        for run in running:
            if run.process.stdout:
                selector.register(run.process.stdout, selectors.EVENT_READ, run)
        while selector.get_map():
            ready = selector.select(max(0.0, until - time.monotonic()))
            if not ready:
                return
            for key, _ in ready:
                run, part = key.data, os.read(key.fd, 65536)
                run.output += part[: LIMIT - len(run.output)]
                if not part:
                    run.ended = True
                    selector.unregister(key.fileobj)
