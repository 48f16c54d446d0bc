"""Control groups (v2) of our own: one for each generation of an engine, below the group that systemd delegated to us.

    UNIT/daemon/            the daemon: a group that has controllers for those below it may hold no process itself
    UNIT/primary.3/         generation 3 of the engine `primary`, whatever it forks and however it hides

Small files that the kernel makes up: nothing here waits.  Without a delegated group there is none of this, and whoever
asks is told why in a sentence; processes are then known by their marks alone, which always hold as well.

Controllers (memory, cpu) are turned on only where systemd itself starts us in a group below, `boot/` (DelegateSubgroup=,
from 254 on): an older one could not start the next daemon beside engines that live on in groups with controllers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.say import Say

LEAF, BOOT = "daemon", "boot"
CONTROLLERS = ("memory", "cpu")
DELEGATED = ("user.delegate", "trusted.delegate")       # what systemd marks a delegated group with: from 251 on, and before
LEAF_MEMORY = 128 << 20         # the daemon's own needs, spared when the host is short
LEAF_WEIGHT = 1000              # against 100 of each engine: a daemon was seen without a processor for 25 s


class NoGroupsError(Exception):
    """Why there are no groups of our own: one sentence."""


@dataclass(frozen=True, slots=True)
class Group:
    """The group of one generation."""

    path: Path

    def kill(self) -> None:
        """SIGKILL to every process in it, at once: nothing forks out of it.  Linux 5.14 or newer, else nothing happens."""
        _write(self.path / "cgroup.kill", "1")

    @property
    def populated(self) -> bool:
        """Does any process live in it?  A group that is gone is empty."""
        return _fields(self.path / "cgroup.events").get("populated") == 1

    @property
    def memory_bytes(self) -> int | None:
        """What its processes are charged with, page cache included; None without the controller."""
        text = _read(self.path / "memory.current").strip()
        return int(text) if text.isdecimal() else None

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel has ended for memory; 0 without the controller."""
        return _fields(self.path / "memory.events").get("oom_kill", 0)

    def remove(self) -> None:
        """Where it is empty."""
        try:
            self.path.rmdir()
        except OSError:
            return      # the next start of a daemon sweeps


class Groups:
    """All of ours, below `root`."""

    def __init__(self, root: Path, memory: bool, say: Say) -> None:
        self.root, self.memory, self._say = root, memory, say

    def create(self, mark: Mark, memory_max: int | None = None) -> Group | None:
        """A new group; None where there can be none, which is said: the engine starts all the same."""
        group = Group(self._path(mark))
        try:
            group.path.mkdir(exist_ok=True)
            if memory_max is not None and self.memory:
                (group.path / "memory.max").write_text(str(memory_max))
                (group.path / "memory.oom.group").write_text("1")       # half an engine serves nobody
        except OSError as error:
            self._say("cgroup.failed", engine=str(mark), why=f"{error.filename}: {error.strerror}")
            return None
        return group

    def find(self, mark: Mark) -> Group | None:
        path = self._path(mark)
        return Group(path) if path.is_dir() else None

    def _path(self, mark: Mark) -> Path:
        return self.root / f"{mark.engine}.{mark.generation}"       # a name of an engine holds no dot

    def inhabitants(self) -> dict[int, Mark]:
        """The PIDs in all groups of engines.  0 stands for each process of another PID namespace, and is nobody's number."""
        found = {}
        for path, mark in self._engines():
            for pid in _read(path / "cgroup.procs").split():
                if int(pid) > 1:
                    found[int(pid)] = mark
        return found

    def sweep(self) -> None:
        """Removes what is empty."""
        for path, _ in self._engines():
            Group(path).remove()

    def _engines(self) -> list[tuple[Path, Mark]]:
        try:
            names = [entry.name for entry in os.scandir(self.root) if entry.is_dir()]
        except OSError:
            return []
        parts = [name.rpartition(".") for name in names]
        return [(self.root / f"{name}.{number}", Mark(name, int(number)))
                for name, _, number in parts if name and number.isdecimal()]


def claim(say: Say, proc: Path = Path("/proc/self")) -> Groups:
    """Makes the delegated group ours, and moves this process into its leaf.  Raises NoGroupsError."""
    own = _own(proc)
    root = own.parent if own.name == BOOT else own
    if not _delegated(root):
        raise NoGroupsError(f"the control group {root} is not delegated to us (Delegate=yes)")
    leaf = root / LEAF
    try:
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text("0")
    except OSError as error:
        raise NoGroupsError(f"{error.filename or leaf}: {error.strerror}") from None
    on = [name for name in CONTROLLERS if own.name == BOOT and _write(root / "cgroup.subtree_control", f"+{name}")]
    if "memory" in on:
        _write(leaf / "memory.low", str(LEAF_MEMORY))
    if "cpu" in on:
        _write(leaf / "cpu.weight", str(LEAF_WEIGHT))
    groups = Groups(root, "memory" in on, say)
    groups.sweep()
    return groups


def _own(proc: Path) -> Path:
    """The folder of our group.  Raises NoGroupsError."""
    mounted = [fields for line in _read(proc / "mountinfo").splitlines()
               if " - cgroup2 " in line and len(fields := line.split()) > 4]
    inside = next((line[3:] for line in _read(proc / "cgroup").splitlines() if line.startswith("0::")), "")
    if not mounted or not inside:
        raise NoGroupsError("this host has no cgroup v2")
    paths = [Path(fields[4]) / os.path.relpath(inside, fields[3]) for fields in mounted]
    for path in paths:      # one mount may hide another
        if str(os.getpid()) in _read(path / "cgroup.procs").split():
            return path
    raise NoGroupsError(f"{paths[-1]} is not the control group of this process")


def _delegated(path: Path) -> bool:
    """systemd says so, or gave it to the user we run as."""
    for name in DELEGATED:
        try:
            if os.getxattr(path, name) == b"1":
                return True
        except OSError:
            continue
    try:
        return 0 != path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


def _fields(path: Path) -> dict[str, int]:
    """`name number` a line."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
