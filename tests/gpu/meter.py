"""The card's memory every 20 ms, read beside the watchdog: what its figures are held against.

Keeps the last minutes only; a thread that does nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_watchdog.sense.gpu_helper import NoGpuError, source

Cards = list[dict[str, Any]]

EVERY_S = 0.02
KEPT = 6000     # samples: two minutes


class Meter(threading.Thread):
    """`samples`: (monotonic instant, the cards as the GPU helper tells them)."""

    def __init__(self) -> None:
        super().__init__(name="meter", daemon=True)
        self.samples: deque[tuple[float, Cards]] = deque(maxlen=KEPT)
        self._source = source()
        self._done, self._rests = threading.Event(), False

    def run(self) -> None:
        while not self._done.wait(EVERY_S):
            if self._rests:
                continue
            try:
                self.samples.append((time.monotonic(), self._source.read()))
            except NoGpuError:
                continue

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is read meanwhile: it would disturb what is timed."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def stop(self) -> None:
        self._done.set()

    def read(self) -> Cards:
        """Now."""
        return self._source.read()

    def cost_us(self, times: int = 200) -> float:
        """Microseconds that one sample takes, by the wall clock."""
        began = time.perf_counter()
        for _ in range(times):
            self._source.read()
        return (time.perf_counter() - began) / times * 1e6

    def back_s(self, gpu: int, pids: Collection[int], since: float, before: Cards) -> float | None:
        """Seconds from an instant until these processes and nine tenths of what they held are gone; None: not seen.

        What others take meanwhile, such as a backup that wakes, is left out of account.
        """
        held = sum(held_by(before, gpu).get(pid) or 0 for pid in pids)
        level = used(before, gpu)[0] - _others(before, gpu, pids) - 0.9 * held
        return next((at - since for at, cards in list(self.samples)
                     if at >= since and not held_by(cards, gpu).keys() & set(pids)
                     and used(cards, gpu)[0] - _others(cards, gpu, pids) <= level), None)

    def first_with(self, pid: int, since: float) -> Cards | None:
        """The first sample from an instant on in which a process holds memory; for a recording."""
        return next((cards for at, cards in list(self.samples)
                     if at > since and any(row["pid"] == pid for card in cards for row in card["processes"])), None)


def _others(cards: Cards, gpu: int, pids: Collection[int]) -> int:
    return sum(held or 0 for pid, held in held_by(cards, gpu).items() if pid not in pids)


def seconds(figure: float | None) -> str:
    return "not seen" if figure is None else f"{figure:.2f} s"


def held_by(cards: Cards, gpu: int) -> dict[int, int | None]:
    """Bytes by PID on one card."""
    return {row["pid"]: row["used_bytes"] for card in cards if card["index"] == gpu for row in card["processes"]}


def used(cards: Cards, gpu: int) -> tuple[int, int]:
    """Bytes used and in all of one card."""
    return next((card["used_bytes"], card["total_bytes"]) for card in cards if card["index"] == gpu)
