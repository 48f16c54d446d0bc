"""Who is ours: processes by PID *and* start time, our mark in their environment, and signals through pidfds.

A PID alone lies after reuse, so nothing here is signalled before its start time and its mark were checked, and the
check is made while a pidfd holds the very process.  Reads `/proc` only: it never waits for a process, and one walk
costs some 15 µs a process.  What the kernel will not tell (gone, another user's) is None or left out, never an error.

A process belongs to a generation when its environment carries the mark; or, where the environment was wiped
(setproctitle, `env -i`), when it lives in a session that our launch began, which strangers can't join; or when it
is in the generation's control group; or when its parent belongs to it.  Once known it stays known, by PID and start time.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_watchdog.core.readings import Holder, Mark
from vllm_watchdog.procfs import ProcId, Stat, age_s, alive, identify, pids, read, read_stat, title, walk

__all__ = [
    "LAUNCH_ENV", "MARK_ENV", "MarkIndex", "Owned", "ProcId", "Stat", "age_s", "alive", "deliver", "hold", "holding",
    "identify", "instance_of", "launch_of", "listeners", "mark_of", "mark_value", "marked", "read_stat", "refuses",
    "send", "title", "walk",
]

MARK_ENV = "LLM_WATCHDOG_MARK"  # its value is `<instance>:<engine>:<generation>`
LAUNCH_ENV = "LLM_WATCHDOG_MARK_LAUNCH"     # beside it: the fingerprint of what the engine was started by
YOUNG_S = 10.0  # between fork and exec a child still shows its parent's environment, so a young "no" is not kept
KNOCK_S = 0.05  # a refusal on the loopback takes microseconds
LISTEN = "0A"  # TCP_LISTEN of the kernel's tcp_states.h
LOCAL = ("127.0.0.1", "0.0.0.0", "::", "::1")  # noqa: S104 - addresses we look for, not ones we bind


Lister = Callable[[Callable[[ProcId], bool]], list[Stat]]


@dataclass(frozen=True, slots=True)
class Owned:
    """A process of ours, zombies included."""

    stat: Stat
    mark: Mark


def instance_of(state_dir: Path) -> str:
    """Tells the daemons of one host apart: a short hash of the resolved state directory."""
    return hashlib.blake2s(str(state_dir.resolve()).encode(), digest_size=4).hexdigest()


def mark_value(mark: Mark, instance: str) -> str:
    return f"{instance}:{mark.engine}:{mark.generation}"


def mark_of(pid: int, instance: str) -> Mark | None:
    """The mark in its environment, where it is of this instance."""
    return _mark_in(read(pid, "environ"), instance)


def launch_of(pid: int) -> str:
    """The fingerprint of what it was started by; empty where it does not tell."""
    start = f"{LAUNCH_ENV}=".encode()
    entries = read(pid, "environ").split(b"\0")
    return next((entry[len(start):].decode(errors="replace") for entry in entries if entry.startswith(start)), "")


def send(who: ProcId, sig: signal.Signals, mark: Mark, instance: str) -> bool:
    """Signals `who` if it is still that process and its environment carries `mark`.  False: it was not signalled."""
    with holding(who) as fd:
        return fd is not None and mark_of(who.pid, instance) == mark and deliver(fd, sig)


def deliver(fd: int, sig: signal.Signals) -> bool:
    """Signals the process a pidfd holds.  False where it is gone or another user's."""
    try:
        signal.pidfd_send_signal(fd, sig)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def hold(who: ProcId) -> int | None:
    """A pidfd of exactly this process, which the caller closes; None where it is gone."""
    try:
        fd = os.pidfd_open(who.pid)
    except OSError:  # ESRCH: gone; EINVAL: no thread group leader any more
        return None
    if identify(who.pid) == who:
        return fd
    os.close(fd)
    return None


@contextmanager
def holding(who: ProcId) -> Iterator[int | None]:
    fd = hold(who)
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def whole(_: object = None) -> list[Stat]:
    """All of them, each time."""
    return walk()


