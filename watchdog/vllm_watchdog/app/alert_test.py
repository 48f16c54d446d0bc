"""`llm-watchdog alert test [CHANNEL]`: sends a test message and prints what the receiver answered."""

from __future__ import annotations

import time
from typing import TextIO

from vllm_watchdog.app.channels import channels, writer
from vllm_watchdog.config import Settings
from vllm_watchdog.tell.payload import trial


def test(settings: Settings, name: str | None, out: TextIO) -> int:
    """0 when every channel took it, 1 when one did not, 2 when there is none."""
    asked = [channel for channel in channels(settings) if name in (None, channel.name)]
    if not asked:
        there = ", ".join(settings.alerts.channels) or "none"
        print(f"alerts.channels.{name or 'NAME'}: not configured; there are: {there}", file=out)
        return 2
    wall = time.time()
    payload = writer(settings).payload(trial(wall), wall)
    taken = True
    for channel in asked:
        outcome, answer = channel.test(payload)
        taken = taken and outcome.ok
        print(f"{channel.name}: {'taken' if outcome.ok else 'NOT TAKEN'}, {outcome.why}" + (f": {answer}" if answer else ""),
              file=out, flush=True)
    return 0 if taken else 1
