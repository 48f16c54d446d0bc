"""Reads the kernel log from now on: Xids, GPUs off the bus, victims of the OOM killer.

Posts KernelRead with whatever it finds, about any process of the host: whether it is ours, the core knows.  Where the
log may not be read (a container, `kernel.dmesg_restrict` without CAP_SYSLOG) that is said once, and nothing else ever.
Blocks its own thread, in poll; every read of `/dev/kmsg` is non-blocking and yields one record.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from vllm_watchdog.core.events import Event, KernelRead
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.verdict import Finding, Reader, Stream

RECORD_LIMIT = 16384    # bytes; the kernel's own limit is 8192, and it refuses a smaller buffer
TURN_LIMIT = 1000       # records read before what they held is told
LOOK_MS = 60_000        # poll looks up this often


def open_kmsg() -> int:
    """A descriptor that stands at the end of the log.  Raises OSError."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.lseek(log, 0, os.SEEK_END)
    return log


class KernelSense:
    def __init__(
        self, post: Callable[[Event], None], clock: Callable[[], float], opened: Callable[[], int] = open_kmsg
    ):
        self._post, self._clock, self._opened = post, clock, opened
        self._reader = Reader(Stream.KERNEL)
        self._leave, self._left = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="sense-kernel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        os.write(self._left, b"x")
        if self._thread.is_alive():     # a daemon that could not even begin stops what it never started
            self._thread.join(deadline_s)

    def _run(self) -> None:
        try:
            log = self._opened()
        except OSError as error:
            self._blind(f"the kernel log can't be read: {error.strerror}")
            return
        try:
            self._follow(log)
        except OSError as error:
            self._blind(f"the kernel log can't be read any more: {error.strerror}")
        finally:
            os.close(log)

    def _blind(self, why: str) -> None:
        at = self._clock()
        self._post(KernelRead(at, Unknown(at, why)))

    def _follow(self, log: int) -> None:
        waiting = select.poll()
        waiting.register(log, select.POLLIN)
        waiting.register(self._leave, select.POLLIN)
        while not any(fd == self._leave for fd, _ in waiting.poll(LOOK_MS)):
            if findings := self._read(log):
                self._post(KernelRead(self._clock(), findings))

    def _read(self, log: int) -> tuple[Finding, ...]:
        found = []
        for _ in range(TURN_LIMIT):
            try:
                record = os.read(log, RECORD_LIMIT)
            except BlockingIOError:
                break
            except BrokenPipeError:     # the kernel overwrote what we had not read: go on with what is left
                continue
            message, _, _ = record.partition(b"\n")     # its other lines are key=value pairs about the device
            if finding := self._reader.feed(message.decode(errors="replace")):
                found.append(finding)
        return tuple(found)
