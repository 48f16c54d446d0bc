"""Who holds the simulated VRAM: EngineCore itself, or its worker processes when it is tensor-parallel.

A worker does no work: it writes what EngineCore tells it to hold, and ends when its pipe reaches the end of file, that
is when EngineCore is gone, however that happened. It waits for nothing but that pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from vllm_watchdog.sim import logs, proctitle, vram


@dataclass(frozen=True, slots=True)
class Holders:
    """The processes that hold the VRAM; `pipes` is empty when EngineCore holds it itself."""

    pipes: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()

    def hold(self, used_bytes: int) -> None:
        """Sets what each holds, in bytes."""
        if not self.pipes:
            vram.hold(vram.gpu_index(0), used_bytes)
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # its death is noticed by the loop
                os.write(pipe, b"%d\n" % used_bytes)

    def stopped(self) -> bool:
        """A worker that is stopped (SIGSTOP) keeps the others waiting for its part of the step."""
        return any(_state(pid) in "Tt" for pid in self.pids)

    def dead_worker(self) -> int | None:
        """The rank of a worker that has ended, or None."""
        for rank, pid in enumerate(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return rank
        return None


def _state(pid: int) -> str:
    """The kernel's letter; a dead worker is a zombie until `dead_worker` has seen it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def start(count: int, close: tuple[int, ...], ignore_term: bool) -> Holders:
    """Forks `count` workers (none for 1: EngineCore runs the model itself); they close the descriptors in `close`."""
    if count == 1:
        return Holders()
    pipes: list[int] = []
    pids: list[int] = []
    for rank in range(count):
        inlet, outlet = os.pipe()
        if (pid := os.fork()) == 0:
            for each in (*close, *pipes, outlet):
                os.close(each)
            _work(rank, inlet, ignore_term)
            os._exit(0)
        os.close(inlet)
        pipes.append(outlet)
        pids.append(pid)
    return Holders(tuple(pipes), tuple(pids))


def _work(rank: int, inlet: int, ignore_term: bool) -> None:
    # vLLM's workers leave SIGTERM during serving to EngineCore, which closes the pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_term else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    proctitle.title(f"VLLM::Worker_TP{rank}")
    with os.fdopen(inlet) as orders:
        for line in orders:
            vram.hold(vram.gpu_index(rank), int(line))
    logs.Log(f"Worker_TP{rank}").info("multiproc_executor.py:843", "Parent process exited, terminating worker queues")
    vram.release()
