"""The forms for people's chats: Slack, DingTalk, Feishu/Lark, WeCom.  Pure.

Each keeps within its service's size, whatever the incident says, and reads the "no" that three of them hide in an answer
with status 200.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from vllm_watchdog.tell.channel import Payload
from vllm_watchdog.tell.letter import Request
from vllm_watchdog.tell.machine import dumped

Lines = Sequence[Sequence[str]]

# Their documents' limits, less some room.  Bytes of UTF-8 but for Slack, which counts characters.
SLACK_HEADER, SLACK_SECTION = 150, 3000
DINGTALK_BYTES = 18_000         # 20,000 for the whole request
FEISHU_BYTES = 18_000           # 20 KB for the whole request
WECOM_BYTES = 4096              # of markdown content
TITLE = 100                     # DingTalk and Feishu show it in one line
WECOM_INSTEAD = str.maketrans({"`": "'", "<": "＜"})
VALUES = (300, 160, 100, 60)    # a value is cut to the first of these that lets the message fit
# Their codes for "too many messages", and when to come back: DingTalk is deaf for ten minutes.
DINGTALK_BUSY, FEISHU_BUSY, WECOM_BUSY = {130101: 600.0, 410100: 600.0}, {11232: 60.0, 230020: 60.0}, {45009: 60.0}


def fitted(payload: Payload, limit: int, write: Callable[[str, str], str], size: Callable[[str], int], gap: str) -> str:
    """The lines, each as `write(label, value)` puts it, cut evenly until they fit; so none is lost for another."""
    text = ""
    for most in VALUES:
        text = gap.join(write(label, _cut(value, most)) for label, value in payload["lines"])
        if size(text) <= limit:
            return text
    while size(text) > limit:
        text = text[: len(text) - max(1, (size(text) - limit) // 4)].rstrip()
    return text


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


# What Markdown would read as its own in a log line.  An underscore within a word is none.
_MARKUP = re.compile(r"[\\`*\[\]<>~]|(?<!\w)_|_(?!\w)")


def _backslashed(text: str) -> str:
    return _MARKUP.sub(lambda match: "\\" + match[0], text)


def _entities(text: str) -> str:
    """What Feishu's documents ask for instead of a backslash."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


@dataclass(frozen=True, slots=True)
class SlackForm:
    """An incoming webhook, with blocks."""

    url: str = field(repr=False)

    def request(self, payload: Payload, wall: float) -> Request:  # noqa: ARG002
        body = fitted(payload, SLACK_SECTION, self._line, len, "\n")
        head = {"type": "plain_text", "text": _cut(payload["headline"], SLACK_HEADER), "emoji": False}
        blocks: list[dict[str, Any]] = [{"type": "header", "text": head}]
        if body:
            blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": body, "verbatim": True}})
        return Request(self.url, {}, dumped({"text": self._escaped(payload["headline"]), "blocks": blocks}))

    def _line(self, label: str, value: str) -> str:
        return f"*{label}*: {self._escaped(value)}" if label else self._escaped(value)

    @staticmethod
    def _escaped(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        if isinstance(reply, dict) and reply.get("ok") is False:
            return str(reply.get("error", "refused")), None
        return None


@dataclass(frozen=True, slots=True)
class DingTalkForm:
    """A custom robot.  With a secret: HMAC-SHA256 of "MILLISECONDS\\nSECRET", in the address, for one hour."""

    url: str = field(repr=False)
    secret: str = field(default="", repr=False)

    def request(self, payload: Payload, wall: float) -> Request:
        text = fitted(payload, DINGTALK_BYTES - 2000, self._line, lambda text: len(dumped(text)), "\n\n")
        text = f"### {_backslashed(payload['headline'])}\n\n{text}"
        body = {"msgtype": "markdown", "markdown": {"title": _cut(payload["headline"], TITLE), "text": text}}
        return Request(self._address(wall), {}, dumped(body))

    @staticmethod
    def _line(label: str, value: str) -> str:
        return f"**{label}**: {_backslashed(value)}" if label else value

    def _address(self, wall: float) -> str:
        if not self.secret:
            return self.url
        stamp = str(round(wall * 1000))
        sign = base64.b64encode(_hmac(self.secret, f"{stamp}\n{self.secret}")).decode()
        return f"{self.url}{'&' if '?' in self.url else '?'}{urlencode({'timestamp': stamp, 'sign': sign})}"

    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        return _coded(reply, "errcode", "errmsg", DINGTALK_BUSY)


@dataclass(frozen=True, slots=True)
class FeishuForm:
    """A custom bot of Feishu or Lark.  With a secret: HMAC-SHA256 of nothing by the key "SECONDS\\nSECRET", in the body."""

    url: str = field(repr=False)
    secret: str = field(default="", repr=False)

    def request(self, payload: Payload, wall: float) -> Request:
        over = payload.get("over") or payload["kind"] in ("resolved", "test")
        colour = "green" if over else {"warning": "orange"}.get(payload["urgency"], "red")
        text = fitted(payload, FEISHU_BYTES - 2000, self._line, lambda text: len(dumped(text)), "\n")
        card = {
            "config": {"wide_screen_mode": True},
            "header": {"template": colour, "title": {"tag": "plain_text", "content": _cut(payload["headline"], TITLE)}},
            "elements": [{"tag": "markdown", "content": text or _entities(payload["headline"])}],
        }
        body: dict[str, Any] = {"msg_type": "interactive", "card": card}
        if self.secret:
            stamp = str(int(wall))
            body = {"timestamp": stamp, "sign": base64.b64encode(_hmac(f"{stamp}\n{self.secret}", "")).decode()} | body
        return Request(self.url, {}, dumped(body))

    @staticmethod
    def _line(label: str, value: str) -> str:
        return f"**{label}**: {_entities(value)}" if label else value

    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        return _coded(reply, "code", "msg", FEISHU_BUSY)


@dataclass(frozen=True, slots=True)
class WeComForm:
    """A group robot."""

    url: str = field(repr=False)

    def request(self, payload: Payload, wall: float) -> Request:  # noqa: ARG002
        head = f"**{_cut(payload['headline'], 2 * TITLE)}**\n"
        text = head + fitted(payload, WECOM_BYTES - _bytes(head), self._line, _bytes, "\n")
        return Request(self.url, {}, dumped({"msgtype": "markdown", "markdown": {"content": text}}))

    @staticmethod
    def _line(label: str, value: str) -> str:
        """It has no escapes, so what would be code or a mention is written otherwise."""
        return f"> {label}: {value.translate(WECOM_INSTEAD)}" if label else value

    def refusal(self, reply: Any) -> tuple[str, float | None] | None:
        return _coded(reply, "errcode", "errmsg", WECOM_BUSY)


def _hmac(key: str, text: str) -> bytes:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()


def _coded(reply: Any, code: str, words: str, busy: Mapping[int, float]) -> tuple[str, float | None] | None:
    """The verdict in the body, which alone says whether the message was taken."""
    if not isinstance(reply, dict) or code not in reply:
        return f"an answer without {code}", None
    if reply[code] == 0:
        return None
    return f"{code} {reply[code]}: {reply.get(words, '')}", busy.get(reply[code])