class MarkIndex:
    """Which processes are ours, remembered by ProcId so that a steady host costs one small read a process.

    For one thread: every adapter keeps its own.  `lister` is given the strangers to tell: `whole`, a Glance, or a fake;
    `inhabitants` are the PIDs in control groups of ours, which hold also what has shed every other sign.
    """

    def __init__(self, instance: str, lister: Lister = whole,
                 inhabitants: Callable[[], dict[int, Mark]] = dict) -> None:
        self.instance = instance
        self._lister, self._inhabitants = lister, inhabitants
        self._known: dict[ProcId, Mark | None] = {}

    def learn(self, who: ProcId, mark: Mark) -> None:
        """This process is known to be ours, whatever its environment shows."""
        self._known[who] = mark

    def marked(self) -> dict[Mark, tuple[ProcId, ...]]:
        """The live processes of each generation, the oldest first.  This process is never among them."""
        return {mark: tuple(stat.who for stat in members) for mark, members in self.members().items()}

    def members(self) -> dict[Mark, list[Stat]]:
        """The same, with what the kernel says of each."""
        found: dict[Mark, list[Stat]] = {}
        for owned in self.owned():
            if owned.stat.alive:
                found.setdefault(owned.mark, []).append(owned.stat)
        return found

    def owned(self) -> tuple[Owned, ...]:
        """Every process of ours, zombies included, the oldest first.  Never this one, nor one that it descends from."""
        stats = self._lister(self._stranger)
        above = _line(stats, os.getpid())
        stats = [stat for stat in stats if stat.who.pid not in above]
        before, self._known = self._known, {}
        for stat in stats:
            self._recall(stat, before)
        sessions = self._sessions(stats)
        by_pid = {pid: mark for pid, mark in self._inhabitants().items() if pid not in above}
        ours = []
        for stat in stats:
            mark = (self._known.get(stat.who) or sessions.get(stat.session) or by_pid.get(stat.who.pid)
                    or by_pid.get(stat.ppid))
            if mark:
                self._known[stat.who] = by_pid[stat.who.pid] = mark
                ours.append(Owned(stat, mark))
        return tuple(ours)

    def _stranger(self, who: ProcId) -> bool:
        """Surely none of ours, as far as signs of its own go; its session's and its parent's still count."""
        return who in self._known and self._known[who] is None

    def _recall(self, stat: Stat, before: dict[ProcId, Mark | None]) -> None:
        if stat.who in before:
            self._known[stat.who] = before[stat.who]
            return
        mark = mark_of(stat.who.pid, self.instance)
        if mark or age_s(stat.who) > YOUNG_S:
            self._known[stat.who] = mark

    def _sessions(self, stats: list[Stat]) -> dict[int, Mark]:
        """Sessions that our launches began: a member is ours, and the session's leader is too, or gone, or mute.

        Never the watchdog's own, nor 0, which stands for every session begun outside this PID namespace.
        """
        leaders = {stat.session: stat.who for stat in stats if stat.session == stat.who.pid}
        sessions: dict[int, Mark] = {}
        for stat in stats:
            mark = self._known.get(stat.who)
            if not mark or stat.session in (0, os.getsid(0)):
                continue
            leader = leaders.get(stat.session)
            if leader is None or self._known.get(leader) or not read(leader.pid, "environ").strip(b"\0"):
                sessions.setdefault(stat.session, mark)
        return sessions


def _line(stats: list[Stat], pid: int) -> set[int]:
    """A process and its ancestors up to init: whatever a mark says of them, an engine's they are not."""
    parents = {stat.who.pid: stat.ppid for stat in stats}
    line = {0, 1}       # init, and what the kernel calls its parent: whose children they are says nothing
    while pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line


def marked(instance: str) -> dict[Mark, tuple[ProcId, ...]]:
    """One walk without a memory; see MarkIndex."""
    return MarkIndex(instance).marked()


def refuses(port: int, host: str = "127.0.0.1") -> bool:
    """Surely nobody listens on `port`, where `listeners` would look: every such address refuses a connection.

    Some 0.1 ms; the kernel's table of sockets takes milliseconds to read.  False: look there.  Waits 3 * KNOCK_S at most.
    """
    return all(_refused(address, port) for address in {"127.0.0.1", "::1", *({host} - set(LOCAL))})


def _refused(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as knock:
            knock.settimeout(KNOCK_S)
            # EADDRNOTAVAIL: this host has no such address (a machine without IPv6), so nobody listens there
            return knock.connect_ex((address, port)) in (errno.ECONNREFUSED, errno.EADDRNOTAVAIL)
    except OSError as error:
        return error.errno == errno.EAFNOSUPPORT


def listeners(port: int, instance: str, host: str = "127.0.0.1", first: Iterable[int] = ()) -> tuple[Holder, ...]:
    """Who listens on `port` of the loopback, of every address, or of `host`; one holder a socket.

    PIDs in `first` are looked at first, which spares the walk through every process's descriptors.
    A socket whose owner we may not see is Holder(0, "").
    """
    inodes = {
        inode
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for address, inode in _listening(table, port)
        if address in (*LOCAL, host)
    }
    holders = []
    for pid in _pids(first):
        if not inodes:
            break
        if held := inodes & _sockets(pid):
            inodes -= held
            holders += [Holder(pid, title(pid), mark_of(pid, instance))] * len(held)
    return tuple(holders) + (Holder(0, ""),) * len(inodes)


def _pids(first: Iterable[int]) -> Iterator[int]:
    early = tuple(first)
    yield from early
    yield from (pid for pid in pids() if pid not in early)


def _listening(table: str, port: int) -> Iterator[tuple[str, str]]:
    """Address and inode of each socket that listens on this port."""
    wanted = f":{port:04X}"
    try:
        with Path(table).open(encoding="ascii") as lines:
            next(lines, None)  # the heading
            for line in lines:
                _, local, _, state, rest = line.split(maxsplit=4)
                if state != LISTEN:
                    break  # the kernel tells listeners first, then the (many) connections
                if local.endswith(wanted):
                    yield _address(local.partition(":")[0]), rest.split()[5]
    except FileNotFoundError:  # no IPv6 on this host
        return


def _address(text: str) -> str:
    """The kernel prints an address as 32-bit words in the byte order of this machine."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def _sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            links = [_link(entry.path) for entry in entries]
    except OSError:
        return set()
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _mark_in(environ: bytes, instance: str) -> Mark | None:
    wanted = f"{MARK_ENV}={instance}:".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(wanted):
            engine, _, generation = entry[len(wanted) :].decode(errors="replace").rpartition(":")
            return Mark(engine, int(generation)) if engine and generation.isdecimal() else None
    return None
