"""What a new daemon knows of the last one: its state file, and the open incidents that only the history holds.

An incident is written into the history, its alerts into the outbox, and then the state file: a daemon that was killed in
between has told of an incident that its state does not know.  Without this it would be told again under another id, and
never be resolved.  What the state file does not hold any more has its alerts on disk.
"""

from __future__ import annotations

from dataclasses import replace

from vllm_watchdog.core.memory import Memory
from vllm_watchdog.say import Say
from vllm_watchdog.tell.history import HistoryError, Reader


def recalled(memory: Memory | None, history: Reader, say: Say) -> Memory | None:
    """Blocks on reading two small tables, at start."""
    try:
        found = history.open_incidents()
    except HistoryError as error:
        say("history.unreadable", why=str(error))
        return memory
    known = {incident.service for incident in memory.incidents} if memory else set[str]()
    newest = {incident.service: incident for incident in found if incident.service not in known}
    if not newest:
        return memory
    for incident in newest.values():
        say("incident.recalled", incident=incident.id)
    memory = memory or Memory(boot_id="")
    return replace(memory, incidents=(*memory.incidents, *newest.values()))
