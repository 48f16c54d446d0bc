"""The EngineCore process: it loads, then steps, and holds the simulated VRAM.

Forked by the API server, in its process group; it does not notice that server's death: an orphan lives on with its
VRAM, as vLLM's does. One thread changes its state; it waits only for its line, for at most a step or a second.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from vllm_watchdog.sim import faults, loading, logs, proctitle, vram, workers
from vllm_watchdog.sim.flags import Options
from vllm_watchdog.sim.link import CLOSED, Link, Message
from vllm_watchdog.sim.peak import Peak
from vllm_watchdog.sim.scheduler import Request, Scheduler

LEAK_LIMIT_MIB = 1024
IDLE_S = 0.25  # so soon a dead worker or a timed fault is noticed
TICK_S = 0.1  # while something grows by the second or a stop is near


class StepFailedError(Exception):
    """A step failed; the text is the error as Python prints it. The engine does not survive it."""


def main(options: Options, link: Link) -> int:
    """The whole life of the process after the fork; returns its exit status."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.sim.ignore_term else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    holders = workers.start(options.tensor_parallel_size, (link.fileno(),), options.sim.ignore_term)
    proctitle.title("VLLM::EngineCore")
    engine = EngineCore(options, link, holders)
    try:
        loading.load(options, engine.log, holders, engine.catch_term)
        link.send({"kind": "ready"})
        engine.run()
    except loading.StartFailedError as failed:
        engine.log.failure("core.py:1510", "EngineCore failed to start.", logs.START_FRAMES, str(failed))
        logs.write(logs.STDERR, "Process EngineCore:")
        logs.traceback(logs.START_FRAMES, str(failed))
        return 1
    except StepFailedError as failed:
        engine.dump()
        engine.log.failure("core.py:1512", "EngineCore encountered a fatal error.", logs.STEP_FRAMES, str(failed))
        link.send({"kind": "dead"})
        return 1
    finally:
        vram.release()
    return 0


