"""Evidence bundles: what the host and the engine looked like at one moment, within a deadline that a kill waits for.

Every part runs in a daemon thread of its own, and only the bundle's thread writes; a part that comes late is named as
missing and what it brings is thrown away.  Whatever goes wrong, `Dumped` is posted: a full disk makes a bundle
without parts, never a crash.  The loop's call starts one thread and returns.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vllm_watchdog.act import bundle
from vllm_watchdog.act.capture import Capture, OverrunError
from vllm_watchdog.act.mask import mask, secrets_of
from vllm_watchdog.act.parts import NAMES, PARTS, AbsentError, Context, Part, Scene
from vllm_watchdog.config_sections import Evidence as Limits
from vllm_watchdog.core.commands import Dump
from vllm_watchdog.core.events import Dumped
from vllm_watchdog.core.units import GIB
from vllm_watchdog.launch import Launch

__all__ = ["Context", "Evidence"]

AT_ONCE = 4  # bundles in progress; with more, a disk or a driver hangs and another would hang too
STUCK = 4  # threads of one part that never came back, before it is given up
SHARE = 0.9  # of the deadline for the parts; the rest is for writing the page about them
CONTENTS = "bundle.txt"
UNHURRIED_S = 0.1  # before a bundle that no kill waits for: the next engine's start needs the interpreter now

Takings = queue.SimpleQueue[tuple[str, str | Exception]]  # a part's name with its text, or with what went wrong


class Evidence:
    """`launches` by engine name; no bundle is written with less than `floor_bytes` free; the folders of
    `open_incidents` stay; `parts` is given only by tests."""

    def __init__(
        self,
        incidents: Path,
        launches: Mapping[str, Launch],
        limits: Limits,
        post: Callable[[Dumped], None],
        clock: Callable[[], float],
        instance: str,
        parts: tuple[Part, ...] = PARTS,
        floor_bytes: int = 0,
        open_incidents: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self._incidents, self._launches, self._post, self._clock = incidents, launches, post, clock
        self.limits, self._instance, self._parts = limits, instance, parts
        self._floor_bytes, self._open_incidents = floor_bytes, open_incidents
        self._capture = Capture()
        self._folders = threading.Lock()
        self._writing: list[str] = []  # incidents into whose folders a bundle is being written
        self._bundles: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._takers: dict[str, list[threading.Thread]] = {part.name: [] for part in parts}

    def start(self) -> None:
        """Nothing runs between dumps."""

    def stop(self, deadline_s: float) -> None:
        """Gives bundles in progress until the deadline."""
        self._stopping.set()
        until = time.monotonic() + deadline_s
        for thread in self._bundles:
            thread.join(max(0.0, until - time.monotonic()))

    def do(self, dump: Dump, context: Context) -> None:
        """-> Dumped.  Never waits."""
        self._bundles = [thread for thread in self._bundles if thread.is_alive()]
        if len(self._bundles) >= AT_ONCE:
            self._tell(dump, "", [f"everything: {AT_ONCE} earlier bundles are not done yet"])
            return
        thread = threading.Thread(target=self._make, args=(dump, context), name=f"bundle-{dump.incident}", daemon=True)
        self._bundles.append(thread)
        thread.start()

    def _make(self, dump: Dump, context: Context) -> None:
        if not dump.stacks:
            self._stopping.wait(UNHURRIED_S)
        launch = self._launches.get(dump.mark.engine) if dump.mark else None
        secrets = secrets_of(launch) if launch else ()
        # Before the disk is touched, which may be slow.
        takings = self._take(Scene(dump, context, launch, self._instance, self._capture), secrets)
        if low := self._low_disk():
            self._tell(dump, "", [f"everything: {low}"])
            return
        try:
            folder = self._open(dump.incident)
        except OSError as error:
            why = error.strerror or str(error)
            self._tell(dump, "", [f"everything: {why}"])
            return
        present, absent, missing = self._collect(dump, takings, folder)
        page = mask(_page(dump, present, absent, missing), secrets)
        if lost := self._write(folder, CONTENTS, page):
            missing.append(f"{CONTENTS}: {lost}")
        self._tell(dump, str(folder) if present or not lost else "", missing)
        self._close(dump.incident)

    def _low_disk(self) -> str:
        """Why no bundle is written: what is left of the disk is for the journal and the engines' logs."""
        try:
            free = shutil.disk_usage(self._incidents.parent).free
        except OSError:
            return ""               # opening the folder will say it better
        low = free < self._floor_bytes
        return f"{free / GIB:.2f} GiB free on the log disk, bundles stop under {self._floor_bytes / GIB:.2f}" if low else ""

    def _open(self, incident: str) -> Path:
        with self._folders:
            folder = bundle.open_folder(self._incidents, incident, NAMES, incident in self._writing)
            self._writing.append(incident)
            return folder

    def _close(self, incident: str) -> None:
        with self._folders:
            self._writing.remove(incident)
            try:
                keep = frozenset((incident, *self._writing)) | self._open_incidents()
                bundle.prune(self._incidents, self.limits.max_bundles, int(self.limits.max_gib * GIB), keep)
            except OSError:
                return  # a folder that can't be removed now is tried again after the next bundle

    def _take(self, scene: Scene, secrets: tuple[str, ...]) -> Takings:
        """Starts every part; each puts its name with its text or with what went wrong."""
        takings: Takings = queue.SimpleQueue()
        for part in self._parts:
            takers = self._takers[part.name] = [taker for taker in self._takers[part.name] if taker.is_alive()]
            if len(takers) >= STUCK:
                takings.put((part.name, OverrunError(f"{len(takers)} earlier attempts never came back")))
                continue
            work = (part, scene, secrets, takings)
            takers.append(threading.Thread(target=_taker, args=work, name=part.name, daemon=True))
            takers[-1].start()
        return takings

    def _collect(
        self, dump: Dump, takings: Takings, folder: Path
    ) -> tuple[list[str], list[str], list[str]]:
        """Writes parts as they come, until all came or the deadline: names present, and absent and missing with why."""
        until = time.monotonic() + dump.deadline_s * SHARE
        waiting = [part.name for part in self._parts]
        present: list[str] = []
        absent: list[str] = []
        missing: list[str] = []
        while waiting:
            try:
                name, taken = takings.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            waiting.remove(name)
            if isinstance(taken, AbsentError):
                absent.append(f"{name}: {taken}")
            elif isinstance(taken, Exception):
                missing.append(f"{name}: {taken}")
            elif why := self._write(folder, name, taken):
                missing.append(f"{name}: {why}")
            else:
                present.append(name)
        missing += [f"{name}: not there in {dump.deadline_s:g} s" for name in waiting]
        return sorted(present), sorted(absent), sorted(missing)

    def _write(self, folder: Path, name: str, text: str) -> str | None:
        """None, or why it could not be written."""
        try:
            bundle.write(folder, name, text)
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _tell(self, dump: Dump, folder: str, missing: list[str]) -> None:
        self._post(Dumped(self._clock(), dump.mark, dump.incident, folder, tuple(missing)))


def _taker(part: Part, scene: Scene, secrets: tuple[str, ...], takings: Takings) -> None:
    deadline_s = min(part.deadline_s, scene.dump.deadline_s * SHARE * SHARE)
    try:
        takings.put((part.name, mask(part.take(scene, deadline_s), secrets)))
    except (OSError, OverrunError, AbsentError) as error:
        takings.put((part.name, error))


def _page(dump: Dump, present: list[str], absent: list[str], missing: list[str]) -> str:
    about = f"# {dump.incident}\n\n{dump.reason}\n\nEngine and generation: {dump.mark or 'none'}\n"
    lists = (("In this folder", present), ("Not on this host", absent), ("Missing", missing))
    return about + "".join(
        f"\n## {heading}\n\n" + "".join(f"- {line}\n" for line in lines) for heading, lines in lists if lines
    )
