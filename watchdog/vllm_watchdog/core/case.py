"""A failure as advice is computed from: its class, the facts of its lines, the flags, the memory, the longest request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_watchdog.core.catalog import Text
from vllm_watchdog.core.details import Details
from vllm_watchdog.core.levels import Levels
from vllm_watchdog.core.readings import InFlight

Lines = tuple[Text, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What is known of a failure.  `args`: vLLM's sizing flags as configured; `files`: an evidence folder lies beside."""

    class_: str
    details: Details = ()
    args: tuple[tuple[str, str], ...] = ()
    levels: Levels | None = None
    longest: InFlight | None = None
    exit_code: int | None = None
    port: int = 0
    files: bool = False

    def fact(self, name: str) -> Any:
        return dict(self.details).get(name)

    def whole(self, flag: str) -> int | None:
        """A flag's value as a number, None where it is not set, or not as one."""
        text = dict(self.args).get(flag, "")
        return int(text) if text.isdigit() else None

    @property
    def util(self) -> float | None:
        """gpu-memory-utilization as configured, or as vLLM said; None where neither is known."""
        text = dict(self.args).get("gpu-memory-utilization")
        try:
            return float(text) if text else self.fact("gpu_memory_utilization")
        except ValueError:
            return None

    @property
    def total(self) -> int | None:
        """Bytes of the card that it happened on, or of the first one that is known."""
        cards = self.levels.cards if self.levels else ()
        of_it = [card.total for card in cards if card.gpu == self.fact("gpu")] or [card.total for card in cards]
        return self.fact("total_bytes") or next(iter(of_it), None)
