"""What a channel is, and the one kind that speaks HTTP: a form writes the request and judges the answer.

A try's outcome holds a status, the name of an error or the receiver's own words, with every secret of the channel
masked: it goes to log, journal and status.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from vllm_watchdog.tell.letter import Reply, Request
from vllm_watchdog.tell.manners import Manners

Payload = Mapping[str, Any]

answer_limit = 500          # characters of an answer that are shown
why_limit = 120
shortest = 6                # a shorter part of an address is part of ordinary words, and hides nothing
PLAIN = frozenset({"alerts", "enqueue", "services", "webhook", "webhooks", "workflows", "cgi-bin", "open-apis"})
MASK = "***"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one try.  `why`: a status, the name of an error or masked words of the receiver, never an address.

    `refused`: the receiver does not want this message, and may well take another.
    """

    ok: bool
    why: str
    retry_after_s: float | None = None
    refused: bool = False


class Channel(Protocol):
    """`test` returns an outcome, and what the receiver answered in one line without secrets."""

    @property
    def name(self) -> str: ...
    @property
    def manners(self) -> Manners: ...
    def send(self, payload: Payload) -> Outcome:
        """One try, over within a deadline of the channel's own.  Errors of the world are outcomes."""
        ...
    def test(self, payload: Payload) -> tuple[Outcome, str]: ...
    def unusable(self) -> str:
        """Why nothing can ever be sent there, as far as that can be known without sending; empty: it may work."""
        ...


class Form(Protocol):
    """What one kind of receiver wants to be sent, and says.  Pure."""

    def request(self, payload: Payload, wall: float) -> Request: ...
    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        """Why an answer with a good status (its JSON; None: it is none) is a "no" all the same, and when to come back."""
        ...


class HttpChannel:
    """`secrets`: whatever must not be shown, beside what `form` sends."""

    def __init__(self, name: str, form: Form, secrets: Iterable[str], manners: Manners, timeout_s: float = 10.0,
                 wall: Callable[[], float] = time.time) -> None:
        from vllm_watchdog.tell.post import post  # requests takes 3 MB, which a host without a channel can keep

        self.name, self.manners, self._post = name, manners, post
        self._form, self._secrets, self._timeout_s, self._wall = form, tuple(secrets), timeout_s, wall

    def send(self, payload: Payload) -> Outcome:
        return self.test(payload)[0]

    def test(self, payload: Payload) -> tuple[Outcome, str]:
        reply = self._post(self._form.request(payload, self._wall()), self._timeout_s, self._wall)
        return self._outcome(reply), self._shown(reply.body.decode("utf-8", "replace"), answer_limit)

    def unusable(self) -> str:
        return ""

    def _outcome(self, reply: Reply) -> Outcome:
        status = reply.status or 0
        if not 200 <= status < 300:
            return Outcome(False, reply.why, reply.retry_after_s, refused=status in REFUSED)
        if no := self._form.refusal(_json(reply.body)):
            why, retry_after_s = no
            why = f"{reply.why}, {self._shown(why, why_limit)}"
            return Outcome(False, why, retry_after_s, refused=retry_after_s is None)
        return Outcome(True, reply.why)

    def _shown(self, text: str, limit: int) -> str:
        return shown(text, self._secrets, limit)


REFUSED = frozenset({400, 411, 413, 414, 415, 422})


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def shown(text: str, secrets: Iterable[str], limit: int) -> str:
    """One line; a receiver that repeats our own secrets to us does not get them printed."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):     # the whole before its parts
        text = text.replace(secret, MASK)
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:limit]


def parts(url: str) -> tuple[str, ...]:
    """An address, and each part of it that may be a secret by itself: user, password, path segments, query values."""
    try:
        split = urlsplit(url)
        found = [split.username or "", split.password or "", split.hostname or "", split.netloc]
    except ValueError:
        return (url,)
    if split.scheme in ("http", "https"):
        found = found[:2]           # the host is no secret; in an Apprise URL it may be
    found += re.split("/", split.path) + [value for _, value in parse_qsl(split.query, keep_blank_values=True)]
    found += [value for pair in split.query.split("&") for value in pair.partition("=")[2:]]
    return (url, *{word for part in found for word in (part, unquote(part)) if len(word) >= shortest and word not in PLAIN})
