"""Stand-ins for what the telling room is given: a clock that stands still, and a `say` that remembers."""

from __future__ import annotations

import threading
from dataclasses import replace

from vllm_watchdog.core.incidents import Incident, Urgency, opened, resolved

WALL = 1_795_989_200.0      # 2026-11-29T21:53:20Z


class Clock:
    def __init__(self, at: float = 100.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


class Said:
    """What was said, by name; `wait` blocks until a name was said so often."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []
        self._changed = threading.Condition()

    def __call__(self, name: str, /, **fields: str | float) -> None:
        with self._changed:
            self.lines.append((name, fields))
            self._changed.notify_all()

    def of(self, name: str) -> list[dict[str, object]]:
        return [fields for said, fields in self.lines if said == name]

    def wait(self, name: str, times: int = 1, deadline_s: float = 10.0) -> list[dict[str, object]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.of(name)) >= times, deadline_s), (name, self.lines)
        return self.of(name)


def incident(number: int = 1, *, over: bool = False, urgency: Urgency = Urgency.CRITICAL) -> Incident:
    made = opened("primary", "primary", 3, "oom_runtime", urgency, "CUDA out of memory", 50.0 + number, WALL + number)
    made = replace(made, id=f"{made.id}-{number}")
    return resolved(made, 80.0, WALL + 30, "serves again") if over else made
