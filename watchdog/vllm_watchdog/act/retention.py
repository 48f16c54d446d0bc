"""What of ours leaves the log disk: what is older than `days`, each hour; and the oldest first, when an engine can't start.

Each writer bounds the size of its own files (journal, bundles, rotated logs, history); this bounds their age, and makes
room on a full disk.  Removes nothing but files and folders that are named like ours; never the folder of an open
incident, the journal's newest file, or a log that an engine writes.  Blocks on the disk alone, in the thread of whoever
asks.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from vllm_watchdog.act.bundle import INCIDENT
from vllm_watchdog.core.units import DAY_S
from vllm_watchdog.say import Say

SWEEP_S = 3600.0
ROTATED = re.compile(r"[\w-]+\.log\.\d+|[\w.]+\.corrupt-\w+")
JOURNAL = re.compile(r"\d{4}-\d\d-\d\d(\.\d+)?\.jsonl")


class Retention:
    """`open_incidents`: ids of those that are not over."""

    def __init__(self, logs: Path, days: float, wall: Callable[[], float], open_incidents: Callable[[], frozenset[str]],
                 say: Say) -> None:
        self._logs, self._days, self._wall = logs, days, wall
        self._open_incidents, self._say = open_incidents, say
        self._one_at_a_time = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="retention", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(deadline_s)

    def _run(self) -> None:
        self.sweep()
        while not self._stopping.wait(SWEEP_S):
            self.sweep()

    def sweep(self) -> None:
        """What is too old goes."""
        before = self._wall() - self._days * DAY_S
        self._remove("retention.expired", lambda mtime: mtime < before)

    def make_room(self, wanted: int) -> None:
        """The oldest go until `wanted` bytes are free, or until nothing is left that may go."""
        self._remove("retention.made_room", lambda _: shutil.disk_usage(self._logs).free < wanted)

    def _remove(self, what: str, due: Callable[[float], bool]) -> None:
        removed = []
        with self._one_at_a_time, suppress(OSError):        # a disk that can't be looked at is looked at again in an hour
            for mtime, path in sorted(self._ours()):
                if not due(mtime):
                    break
                with suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                    removed.append(path.name)
        if removed:
            self._say(what, count=len(removed), oldest=removed[0], newest=removed[-1])

    def _ours(self) -> Iterator[tuple[float, Path]]:
        """Everything that may go, with the instant it was last written."""
        kept = self._open_incidents()
        folders = (path for path in _named(self._logs / "incidents", INCIDENT) if path.name not in kept)
        journal = sorted(_named(self._logs / "journal", JOURNAL), key=_mtime)[:-1]
        for path in (*folders, *journal, *_named(self._logs, ROTATED)):
            yield _mtime(path), path


def _named(folder: Path, name: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.iterdir() if name.fullmatch(path.name)] if folder.is_dir() else []


def _mtime(path: Path) -> float:
    return path.lstat().st_mtime
