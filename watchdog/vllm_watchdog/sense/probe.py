"""Asks one engine over HTTP: `/health`, `/metrics`, and now and then for one token.

Posts Probed, Scraped (only where `/health` is 200) and Answered.  Blocks only its own threads: one for health and
metrics, for 2 × `health_timeout_s` a wake and the look at who listens; one for each token asked for, for the deadline
it was given, and never two of one generation.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_watchdog import proc
from vllm_watchdog.core.events import Answered, Event, Probed, Scraped
from vllm_watchdog.core.readings import Health, Holder, Mark, Metrics, Unknown
from vllm_watchdog.exchange import Exchange, RefusedError, SilentError, TooLongError
from vllm_watchdog.sense.metrics import parse

if TYPE_CHECKING:
    from vllm_watchdog.launch import Launch

BODY_CAP = 4 << 20      # bytes; a page of metrics has 70 kB, with many adapters a few hundred
OWNERS_S = 30.0         # old vLLM binds with SO_REUSEPORT: a second server may join the port at any time
UNSPECIFIED = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what we ask instead


class ProbeSense:
    """The probes of one engine."""

    def __init__(
        self, launch: Launch, post: Callable[[Event], None], clock: Callable[[], float], instance: str,
        health_timeout_s: float,
    ):
        self.launch, self._post, self._clock, self._timeout_s = launch, post, clock, health_timeout_s
        self._index = proc.MarkIndex(instance)
        self._host = UNSPECIFIED.get(launch.host, launch.host)
        self._exchange = Exchange(self._host, launch.port)
        self._owners: tuple[Holder, ...] = ()
        self._owners_of: tuple[Mark, int] | None = None     # whose they are: generation, connection
        self._owners_until = 0.0
        self._blind_since: float | None = None
        self._mark: Mark | None = None
        self._asking: set[Mark] = set()
        self._lock = threading.Lock()                       # of `_asking`; held for a set operation
        self._woken, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"probe-{launch.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self, mark: Mark) -> None:
        """Probe now; what is answered counts for this generation."""
        self._mark = mark
        self._woken.set()

    def ask(self, mark: Mark, deadline_s: float) -> None:
        """Ask for one token; ignored while one of this generation is out."""
        with self._lock:
            if mark in self._asking:
                return
            self._asking.add(mark)
        name = f"ask-{self.launch.name}"
        threading.Thread(target=self._ask, args=(mark, deadline_s), name=name, daemon=True).start()

    def stop(self, deadline_s: float) -> None:
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():     # a daemon that could not even begin stops what it never started
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.wait(timeout=60) and not self._stopping.is_set():
                self._woken.clear()
                if mark := self._mark:
                    self._probe(mark)
        self._exchange.close()

    def _probe(self, mark: Mark) -> None:
        health = self._health()
        owners = self._listeners(mark) if health is Health.OK else ()
        self._post(Probed(self._clock(), mark, health, owners))
        if health is Health.OK:
            metrics = self._scrape()
            self._post(Scraped(self._clock(), mark, metrics))

    def _health(self) -> Health:
        try:
            status, _ = self._exchange.ask("GET", "/health", self._timeout_s, BODY_CAP)
        except RefusedError:
            return Health.REFUSED
        except (SilentError, TooLongError):
            return Health.SILENT
        if status == 200:
            return Health.OK
        return Health.DEAD if 500 <= status < 600 else Health.ODD

    def _listeners(self, mark: Mark) -> tuple[Holder, ...]:
        """Who listens on the port: believed for OWNERS_S while the same connection answers for the same generation."""
        key, at = (mark, self._exchange.connects), self._clock()
        if key != self._owners_of or at >= self._owners_until:
            first = [holder.pid for holder in self._owners if holder.pid]
            found = proc.listeners(self.launch.port, self._index.instance, self._host, first)
            self._owners = tuple(holder if holder.mark else self._known(holder) for holder in found)
            self._owners_of, self._owners_until = key, at + OWNERS_S
        return self._owners

    def _known(self, holder: Holder) -> Holder:
        """Process titles wipe the environment that holds our mark; the walk over everything knows more."""
        marks = {who.pid: mark for mark, members in self._index.marked().items() for who in members}
        return Holder(holder.pid, holder.name, marks.get(holder.pid))

    def _scrape(self) -> Metrics | Unknown:
        try:
            status, page = self._exchange.ask("GET", "/metrics", self._timeout_s, BODY_CAP)
        except RefusedError:
            return self._blind("/metrics: connection refused")
        except (SilentError, TooLongError) as error:
            return self._blind(f"/metrics: {error}")
        if status != 200:
            return self._blind(f"/metrics answered {status}")
        self._blind_since = None
        return parse(page)

    def _blind(self, why: str) -> Unknown:
        self._blind_since = self._blind_since or self._clock()
        return Unknown(self._blind_since, why)

    # -- one token

    def _ask(self, mark: Mark, deadline_s: float) -> None:
        asked_at = self._clock()
        answer = self._token(deadline_s)
        with self._lock:
            self._asking.discard(mark)
        at = self._clock()
        self._post(Answered(at, mark, answer if isinstance(answer, bool) else Unknown(at, answer), at - asked_at))

    def _token(self, deadline_s: float) -> bool | str:
        """True: a token came.  False: none came.  A text: why the answer proves neither."""
        key = self.launch.api_key
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        body = json.dumps({"model": self.launch.model, "prompt": "a", "max_tokens": 1, "temperature": 0}).encode()
        exchange = Exchange(self._host, self.launch.port, headers)
        try:
            status, _ = exchange.ask("POST", "/v1/completions", deadline_s, BODY_CAP, body)
        except (RefusedError, SilentError):
            return False
        except TooLongError as error:
            return f"/v1/completions answered {error}"
        finally:
            exchange.close()
        if status == 200:
            return True
        # 503 is admission control of a full queue: the API server lives, of the engine it says nothing
        return False if 500 <= status < 600 and status != 503 else f"/v1/completions answered {status}"
