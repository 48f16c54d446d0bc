"""Reads a log line by line and says what went wrong: the same fold serves the live tail and `classify`.

Context decides what a line means: the same OOM text is a start-up error before the engine was ready, a death in a step,
and nothing inside `add_lora`, which vLLM survives.  What follows a requested stop is no symptom, and tokens that flow
again take a stall back.  Pure and bounded: no clock, no I/O.  A finding is evidence; whether to act is the policy's.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_watchdog.core import markers, validation
from vllm_watchdog.core.catalog import CATALOG
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.details import Details, clip, details_of
from vllm_watchdog.core.findings import KERNEL_RANK, NOTHING, STALLS, Finding, Incident, Verdict, judge
from vllm_watchdog.core.kernel import KernelLog
from vllm_watchdog.core.markers import Mark
from vllm_watchdog.core.records import Kind, Record, Stream, parse, stream_of
from vllm_watchdog.core.signatures import ONLY_AT_START, Phase, Row, best_row

__all__ = ["HEAD_LINES", "Finding", "Phase", "Reader", "Stream", "Verdict", "classify"]

CONTEXT_LIMIT = 64      # call sites whose last headline is remembered: processes × sites of one engine
HEAD_LINES = 200        # lines that decide which stream a text is
STALLED = 2             # shm_stall lines in a row, one a minute, before it is more than a slow step
DEADLOCKED = 3          # stats lines in a row, one in 10 s, with waiting requests and nothing running
SILENT = 6              # the same with running requests that get no token; only V0 repeats the line at INFO
ECHO_RANK = 40          # rows up to here only repeat that the engine is gone
SHUTDOWN_EXIT = -15     # a worker ended by SIGTERM is an effect of the shutdown, never a cause


class Reader:
    """The state of one log.  `feed` each line in order; `verdict` may be asked at any time."""

    def __init__(self, stream: Stream | None = None, phase: Phase = Phase.UNKNOWN) -> None:
        self.stream = stream
        self.phase = phase
        self._line = 0
        self._kernel = KernelLog()
        self._incident = Incident()
        self._failed: tuple[Finding, ...] = ()      # the incident before this start
        self._complaint: validation.Complaint | None = None
        self._open: dict[tuple[str, int, str, int], Mark] = {}  # call site -> the headline whose traceback it prints
        self._forget()

    def feed(self, line: str, number: int | None = None) -> Finding | None:
        """What this line newly proves, or None.  Give its `number` where lines were skipped; numbers must grow."""
        self._line = self._line + 1 if number is None else number
        records = parse(line)
        if records[0].kind is Kind.RECORD and not records[0].lineno:
            self._open.pop(records[0].site, None)   # JSON names no line, so each object is a call site of its own
        found = [finding for record in records if (finding := self._read(record))]
        return max(found, key=lambda each: each.rank, default=None)

    def stop_requested(self) -> None:
        """We asked the engine to stop: nothing after this is a symptom, until it starts again."""
        self.phase = Phase.SHUTDOWN

    def started(self) -> None:
        """A new process writes from here on."""
        self._failed = self._incident.fatal(self.phase) or self._failed
        self._forget()
        self._open.clear()
        self.phase = Phase.STARTUP

    def verdict(self) -> Verdict:
        """The cause of the latest failure in what was fed, or the most telling warning where nothing failed."""
        found = self._incident.fatal(self.phase) or self._failed or self._incident.findings(self.phase)
        if not found:
            return replace(NOTHING, phase="any" if self.stream is Stream.KERNEL else self.phase)
        return judge(found)

    # -- one record

    def _read(self, record: Record) -> Finding | None:
        if record.kind is Kind.KERNEL:
            return self._read_kernel(record)
        if self.stream is Stream.KERNEL:
            return None
        if record.kind is Kind.ACCESS:
            self._serving()
            return None
        if mark := markers.mark_of(record):
            self._note(mark, record)
        if self.phase is Phase.SHUTDOWN:
            return None
        if stats := markers.stats_of(record):
            return self._read_stats(stats)
        if mark is Mark.UTILITY_FAILED and "wake_up" in record.message:
            return self._prove("wake_failed", 88, record.message)
        row = best_row(record, self.phase)
        whole = self._hear(record)      # what has a row of its own, too, says more by that
        found = self._judge(row, record) if row else None
        return found or whole

    def _hear(self, record: Record) -> Finding | None:
        """A validation error is told over several lines: the finding of its headline, once it is whole."""
        before = self._complaint
        said = validation.heard(before, record, self._line) if before else None
        self._complaint = validation.begun(record, self._line) or said
        if before is None or said is None or said.told == before.told:
            return None
        return self._incident.complete("bad_args", said.line, clip(said.text), said.details)

    def _judge(self, row: Row, record: Record) -> Finding | None:
        """What the context leaves of a matching line."""
        context = self._open.get(record.site)
        echo = self._engine_asked and row.class_ == "engine_dead_v1" and row.rank <= ECHO_RANK
        if context is Mark.REQUEST_FAILED or echo:
            return None
        if row.class_ == "shm_stall":
            return self._read_stall(record)
        if row.recoverable and context is Mark.UTILITY_FAILED:
            return None
        if row.recoverable and (context is Mark.WORKER_FAILED or (record.raw and self.phase is Phase.SERVING)):
            self._incident.suspect(self._finding(row.class_, row.rank, record.message))
            return None
        return self._prove(row.class_, row.rank, record.message)

    def _prove(self, class_: str, rank: int, message: str) -> Finding | None:
        finding = self._finding(class_, rank, message)
        if dict(finding.details).get("exit_code") == SHUTDOWN_EXIT:
            return None
        return self._incident.keep(finding, self.phase)

    def _finding(self, class_: str, rank: int, message: str, facts: Details | None = None) -> Finding:
        entry = CATALOG["oom_runtime" if class_ == "oom" else class_]
        found = details_of(message) if facts is None else facts
        return Finding(class_, entry.severity, entry.action, self._line, clip(message), found, self.phase, rank)

    # -- phases

    def _note(self, mark: Mark, record: Record) -> None:
        """What the milestones of vLLM's life mean for the lines that follow."""
        if mark in markers.HEADLINES:
            self._open[record.site] = mark
            if len(self._open) > CONTEXT_LIMIT:
                del self._open[next(iter(self._open))]
        if mark is Mark.UTILITY_FAILED:
            self._incident.survived()
        elif mark in markers.STOPS:
            self._note_stop(mark)
        elif mark in markers.STARTS:
            self._note_start(mark)
        elif mark in (Mark.STEP_FAILED, Mark.IN_REQUEST):
            self._serving()

    def _note_start(self, mark: Mark) -> None:
        again = self.phase is Phase.SHUTDOWN or (self.phase is Phase.SERVING and self._is_dead())
        if mark is Mark.READY:
            self._came_up()
        elif mark is Mark.START or (mark is Mark.INITIALIZING and again):
            self.started()
        elif self.phase is Phase.UNKNOWN or (mark is Mark.START_FAILED and self.phase is not Phase.SHUTDOWN):
            self.phase = Phase.STARTUP

    def _note_stop(self, mark: Mark) -> None:
        if mark is Mark.ENGINE_STOP:
            self._engine_asked = not self._is_dead()
        elif mark is Mark.STOP or not self._is_dead():
            if self._engine_asked:
                self._incident.clear()      # one signal for the whole group, and the engine was faster
            self.stop_requested()

    def _serving(self) -> None:
        if self.phase is Phase.UNKNOWN:     # the text began inside a request's traceback
            self._incident.drop(ONLY_AT_START)
        if self.phase in (Phase.UNKNOWN, Phase.STARTUP):
            self.phase = Phase.SERVING

    def _came_up(self) -> None:
        """Ready: whatever went wrong on the way did not stop it."""
        if self.phase is Phase.STARTUP:
            self._forget()
        elif self.phase is Phase.SHUTDOWN:
            self.started()
        self.phase = Phase.SERVING
        self._progress()

    def _progress(self) -> None:
        """Tokens flow: a stall is over, and an error that vLLM may survive was survived."""
        self._stalls = self._zeros = self._silent = 0
        self._incident.survived()
        self._incident.drop(STALLS)

    def _is_dead(self) -> bool:
        return bool(self._incident.fatal(self.phase))

    def _forget(self) -> None:
        self._incident.clear()
        self._engine_asked = False  # the engine core was signalled: alone, or with the whole group
        self._stalls = self._zeros = self._silent = 0

    # -- what only repetition proves

    def _read_stall(self, record: Record) -> Finding | None:
        """One message of a blocked queue is a slow step; before the engine is ready it is the compiler."""
        if self.phase is Phase.STARTUP:
            return None
        self._stalls += 1
        return self._prove("shm_stall", 10, record.message) if self._stalls >= STALLED else None

    def _read_stats(self, stats: markers.Stats) -> Finding | None:
        self._serving()
        if stats.tokens_per_s > 0:
            self._progress()
        self._zeros = self._zeros + 1 if stats.deadlocked else 0
        self._silent = self._silent + 1 if stats.silent else 0
        if self._zeros >= DEADLOCKED:
            return self._prove("scheduler_deadlock", 52, stats.text)
        if self._silent >= SILENT:
            return self._prove("engine_stall", 58, stats.text)
        return self._prove("kv_pressure", 8, stats.text) if stats.preemptions else None

    # -- the kernel

    def _read_kernel(self, record: Record) -> Finding | None:
        if self.stream is Stream.ENGINE and not record.process:     # text that only looks like the kernel's
            return None
        class_, facts = self._kernel.read(record.message)
        if "recovery_action" in dict(facts):    # the driver's own verdict replaces what the table made of that GPU
            self._incident.drop(("xid_node", "xid_reset", "xid_other"), dict(facts)["pci"])
        if not class_:
            return None
        finding = self._finding(class_, KERNEL_RANK[class_], record.message, facts)
        self._incident.keep(finding, self.phase)
        return finding      # each one: the kernel log has no incidents of its own


def classify(lines: Iterable[str], stream: Stream | None = None) -> Verdict:
    """The verdict over whole lines; the stream is told from the first `HEAD_LINES` of them where it is not given."""
    source = iter(lines)
    head = [line for _, line in zip(range(HEAD_LINES), source, strict=False)]
    reader = Reader(stream or stream_of(head))
    for part in (head, source):
        for line in part:
            reader.feed(line)
    return reader.verdict()
