"""Who holds the simulated VRAM: EngineCore itself, or its worker processes when it is tensor-parallel.

A worker does no work: it writes what EngineCore tells it to hold, says of each step that it is done, and ends when its
pipe reaches the end of file, that is when EngineCore is gone, however that happened. It waits for nothing but that pipe.
A step ends when every worker has said so: a stopped worker hangs the engine, as vLLM's does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from vllm_watchdog.sim import logs, proctitle, vram

STEP = b"step\n"


@dataclass(slots=True)
class Holders:
    """The processes that hold the VRAM; `pipes` is empty when EngineCore holds it itself."""

    pipes: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    answers: int = -1       # a byte of each worker for each step
    owed: int = 0

    def hold(self, used_bytes: int) -> None:
        """Sets what each holds, in bytes."""
        if not self.pipes:
            vram.hold(vram.gpu_index(0), used_bytes)
        self._order(b"%d\n" % used_bytes)

    def _order(self, line: bytes) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # its death is noticed by the loop
                os.write(pipe, line)

    def step(self) -> None:
        """Begins a step."""
        self._order(STEP)
        self.owed += len(self.pipes)

    def stepped(self) -> bool:
        """Whether every worker is done with it."""
        if self.owed:
            with contextlib.suppress(BlockingIOError):
                self.owed -= len(os.read(self.answers, self.owed))
        return self.owed == 0

    def dead_worker(self) -> int | None:
        """The rank of a worker that has ended, or None."""
        for rank, pid in enumerate(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return rank
        return None


def start(count: int, close: tuple[int, ...], ignore_term: bool) -> Holders:
    """Forks `count` workers (none for 1: EngineCore runs the model itself); they close the descriptors in `close`."""
    if count == 1:
        return Holders()
    pipes: list[int] = []
    pids: list[int] = []
    answers, answer = os.pipe()
    os.set_blocking(answers, False)
    for rank in range(count):
        inlet, outlet = os.pipe()
        if (pid := os.fork()) == 0:
            for each in (*close, *pipes, outlet, answers):
                os.close(each)
            _work(rank, inlet, answer, ignore_term)
            os._exit(0)
        os.close(inlet)
        pipes.append(outlet)
        pids.append(pid)
    os.close(answer)
    return Holders(tuple(pipes), tuple(pids), answers)


def _work(rank: int, inlet: int, answer: int, ignore_term: bool) -> None:
    # vLLM's workers leave SIGTERM during serving to EngineCore, which closes the pipe.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_term else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    proctitle.title(f"VLLM::Worker_TP{rank}")
    with os.fdopen(inlet) as orders:
        for line in orders:
            if line.encode() != STEP:
                vram.hold(vram.gpu_index(rank), int(line))
                continue
            with contextlib.suppress(BrokenPipeError):  # EngineCore is gone: the end of file comes next
                os.write(answer, b".")
    logs.Log(f"Worker_TP{rank}").info("multiproc_executor.py:843", "Parent process exited, terminating worker queues")
    vram.release()
