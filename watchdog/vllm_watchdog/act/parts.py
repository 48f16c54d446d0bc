"""What a bundle holds, part by part: each a function from the scene to text, run in a thread of its own.

A part reads and never changes anything; it may be stuck for ever in a driver or a process's memory map, so nobody
waits for it beyond its deadline.  It raises AbsentError where this host has no such thing, OSError or OverrunError
where it could not be read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO, StringIO
from itertools import filterfalse
from pathlib import Path
from typing import Any

from vllm_watchdog.act.capture import Capture, OverrunError
from vllm_watchdog.act.fetch import fetch
from vllm_watchdog.core.commands import Dump
from vllm_watchdog.core.records import is_probe
from vllm_watchdog.launch import Launch, masked, masked_env
from vllm_watchdog.proc import marked
from vllm_watchdog.procfs import PAGE, read, walk

LOG_LINES, LOG_BYTES = 2000, 1 << 20
KERNEL_LINES = 500
MOST_PROCESSES = 32  # of one engine whose stacks are taken: eight cards and their helpers
MOST_THREADS = 128  # of one process
VERSION = re.compile(rb"version (\d+\.\d+[\w.+-]*)")


class AbsentError(Exception):
    """This host, or this engine, has no such thing; its text is one clause for people."""


@dataclass(frozen=True, slots=True)
class Context:
    """What only the loop knows at the moment of a dump.

    `report` makes the status document of that moment, `samples` the CSV lines of the last quarter of an hour, with the
    heading first: both are called in a thread of the bundle's.  `pids` are the processes of the generation with the leader
    first; empty: not sampled yet.
    """

    report: Callable[[], dict[str, Any]] = dict
    samples: Callable[[], Iterable[str]] = tuple
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    dump: Dump
    context: Context
    launch: Launch | None
    instance: str
    capture: Capture

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes of the generation.  Looked for only where nobody sampled them: that reads environments."""
        if self.context.pids or self.dump.mark is None:
            return self.context.pids
        return tuple(who.pid for who in marked(self.instance).get(self.dump.mark, ()))


@dataclass(frozen=True, slots=True)
class Part:
    """`deadline_s`: what a healthy host needs many times over."""

    name: str
    take: Callable[[Scene, float], str]
    deadline_s: float


def log_tail(scene: Scene, _: float) -> str:
    try:
        tail = _tail(_launch(scene).log_path)
    except FileNotFoundError:
        raise AbsentError("the engine never ran") from None
    lines = (raw.decode(errors="replace") for raw in BytesIO(tail))
    return "".join(deque(filterfalse(is_probe, lines), maxlen=LOG_LINES))   # a megabyte is ten thousand of them


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        return file.read(LOG_BYTES)


def nvidia_smi(scene: Scene, deadline_s: float) -> str:
    program = shutil.which("nvidia-smi")
    if not program:
        raise AbsentError("nvidia-smi is not installed")
    return _said(scene.capture.run([[program, "-q"]], deadline_s)[0])


def gpu_processes(scene: Scene, _: float) -> str:
    """As last sampled: asking the driver again may hang."""
    return _json(scene.context.report().get("gpus"))


def ps(scene: Scene, _: float) -> str:
    """Every process by resident memory.  Of strangers the name alone: their command lines may hold secrets."""
    rows = sorted(_processes(frozenset(scene.pids)), reverse=True)
    lines = (f"{rss >> 20:9} {vsz >> 20:9} {pid:8} {ppid:8}  {name}" for rss, vsz, pid, ppid, name in rows)
    return "\n".join((f"{'RSS_MIB':>9} {'VSZ_MIB':>9} {'PID':>8} {'PPID':>8}  COMMAND", *lines, ""))


def _processes(ours: frozenset[int]) -> Iterator[tuple[int, int, int, int, str]]:
    for stat in walk():
        pid = stat.who.pid
        pages = read(pid, "statm").split()
        if pages:
            words = read(pid, "cmdline").decode(errors="replace").rstrip("\0").split("\0") if pid in ours else []
            name = masked(words) if any(words) else stat.comm
            yield int(pages[1]) * PAGE, int(pages[0]) * PAGE, pid, stat.ppid, name


def metrics(scene: Scene, deadline_s: float) -> str:
    if not scene.pids:
        raise AbsentError("no process of the engine was alive")     # a stranger may answer on its port
    return fetch(_launch(scene).url + "/metrics", deadline_s).decode(errors="replace")


def stacks(scene: Scene, deadline_s: float) -> str:
    """Python stacks by py-spy where it may look, and what the kernel says each thread waits for."""
    pids = scene.pids[:MOST_PROCESSES]
    if not scene.dump.stacks or not pids:
        raise AbsentError("no process of the engine was alive")
    pictures: list[str] = ["py-spy is not installed"] * len(pids)
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program:
        argvs = [[program, "dump", "--nonblocking", "--pid", str(pid)] for pid in pids]
        pictures = [_told(taken) for taken in scene.capture.run(argvs, deadline_s * 0.8)]
    return "\n".join(
        f"===== PID {pid} ({read(pid, 'comm').decode(errors='replace').strip()})\n{picture}\n{_kernel_view(pid)}"
        for pid, picture in zip(pids, pictures, strict=True)
    )


