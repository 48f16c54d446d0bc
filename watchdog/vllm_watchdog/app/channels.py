"""The configured alert channels, and what they are told: for the daemon and for `alert test` alike."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllm_watchdog.config import Settings
from vllm_watchdog.config_channels import PROGRAMS, Address, Kind, address, minutes
from vllm_watchdog.config_sections import Channel as Written
from vllm_watchdog.tell.apprise_channel import AppriseChannel
from vllm_watchdog.tell.channel import Channel, Form, HttpChannel, parts
from vllm_watchdog.tell.chat import DingTalkForm, FeishuForm, SlackForm, WeComForm
from vllm_watchdog.tell.machine import AlertmanagerForm, PagerDutyForm, WebhookForm
from vllm_watchdog.tell.manners import Hours, Manners
from vllm_watchdog.tell.payload import Templates, Writer
from vllm_watchdog.tell.phrases import Language

FORMS: dict[Kind, Callable[[Address, dict[str, str]], Form]] = {
    Kind.WEBHOOK: lambda to, headers: WebhookForm(to.url, headers, to.secret),
    Kind.ALERTMANAGER: lambda to, headers: AlertmanagerForm(to.url, headers),
    Kind.PAGERDUTY: lambda to, _: PagerDutyForm(to.url, to.secret),
    Kind.SLACK: lambda to, _: SlackForm(to.url),
    Kind.DINGTALK: lambda to, _: DingTalkForm(to.url, to.secret),
    Kind.FEISHU: lambda to, _: FeishuForm(to.url, to.secret),
    Kind.WECOM: lambda to, _: WeComForm(to.url),
}


def channels(settings: Settings) -> tuple[Channel, ...]:
    return tuple(_channel(name, written) for name, written in settings.alerts.channels.items())


def _channel(name: str, written: Written) -> Channel:
    to = address(written)
    manners = Manners(
        least=written.min_severity, quiet=Hours(*minutes(written.quiet_hours)) if written.quiet_hours else None,
        most_per_hour=0 if to.kind in PROGRAMS else written.max_per_hour, together=to.kind not in PROGRAMS)
    if to.kind is Kind.APPRISE:
        return AppriseChannel(name, to.url, manners, written.timeout_s)
    headers = {key: value.get_secret_value() for key, value in written.headers.items()}
    secrets = (*parts(written.url.get_secret_value()), *parts(to.url), to.secret, *headers.values())
    return HttpChannel(name, FORMS[to.kind](to, headers), secrets, manners, written.timeout_s)


def writer(settings: Settings) -> Writer:
    alerts = settings.alerts
    return Writer(os.uname().nodename, settings.daemon.log_dir / "incidents", Language(alerts.language),
                  Templates(alerts.templates.title, alerts.templates.text))


def unusable(settings: Settings) -> dict[str, str]:
    """The channels whose address Apprise does not take, and why.  Sends nothing; half a second for each that it has."""
    found = {channel.name: channel.unusable() for channel in channels(settings)}
    return {name: why for name, why in found.items() if why}
