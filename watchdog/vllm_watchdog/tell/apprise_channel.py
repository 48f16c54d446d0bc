"""An alert channel by an Apprise URL: e-mail, Telegram, Teams and a hundred others, in a child process for each message.

The child is killed at the deadline, whatever Apprise does; 0.3 s of CPU for a message are cheap, and the daemon need not
hold a library of 37 MB.  The address is a secret: the child gets it on standard input, and whatever it says is masked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_watchdog.tell.channel import REFUSED, Outcome, Payload, answer_limit, parts, shown, why_limit
from vllm_watchdog.tell.letter import retry_after
from vllm_watchdog.tell.manners import Manners
from vllm_watchdog.tell.payload import plain

CHILD = (sys.executable, "-m", "vllm_watchdog.tell.apprise_child")
START_S = 5.0           # to start Python and import Apprise on a busy host; the deadline counts from there
BODY_LIMIT = 3500       # characters; the smallest limit of the big services is Telegram's 4096
REPLY_LIMIT = 64 << 10


class AppriseChannel:
    """`url` is a secret."""

    def __init__(self, name: str, url: str, manners: Manners, timeout_s: float = 10.0,
                 wall: Callable[[], float] = time.time) -> None:
        self.name, self.manners = name, manners
        self._url, self._timeout_s, self._wall = url, timeout_s, wall

    def send(self, payload: Payload) -> Outcome:
        return self.test(payload)[0]

    def test(self, payload: Payload) -> tuple[Outcome, str]:
        over = payload.get("over") or payload["kind"] == "resolved"
        kind = "test" if payload["kind"] == "test" else "over" if over else payload["urgency"]
        body = plain("", payload["lines"]).lstrip("\n")[:BODY_LIMIT] or payload["headline"]
        return self._asked({"title": payload["headline"], "body": body, "kind": kind})

    def unusable(self) -> str:
        outcome, said = self._asked({})
        return "" if outcome.ok else f"{outcome.why}, {said}".removesuffix(", ")

    def _asked(self, question: Mapping[str, Any]) -> tuple[Outcome, str]:
        limit_s = self._timeout_s + START_S
        text = json.dumps({"url": self._url, "limit_s": limit_s + 1.0} | dict(question))
        try:
            done = subprocess.run(CHILD, input=text, capture_output=True, text=True, timeout=limit_s, check=False)
            answer = json.loads(done.stdout[:REPLY_LIMIT])
        except subprocess.TimeoutExpired:
            return Outcome(False, f"no answer within {self._timeout_s:g} s"), ""
        except OSError as error:
            return Outcome(False, f"Apprise can't be started ({error.strerror})"), ""
        except ValueError:
            return Outcome(False, f"Apprise failed (exit code {done.returncode})"), ""
        return self._outcome(answer), self._shown("; ".join(answer["said"]), answer_limit)

    def _outcome(self, answer: Mapping[str, Any]) -> Outcome:
        status, error = answer["status"], answer["error"]
        why = f"HTTP {status}" if status else error or self._shown((answer["said"] or ["not taken"])[-1], why_limit)
        if answer["ok"]:
            return Outcome(True, why if status else "taken")
        return Outcome(False, why, retry_after(answer["retry_after"], self._wall()), refused=status in REFUSED)

    def _shown(self, text: str, limit: int) -> str:
        return shown(text, parts(self._url), limit)
