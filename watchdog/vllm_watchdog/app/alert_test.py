"""`llm-watchdog alert test [CHANNEL]`: sends a test message and prints what the receiver answered."""

from __future__ import annotations

import time
from typing import TextIO

from vllm_watchdog.app.channels import webhooks, writer
from vllm_watchdog.config import Settings
from vllm_watchdog.tell.payload import trial


def test(settings: Settings, name: str | None, out: TextIO) -> int:
    """0 when every channel took it, 1 when one did not, 2 when there is none."""
    channels = [channel for channel in webhooks(settings) if name in (None, channel.name)]
    if not channels:
        there = ", ".join(settings.alerts.channels) or "none"
        print(f"alerts.channels.{name or 'NAME'}: not configured; there are: {there}", file=out)
        return 2
    wall = time.time()
    payload = writer(settings).payload(trial(wall), wall)
    answers = {channel.name: channel.test(payload) for channel in channels}
    for channel, answer in answers.items():
        print(f"{channel}: {answer}", file=out)
    return 0 if all(answer.startswith("HTTP 2") for answer in answers.values()) else 1
