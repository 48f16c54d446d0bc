"""What the gateway is told at its start.  Frozen; the command line makes it from the settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllm_watchdog.core.units import MIB


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """Durations in seconds, sizes in bytes.

    `control`: the daemon's socket; `route_file`: where it also writes the route; `admin`: our own socket for operators
    (None: none).  Bodies of held requests take at most `hold_bytes`, bodies that arrive or are in flight as much again.
    A prompt of `long_tokens` is a long one; those together take at most `long_share` of what an engine may have at once, and
    a key's requests `key_concurrent` of it.  `first_token_s`: short prompts get fewer beside them when theirs comes later.
    """

    host: str
    port: int
    control: Path
    route_file: Path
    admin: Path | None = None
    hold_s: float = 60.0
    hold_requests: int = 1000
    hold_bytes: int = 256 * MIB
    max_body_bytes: int = 64 * MIB
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0        # and a second more for each 64 KiB that came; also for a client that reads nothing
    idle_timeout_s: float = 75.0        # nginx's keepalive_timeout
    max_connections: int = 4096
    suspect_tokens: int = 8000
    refuse_s: float = 3600.0
    long_tokens: int = 8000
    long_share: float = 0.5
    key_concurrent: int | None = None
    first_token_s: float | None = None
    drain_s: float = 30.0
