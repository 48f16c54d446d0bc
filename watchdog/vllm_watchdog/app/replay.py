"""Folds a recorded journal again and compares what it decided with what was decided then.  Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_watchdog.core import events
from vllm_watchdog.core.advance import advance
from vllm_watchdog.core.commands import Say
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.core.world import World

GAPS = frozenset({"journal.lost", "journal.line_too_long", "journal.unreadable"})


@dataclass(frozen=True, slots=True)
class Difference:
    """`line` of the journal; what was said then, and what is said now."""

    line: int
    then: str
    now: str


@dataclass(frozen=True, slots=True)
class Replayed:
    events: int
    decisions: int
    difference: Difference | None
    world: World


def replay(lines: Iterable[dict[str, Any]]) -> Replayed:
    """Fold the events; each must lead to the decisions (`say` lines) that the journal shows.

    Decisions stand after the event that led to them, in order.  Events before a `Booted` are skipped: a rotated journal
    begins in the middle of a life, and behind a gap nobody can say what was known.  A daemon that was killed owes its
    last decisions.  Raises ValueError for a line that is no record of ours.
    """
    world, folded, said = World(), 0, 0
    owed: list[str] = []
    started = False
    for number, line in enumerate(lines, start=1):
        if "event" in line:
            event = CODEC.decode(line["event"])
            if isinstance(event, events.Booted):
                started, owed = True, []
            if not started:
                continue
            if owed:
                return Replayed(folded, said, Difference(number, "nothing more", owed[0]), world)
            world, decided = advance(world, event)
            folded += 1
            owed = [told(command) for command in decided if isinstance(command, Say)]
        elif line.get("decided") and started:
            then = _text(line)
            now = owed.pop(0) if owed else "nothing"
            if then != now:
                return Replayed(folded, said, Difference(number, then, now), world)
            said += 1
        elif line.get("say") in GAPS:
            started = False
    return Replayed(folded, said, None, world)


def told(say: Say) -> str:
    """A decision as one comparable string."""
    return json.dumps([say.name, dict(say.fields)], ensure_ascii=False, sort_keys=True)


def _text(line: dict[str, Any]) -> str:
    fields = {key: value for key, value in line.items() if key not in ("wall", "at", "say", "decided")}
    return json.dumps([line["say"], fields], ensure_ascii=False, sort_keys=True)


def parsed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The journal's lines as objects.  A line that a crash cut off, whose next event is a `Booted`, comes as an empty one.

    Raises ValueError for any other line that is no JSON object.
    """
    torn = 0
    for number, line in enumerate(lines, start=1):
        record = _object(line)
        if torn and (record is None or _event(record) not in ("", "Booted")):
            raise ValueError(f"line {torn}: expected a JSON object")
        if record is None:
            torn = number
        elif _event(record):
            torn = 0
        yield record or {}


def _object(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _event(record: dict[str, Any]) -> str:
    """The name of the event; empty for what was said."""
    event = record.get("event")
    return str(event.get("_")) if isinstance(event, dict) else ""