def _kernel_view(pid: int) -> str:
    """State, what it waits for in the kernel, and the kernel's stack where root may see it; thread by thread."""
    try:
        tasks = sorted(entry.name for entry in Path(f"/proc/{pid}/task").iterdir())[:MOST_THREADS]
    except OSError:
        return "gone\n"
    blocks = []
    for task in tasks:
        status = read(pid, f"task/{task}/status").decode(errors="replace")
        facts = [line.replace("\t", " ") for line in status.splitlines() if line.startswith(("Name:", "State:"))]
        wchan = read(pid, f"task/{task}/wchan").decode(errors="replace")
        stack = read(pid, f"task/{task}/stack").decode(errors="replace")
        blocks.append(f"thread {task}  {'  '.join(facts)}  waits in {wchan or '?'}\n{stack}")
    return "\n".join(blocks)


def kernel(_: Scene, deadline_s: float) -> str:
    """The end of the kernel's log.  The oldest record comes first, and a read at the end says EAGAIN."""
    lines: deque[str] = deque(maxlen=KERNEL_LINES)
    booted = time.time() - time.monotonic()
    until = time.monotonic() + deadline_s
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            try:
                lines.append(_kernel_line(os.read(fd, 8192), booted))
            except BlockingIOError:
                break
            except BrokenPipeError:  # overwritten while we read: the next read goes on behind the gap
                continue
    finally:
        os.close(fd)
    return "\n".join((*lines, ""))


def _kernel_line(record: bytes, booted: float) -> str:
    """As `dmesg -T` has it, in UTC, the incident's own clock; `booted`: epoch seconds."""
    head, _, text = record.decode(errors="replace").partition(";")
    stamp = time.asctime(time.gmtime(booted + int(head.split(",")[2]) / 1e6))
    return f"[{stamp}] {text.splitlines()[0] if text else ''}"


def cgroup(scene: Scene, _: float) -> str:
    """The memory files of the engine's cgroup, v2 or v1; of ours, in which it ran, where it is dead."""
    lines = (read(next(iter(scene.pids), 0), "cgroup") or read(os.getpid(), "cgroup")).decode().splitlines()
    for number, controllers, path in (line.split(":", 2) for line in lines):
        roots = ("", "unified") if number == "0" else ("memory",) if "memory" in controllers.split(",") else ()
        for root in roots:
            folder = Path("/sys/fs/cgroup") / root
            inside = folder / path.lstrip("/")
            texts = list(_memory_files(inside if inside.is_dir() else folder))
            if texts:
                return f"{inside}\n" + "".join(texts)
    raise AbsentError("no memory cgroup")


def _memory_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("memory.*")):
        try:
            text = path.read_text()
        except OSError:
            continue  # some can only be written to
        yield f"-- {path.name}\n{text}"


def engine(scene: Scene, deadline_s: float) -> str:
    launch, mark = _launch(scene), scene.dump.mark
    facts = {
        "engine": launch.name,
        "generation": mark.generation if mark else None,
        "command": masked(launch.argv),
        "environment": masked_env(launch.env),
        "cwd": str(launch.cwd),
        "version": _version(launch, deadline_s / 2),
        "url": launch.url,
        "log": str(launch.log_path),
        "pids": scene.pids,
        "reason": scene.dump.reason,
    }
    return _json(facts)


def _version(launch: Launch, deadline_s: float) -> str | None:
    """Asked of the engine; of its log where it does not answer."""
    try:
        return str(json.loads(fetch(launch.url + "/version", deadline_s))["version"])
    except (OSError, ValueError, LookupError, TypeError, OverrunError):
        try:
            found = VERSION.findall(_tail(launch.log_path))
        except OSError:
            return None
        return found[-1].decode() if found else None


def samples(scene: Scene, _: float) -> str:
    out = StringIO()
    out.writelines(f"{line}\n" for line in scene.context.samples())
    if text := out.getvalue():
        return text
    raise AbsentError("nothing was sampled yet")


def report(scene: Scene, _: float) -> str:
    return _json(scene.context.report())


PARTS = (
    Part("log-tail.txt", log_tail, 5),
    Part("nvidia-smi-q.txt", nvidia_smi, 6),  # 95 ms on a healthy H200
    Part("gpu-processes.json", gpu_processes, 5),
    Part("ps.txt", ps, 5),
    Part("vllm-metrics.txt", metrics, 4),
    Part("stacks.txt", stacks, 8),
    Part("kernel.txt", kernel, 5),
    Part("cgroup.txt", cgroup, 5),
    Part("engine.json", engine, 4),
    Part("samples.csv", samples, 5),
    Part("report.json", report, 5),
)
NAMES = frozenset(part.name for part in PARTS)


def _json(value: object) -> str:
    """Piece by piece, where `dumps` with an indent keeps all pieces until the end."""
    out = StringIO()
    json.dump(value, out, indent=1, ensure_ascii=False)
    out.write("\n")
    return out.getvalue()


def _launch(scene: Scene) -> Launch:
    if scene.launch is None:
        raise AbsentError("no engine is concerned")
    return scene.launch


def _said(taken: bytes | OverrunError) -> str:
    if isinstance(taken, OverrunError):
        raise taken
    return taken.decode(errors="replace")


def _told(taken: bytes | OverrunError) -> str:
    return str(taken) if isinstance(taken, OverrunError) else taken.decode(errors="replace").rstrip()
