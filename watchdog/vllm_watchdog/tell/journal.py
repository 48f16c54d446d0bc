"""The journal: every event and decision, one JSON object a line, `DIR/YYYY-MM-DD.jsonl` (UTC).

Never makes the loop wait: lines go through a bounded queue to a thread of its own; what finds no room is lost, counted,
and a line in its place says how many.  Never fatal: while the disk is full the thread keeps its batch, says so on
standard error once a minute, and tries again each second.  A file that reaches `max_bytes` becomes `YYYY-MM-DD.N.jsonl`
(N counts up); the oldest files go when all together pass `total_bytes`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from vllm_watchdog.core.codec import encode
from vllm_watchdog.core.events import Event
from vllm_watchdog.core.units import iso
from vllm_watchdog.tell.backlog import Backlog, ended
from vllm_watchdog.tell.files import open_owner_only

line_limit = 1 << 20
batch_bytes = 1 << 20           # one write
gather_s = 0.03                 # what a sample brings comes within this, and is one write; what is said is written at once
retry_s = 1.0
complain_s = 60.0

Line = dict[str, Any]
_name = re.compile(r"(\d{4}-\d\d-\d\d)(?:\.(\d+))?\.jsonl")


def to_stderr(text: str) -> None:
    with suppress(OSError):     # nobody reads it any more: that must not end the journal
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class Journal:
    """`clock` is monotonic, `wall` epoch seconds; `tap` gets every line as it is written (it must not block); `give_way` may
    wait for a moment before lines are written."""

    def __init__(self, folder: Path, clock: Callable[[], float], wall: Callable[[], float], *,
                 tap: Callable[[Line], None] | None = None, complain: Callable[[str], None] = to_stderr,
                 max_bytes: int = 64 << 20, total_bytes: int = 1 << 30, queue_lines: int = 10_000,
                 give_way: Callable[[], None] = lambda: None) -> None:
        self._clock, self._wall, self._tap = clock, wall, tap
        self._file = _File(folder, max_bytes, total_bytes)
        self._backlog: Backlog[tuple[float, Event | Line]] = Backlog(queue_lines)
        self._complain, self._give_way = complain, give_way
        self._complained_at = float("-inf")
        self._failures = 0
        self._wake = threading.Event()      # set by stop: a writer that waits out a full disk must not delay it
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.lost = 0                       # lines, since the start

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Writes what waits.  False: not all of it was written within `deadline_s`."""
        self._backlog.close()
        self._wake.set()
        return ended(self._thread, deadline_s) and not self._failures

    @property
    def waiting(self) -> int:
        """Lines that are not written yet; what is being written counts as one."""
        return self._backlog.waiting

    def flush(self, deadline_s: float) -> bool:
        """Waits until every line put so far is in the file.  False: not within `deadline_s`."""
        return self._backlog.settled(deadline_s)

    def event(self, event: Event) -> None:
        """One line of the journal that replays.  Encoded by the journal's thread, for an event is frozen."""
        self._backlog.put((self._wall(), event), at_once=False)

    def say(self, name: str, /, **fields: str | float) -> None:
        self.write({"at": round(self._clock(), 6), "say": name} | fields)

    def write(self, line: Line) -> None:
        """The line as it is, with the wall clock in front.  The caller must not change it afterwards."""
        self._backlog.put((self._wall(), line))

    def _run(self) -> None:
        while not self._backlog.over:
            items, lost = self._backlog.take(gather_s=gather_s)
            self._give_way()
            lines = [self._dressed(wall, item) for wall, item in items]
            if lost:
                self.lost += lost
                lines.append(self._said("journal.lost", lines=lost))
            for chunk in _chunks(map(self._bytes, lines)):
                self._put(chunk)
        self._file.close()

    def _dressed(self, wall: float, item: Event | Line) -> Line:
        body = {"at": item.at, "event": encode(item)} if isinstance(item, Event) else item
        return {"wall": iso(wall)} | body

    def _said(self, name: str, **fields: str | float) -> Line:
        return {"wall": iso(self._wall()), "at": round(self._clock(), 6), "say": name} | fields

    def _bytes(self, line: Line) -> bytes:
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str).encode("utf-8", "replace")
        if len(data) >= line_limit:
            what = line["event"]["_"] if "event" in line else str(line.get("say", "line"))
            line = self._said("journal.line_too_long", what=what[:100], bytes=len(data))
            data = json.dumps(line, separators=(",", ":")).encode()
        if self._tap:
            self._tap(line)
        return data + b"\n"

    def _put(self, data: bytes) -> None:
        """Until all of it is written, from where the last try got to: a line is never written twice or torn."""
        fresh = True
        while data:
            try:
                data = data[self._file.append(data, self._wall(), fresh):]
            except OSError as error:
                self._failed(error)
                if self._backlog.closed:
                    return self._give_up(data)
                self._wake.wait(retry_s)
            else:
                self._failures, fresh = 0, False
        return None

    def _failed(self, error: OSError) -> None:
        self._failures += 1
        if self._clock() - self._complained_at >= complain_s:
            self._complained_at = self._clock()
            self._complain(f"journal: cannot write {self._file.folder}: {error.strerror} "
                           f"({self._failures} tries); trying again each second")

    def _give_up(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self.lost += lines
        self._complain(f"journal: stopped with {lines} lines unwritten")


class _File:
    """The day's file: opened when first needed, again on a new day, at the size limit, or when someone removed it."""

    def __init__(self, folder: Path, max_bytes: int, total_bytes: int) -> None:
        self.folder, self._max, self._total = folder, max_bytes, total_bytes
        self._path, self._descriptor = folder, -1

    def append(self, data: bytes, wall: float, fresh: bool) -> int:
        """How many bytes were written.  `fresh`: `data` begins a line, so it may begin a file.  Raises OSError."""
        path = self.folder / f"{iso(wall)[:10]}.jsonl" if fresh else self._path
        if path != self._path or not self._is_there():
            self._open(path)
        elif fresh and os.fstat(self._descriptor).st_size >= self._max:
            self._retire(path)
            self._open(path)
        return os.write(self._descriptor, data)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def _open(self, path: Path) -> None:
        self.close()
        self._descriptor = open_owner_only(path, os.O_RDWR | os.O_APPEND)
        self._path = path
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")       # a daemon died in the middle of a line: ours begins on its own
        self._prune()

    def _retire(self, path: Path) -> None:
        numbers = [number for day, number, _ in _files(self.folder) if day == path.stem and number != _current]
        path.rename(path.with_name(f"{path.stem}.{max(numbers, default=0) + 1}.jsonl"))

    def _prune(self) -> None:
        files = [(path, path.stat().st_size) for _, _, path in _files(self.folder)]
        total = sum(size for _, size in files)
        for path, size in files[:-1]:               # the last is the one we write
            if total <= self._total:
                return
            path.unlink(missing_ok=True)
            total -= size


_current = sys.maxsize      # the day's unnumbered file is its newest


def _files(folder: Path) -> list[tuple[str, int, Path]]:
    named = ((_name.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((match[1], int(match[2] or _current), path) for match, path in named if match)


def _chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    chunk = bytearray()
    for line in lines:
        chunk += line
        if len(chunk) >= batch_bytes:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def files(folder: Path) -> tuple[Path, ...]:
    """The journal's files, oldest first.  Raises OSError."""
    return tuple(path for _, _, path in _files(folder))


def read(path: Path) -> Iterator[Line]:
    """The lines of a file, or of all files of a folder.  A line that cannot be read (a daemon killed while it wrote it)
    comes as `{"say": "journal.unreadable", "file": …, "line": N}`.  Raises OSError."""
    for file in files(path) if path.is_dir() else (path,):
        with file.open("rb") as lines:
            for number in count(1):
                data = lines.readline(line_limit)
                if not data:
                    break
                yield _parsed(data) or {"say": "journal.unreadable", "file": str(file), "line": number}


def _parsed(data: bytes) -> Line | None:
    try:
        line = json.loads(data)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
