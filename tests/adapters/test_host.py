"""HostSense against real processes of this machine."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_watchdog import proc
from vllm_watchdog.core.events import HostSampled
from vllm_watchdog.core.readings import Host, Mark, Tree, Unknown
from vllm_watchdog.procfs import Glance, Stat
from vllm_watchdog.sense import host, memory_limit, usage
from vllm_watchdog.sense.host import HostSense

INSTANCE = f"host{os.getpid()}"        # several test runs may share the machine
MARK = Mark("primary", 2)
IDLE = "import sys; print('up', flush=True); sys.stdin.read()"
BUSY = "import sys; print('up', flush=True)\nwhile True: pass"


class Desk:
    def __init__(self, disk: Path) -> None:
        self.offset = 0.0
        self.events: queue.Queue[Any] = queue.Queue()
        self.sense = HostSense(self.events.put, self.clock, proc.MarkIndex(INSTANCE, Glance()), disk)
        self.sense.start()

    def clock(self) -> float:
        return time.monotonic() + self.offset

    def sample(self) -> HostSampled:
        self.sense.wake()
        event = self.events.get(timeout=10)
        assert isinstance(event, HostSampled)
        return event

    def tree(self) -> Tree:
        (tree,) = self.sample().trees
        return tree


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    one = Desk(tmp_path)
    yield one
    one.sense.stop(5)
    assert not one.sense._thread.is_alive()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start(program: str, mark: str = f"{INSTANCE}:primary:2") -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {proc.MARK_ENV: mark},
        ))
        assert made[-1].stdout
        assert made[-1].stdout.read(2) == b"up"
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.communicate()


def test_memory_and_disk_of_the_machine_are_told(desk: Desk) -> None:
    event = desk.sample()
    assert isinstance(event.host, Host)
    assert 0 < event.host.memory_available < event.host.memory_total
    assert 0 < event.host.disk_free < event.host.disk_total
    assert event.host.load >= 0
    assert event.trees == ()


def test_a_disk_that_is_gone_is_unknown_since_it_went_and_the_trees_are_told(desk: Desk, spawn: Any) -> None:
    spawn(IDLE)
    desk.sense._disk = Path("/nonexistent/logs")
    first, second = desk.sample(), desk.sample()
    assert isinstance(first.host, Unknown)
    assert first.host == second.host
    assert first.host.why == "/nonexistent/logs: No such file or directory"
    assert len(second.trees) == 1


def test_a_tree_is_its_marked_processes_with_the_leader_first(desk: Desk, spawn: Any) -> None:
    leader, member = spawn(IDLE), spawn(IDLE)
    spawn(IDLE, mark="other:primary:2")
    tree = desk.tree()
    assert tree.mark == MARK
    assert [process.pid for process in tree.processes] == [leader.pid, member.pid]
    first = tree.processes[0]
    assert first.name == psutil.Process(leader.pid).name()
    assert first.rss_bytes == pytest.approx(psutil.Process(leader.pid).memory_info().rss, rel=0.2)
    assert first.threads == 1
    assert first.fds == psutil.Process(leader.pid).num_fds()
    assert first.fd_limit == psutil.Process(leader.pid).rlimit(psutil.RLIMIT_NOFILE)[0]


def test_generations_are_trees_of_their_own(desk: Desk, spawn: Any) -> None:
    spawn(IDLE)
    spawn(IDLE, mark=f"{INSTANCE}:backup:1")
    assert {tree.mark for tree in desk.sample().trees} == {MARK, Mark("backup", 1)}


def test_cpu_is_told_from_the_second_sample_on(desk: Desk, spawn: Any) -> None:
    spawn(BUSY)
    assert desk.tree().processes[0].cpu is None
    until = time.monotonic() + 10
    while not (desk.tree().processes[0].cpu or 0) > 0.05:      # ticks of 10 ms: the first look may see none
        assert time.monotonic() < until


def test_io_moves_with_what_is_read(desk: Desk, spawn: Any) -> None:
    child = spawn("import sys\nprint('up', flush=True)\nfor line in sys.stdin: print('again', flush=True)")
    before = desk.tree().io_bytes
    child.stdin.write(b"line\n")
    child.stdin.flush()
    child.stdout.readline(), child.stdout.readline()
    after = desk.tree().io_bytes
    assert before is not None
    assert after is not None
    assert after >= before + 5


def test_uss_is_taken_of_one_process_a_sample_and_kept(desk: Desk, spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = psutil.Process.memory_full_info
    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda self: taken.append(self.pid) or real(self))
    pids = {spawn(IDLE).pid, spawn(IDLE).pid}
    assert [process.uss_bytes for process in desk.tree().processes] == [None, None]
    assert [process.uss_bytes is None for process in desk.tree().processes].count(True) == 1
    for _ in range(3):
        tree = desk.tree()
    assert set(taken) == pids
    assert len(taken) == 2
    assert all(0 < (process.uss_bytes or 0) <= process.rss_bytes for process in tree.processes)
    desk.offset += host.USS_S
    desk.tree()
    assert len(taken) == 3


def test_uss_of_a_process_in_the_driver_is_not_asked(desk: Desk, spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_DISK_SLEEP)
    spawn(IDLE)
    for _ in range(3):
        assert desk.tree().processes[0].uss_bytes is None


def test_what_the_kernel_does_not_tell_is_none(desk: Desk, spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Any) -> None:
        raise psutil.AccessDenied(self.pid)

    def nothing(_: int) -> None:
        return None

    for call in ("open_files", "file_limit", "io_bytes"):
        monkeypatch.setattr(host, call, nothing)
    monkeypatch.setattr(psutil.Process, "memory_full_info", deny)
    spawn(IDLE)
    for _ in range(2):
        tree = desk.tree()
    assert tree.io_bytes is None
    first = tree.processes[0]
    assert (first.fds, first.fd_limit, first.uss_bytes) == (None, None, None)
    assert tree.rss_bytes > 0


def test_the_dead_leave_the_tree_and_what_was_kept_of_them(desk: Desk, spawn: Any) -> None:
    leader, member = spawn(IDLE), spawn(IDLE)
    assert len(desk.tree().processes) == 2
    leader.kill()
    leader.wait()
    assert [process.pid for process in desk.tree().processes] == [member.pid]
    assert {who.pid for who in desk.sense._kept} == {member.pid}


def test_a_zombie_is_no_member(desk: Desk, spawn: Any) -> None:
    child = spawn(IDLE)
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert desk.sample().trees == ()


class Members:
    """An index that shows one process, whose CPU time a test sets."""

    def __init__(self) -> None:
        self.stat = Stat(proc.ProcId(os.getpid(), 1), "a", True, 1, 1, 1, False)

    def members(self) -> dict[Mark, list[Stat]]:
        return {MARK: [self.stat]}


def test_cpu_is_of_the_time_between_the_looks_however_long_the_rest_of_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, now = Members(), [0.0]
    sense = HostSense(lambda _: None, lambda: now[0], index, tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(sense, "_take_uss", lambda: now.__setitem__(0, now[0] + 3))
    told = []
    for spent in (0.0, 10.0, 20.0):
        now[0], index.stat = spent, replace(index.stat, cpu_s=spent)
        told.append(sense._trees()[0].processes[0].cpu)
    assert told == [None, 1.0, 1.0]


def test_a_process_that_ends_while_it_is_looked_at_is_left_out(
    desk: Desk, spawn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn(IDLE)
    for name in ("open_files", "io_bytes"):
        monkeypatch.setattr(host, name, lambda _: None)
    assert len(desk.sample().trees) == 1, "another user's tells as little"
    monkeypatch.setattr(host, "alive", lambda _: False)
    assert desk.sample().trees == ()


def test_what_nobody_may_see_or_nobody_is_there_to_show_is_none() -> None:
    nobody = 2**22 + 1
    assert (usage.io_bytes(nobody), usage.open_files(nobody), usage.file_limit(nobody)) == (None, None, None)


def test_a_new_name_is_told(desk: Desk, spawn: Any) -> None:
    child = spawn("import sys\nprint('up', flush=True)\nsys.stdin.readline()\n"
                  "open('/proc/self/comm', 'w').write('renamed')\nprint('done', flush=True)\nsys.stdin.read()")
    assert desk.tree().processes[0].name != "renamed"
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline(), child.stdout.readline()
    assert desk.tree().processes[0].name == "renamed"


def test_a_sense_that_was_never_started_can_be_stopped(tmp_path: Path) -> None:
    HostSense(print, time.monotonic, proc.MarkIndex("test"), tmp_path).stop(1)


# -- the cgroup's memory limit

def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)


def member(folder: Path, line: str) -> Path:
    path = folder / "cgroup"
    path.write_text(line)
    return path


def test_the_tightest_limit_of_all_levels_counts_and_page_cache_is_left(tmp_path: Path) -> None:
    group(tmp_path / "a/b", memory_max="max\n")
    group(tmp_path / "a", memory_max="1000\n", memory_current="700\n", memory_stat="anon 500\ninactive_file 150\n")
    group(tmp_path, memory_max="5000\n", memory_current="4950\n", memory_stat="anon 5000\n")
    assert memory_limit.memory(tmp_path, member(tmp_path, "0::/a/b\n")) == (5000, 50)
    group(tmp_path, memory_current="100\n")
    assert memory_limit.memory(tmp_path, member(tmp_path, "0::/a/b\n")) == (1000, 450)


def test_a_container_sees_its_limit_at_the_root_though_its_path_is_the_hosts(tmp_path: Path) -> None:
    group(tmp_path, memory_max="1000\n", memory_current="1200\n", memory_stat="inactive_file 0\n")
    assert memory_limit.memory(tmp_path, member(tmp_path, "0::/docker/not-here\n")) == (1000, 0)


def test_the_first_version_is_read_where_it_is_mounted(tmp_path: Path) -> None:
    group(tmp_path / "memory/x", memory_limit_in_bytes="1000\n", memory_usage_in_bytes="300\n",
          memory_stat="total_inactive_file 100\n")
    group(tmp_path / "memory", memory_limit_in_bytes="9223372036854771712\n")
    line = member(tmp_path, "4:cpu,cpuacct:/x\n3:memory:/x\n")
    assert memory_limit.memory(tmp_path, line) == (1000, 800)


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert memory_limit.memory(tmp_path, member(tmp_path, "0::/\n")) is None
    assert memory_limit.memory(tmp_path, tmp_path / "gone") is None
