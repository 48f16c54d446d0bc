"""Puts a standby to sleep and wakes it, over vLLM's developer endpoints on loopback.

Level 1: weights to host memory, the KV cache dropped.  What runs may finish first (vLLM's default mode cuts it short, with
a 200), and what comes to an engine on its way to sleep waits for the wake: so the gateway is given time to follow the
route.  A wake is believed when a token has come: an engine that answers /wake_up may be half mapped.  Each order runs in a
thread of its own, for the deadline it was given at most, and answers by an event; it never raises.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from vllm_watchdog.core.commands import Sleep, Wake
from vllm_watchdog.core.events import Event, Slept, Woke
from vllm_watchdog.exchange import Exchange, RefusedError, SilentError, TooLongError
from vllm_watchdog.launch import Launch

BODY_CAP = 1 << 20
followed_s = 0.2    # the gateway follows within 0.05


class Sleeper:
    """The standby of one engine."""

    def __init__(self, launch: Launch, post: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self.launch, self._post, self._clock = launch, post, clock

    def do(self, order: Sleep | Wake) -> None:
        """Never waits.  -> Slept | Woke."""
        carry_out = self._sleep if isinstance(order, Sleep) else self._wake
        threading.Thread(target=carry_out, args=(order,), name=f"sleeper-{self.launch.name}", daemon=True).start()

    def _sleep(self, order: Sleep | Wake) -> None:
        began = self._clock()
        time.sleep(min(followed_s, order.deadline_s / 2))
        why = self._call("/sleep?level=1&mode=wait", began + order.deadline_s - self._clock(), b"")
        self._post(Slept(self._clock(), order.mark, why, self._clock() - began))

    def _wake(self, order: Sleep | Wake) -> None:
        began = self._clock()
        why = self._call("/wake_up", order.deadline_s, b"")
        if not why:
            body = json.dumps({"model": self.launch.model, "prompt": "a", "max_tokens": 1, "temperature": 0}).encode()
            why = self._call("/v1/completions", began + order.deadline_s - self._clock(), body)
        self._post(Woke(self._clock(), order.mark, why, self._clock() - began))

    def _call(self, path: str, within_s: float, body: bytes) -> str:
        """Empty: 200; else what went wrong, in one sentence."""
        headers = {"Content-Type": "application/json"} if body else {}
        if key := self.launch.api_key:
            headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        exchange = Exchange(self.launch.url.split("//")[1].rsplit(":", 1)[0].strip("[]"), self.launch.port, headers)
        try:
            status, _ = exchange.ask("POST", path, max(within_s, 0.1), BODY_CAP, body)
        except RefusedError:
            return f"{path}: connection refused"
        except (SilentError, TooLongError) as error:
            return f"{path}: {error}"
        finally:
            exchange.close()
        return "" if status == 200 else f"{path} answered {status}"
