"""What the daemon's journal says from now on: its own instants, so that looking late changes no figure.

A journal line's `at` is the monotonic clock, which all processes of a host share.  Blocks on small local reads only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_watchdog.tell.journal import files

SAY, READY = b'"say":', b'"say":"engine.ready"'
RECENT = 3              # files of the journal, of 64 MiB at most

Line = dict[str, Any]


class Said:
    """`lines` are those said since it was made, the oldest first; `read` adds the new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[int, int] = {}      # by inode: a file that is rotated keeps its place
        self.lines: list[Line] = []
        for path in self._files():
            stat = path.stat()
            self._offsets[stat.st_ino] = stat.st_size

    def read(self) -> list[Line]:
        """All lines so far."""
        for path in self._files():
            with suppress(FileNotFoundError), path.open("rb") as file:
                self._take(file.fileno(), file)
        return self.lines

    def first(self, signs: Iterable[str], since: float) -> Line | None:
        """The first line since then that is one of `signs`: `NAME`, `NAME CLASS`, or `NAME URGENCY`."""
        wanted = [sign.partition(" ") for sign in signs]
        return next((line for line in self.lines if line["at"] >= since and any(
            line["say"] == name and (not word or word in (line.get("class_"), line.get("urgency")))
            for name, _, word in wanted)), None)

    def all(self, name: str, since: float) -> Iterator[Line]:
        return (line for line in self.lines if line["say"] == name and line["at"] >= since)

    def loads(self) -> dict[str, float]:
        """How long each engine took to load when that was last seen, in seconds; the journal outlives its daemons."""
        found = {}
        for path in self._files()[-RECENT:]:
            with suppress(OSError), path.open("rb") as file:
                for data in file:
                    if READY in data and (line := _line(data)):
                        found[line["engine"].partition("#")[0]] = float(line["after_s"])
        return found

    def _files(self) -> tuple[Path, ...]:
        try:
            return files(self._folder)
        except FileNotFoundError:
            return ()

    def _take(self, descriptor: int, file: Any) -> None:
        inode = Path(f"/proc/self/fd/{descriptor}").stat().st_ino
        file.seek(self._offsets.get(inode, 0))
        for data in file:
            if not data.endswith(b"\n"):
                break               # the rest of it is still being written
            self._offsets[inode] = self._offsets.get(inode, 0) + len(data)
            if SAY in data and (line := _line(data)):
                self.lines.append(line)


def _line(data: bytes) -> Line | None:
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "say" in line else None
