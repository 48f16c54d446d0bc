"""The API server's side of the line: hands requests to EngineCore, hands its outputs to the threads that wait for them.

One reader thread owns the receiving end. A request's thread waits on its own queue with a deadline of its own choosing.
When the line ends, every waiting request gets `DEAD`, and the death is announced once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from vllm_watchdog.sim.link import CLOSED, Link, Message
from vllm_watchdog.sim.metrics import Metrics

DEAD = "dead"  # the engine will never answer
READ_S = 1.0


class EngineClient:
    """Requests by number; `on_death(announced)` is called once, with False when the engine vanished without a word."""

    def __init__(self, link: Link, metrics: Metrics, on_death: Callable[[bool], None]) -> None:
        self.link, self.metrics, self._on_death = link, metrics, on_death
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # over the table and sends
        self._waiting: dict[int, SimpleQueue[Any]] = {}
        self.dead = False
        self.closing = False  # we are stopping it: its end is no death

    def start(self) -> None:
        threading.Thread(target=self._read, name="output-handler", daemon=True).start()

    def add(self, prompt_tokens: int, max_tokens: int, natural_stop: bool, poison: bool) -> int:
        """Hands a request in; its outputs come from `take`."""
        return self._open(
            {
                "kind": "add",
                "prompt_tokens": prompt_tokens,
                "max_tokens": max_tokens,
                "natural_stop": natural_stop,
                "poison": poison,
            }
        )

    def utility(self, name: str, level: int = 0, mode: str = "") -> int:
        """A call that goes through the engine's loop; its answer comes from `take`."""
        return self._open({"kind": "utility", "name": name, "level": level, "mode": mode})

    def fault(self, message: Message) -> None:
        with self._lock:
            self.link.send({**message, "kind": "fault"})

    def take(self, number: int, timeout_s: float) -> Any:
        """The next output: a finish reason ("" for a plain token), a utility's value or DEAD; None: not in time."""
        try:
            return self._waiting[number].get(timeout=timeout_s)
        except Empty:
            return None

    def close(self, number: int, abort: bool) -> None:
        """Forgets a request; `abort` tells the engine to, as well."""
        with self._lock:
            self._waiting.pop(number, None)
            if abort and not self.dead:
                self.link.send({"kind": "abort", "id": number})
        if abort:
            self.metrics.finish("abort")

    def busy(self) -> int:
        """How many requests are open."""
        with self._lock:
            return len(self._waiting)

    def _open(self, message: Message) -> int:
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = SimpleQueue()
            if self.dead or not self.link.send({**message, "id": number}):
                self._waiting[number].put(DEAD)
            return number

    def _read(self) -> None:
        while (message := self.link.receive(READ_S)) is not CLOSED:
            if message is None:
                continue
            if message["kind"] == "dead":
                self._die(announced=True)
                return
            self._deliver(message)
        self._die(announced=False)

    def _deliver(self, message: Message) -> None:
        if message["kind"] == "step":
            self.metrics.step(message)
            for number, reason in message["out"]:
                self._put(number, reason)
        elif message["kind"] == "finish":
            self._put(message["id"], message["reason"])
        elif message["kind"] == "reply":
            self._put(message["id"], message["value"])

    def _put(self, number: int, output: Any) -> None:
        if output in ("stop", "length", "abort"):
            self.metrics.finish(output)
        with self._lock:
            queue = self._waiting.get(number)
        if queue is not None:
            queue.put(output)

    def _die(self, announced: bool) -> None:
        with self._lock:
            self.dead = True
            waiting = list(self._waiting.values())
        if not self.closing:
            self._on_death(announced)
        for queue in waiting:
            queue.put(DEAD)
