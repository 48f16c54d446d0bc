"""What an alert channel's keys mean: which kind it is, where it sends to, what its texts may hold.  Pure.

A kind of our own is known by the host of a webhook's address as its service shows it, or by the scheme of the Apprise
URL that means the same; every other scheme is Apprise's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from string import Template
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from vllm_watchdog.config_sections import Alerts, Channel


class Kind(StrEnum):
    WEBHOOK = "webhook"
    ALERTMANAGER = "alertmanager"
    PAGERDUTY = "pagerduty"
    SLACK = "slack"
    DINGTALK = "dingtalk"
    FEISHU = "feishu"
    WECOM = "wecom"
    APPRISE = "apprise"


PROGRAMS = frozenset({Kind.WEBHOOK, Kind.ALERTMANAGER, Kind.PAGERDUTY})     # each alert by itself
SIGNED = frozenset({Kind.WEBHOOK, Kind.DINGTALK, Kind.FEISHU, Kind.PAGERDUTY})
HEADED = frozenset({Kind.WEBHOOK, Kind.ALERTMANAGER})
HOSTS = {
    "hooks.slack.com": Kind.SLACK, "oapi.dingtalk.com": Kind.DINGTALK, "open.feishu.cn": Kind.FEISHU,
    "open.larksuite.com": Kind.FEISHU, "qyapi.weixin.qq.com": Kind.WECOM,
    "events.pagerduty.com": Kind.PAGERDUTY, "events.eu.pagerduty.com": Kind.PAGERDUTY,
}
# What follows the host in a webhook's address as its service shows it, also behind somebody's own relay.
PATHS = {
    Kind.SLACK: re.compile(r"/services/T\w*/B\w*/\w+"), Kind.DINGTALK: re.compile(r"/robot/send\?(?:.*&)?access_token="),
    Kind.FEISHU: re.compile(r"/open-apis/bot/v2/hook/."), Kind.WECOM: re.compile(r"/cgi-bin/webhook/send\?(?:.*&)?key="),
}
NAMES = frozenset({         # that alerts.templates may hold
    "kind", "urgency", "title", "class", "host", "service", "engine", "cause", "state", "human", "action", "gap", "opened",
    "resolved", "next", "folder", "incident", "failures",
})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a channel sends to."""

    kind: Kind
    url: str = field(repr=False)
    secret: str = field(default="", repr=False)


def address(channel: Channel) -> Address:
    url, secret = channel.url.get_secret_value(), channel.secret.get_secret_value() if channel.secret else ""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if channel.type is not None:
        return Address(channel.type, url, secret)
    if scheme in ("http", "https"):
        return Address(HOSTS.get((urlsplit(url).hostname or "").lower(), Kind.WEBHOOK), url, secret)
    first, *more = [unquote(part) for part in rest.partition("?")[0].split("/") if part] or [""]
    user, _, host = first.rpartition("@")
    if scheme == "dingtalk" and not more:
        return Address(Kind.DINGTALK, f"https://oapi.dingtalk.com/robot/send?access_token={host}", secret or user)
    if scheme in ("feishu", "lark") and not more:
        site = "open.feishu.cn" if scheme == "feishu" else "open.larksuite.com"
        return Address(Kind.FEISHU, f"https://{site}/open-apis/bot/v2/hook/{host}", secret)
    if scheme == "wecombot" and not more:
        return Address(Kind.WECOM, f"https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={host}")
    if scheme == "slack" and len(more) == 2 and re.fullmatch(r"T\w+", host):
        return Address(Kind.SLACK, f"https://hooks.slack.com/services/{'/'.join((host, *more))}")
    if scheme == "pagerduty" and user:
        region = "eu." if "eu" in parse_qs(rest.partition("?")[2]).get("region", []) else ""
        return Address(Kind.PAGERDUTY, f"https://events.{region}pagerduty.com/v2/enqueue", secret or user)
    return Address(Kind.APPRISE, url, secret)


def wrong(alerts: Alerts) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys that do not go together, and what was expected."""
    for name, channel in alerts.channels.items():
        at, found = ("alerts", "channels", name), address(channel)
        web = channel.url.get_secret_value().lower().startswith(("http://", "https://"))
        if channel.type is not None and web is (channel.type is Kind.APPRISE):
            expected = "an Apprise URL, such as mailtos://…" if web else "https://… or http://…"
            yield (*at, "url"), f"not for type {channel.type}, expected {expected}"
        if found.kind is Kind.PAGERDUTY and not found.secret:
            yield (*at, "secret"), "missing, expected PagerDuty's integration key (Events API v2)"
        if channel.secret and found.kind not in SIGNED:
            yield (*at, "secret"), f"{found.kind} has no use for it, expected none"
        if channel.headers and found.kind not in HEADED:
            yield (*at, "headers"), f"{found.kind} has no use for them, expected none"
        if "max_per_hour" in channel.model_fields_set and found.kind in PROGRAMS:
            yield (*at, "max_per_hour"), f"{found.kind} gets every alert by itself, expected none"


def doubtful(alerts: Alerts) -> Iterator[tuple[tuple[str, ...], str]]:
    """Addresses that may be meant otherwise; nothing of them is said, since they are secrets."""
    for name, channel in alerts.channels.items():
        at, found, url = ("alerts", "channels", name), address(channel), urlsplit(channel.url.get_secret_value())
        if found.kind is Kind.WEBHOOK and channel.type is None:
            for kind, path in PATHS.items():
                if path.match(f"{url.path}?{url.query}"):
                    yield at, f'gets our own JSON as a plain webhook, but its address looks like {kind}: set type = "{kind}"'
        elif url.scheme == "http" and (url.hostname or "").lower() in HOSTS:
            yield (*at, "url"), f"{found.kind} takes https:// only"


def minutes(text: str) -> tuple[int, int]:
    """"22:00-07:00" -> minutes of the day.  Raises ValueError."""
    found = re.fullmatch(r"([01]\d|2[0-3]):([0-5]\d) ?- ?([01]\d|2[0-3]):([0-5]\d)", text)
    if not found or found[1] + found[2] == found[3] + found[4]:
        raise ValueError('not a part of the day, expected such as "22:00-07:00"')
    hour, minute, to_hour, to_minute = map(int, found.groups())
    return hour * 60 + minute, to_hour * 60 + to_minute


def template(text: str) -> str:
    """Raises ValueError for what `string.Template` or we do not know."""
    form = Template(text)
    if not form.is_valid():
        raise ValueError("holds a $ that begins no name, expected $name, ${name}, or $$ for a $")
    unknown = [f"${name}" for name in form.get_identifiers() if name not in NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]:.40} is no name, expected some of {', '.join(f'${name}' for name in sorted(NAMES))}")
    return text


def channel_url(url: str) -> str:
    """An address of the web, or one that may be Apprise's.  Raises ValueError, without saying it."""
    try:
        parts = urlsplit(url)
        web = parts.scheme in ("http", "https")
        fits = bool(parts.hostname) and parts.port != 0 if web else bool(re.match(r"[a-z][a-z0-9+.-]*://.", url, re.I))
    except ValueError:
        fits = False
    if not fits or not url.isprintable() or " " in url:
        raise ValueError("not an address, expected https://… or an Apprise URL, such as mailtos://…")
    return url
