"""Which alerts are still owed, in the history's `outbox` table: the memory of the outbox across restarts.

Waits for the history's thread, each time for at most `patience_s`; called by the outbox's threads, never by the loop.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from vllm_watchdog.tell.history import History

patience_s = 5.0


@dataclass(frozen=True, slots=True)
class Letter:
    """One alert for one channel.  `wall`: when it was told, epoch seconds; of a delivered one, when it was taken; `payload`:
    its JSON."""

    channel: str
    incident: str
    kind: str
    wall: float
    payload: str
    attempts: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return self.incident, self.kind


class Ledger:
    def __init__(self, history: History) -> None:
        self._history = history

    def add(self, letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
        """Those not told before, now on disk.  When the disk does not take them they are all returned: told twice is
        better than not told."""
        def work(db: sqlite3.Connection) -> tuple[Letter, ...]:
            return tuple(letter for letter in letters if db.execute(
                "INSERT OR IGNORE INTO outbox (channel, incident, kind, wall, payload) VALUES (?, ?, ?, ?, ?)",
                (letter.channel, letter.incident, letter.kind, letter.wall, letter.payload)).rowcount)
        new = self._history.ask(work, patience_s)
        return letters if new is None else new

    def undelivered(self, channels: tuple[str, ...]) -> tuple[Letter, ...] | None:
        """What an earlier daemon still owed to these channels, in the order of telling.  None: not known yet."""
        def work(db: sqlite3.Connection) -> tuple[Letter, ...]:
            rows = db.execute("SELECT channel, incident, kind, wall, payload, attempts FROM outbox"
                              " WHERE done IS NULL ORDER BY wall, rowid")
            return tuple(letter for letter in (Letter(*row) for row in rows) if letter.channel in channels)
        return self._history.ask(work, patience_s)

    def delivered(self, channels: tuple[str, ...]) -> dict[str, float]:
        """When each of these channels last took an alert, epoch seconds; without those that never did, and empty where that
        can't be read now: it is only shown."""
        def work(db: sqlite3.Connection) -> dict[str, float]:
            rows = db.execute("SELECT channel, MAX(wall) FROM outbox WHERE done = 'delivered' GROUP BY channel")
            return {channel: wall for channel, wall in rows if channel in channels}
        return self._history.ask(work, patience_s) or {}

    def tried(self, letters: tuple[Letter, ...]) -> None:
        """Keeps the count of tries; a lost one costs nothing, so nobody waits for it."""
        rows = [(letter.attempts, letter.channel, letter.incident, letter.kind) for letter in letters]
        self._history.do(lambda db: db.executemany(
            "UPDATE outbox SET attempts = ? WHERE channel = ? AND incident = ? AND kind = ?", rows))

    def close(self, letters: tuple[Letter, ...], how: str) -> bool:
        """`how` they ended, all of them or none on disk.  False: not written."""
        rows = [(letter.channel, letter.incident, letter.kind, letter.wall, "", letter.attempts, how) for letter in letters]

        def work(db: sqlite3.Connection) -> bool:
            db.executemany("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            return True
        return self._history.ask(work, patience_s) is not None
