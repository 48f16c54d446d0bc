"""The history: incidents, samples for the plots, and alerts not yet delivered, in one SQLite file (WAL).

One thread owns the only writing connection; everyone else hands it jobs through a bounded queue and does not wait
(the outbox may wait, with a deadline).  Never fatal: a corrupt file is set aside and a new one begun; while the disk is
full or the file locked what is to be written is kept, within a limit, said once a minute and tried again each second.
`Reader` is for everyone who asks; it
opens the file read-only, while the daemon writes and when there is no daemon.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.incidents import Incident
from vllm_watchdog.core.schema import CODEC
from vllm_watchdog.say import Say
from vllm_watchdog.tell import samples
from vllm_watchdog.tell.backlog import Backlog, ended
from vllm_watchdog.tell.files import open_owner_only, set_aside

keep_incidents = 10_000
incidents_bytes = 256 << 20         # ... and as much of their JSON; one is 10 to 100 kB
keep_s = 30 * 86_400.0              # an incident that is over
keep_alerts_s = 30 * 86_400.0       # a delivered alert is remembered so that it is not told twice
prune_s = 3600.0
retry_s = 1.0
idle_s = 60.0
complain_s = 60.0
cache_kib = 256                     # SQLite's own 2,000 fill within hours, and are not given back
busy_s = 5.0                        # readers never hold a WAL writer up; a human with a shell might
answer_s = 0.5                      # who asks the daemon waits no longer for what it is about to write

VERSION = 2     # 1 kept other samples
schema = """
CREATE TABLE IF NOT EXISTS incidents (
    id TEXT PRIMARY KEY, service TEXT, engine TEXT, class TEXT, urgency TEXT,
    wall_opened REAL, wall_resolved REAL, json TEXT);
CREATE INDEX IF NOT EXISTS incidents_by_time ON incidents (wall_opened);
CREATE TABLE IF NOT EXISTS outbox (
    channel TEXT, incident TEXT, kind TEXT, wall REAL, payload TEXT, attempts INTEGER DEFAULT 0, done TEXT,
    PRIMARY KEY (channel, incident, kind));
