"""KernelSense against a descriptor that yields one record a read, as /dev/kmsg does."""

from __future__ import annotations

import errno
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_watchdog.core.events import KernelRead
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.sense import kernel
from vllm_watchdog.sense.kernel import KernelSense

XID = (
    b"3,1200,99000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4242, name=VLLM::EngineCor, GPU has fallen off the bus.\n"
    b" SUBSYSTEM=pci\n"
)
OOM = b"3,1201,99001,-;Out of memory: Killed process 4455 (VLLM::EngineCor) total-vm:90000000kB, anon-rss:1kB\n"
NOISE = b"6,1199,98000,-;eth0: link up NVRM\n"


class Desk:
    def __init__(self, opened: Callable[[], int] | None = None) -> None:
        self.kernel, reader = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader.setblocking(False)
        self.events: queue.Queue[Any] = queue.Queue()
        self.sense = KernelSense(self.events.put, time.monotonic, opened or reader.detach)
        if opened:
            reader.close()

    def read(self) -> KernelRead:
        event = self.events.get(timeout=5)
        assert isinstance(event, KernelRead)
        return event

    def found(self) -> list[tuple[str, dict[str, Any]]]:
        findings = self.read().findings
        assert isinstance(findings, tuple)
        return [(finding.class_, dict(finding.details)) for finding in findings]


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(opened: Callable[[], int] | None = None) -> Desk:
        made.append(Desk(opened))
        made[-1].sense.start()
        return made[-1]

    yield make
    for one in made:
        one.sense.stop(5)
        one.kernel.close()
        assert not one.sense._thread.is_alive()


def test_an_xid_is_told_with_its_gpu_and_process(desk: Any) -> None:
    one = desk()
    one.kernel.send(XID)
    ((class_, details),) = one.found()
    assert class_ == "xid_node"
    assert (details["xid"], details["pid"], details["pci"]) == (79, 4242, "0000:3b:00")


def test_an_oom_kill_is_told_with_the_pid_of_its_victim(desk: Any) -> None:
    one = desk()
    one.kernel.send(OOM)
    ((class_, details),) = one.found()
    assert (class_, details["pid"]) == ("host_oom_kill", 4455)


def test_each_line_is_told_also_when_its_class_is_known(desk: Any) -> None:
    one = desk()
    for _ in range(2):
        one.kernel.send(XID)
        assert [class_ for class_, _ in one.found()] == ["xid_node"]


def test_noise_is_not_told(desk: Any) -> None:
    one = desk()
    one.kernel.send(NOISE)
    one.kernel.send(OOM)
    assert [class_ for class_, _ in one.found()] == ["host_oom_kill"]
    assert one.events.empty()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOENT])
def test_a_log_that_may_not_be_read_is_said_once(desk: Any, number: int) -> None:
    def refused() -> int:
        raise OSError(number, os.strerror(number))

    one = desk(refused)
    reading = one.read().findings
    assert isinstance(reading, Unknown)
    assert reading.why == f"the kernel log can't be read: {os.strerror(number)}"
    one.sense._thread.join(5)
    assert one.events.empty()


def test_lost_records_are_skipped_and_the_reading_goes_on(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [OSError(errno.EPIPE, "overwritten")]
    real = os.read

    def read(fd: int, size: int) -> bytes:
        if size == kernel.RECORD_LIMIT and lost:
            raise lost.pop()
        return real(fd, size)

    monkeypatch.setattr(kernel.os, "read", read)
    one = desk()
    one.kernel.send(XID)
    assert [class_ for class_, _ in one.found()] == ["xid_node"]
    assert not lost


def test_a_log_that_fails_later_is_said(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.read

    def read(fd: int, size: int) -> bytes:
        if size == kernel.RECORD_LIMIT:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, size)

    monkeypatch.setattr(kernel.os, "read", read)
    one = desk()
    one.kernel.send(XID)
    reading = one.read().findings
    assert isinstance(reading, Unknown)
    assert reading.why == "the kernel log can't be read any more: Input/output error"


def test_the_real_log_is_opened_at_its_end_without_blocking() -> None:
    try:
        log = kernel.open_kmsg()
    except OSError as error:
        pytest.skip(f"/dev/kmsg: {error.strerror}")
    with pytest.raises(BlockingIOError):
        while os.read(log, kernel.RECORD_LIMIT):     # what the kernel said since we opened it
            pass
    os.close(log)


def test_a_sense_that_was_never_started_can_be_stopped() -> None:
    KernelSense(print, time.monotonic).stop(1)
