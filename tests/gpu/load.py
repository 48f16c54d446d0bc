"""Who asks the engines: steady clients through the gateway, and one long prompt."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

import requests

CLIENTS = 8
LONG = 60_000       # tokens of the prompt that exhausts a full card


class Clients:
    """Ask until told to stop; `done` holds (asked at, answered at, status or error) of every answer.

    Who still waits for one then has `leave_s`.
    """

    def __init__(self, base: str, leave_s: float = 95.0) -> None:
        self.base, self.leave_s = base, leave_s
        self.done: list[tuple[float, float, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stop.set()
        until = time.monotonic() + self.leave_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _ask(self, number: int) -> None:
        with requests.Session() as session:
            while not self._stop.is_set():
                began = time.monotonic()
                body = {"model": "m", "prompt": f"client {number}", "max_tokens": 8}
                try:
                    said = str(session.post(f"{self.base}/v1/completions", json=body, timeout=90).status_code)
                except requests.RequestException as error:
                    said = type(error).__name__
                self.done.append((began, time.monotonic(), said))

    def gap_s(self, since: float, until: float) -> float:
        """The longest time without any answer, between two instants."""
        times = sorted(at for _, at, said in list(self.done) if since <= at <= until and said == "200")
        return max(later - earlier for earlier, later in itertools.pairwise([since, *times, until]))

    def longest_s(self, since: float) -> float:
        """The longest that an answer since an instant took; 0.0: there was none."""
        return max((at - asked_at for asked_at, at, _ in list(self.done) if at >= since), default=0.0)

    def said(self, since: float = 0.0) -> dict[str, int]:
        """Answers by status; none of them had begun before it was whole, so whatever is not 200 is lost."""
        return dict(Counter(said for _, at, said in list(self.done) if at >= since))


def asked(base: str, prompt: Any) -> str:
    """What one client is told, the status first."""
    try:
        reply = requests.post(f"{base}/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 4}, timeout=90)
    except requests.RequestException as error:
        return type(error).__name__
    return f"{reply.status_code} {reply.text[:300]}"
