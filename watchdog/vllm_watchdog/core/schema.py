"""The one decoder of everything that is written down: journal, state file, history."""

from __future__ import annotations

from vllm_watchdog.core import commands, events, failures, findings, incidents, levels, lowering, memory, plan, readings
from vllm_watchdog.core.codec import Codec

CODEC = Codec(readings, levels, plan, findings, failures, incidents, lowering, memory, events, commands)
