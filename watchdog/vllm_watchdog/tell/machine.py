"""The forms for programs: our own webhook, an Alertmanager, PagerDuty.  Pure.

Each gets every alert by itself and in order, with an id that stays the same when it is sent again, so that a receiver
that looks at it has each alert exactly once.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.units import iso
from vllm_watchdog.tell.channel import Payload
from vllm_watchdog.tell.letter import Request

SUMMARY_LIMIT = 1024        # characters, PagerDuty's limit
TEST_S = 300.0              # a test in an Alertmanager ends by itself
OPEN_S = 30 * 86_400.0      # Alertmanager ends an alert that nobody repeats within resolve_timeout, unless it knows when


def dumped(value: object) -> bytes:
    """JSON as UTF-8; Chinese as it is, since the limits count bytes."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class WebhookForm:
    """POST of the payload.  With a secret, signed: `sha256=` and the hex HMAC-SHA256 of `TIMESTAMP.BODY`."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    secret: str = field(default="", repr=False)

    def request(self, payload: Payload, wall: float) -> Request:
        body, headers = dumped(payload), dict(self.headers)
        if self.secret:
            stamp = str(int(wall))
            digest = hmac.new(self.secret.encode(), f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
            headers |= {"X-LLM-Watchdog-Timestamp": stamp, "X-LLM-Watchdog-Signature": f"sha256={digest}"}
        return Request(self.url, headers, body)

    def refusal(self, reply: Any) -> None:  # noqa: ARG002 - the status says it all
        return None


@dataclass(frozen=True, slots=True)
class AlertmanagerForm:
    """`url`: …/api/v2/alerts.  Labels are an alert's identity there, so the severity, which may rise, makes another alert,
    and the one of before ends with it.  Repeating any of it changes nothing."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def request(self, payload: Payload, wall: float) -> Request:
        now, opened = iso(wall), payload["opened"]
        over = payload["resolved"]
        ends = over or iso(wall + (TEST_S if payload["kind"] == "test" else OPEN_S))
        urgency = Urgency(payload["urgency"])
        alerts = [self._alert(payload, urgency.value, opened, ends)]
        alerts += [self._alert(payload, each.value, opened, over or now) for each in Urgency
                   if each.rank < urgency.rank and payload["kind"] != "opened"]
        return Request(self.url, self.headers, dumped(alerts))

    def _alert(self, payload: Payload, severity: str, starts: str, ends: str) -> dict[str, Any]:
        return {
            "labels": {"alertname": "LLMWatchdogIncident", "job": "llm-watchdog", "incident": payload["incident"],
                       "service": payload["service"], "host": payload["host"], "severity": severity},
            "annotations": {"summary": payload["headline"], "description": payload["text"], "class": payload["class"],
                            "engine": payload["engine"], "folder": payload["folder"]},
            "startsAt": starts, "endsAt": max(ends, starts),
        }

    def refusal(self, reply: Any) -> None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class PagerDutyForm:
    """Events API v2.  One PagerDuty incident for each of ours, by `dedup_key`, and it is resolved with ours."""

    url: str = field(repr=False)
    routing_key: str = field(repr=False)

    def request(self, payload: Payload, wall: float) -> Request:  # noqa: ARG002
        event: dict[str, Any] = {
            "routing_key": self.routing_key, "dedup_key": payload["incident"][:255],
            "event_action": "resolve" if payload["kind"] == "resolved" else "trigger",
        }
        severity = {"warning": "warning", "critical": "error", "page": "critical"}[payload["urgency"]]
        event["payload"] = {
            "summary": payload["headline"][:SUMMARY_LIMIT], "source": payload["host"], "timestamp": payload["opened"],
            "severity": "info" if payload["kind"] == "test" else severity,
            "component": payload["engine"], "group": payload["service"], "class": payload["class"],
            "custom_details": {label: value for label, value in payload["lines"] if label} | {"text": payload["text"]},
        }
        event["client"] = "llm-watchdog"
        return Request(self.url, {}, dumped(event))

    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        if isinstance(reply, dict) and reply.get("status", "success") != "success":
            return str(reply.get("message", "refused")), None
        return None
