"""The configured alert channels, and what they are told: for the daemon and for `alert test` alike."""

from __future__ import annotations

import os
import time

from vllm_watchdog.config import Settings
from vllm_watchdog.tell.payload import Language, Writer
from vllm_watchdog.tell.webhook import Webhook


def webhooks(settings: Settings) -> tuple[Webhook, ...]:
    return tuple(
        Webhook(name, channel.url.get_secret_value(),
                {key: value.get_secret_value() for key, value in channel.headers.items()}, channel.timeout_s, time.time)
        for name, channel in settings.alerts.channels.items()
    )


def writer(settings: Settings) -> Writer:
    return Writer(os.uname().nodename, settings.daemon.log_dir / "incidents", Language(settings.alerts.language))
