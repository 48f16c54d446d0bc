"""The journal's lines in words, to all who listen: standard error, the page, whoever follows `events`.

Called by the journal with every line, in the thread that said it; no listener may block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

Listener = Callable[[dict[str, Any]], None]


class Voice:
    """`alerts` counts how tries to deliver one ended."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)
        self.alerts: Counter[str] = Counter()

    def line(self, line: dict[str, Any]) -> None:
        """An event as the core reads it is not in words, and stays in the file."""
        if "say" not in line:
            return
        if (name := line["say"]).startswith("alert."):
            self.alerts[name.removeprefix("alert.")] += 1
        for listener in self.listeners:
            listener(line)
