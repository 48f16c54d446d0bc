"""Asks the GPU helper process for one sample a wake, and says so when the driver no longer answers.

A silent helper is stuck in the driver: it is SIGKILLed and never waited for, and no second one is started beside it,
because it would only get stuck too.  Blocks its own thread for at most `silence_s` a sample (START_S for the first of
a new helper); no other thread ever waits for the driver.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vllm_watchdog import proc
from vllm_watchdog.core.events import Event, GpusSampled
from vllm_watchdog.core.readings import Gpu, GpuProcess, Holder, Mark, Unknown

HELPER = (sys.executable, "-m", "vllm_watchdog.sense.gpu_helper")
START_S = 20.0          # Python's start on a loaded host, and nvmlInit, which takes seconds without persistence mode
BACKOFF_MAX_S = 60.0    # between helpers that die, and between looks for a driver that is not there
RETELL_S = 60.0         # the same outage is told again this rarely
LINE_LIMIT = 4 << 20    # bytes of one answer; 16 cards with 100 processes each make 100 KiB
UNRESPONSIVE = "GPU driver unresponsive"
RENAME_S = 30.0         # how long a holder's name is believed: vLLM renames its workers while they load


class DiedError(Exception):
    """The helper ended, or wrote what no helper writes."""


class Helper:
    """One helper process.  At most one request is out; its number tells a late answer from the wanted one."""

    def __init__(self) -> None:
        """Raises OSError where no process can be started."""
        self._process = subprocess.Popen(
            HELPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.pid = self._process.pid
        self.condemned = False
        self._seq = 0
        self._rest = b""

    def ask(self, patience_s: float) -> dict[str, Any] | None:
        """The answer to a new request, None after this much silence.  Raises `DiedError`."""
        assert self._process.stdin and self._process.stdout  # noqa: S101 - both are pipes
        self._seq += 1
        try:
            os.write(self._process.stdin.fileno(), b"%d\n" % self._seq)
        except BrokenPipeError:
            raise DiedError from None
        answers, until = self._process.stdout.fileno(), time.monotonic() + patience_s
        # Looks once more when the time is up: it may be ourselves who were stopped.
        while select.select((answers,), (), (), max(0.0, until - time.monotonic()))[0]:
            part = os.read(answers, 65536)
            *lines, self._rest = (self._rest + part).split(b"\n")
            if not part or len(self._rest) > LINE_LIMIT:
                raise DiedError
            for answer in map(json.loads, lines):
                if answer["seq"] == self._seq:
                    return dict(answer)
        return None

    def condemn(self) -> None:
        """SIGKILL, which a process in the driver does not feel; never waited for."""
        self.condemned = True
        self._process.kill()

    def wait(self, deadline_s: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(deadline_s)

    def gone(self) -> bool:
        """Really gone, and its zombie reaped; never blocks."""
        if self._process.poll() is None:
            return False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        return True


class GpuSense:
    """Posts GpusSampled; see the module's head."""

    def __init__(self, post: Callable[[Event], None], clock: Callable[[], float], instance: str, silence_s: float):
        self._post, self._clock, self._silence_s = post, clock, silence_s
        self._holders = Holders(instance, clock)
        self._helper: Helper | None = None
        self._fresh = True              # the helper has not answered yet
        self._failures = 0
        self._retry_at = 0.0
        self._seen_at = clock()         # the last good sample
        self._why = ""                  # why there is none now
        self._told: tuple[float, str, float] | None = None     # the outage last told: since, why, at
        self._woken, self._asked, self._stopping = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="sense-gpu", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self, asked: bool = False) -> None:
        """Take a sample.  `asked`: answer in any case, also when the same outage was told a moment ago."""
        if asked:
            self._asked.set()
        self._woken.set()

    def stop(self, deadline_s: float) -> None:
        """Ends the helper; a stuck one ends with its standard input as soon as the driver lets it go."""
        self._stopping.set()
        self._woken.set()
        self._join(deadline_s / 3)
        if helper := self._helper:
            helper.condemn()
            helper.wait(deadline_s / 3)     # its end is what the thread may be waiting for
            self._join(deadline_s / 3)
            helper.gone()

    def _join(self, deadline_s: float) -> None:
        if self._thread.is_alive():     # a daemon that could not even begin stops what it never started
            self._thread.join(deadline_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._woken.wait(timeout=60) and not self._stopping.is_set():
                self._woken.clear()
                asked = self._asked.is_set()
                self._asked.clear()
                self._tell(self._sample(), asked)

    def _tell(self, reading: tuple[Gpu, ...] | Unknown, asked: bool) -> None:
        """An outage that lasts is one fact, not one a second."""
        at = self._clock()
        if isinstance(reading, Unknown):
            outage, told = (reading.since, self._why), self._told
            if told and told[:2] == outage and at - told[2] < RETELL_S and not asked:
                return
            self._told = (*outage, at)
        self._post(GpusSampled(at, reading))

    def _sample(self) -> tuple[Gpu, ...] | Unknown:
        if self._helper and self._helper.condemned and self._helper.gone():
            self._helper = None
        if self._helper is None and self._clock() >= self._retry_at:
            try:
                self._helper, self._fresh = Helper(), True
            except OSError as error:
                return self._failed(f"the GPU helper can't be started: {error.strerror}")
        if self._helper is None or self._helper.condemned:
            return self._blind()
        try:
            answer = self._helper.ask(START_S if self._fresh else self._silence_s)
        except DiedError:
            return self._failed("the GPU helper died")
        if answer is None:
            return self._failed(UNRESPONSIVE)
        if "unknown" in answer:
            return self._failed(answer["unknown"], retry_s=BACKOFF_MAX_S)
        return self._seen(answer["gpus"])

    def _seen(self, cards: list[dict[str, Any]]) -> tuple[Gpu, ...]:
        self._holders.renew()
        self._fresh, self._failures, self._why, self._told, self._seen_at = False, 0, "", None, self._clock()
        return tuple(
            Gpu(**card | {"processes": tuple(self._holder(row) for row in card["processes"])}) for card in cards
        )

    def _holder(self, row: dict[str, Any]) -> GpuProcess:
        return GpuProcess(self._holders.of(row["pid"]), row["used_bytes"])

    def _failed(self, why: str, retry_s: float | None = None) -> Unknown:
        """The helper is of no more use; the next one after a backoff that doubles."""
        if self._helper:
            self._helper.condemn()
        self._failures += 1
        self._retry_at = self._clock() + (retry_s or min(2.0 ** (self._failures - 1), BACKOFF_MAX_S))
        self._why = why
        return self._blind()

    def _blind(self) -> Unknown:
        why = self._why
        if why == UNRESPONSIVE:
            why += f": no sample for {self._clock() - self._seen_at:.0f} s"
        return Unknown(self._seen_at, why)


class Holders:
    """Name and mark of the processes on the cards, read again every RENAME_S: a read in `/proc` of a stuck process
    can wait for its memory lock, so the fewer the better.  A PID of another PID namespace has neither."""

    def __init__(self, instance: str, clock: Callable[[], float]) -> None:
        self._instance, self._clock = instance, clock
        self._index = proc.MarkIndex(instance)
        self._known: dict[proc.ProcId, tuple[float, Holder]] = {}
        self._walked: dict[proc.ProcId, Mark] | None = None

    def renew(self) -> None:
        """Before each sample: what was believed long enough is read again."""
        at = self._clock()
        self._known = {one: entry for one, entry in self._known.items() if entry[0] > at}
        self._walked = None

    def of(self, pid: int) -> Holder:
        who, at = proc.identify(pid), self._clock()
        if who is None:
            return Holder(pid, "")
        if who not in self._known:
            keep_s = RENAME_S if proc.age_s(who) > proc.YOUNG_S else 0.0
            self._known[who] = (at + keep_s, Holder(pid, proc.title(pid), self._mark(who)))
        return self._known[who][1]

    def _mark(self, who: proc.ProcId) -> Mark | None:
        """vLLM's process titles wipe the environment: then the walk over everything tells."""
        if mark := proc.mark_of(who.pid, self._instance):
            return mark
        if self._walked is None:        # once a sample, however many strangers hold memory
            self._walked = {one: mark for mark, members in self._index.marked().items() for one in members}
        return self._walked.get(who)