class EngineCore:
    """The engine's loop and its state."""

    def __init__(self, options: Options, link: Link, holders: workers.Holders) -> None:
        self.options, self.sim, self.link, self.holders = options, options.sim, link, holders
        self.log = logs.Log("EngineCore")
        self.scheduler = Scheduler(
            options.max_num_seqs, options.max_num_batched_tokens, options.block_size, options.kv_tokens,
            options.long_prefill_tokens)
        self.peak = Peak(options.sim.kib_per_token, holders)
        self.attached = True  # the API server is there
        self.terminated = False
        self.hung = False
        self.asleep = 0
        self.dozing: Message | None = None  # asked to sleep when what runs is done
        self.late: list[Message] = []  # requests that came since: they wait for the wake
        self.requests = 0
        self.ready_at = self.leaked_at = 0.0
        self.held: list[Message] = []  # what came while the loop was stuck
        self.leak: list[bytearray] = []
        self.vram_bytes = float(loading.budget_bytes(options))

    def catch_term(self) -> None:
        """From here on SIGTERM is noted and answered by the loop."""
        if not self.sim.ignore_term:
            signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, _frame: object) -> None:
        self.log.info("core.py:1454", f"[shutdown] EngineCore: trigger received signal={signal.Signals(number).name}")
        self.terminated = True

    def run(self) -> None:
        """Steps until it is told to stop and has nothing left to do. Raises StepFailedError."""
        self.ready_at = self.leaked_at = time.monotonic()
        while not self.terminated:
            self._turn()
        self._begin_shutdown()
        while self.scheduler.busy:  # a hung loop stays here until it is killed
            self._turn()
        self.log.info("core.py:1666", "[shutdown] EngineCore: request processing complete; starting resource teardown")
        self.log.info("core.py:1499", "[shutdown] EngineCore: exiting busy loop")

    def _turn(self) -> None:
        self._timed_faults()
        if (dead := self.holders.dead_worker()) is not None:
            text = f"Worker proc VllmWorker-{dead} died unexpectedly (exit code: None), shutting down executor."
            self.log.record("ERROR", "multiproc_executor.py:315", text)
            raise StepFailedError("RuntimeError: cancelled")
        if self.dozing is not None and not self.scheduler.busy:
            self._fall_asleep(self.dozing)
        if self.hung or self.asleep or not self.scheduler.busy or self.holders.stopped():
            self._listen(TICK_S if self.terminated or self._timed else IDLE_S)
        else:
            self._step()

    def _begin_shutdown(self) -> None:
        timeout_s = self.options.shutdown_timeout_s
        mode = "drain" if timeout_s else "abort"
        self.log.info("core.py:1635", f"[shutdown] EngineCore: start mode={mode} timeout={timeout_s:.0f}s")
        if timeout_s or self.hung:
            return
        left = len(self.scheduler.running) + len(self.scheduler.waiting)
        if left:
            self.log.info("core.py:1644", f"[shutdown] EngineCore: aborting in-flight requests count={left}")
        self._abort_all()

    def _abort_all(self) -> None:
        for each in (*self.scheduler.running, *self.scheduler.waiting):
            self._finish(each.id, "abort")
        self.scheduler.clear()

    def _step(self) -> None:
        """One forward pass: it listens while the pass takes its time, and reports when it ends."""
        step = self.scheduler.step()
        if error := self.peak.hold(int(self.vram_bytes), self.scheduler.cached_tokens):
            raise StepFailedError(error)
        ends_at = time.monotonic() + self.sim.token_s + step.prefill_tokens / self.sim.prefill_tokens_per_s
        while True:
            left_s = ends_at - time.monotonic()
            self._listen(max(0.0, left_s))
            if self.hung:
                return  # the pass never returns: no output, no new gauge
            if left_s <= 0:
                break
        self._send(
            {
                "kind": "step",
                "out": [[each.id, each.finished] for each in step.outputs],
                "queried_tokens": step.queried_tokens,
                "prompt_tokens": step.prompt_tokens,
                "preempted": step.preempted,
                "running": step.running,
                "waiting": step.waiting,
                "kv_share": step.kv_share,
            }
        )

    def _send(self, message: Message) -> None:
        if self.attached:
            self.attached = self.link.send(message)

    def _finish(self, request_id: int, reason: str) -> None:
        self._send({"kind": "finish", "id": request_id, "reason": reason})

    def _listen(self, timeout_s: float) -> None:
        if not self.attached:
            select.select([], [], [], timeout_s)
            return
        message = self.link.receive(timeout_s)
        if message is CLOSED:
            self.attached = False
        elif message is not None:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message["kind"] == "fault":
            self._fault(message["name"], message)
        elif self.hung:
            self.held.append(message)
        else:
            TAKES[message["kind"]](self, message)

    def _abort(self, message: Message) -> None:
        self.scheduler.abort(message["id"])
        self.late = [each for each in self.late if each["id"] != message["id"]]

    def _add(self, message: Message) -> None:
        if self.terminated:
            self._finish(message["id"], "abort")
            return
        if self.dozing or self.asleep:
            self.late.append(message)
            return
        self.requests += 1
        self.scheduler.add(
            Request(message["id"], message["prompt_tokens"], message["max_tokens"], message["natural_stop"])
        )
        if 0 < self.sim.oom_over_tokens < message["prompt_tokens"]:
            self._fault("oom", {})
        if self.requests == self.sim.core_death_after_requests:
            self._fault("core_death", {})
        if self.requests == self.sim.hang_after_requests or message["poison"]:
            self._fault("hang", {})

    def _utility(self, message: Message) -> None:
        """A round trip through the loop: sleep, wake_up, is_sleeping."""
        if message["name"] == "sleep":
            if message["mode"] == "abort":
                self._abort_all()
            self.dozing = message
            return
        if message["name"] == "wake_up":
            self._wake_up()
        self._send({"kind": "reply", "id": message["id"], "value": bool(self.asleep)})

    def _fall_asleep(self, message: Message) -> None:
        self.asleep, self.dozing = message["level"], None
        self.holders.hold(vram.CONTEXT_BYTES)
        self.log.info("abstract.py:390", "It took 0.010000 seconds to fall asleep.")
        self._send({"kind": "reply", "id": message["id"], "value": True})

    def _wake_up(self) -> None:
        self.asleep = 0
        self.holders.hold(int(self.vram_bytes) + self.peak.bytes)
        self.log.info("abstract.py:408", "It took 0.010000 seconds to wake up tags {'kv_cache', 'weights'}.")
        late, self.late = self.late, []
        for each in late:
            self._add(each)

    @property
    def _timed(self) -> bool:
        sim = self.sim
        return any((sim.core_death_after_s, sim.hang_after_s, sim.leak_mib_per_s, sim.vram_leak_mib_per_s))

    def _timed_faults(self) -> None:
        now = time.monotonic()
        if 0 < self.sim.core_death_after_s <= now - self.ready_at:
            self._fault("core_death", {})
        if 0 < self.sim.hang_after_s <= now - self.ready_at:
            self.sim = replace(self.sim, hang_after_s=0.0)
            self._fault("hang", {})
        if now - self.leaked_at >= TICK_S:
            self._leak(now - self.leaked_at)
            self.leaked_at = now

    def _leak(self, passed_s: float) -> None:
        size = int(self.sim.leak_mib_per_s * passed_s * 1024**2)
        if size and sum(map(len, self.leak)) < LEAK_LIMIT_MIB * 1024**2:
            self.leak.append(bytearray(b"\1") * size)  # written to, or it would not be resident
        if self.sim.vram_leak_mib_per_s and not self.asleep:
            self.vram_bytes += self.sim.vram_leak_mib_per_s * passed_s * 1024**2
            self.holders.hold(int(self.vram_bytes) + self.peak.bytes)

    def _fault(self, name: str, given: Message) -> None:
        FAULTS[name](self, given)

    def _out_of_memory(self, _given: Message) -> None:
        raise StepFailedError(faults.RUNTIME_OOM)

    def _die(self, _given: Message) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self, _given: Message) -> None:
        self.hung = True

    def _unhang(self, _given: Message) -> None:
        self.hung, held, self.held = False, self.held, []
        for message in held:
            self._take(message)

    def _slow(self, given: Message) -> None:
        self.sim = replace(self.sim, token_s=float(given.get("token_s", 0.5)))

    def _leak_ram(self, given: Message) -> None:
        self.sim = replace(self.sim, leak_mib_per_s=float(given.get("mib_per_s", 10)))

    def _leak_vram(self, given: Message) -> None:
        self.sim = replace(self.sim, vram_leak_mib_per_s=float(given.get("mib_per_s", 100)))

    def dump(self) -> None:
        """What vLLM logs before a fatal error: the input and the scheduler's figures, never the prompt's text."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        self.log.record(
            "ERROR",
            "dump_input.py:81",
            f"Dumping scheduler stats: SchedulerStats(num_running_reqs={running}, num_waiting_reqs={waiting}, "
            f"num_skipped_waiting_reqs=0, step_counter=0, current_wave=0, kv_cache_usage={self.scheduler.kv_share})",
        )


TAKES: dict[str, Callable[[EngineCore, Message], None]] = {
    "add": EngineCore._add,
    "abort": EngineCore._abort,
    "utility": EngineCore._utility,
}
FAULTS: dict[str, Callable[[EngineCore, Message], None]] = {
    "oom": EngineCore._out_of_memory,
    "core_death": EngineCore._die,
    "hang": EngineCore._hang,
    "unhang": EngineCore._unhang,
    "slow": EngineCore._slow,
    "leak": EngineCore._leak_ram,
    "vram_leak": EngineCore._leak_vram,
}
