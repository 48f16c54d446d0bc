"""A week of figures for the plots: each second of the last ten minutes in memory, the rest thinned as it is written.

A thinned row stands for all of its slot: the highest of each level (peaks are what kills), the mean of each rate.  So a week
is read in well under a second.  `Samples.take` is called by one thread and never waits; anybody may read.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_watchdog.tell.track import Track

KEPT_S = 600.0                      # in memory, as sampled
KEPT_ROWS = 1_200                   # ... but no more of one subject: two a second
WALL = "t"                          # the column of the instant
RATES = frozenset({"tokens_per_s", "cpu"})


@dataclass(frozen=True, slots=True)
class Tier:
    """Rows of `step_s`, kept for `keep_s`."""

    name: str
    step_s: float
    keep_s: float


TIERS = (Tier("6h", 10.0, 6 * 3600.0), Tier("7d", 120.0, 7 * 86_400.0))
RECENT = "10m"

schema = """
CREATE TABLE IF NOT EXISTS samples (
    tier TEXT, subject TEXT, slot INTEGER, figures TEXT, PRIMARY KEY (tier, slot, subject)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """`subject`: engine/NAME, gpu/INDEX; `wall` epoch seconds; `figures` by name, what is not known left out."""

    subject: str
    wall: float
    figures: Mapping[str, float]


@dataclass(slots=True)
class _Slot:
    """What one slot of one subject has seen so far."""

    number: int
    highest: dict[str, float] = field(default_factory=dict)
    summed: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            if name in RATES:
                total, count = self.summed.get(name, (0.0, 0))
                self.summed[name] = (total + value, count + 1)
            else:
                self.highest[name] = max(value, self.highest.get(name, value))

    def figures(self) -> dict[str, float]:
        return self.highest | {name: round(total / count, 3) for name, (total, count) in self.summed.items()}


class Samples:
    """`do` hands a job to the one who writes the history."""

    def __init__(self, do: Callable[[Callable[[sqlite3.Connection], object]], None]) -> None:
        self._do = do
        self._slots: dict[tuple[Tier, str], _Slot] = {}
        self._recent: dict[str, Track] = {}
        self._lock = threading.Lock()       # over the recent ones, for copying them

    def start(self) -> None:
        """It has no thread of its own."""

    def take(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            with self._lock:
                if sample.subject not in self._recent:
                    self._recent[sample.subject] = Track(KEPT_ROWS)
                self._recent[sample.subject].append({WALL: sample.wall, **sample.figures})
            for tier in TIERS:
                self._thin(tier, sample)

    def _thin(self, tier: Tier, sample: Sample) -> None:
        number = int(sample.wall // tier.step_s)
        slot = self._slots.get((tier, sample.subject))
        if slot is None or slot.number != number:
            if slot is not None:
                self._write(tier, sample.subject, slot)
            slot = self._slots[tier, sample.subject] = _Slot(number)
        slot.add(sample.figures)

    def _write(self, tier: Tier, subject: str, slot: _Slot) -> None:
        row = (tier.name, subject, slot.number, json.dumps(slot.figures()))
        self._do(lambda db: db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", row))

    def stop(self, _: float = 0.0) -> None:
        """Writes the slots that are not full yet."""
        for (tier, subject), slot in self._slots.items():
            self._write(tier, subject, slot)
        self._slots.clear()

    def recent(self, now_wall: float, since: float = 0.0) -> dict[str, Any]:
        """What is newer than `since` of the last ten minutes, as `columns` does."""
        with self._lock:
            tracks = {subject: track.copy() for subject, track in self._recent.items()}
        kept = ((subject, round(row.pop(WALL), 3), row)
                for subject, track in tracks.items() for row in track.rows(WALL, max(since, now_wall - KEPT_S)))
        return columns(RECENT, 1.0, kept)


def read(rows: Callable[..., Sequence[Mapping[str, Any]]], name: str, now_wall: float,
         since: float = 0.0) -> dict[str, Any]:
    """What is newer than `since` (epoch seconds) of one tier, as `columns` does.

    `rows` runs a query.  Raises KeyError for a range that is not kept on disk.
    """
    tier = {tier.name: tier for tier in TIERS}[name]
    oldest = int(max(since + tier.step_s, now_wall - tier.keep_s) // tier.step_s)
    found = rows("SELECT subject, slot, figures FROM samples WHERE tier = ? AND slot >= ? ORDER BY slot", name, oldest)
    kept = ((row["subject"], row["slot"] * tier.step_s, json.loads(row["figures"])) for row in found)
    return columns(name, tier.step_s, kept)


def columns(name: str, step_s: float, rows: Iterable[tuple[str, float, Mapping[str, float]]]) -> dict[str, Any]:
    """`{"range", "step_s", "series": {subject: {"t": [epoch seconds], FIGURE: [value or null]}}}`, oldest first."""
    series: dict[str, dict[str, list[float | None]]] = {}
    for subject, wall, figures in rows:
        one = series.setdefault(subject, {"t": []})
        count = len(one["t"])
        one["t"].append(wall)
        for figure, value in figures.items():
            column = one.setdefault(figure, [])
            column.extend([None] * (count - len(column)))
            column.append(value)
    for one in series.values():
        for column in one.values():
            column.extend([None] * (len(one["t"]) - len(column)))
    return {"range": name, "step_s": step_s, "series": series}


def prune(db: sqlite3.Connection, wall: float) -> None:
    for tier in TIERS:
        db.execute("DELETE FROM samples WHERE tier = ? AND slot < ?",
                   (tier.name, int((wall - tier.keep_s) // tier.step_s)))
