"""Reads one engine's log as it grows, and tells what it proves about the generation that writes it.

Posts LogRead where there are findings, and when a dead generation's log is read to its end.  A fatal finding waits for
the end of its burst, so that a whole traceback is in one event.  Looks when inotify says so, and by the clock all the same
(it misses what a rotation does); reads at most TURN_BLOCKS a turn; blocks its own thread only, on local files.  The offset
is on disk, so a new daemon reads on: after a `kill -9` between the two writes at worst the lines of the last findings are
told again, none is lost.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from vllm_watchdog.core.catalog import Severity
from vllm_watchdog.core.events import Event, LogRead, MemberDied
from vllm_watchdog.core.last_words import TAIL_BYTES, last_words
from vllm_watchdog.core.loading import stage_of
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.signatures import Phase
from vllm_watchdog.core.verdict import Finding, Reader, Stream
from vllm_watchdog.sense.bell import Bell
from vllm_watchdog.sense.logfile import BLOCK, LogFile
from vllm_watchdog.sense.place import Place, end_of, load, save
from vllm_watchdog.sense.scan import Scanner

LOOK_S = 0.2            # between looks at a quiet file where inotify does not tell
SURE_S = 0.5            # ... and where it does
QUIET_S = 0.01          # no new bytes for this long: the burst is over; a traceback is written within microseconds
BURST_S = 0.5           # ... and it is told no later than this
SAVE_S = 10.0           # what is read twice after a kill -9 had nothing to tell: findings are saved with the place at once
DRAIN_S = 3.0           # less than Limits.settle_s: an orphan that floods the log must not hold up the funeral
TURN_BLOCKS = 4         # 1 MiB, some 3 ms of scanning
PENDING = 64            # findings of one burst; each class is found once, but kernel lines every time
BEHIND = 512 << 20      # bytes unread; a log of nothing but candidates is read at some 5 MB/s, so skip what is older
ROTATE_RETRY_S = 60.0

log = logging.getLogger(__name__)


class LogTail:
    """`path`: the engine's log; `offset_path`: where the place is kept; rotated at `rotate_bytes`, `keep` old ones;
    `give_way` may wait for a moment before the place is saved."""

    def __init__(
        self, engine: str, path: Path, offset_path: Path, post: Callable[[Event], None], clock: Callable[[], float],
        rotate_bytes: int = 64 << 20, keep: int = 5, give_way: Callable[[], None] = lambda: None,
    ):
        self._post, self._clock, self._give_way = post, clock, give_way
        self._place_path, self._rotate_bytes, self._keep = offset_path, rotate_bytes, keep
        self._file = LogFile(path)
        self._mark: Mark | None = None
        self._reader, self._scanner = Reader(Stream.ENGINE), Scanner()
        self._since = 0                 # where the followed generation begins, if it began while we looked
        self._begun: Place | None = None    # where the newest one began, by the thread that started it
        self._partial = 0               # bytes read of a line that has no end yet
        self._pending: list[Finding] = []
        self._found_at = self._grew_at = self._rotate_at = self._save_at = 0.0
        self._saved: Place | None = None
        self._trouble = ""
        self.stage = ""                 # what the followed generation is loading; anybody may read it
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._bell, self._stopping = Bell(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log-{engine}", daemon=True)

    def start(self) -> None:
        self._saved = load(self._place_path)
        self._thread.start()

    def follow(self, mark: Mark) -> None:
        """What is written from now on is this generation's; call it before the spawn.

        Where a place is kept of this very generation (an adopted engine), reading goes on there.
        """
        self._order(partial(self._follow, mark))

    def begins(self, mark: Mark) -> None:
        """A followed generation is spawned in a moment: its log begins here, however late our own thread gets to it.

        For the thread that spawns; blocks on local files.
        """
        self._begun = end_of(self._file.path, mark)

    def drain(self, mark: Mark) -> None:
        """The generation is dead: read to the end, tell what is left -> LogRead(drained=True)."""
        self._order(partial(self._drain, mark))

    def asked_to_stop(self, mark: Mark) -> None:
        """We asked this generation to leave: what it writes about that is no symptom."""
        self._order(partial(self._asked_to_stop, mark))

    def member_died(self, event: MemberDied) -> None:
        """Posts it when what was written before is told; not of a server that somebody has asked to stop: it ends them."""
        self._order(partial(self._member_died, event))

    def stop(self, deadline_s: float) -> None:
        self._stopping.set()
        self._bell.ring()
        if self._thread.is_alive():     # a daemon that could not even begin stops what it never started
            self._thread.join(deadline_s)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        self._bell.ring()

    # -- everything below runs in the thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            while not self._orders.empty():
                self._orders.get()()
            more = self._mark is not None and self._turn()
            more = self._bell.listen(str(self._file.path), self._file.inode) or more
            self._bell.wait(0 if more else QUIET_S / 2 if self._pending else SURE_S if self._bell.armed else LOOK_S)
        self._tell()
        self._save()
        self._file.close()
        self._bell.close()

    def _turn(self) -> bool:
        """One bounded step.  True: there may be more to read at once."""
        self._complain()
        self._skip_what_is_too_much()
        more = self._read_on()
        at = self._clock()
        if self._pending and (at - self._grew_at >= QUIET_S or at - self._found_at >= BURST_S or not self._fatal()):
            self._tell()
        if at >= self._save_at and not self._pending:
            self._save()
        if self._file.size >= self._rotate_bytes and at >= self._rotate_at:
            self._rotate()
        return more

    def _read_on(self) -> bool:
        """What is there, a bounded part of it.  True: there may be more."""
        return all(self._read() for _ in range(TURN_BLOCKS))    # ends at the first empty read

    def _read(self) -> bool:
        """One block."""
        at = self._file.offset
        block = self._file.read(self._left())
        if self._file.offset < at + len(block):     # it began anew: by the place that is kept, what is new would be skipped
            self._save_at = 0.0
        if not block:
            return False
        self._grew_at = self._clock()
        newline = block.rfind(b"\n")
        self._partial = len(block) - newline - 1 + (self._partial if newline < 0 else 0)
        for number, line in self._scanner.feed(block):
            self._feed(number, line)
        return True

    def _left(self) -> int:
        """Bytes until the next generation begins, if that has begun already."""
        begun = self._begun
        if begun is None or begun.mark == self._mark or begun.inode != self._file.inode or self._file.rotating:
            return BLOCK
        return max(0, begun.offset - self._file.offset)

    def _feed(self, number: int, line: str) -> None:
        self.stage = stage_of(line) or self.stage
        if (finding := self._reader.feed(line, number)) and len(self._pending) < PENDING:
            if not self._pending:
                self._found_at = self._clock()
            self._pending = [each for each in self._pending if (each.class_, each.line) != (finding.class_, finding.line)]
            self._pending.append(finding)

    def _fatal(self) -> bool:
        return any(finding.severity is Severity.FATAL for finding in self._pending)

    def _tell(self, ending: tuple[str, ...] | None = None) -> None:
        """With its `ending` the generation is dead, and its log was read to the end."""
        findings, self._pending = tuple(self._pending), []
        drained = ending is not None
        if self._mark and (findings or drained):
            self._post(LogRead(self._clock(), self._mark, findings, drained, ending or ()))
            if drained:     # else a drain, which a start waits for, may come next
                self._give_way()
            self._save()

    # -- orders

    def _follow(self, mark: Mark) -> None:
        if mark == self._mark:
            return
        if self._mark:
            self._read_to_end()
            self._tell()
        end = end_of(self._file.path, mark)     # first: if it begins only now, it does so here, or after
        self._begin(next((place for place in (self._begun, self._saved) if place and place.mark == mark), end))

    def _begin(self, place: Place) -> None:
        self._mark, self._scanner, self._partial, self.stage = place.mark, Scanner(), 0, ""
        self._reader = Reader(Stream.ENGINE, Phase(place.phase))
        self._scanner.lines = place.lines
        self._file.close()      # the path may lead to another file by now
        # Another inode, or a file that is shorter: it was rotated meanwhile, so all that is there is new.
        known = place.inode == self._file.inode and place.offset <= self._file.size
        self._file.offset = place.offset if known else 0
        self._since = 0 if place is self._saved else self._file.offset
        self._save()

    def _drain(self, mark: Mark) -> None:
        if mark != self._mark and self._saved and self._saved.mark == mark:
            self._begin(self._saved)
        if mark != self._mark:
            self._post(LogRead(self._clock(), mark, (), True))     # nothing was ever read of it
            return
        self._read_to_end()
        self._tell(last_words(self._file.tail(self._since, TAIL_BYTES).decode("utf-8", "replace")))

    def _read_to_end(self) -> None:
        until = self._clock() + DRAIN_S
        while self._read() and self._clock() < until:
            pass
        for number, line in self._scanner.finish():
            self._feed(number, line)
        self._partial = 0

    def _asked_to_stop(self, mark: Mark) -> None:
        if mark == self._mark:
            self._read_on()         # what it wrote until now is no answer to us
            self._reader.stop_requested()

    def _member_died(self, event: MemberDied) -> None:
        if event.mark == self._mark:
            self._read_on()
            self._tell()
            if self._reader.phase is Phase.SHUTDOWN:
                return
        self._post(replace(event, at=self._clock()))

    # -- limits

    def _complain(self) -> None:
        """A log that can't be read costs its findings, never the watching: said once."""
        trouble = self._file.trouble
        if trouble and trouble != self._trouble:
            log.warning("log.unreadable path=%s error=%s", self._file.path, trouble)
        self._trouble = trouble

    def _skip_what_is_too_much(self) -> None:
        if not self._file.rotating and (unread := self._file.size - self._file.offset) > BEHIND:
            log.warning("log.skipped path=%s bytes=%d", self._file.path, unread)
            self._file.skip_to_end()

    def _rotate(self) -> None:
        try:
            self._file.rotate(self._keep)
            self._since = 0
        except OSError as error:
            log.warning("log.rotate_failed path=%s error=%s", self._file.path, error.strerror)
            self._rotate_at = self._clock() + ROTATE_RETRY_S

    # -- the place

    def _save(self) -> None:
        self._save_at = self._clock() + SAVE_S
        if self._mark is None or self._file.rotating:
            return
        offset = max(0, self._file.offset - self._partial)
        place = Place(
            self._mark.engine, self._mark.generation, self._file.inode, offset, self._scanner.lines, self._reader.phase
        )
        if place == self._saved:
            return
        try:
            save(place, self._place_path)
        except OSError as error:
            log.warning("log.place_not_saved path=%s error=%s", self._place_path, error.strerror)
            return
        self._saved = place
