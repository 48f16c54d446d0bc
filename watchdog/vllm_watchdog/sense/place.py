"""How far the log of one generation was read, kept on disk for the next daemon.  Blocks on local files only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.signatures import Phase


@dataclass(frozen=True, slots=True)
class Place:
    """Whole lines only, up to `offset`."""

    engine: str
    generation: int
    inode: int
    offset: int
    lines: int
    phase: str

    @property
    def mark(self) -> Mark:
        return Mark(self.engine, self.generation)


def end_of(log: Path, mark: Mark) -> Place:
    """The end of a log as it is now, for a generation that has written nothing yet; inode 0: there is no log."""
    try:
        there = log.stat()
    except OSError:
        return Place(mark.engine, mark.generation, 0, 0, 0, Phase.STARTUP)
    return Place(mark.engine, mark.generation, there.st_ino, there.st_size, 0, Phase.STARTUP)


def save(place: Place, path: Path) -> None:
    """Atomic; not flushed to the disk, since a crash of the host ends the engine, too.  Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(json.dumps(asdict(place)))
    fresh.replace(path)


def load(path: Path) -> Place | None:
    """None where nothing readable was kept."""
    try:
        place = Place(**json.loads(path.read_text()))
        Phase(place.phase)
    except (OSError, ValueError, TypeError):
        return None
    return place
