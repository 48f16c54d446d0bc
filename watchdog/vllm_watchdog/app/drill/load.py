"""A small load through the gateway while a drill runs: few clients that ask again and again, each answer timed.

Threads of their own, each blocks on its request for at most `hold_s` of the gateway and some seconds; `leave` waits for
them.  Instants are monotonic seconds.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType

import requests

CLIENTS = 4
PAUSE_S = 0.02          # between two requests of a client
TOKENS = 4
BEYOND_S = 30.0         # a held request is given up by the gateway; one that runs has this long on top
PROMPT = "A drill of the watchdog asks for a word."


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request came to.  `ok`: an answer with status 200."""

    began: float
    ended: float
    ok: bool


class Load:
    """`url`: of the gateway."""

    def __init__(self, url: str, model: str, key: str | None, hold_s: float) -> None:
        self._url, self._timeout_s = f"{url}/v1/completions", hold_s + BEYOND_S
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS}
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, name=f"client-{n}", daemon=True) for n in range(CLIENTS)]
        self.answers: list[Answer] = []
        self.last = "nothing"       # what came of the last request

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if kind is None:
            for thread in self._threads:
                thread.join(self._timeout_s)

    def answered(self, since: float) -> bool:
        """Has every client's worth of requests, begun since then, been answered?"""
        return sum(answer.ok and answer.began > since for answer in list(self.answers)) >= CLIENTS

    def gap_s(self, since: float, until: float) -> float:
        """The longest time without any answer between the last one before `since` and `until`."""
        ends = sorted(answer.ended for answer in self.answers if answer.ok and answer.ended <= until)
        before = max((end for end in ends if end <= since), default=since)
        instants = [before, *(end for end in ends if end > since), until]
        return max(later - sooner for sooner, later in pairwise(instants))

    def slowest_s(self, until: float) -> float:
        """The longest wait for an answer that came before `until`."""
        waits = (answer.ended - answer.began for answer in self.answers if answer.ok and answer.ended <= until)
        return max(waits, default=0.0)

    def _ask(self) -> None:
        with requests.Session() as session:
            session.trust_env = False       # a proxy is for the world outside
            while not self._over.wait(PAUSE_S):
                began = time.monotonic()
                try:
                    status = session.post(self._url, json=self._body, headers=self._headers,
                                          timeout=self._timeout_s).status_code
                    ok, self.last = status == requests.codes.ok, f"HTTP {status}"
                except requests.RequestException as error:
                    ok, self.last = False, type(error).__name__
                self.answers.append(Answer(began, time.monotonic(), ok))

