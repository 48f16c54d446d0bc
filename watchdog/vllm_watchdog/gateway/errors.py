"""What the gateway says itself when it can't pass a request on, in OpenAI's error form.  Pure.

A table of refusals: `code` is stable and meant for programs, `message` for people.  No message carries request text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from http import HTTPStatus


@dataclass(frozen=True, slots=True)
class Refusal:
    """One error answer.  `retry_after_s`: None where trying again soon can't help."""

    status: int
    code: str
    message: str
    retry_after_s: int | None = None
    param: str | None = None

    def in_s(self, retry_after_s: int) -> Refusal:
        return replace(self, retry_after_s=retry_after_s)

    def because(self, why: str) -> Refusal:
        return replace(self, message=f"{self.message}: {why}") if why else self


BAD_REQUEST = Refusal(400, "bad_request", "The request is not valid HTTP/1.1")
HEAD_TIMEOUT = Refusal(408, "request_timeout", "The request did not arrive in time")
BODY_TOO_LARGE = Refusal(413, "body_too_large", "The request body is larger than this gateway accepts")
HEAD_TOO_LARGE = Refusal(431, "head_too_large", "The request head is larger than this gateway accepts")
EXPECTATION = Refusal(417, "expectation_failed", "Only 'Expect: 100-continue' is understood")
NOT_IMPLEMENTED = Refusal(501, "not_implemented", "This gateway does not do that")
VERSION = Refusal(505, "http_version", "Only HTTP/1.0 and HTTP/1.1 are spoken here")
NOT_FOUND = Refusal(404, "not_found", "There is nothing under this path")

DEVELOPER = Refusal(403, "developer_endpoint", "vLLM's developer endpoints are for the watchdog, on loopback")
NOT_SERVING = Refusal(503, "engine_unavailable", "No engine serves at the moment", 5)
HELD_TOO_LONG = Refusal(503, "engine_unavailable", "No engine came to serve while the request was held", 5)
QUEUE_FULL = Refusal(503, "queue_full", "Too many requests are waiting for an engine", 5)
NO_MEMORY = Refusal(503, "queue_full", "Too many bytes of requests are waiting for an engine", 5)
CROWDED = Refusal(429, "queue_full", "Too many requests are waiting for this engine", 5)
BUSY = Refusal(429, "engine_busy", "The engine serves, but had no room for this request while it was held", 5)
FAILING = Refusal(503, "engine_failing", "The engine lives, but fails what it is asked", 5)
TOO_MANY_CONNECTIONS = Refusal(503, "too_many_connections", "Too many connections are open", 1)
DRAINING = Refusal(503, "gateway_stopping", "The gateway is stopping", 2)

UNREADABLE = Refusal(400, "invalid_body", "The body can't be read")
ENCODED = Refusal(415, "unsupported_encoding", "Compressed bodies are not taken here, since their size could not be known")

ENGINE_DIED = Refusal(502, "engine_died", "The engine ended before it answered, and this request is not safe to repeat")
ENGINE_CUT = Refusal(502, "engine_died", "The engine ended before its answer was complete")
BAD_UPSTREAM = Refusal(502, "bad_answer", "The engine's answer is not valid HTTP")
HUNG_UP = Refusal(502, "engine_hung_up", "The engine closed the connection without an answer, twice")

SUSPECT = Refusal(
    422, "prompt_quarantined",
    "The engine ended while it was reading this prompt, the longest at that moment, so it was not given to another engine",
)
SEEN_TWICE = Refusal(
    422, "prompt_quarantined", "Two engines ended one after the other while they had this request, so no third gets it"
)
QUARANTINED = Refusal(
    422, "prompt_quarantined", "A request with the same content was there when an engine ended, and is refused for now"
)


def too_long(tokens: int, limit: int, exact: bool, path: str) -> Refusal:
    """In the words that OpenAI's clients look for: the code, and both numbers."""
    about = "has" if exact else "has by estimate"
    message = f"The prompt {about} {tokens} tokens, and the longest that is taken here has {limit}: shorten it"
    return Refusal(400, "context_length_exceeded", message, param="messages" if "chat" in path else "prompt")


KINDS = {429: "rate_limit_error"}


def payload(refusal: Refusal) -> bytes:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    error = {"message": refusal.message + ".", "type": kind, "param": refusal.param, "code": refusal.code}
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def event(refusal: Refusal) -> bytes:
    """As a server-sent event; the blank line before it ends whatever event was cut."""
    return b"\n\ndata: " + payload(refusal) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def response(refusal: Refusal, keep_alive: bool, head_only: bool = False) -> bytes:
    retry = f"Retry-After: {refusal.retry_after_s}\r\n" if refusal.retry_after_s is not None else ""
    return answer(refusal.status, payload(refusal), "application/json", keep_alive, head_only, retry)


def answer(status: int, body: bytes, kind: str, keep_alive: bool, head_only: bool = False, more: str = "") -> bytes:
    """A whole response of our own."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    )
    return head.encode() if head_only else head.encode() + body
