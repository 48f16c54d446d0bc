"""How whatever is not the loop tells of itself: one line in log and journal."""

from __future__ import annotations

from typing import Protocol


class Say(Protocol):
    """`name` a dotted event name, `fields` its figures.  Never blocks."""

    def __call__(self, name: str, /, **fields: str | float) -> None: ...