""" + samples.schema + f"PRAGMA user_version = {VERSION};"

T = TypeVar("T")


class _Job(Generic[T]):
    """Something to write.  `over`: it is committed and `value` its answer, or it failed and `value` is None.
    `asked`: someone waits, and will ask again if he must; any other is kept until it is written."""

    def __init__(self, work: Callable[[sqlite3.Connection], T], asked: bool) -> None:
        self.work, self.asked = work, asked
        self.value: T | None = None
        self.over = threading.Event()

    def finish(self, value: T | None) -> None:
        self.value = value
        self.over.set()


class History:
    """`clock` is monotonic, `wall` epoch seconds.  Every method but `ask` returns at once."""

    def __init__(self, path: Path, clock: Callable[[], float], wall: Callable[[], float], say: Say, *,
                 keep_s: float = keep_s, queue_jobs: int = 10_000,
                 give_way: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._keep_s, self._give_way = keep_s, give_way
        self._clock, self._wall, self._say = clock, wall, say
        self._limit = queue_jobs
        self._backlog: Backlog[_Job[Any]] = Backlog(queue_jobs)
        self._kept: list[_Job[Any]] = []        # what the disk did not take yet
        self._connection: sqlite3.Connection | None = None
        self._pruned_at = self._complained_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self.lost = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Writes what waits.  False: not within `deadline_s`."""
        self._backlog.close()
        return ended(self._thread, deadline_s) and not self._kept

    def flush(self, deadline_s: float) -> bool:
        """Waits until all that was put is written.  False: not within `deadline_s`, or the disk does not take it."""
        return self._backlog.settled(deadline_s) and not self._kept

    @property
    def waiting(self) -> int:
        """Jobs that are not written yet."""
        return self._backlog.waiting + len(self._kept)

    def reader(self) -> Reader:
        """One whose answers hold all that was put before the question; what the disk does not take yet, they lack."""
        return Reader(self.path, lambda: self.flush(answer_s))

    def record(self, incident: Incident) -> None:
        """Writes the incident as it is now, over what was known of it."""
        self.do(lambda db: _write_incident(db, incident))

    def do(self, work: Callable[[sqlite3.Connection], object]) -> None:
        """Work that nobody waits for."""
        self._backlog.put(_Job(work, asked=False))

    def ask(self, work: Callable[[sqlite3.Connection], T], deadline_s: float) -> T | None:
        """The work's answer once it is committed.  None: it failed, or is not done within `deadline_s` (yet)."""
        job = _Job(work, asked=True)
        if self._backlog.put(job):
            job.over.wait(deadline_s)
        return job.value

    def _run(self) -> None:
        while not self._backlog.over:
            jobs, lost = self._backlog.take(retry_s if self._kept else idle_s)
            self._give_way()
            if lost:
                self._complain("the queue was full", lost)
            self._carry_out(self._kept + jobs)
        self._carry_out(self._kept)     # a last try
        if self._connection:
            self._connection.close()    # the last connection folds the WAL into the file

    def _carry_out(self, jobs: list[_Job[Any]]) -> None:
        """One transaction for all: a batch is as durable as one job, and costs one fsync."""
        self._kept = []
        if not jobs:
            return
        try:
            self._commit(jobs)
        except sqlite3.OperationalError as error:       # locked, full, read-only, I/O error
            self._keep(jobs, str(error))
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            self._replace(str(error), jobs)
        except OSError as error:
            self._keep(jobs, error.strerror or str(error))

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        if self._connection and not self.path.exists():
            self._forget_connection()       # someone removed it: what is written there is nobody's
        if not self._connection:
            self._connection = _open(self.path)
        with self._connection as db:
            db.execute("BEGIN IMMEDIATE")
            answers = [job.work(db) for job in jobs]
            if self._clock() - self._pruned_at >= prune_s:
                self._pruned_at = self._clock()
                _prune(db, self._wall(), self._keep_s)
        for job, answer in zip(jobs, answers, strict=True):
            job.finish(answer)

    def _replace(self, why: str, jobs: list[_Job[Any]]) -> None:
        self._forget_connection()
        try:
            set_aside(self.path, self._wall(), why, self._say)
            self._commit(jobs)
        except (OSError, sqlite3.DatabaseError) as error:
            self._keep(jobs, str(error))

    def _keep(self, jobs: list[_Job[Any]], why: str) -> None:
        self._forget_connection()
        for job in jobs:
            job.finish(None)
        mine = [job for job in jobs if not job.asked]
        self._kept = mine[-self._limit:]
        self._complain(why, len(mine) - len(self._kept))

    def _forget_connection(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

    def _complain(self, why: str, lost: int) -> None:
        self.lost += lost
        if self._clock() - self._complained_at >= complain_s:
            self._complained_at = self._clock()
            self._say("history.failed", file=str(self.path), why=why, waiting=len(self._kept), lost=self.lost)


class Reader:
    """Read-only, a connection a call, so any thread may ask.  Every method raises HistoryError.

    `first` is called before each look at the file."""

    def __init__(self, path: Path, first: Callable[[], object] = lambda: None) -> None:
        self._path, self._first = path, first

    def incidents(self, limit: int = 50) -> list[dict[str, Any]]:
        """The newest first: id, service, engine, class, urgency, wall_opened, wall_resolved (epoch seconds or None)."""
        return self._rows("SELECT id, service, engine, class, urgency, wall_opened, wall_resolved FROM incidents"
                          " ORDER BY wall_opened DESC, id DESC LIMIT ?", max(0, limit))

    def incident(self, id_: str) -> dict[str, Any] | None:
        """The same of one incident, and under `incident` all of it as `core.codec` encodes it.  None: there is none.
        The beginning of an id is enough where only one begins so."""
        rows = self._rows("SELECT * FROM incidents WHERE id = ?1 OR (?1 <> '' AND substr(id, 1, length(?1)) = ?1)"
                          " ORDER BY id = ?1 DESC LIMIT 2", id_)
        if not rows or (len(rows) == 2 and rows[0]["id"] != id_):
            return None
        row = rows[0]
        row["incident"] = json.loads(row.pop("json"))
        return row

    def open_incidents(self) -> tuple[Incident, ...]:
        """As they were written last.  One that cannot be read is left out: it is history, not memory."""
        found = []
        for row in self._rows("SELECT json FROM incidents WHERE wall_resolved IS NULL ORDER BY wall_opened"):
            with suppress(ValueError):
                found.append(CODEC.decode(json.loads(row["json"])))
        return tuple(incident for incident in found if isinstance(incident, Incident))

    def samples(self, name: str, now_wall: float, since: float = 0.0) -> dict[str, Any]:
        """What is newer than `since` of a range of `samples.TIERS`, in columns.  Raises KeyError for another."""
        return samples.read(self._rows, name, now_wall, since)

    def _rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        self._first()
        try:
            self._path.stat()
        except FileNotFoundError:
            return []                   # nothing has happened yet
        except OSError as error:
            raise HistoryError(f"{self._path}: {error.strerror}, expected the history of llm-watchdog") from None
        try:
            db = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=busy_s)
            db.row_factory = sqlite3.Row
            try:
                return [dict(row) for row in db.execute(query, values)]
            finally:
                db.close()
        except sqlite3.DatabaseError as error:
            raise HistoryError(f"{self._path}: {error}, expected the history of llm-watchdog") from None


class HistoryError(Exception):
    """The history cannot be read: one sentence."""


def _open(path: Path) -> sqlite3.Connection:
    """Raises OSError, sqlite3.DatabaseError: also where the integrity check fails."""
    os.close(open_owner_only(path, os.O_RDWR))      # SQLite gives its WAL the mode of the file
    db = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
    try:
        _check(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")     # a delivered alert must stay delivered after a power cut
        db.execute(f"PRAGMA cache_size = -{cache_kib}")
        if db.execute("PRAGMA user_version").fetchone()[0] < VERSION:
            db.execute("DROP TABLE IF EXISTS samples")
        db.executescript(schema)
    except BaseException:
        db.close()
        raise
    return db


def _check(db: sqlite3.Connection) -> None:
    verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if verdict != "ok":
        raise sqlite3.DatabaseError(f"malformed: {verdict}")


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    return "malformed" in str(error) or "not a database" in str(error)


def _write_incident(db: sqlite3.Connection, incident: Incident) -> None:
    db.execute("INSERT OR REPLACE INTO incidents VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
               (incident.id, incident.service, incident.engine, incident.class_, incident.urgency.value,
                incident.wall_opened, incident.wall_resolved, json.dumps(encode(incident))))


def _prune(db: sqlite3.Connection, wall: float, keep_s: float) -> None:
    """The oldest first; an incident that is not over stays."""
    samples.prune(db, wall)
    db.execute("DELETE FROM outbox WHERE wall < ?", (wall - keep_alerts_s,))
    db.execute("DELETE FROM incidents WHERE wall_resolved < ?", (wall - keep_s,))
    db.execute("DELETE FROM incidents WHERE wall_resolved IS NOT NULL AND id IN (SELECT id FROM (SELECT id,"
               " sum(length(json)) OVER newest AS bytes, row_number() OVER newest AS number FROM incidents"
               " WINDOW newest AS (ORDER BY wall_opened DESC, id)) WHERE bytes > ? OR number > ?)",
               (incidents_bytes, keep_incidents))
