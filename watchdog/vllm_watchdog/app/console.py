"""Journal lines in words, on standard error; under systemd with the priority that `journalctl -p` filters by.

sd-daemon(3): a line that begins with `<4>` is a warning.  Only where standard error is the journal's own stream, which
$JOURNAL_STREAM tells: a terminal or a file gets the plain line.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vllm_watchdog.app.show import worded
from vllm_watchdog.core.units import iso

CRIT, ERR, WARNING, NOTICE, INFO = 2, 3, 4, 5, 6     # syslog(3)
BY_URGENCY = {"page": CRIT, "critical": ERR, "warning": WARNING}
# By the last word of a line's name.
BY_WORD = dict.fromkeys(("failed", "lost", "given_up", "refused", "cannot_listen", "spawn_failed"), ERR) | dict.fromkeys(
    ("unknown", "stray", "raised", "stepped", "set_aside", "finding", "proves_nothing", "dropped", "engine_died", "untold",
     "casualties", "failover", "route_unreadable", "unreadable"), WARNING) | dict.fromkeys(
    ("started", "stopping", "adopted", "ready", "exited", "resolved", "failback", "reloaded", "leaving"), NOTICE)


def priority(line: Mapping[str, Any]) -> int:
    """A syslog priority, 2 (a human is needed now) to 6."""
    if line["say"].startswith("incident.") and line.get("urgency") in BY_URGENCY:
        return BY_URGENCY[line["urgency"]]
    return BY_WORD.get(line["say"].rpartition(".")[2], INFO)


def journald(environ: Mapping[str, str] = os.environ, descriptor: int = 2) -> bool:
    """Is this descriptor the journal's own stream?"""
    try:
        stat = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{stat.st_dev}:{stat.st_ino}"


class Console:
    """`prefix`: begin each line with its priority."""

    def __init__(self, prefix: bool) -> None:
        self._prefix = prefix

    def line(self, line: Mapping[str, Any]) -> None:
        """`2026-11-29T14:41:57.123Z engine.phase engine=primary#2 was=loading now=serving`"""
        before = f"<{priority(line)}>" if self._prefix else ""
        words = worded({"wall": iso(time.time()), **line})
        with suppress(OSError):     # a terminal that hung up must not end the daemon
            sys.stderr.write(f"{before}{words}\n")
            sys.stderr.flush()

    def say(self, name: str, /, **fields: str | float) -> None:
        self.line({"say": name} | fields)
