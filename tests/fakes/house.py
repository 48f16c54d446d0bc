"""What one daemon has to tell by: a history and an outbox on one file, with channels that answer as they are told."""

from __future__ import annotations

import queue
import threading
import time
from pathlib import Path

from tests.fakes.tell import WALL, Clock, Said

from vllm_watchdog.tell.channel import Outcome
from vllm_watchdog.tell.desk import Patience
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.ledger import Ledger
from vllm_watchdog.tell.manners import Manners
from vllm_watchdog.tell.outbox import Outbox
from vllm_watchdog.tell.payload import Writer

QUICK = Patience(first_s=0.01, most_s=0.05)
WRITER = Writer("gpu-1", Path("/var/log/llm-watchdog/incidents"))
YES = Outcome(True, "HTTP 200")


class Receiver:
    """A channel that answers from a list, then always yes, and can be held up."""

    def __init__(self, name="oncall", *outcomes, manners=None):
        self.name, self.outcomes, self.manners = name, list(outcomes), manners or Manners()
        self.got = queue.Queue()
        self.go = threading.Event()
        self.go.set()

    def send(self, payload):
        self.got.put(payload)
        assert self.go.wait(20)
        return self.outcomes.pop(0) if self.outcomes else YES

    def unusable(self):
        return ""

    def kinds(self, count):
        return [self.got.get(timeout=5)["kind"] for _ in range(count)]


class House:
    """A history and an outbox on one file: what one daemon has."""

    def __init__(self, path, *receivers, patience=QUICK, wall=WALL, broken=False):
        self.said, self.wall = Said(), Clock(wall)
        self.history = History(path, time.monotonic, self.wall, self.said)
        self.box = Outbox(receivers, Ledger(self.history), WRITER, time.monotonic, self.wall, self.said,
                          patience=patience, chance=lambda: 0.5)
        self.history.start()
        self.box.start()

    def stop(self, deadline_s=5.0):
        over = self.box.stop(deadline_s)
        return self.history.stop(5) and over
