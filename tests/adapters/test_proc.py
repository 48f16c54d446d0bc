"""Who is ours: against real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_watchdog import proc, procfs
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MARK_ENV, MarkIndex, ProcId, Stat
from vllm_watchdog.procfs import Glance

INSTANCE = f"test{os.getpid()}"
MARK = Mark("primary", 3)
SLEEP = "print('up', flush=True); import time; time.sleep(60)"


@contextmanager
def child(code: str = SLEEP, mark: Mark | None = MARK, **kwargs: object) -> Iterator[subprocess.Popen[bytes]]:
    env = dict(os.environ)
    if mark:
        env[MARK_ENV] = proc.mark_value(mark, INSTANCE)
    started = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, **kwargs)  # type: ignore[call-overload]
    try:
        yield started
    finally:
        started.kill()
        started.wait(10)
        started.stdout.close()


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 10)[0], "the child said nothing"
    return process.stdout.readline().decode().strip()


def who(pid: int) -> ProcId:
    found = proc.identify(pid)
    assert found
    return found


def test_a_marked_process_is_found_by_its_environment() -> None:
    with child() as ours, child(mark=None) as stranger:
        said(ours), said(stranger)
        assert proc.mark_of(ours.pid, INSTANCE) == MARK
        assert proc.mark_of(stranger.pid, INSTANCE) is None
        assert proc.marked(INSTANCE) == {MARK: (who(ours.pid),)}


def test_another_instances_mark_is_a_strangers() -> None:
    with child() as ours:
        said(ours)
        assert proc.mark_of(ours.pid, INSTANCE + "x") is None
        assert proc.marked(INSTANCE + "x") == {}


@pytest.mark.parametrize("value", ["", "primary", "primary:", ":3", "primary:x", "primary:-1"])
def test_a_mangled_mark_is_no_mark(value: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEP], env={MARK_ENV: f"{INSTANCE}:{value}"}, stdout=subprocess.PIPE
    ) as mangled:
        said(mangled)
        assert proc.mark_of(mangled.pid, INSTANCE) is None
        mangled.kill()


def test_this_process_is_never_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = proc.read_stat(os.getpid())
    assert stat
    index = MarkIndex(INSTANCE, lambda _: [stat])
    index.learn(stat.who, MARK)
    assert index.marked() == {}


def test_a_child_that_wiped_its_environment_is_ours_by_its_parent_and_stays_ours() -> None:
    code = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env={{}}, start_new_session=True, stdout=-1)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    with child(code) as parent:
        wiped = who(int(said(parent)))
        index = MarkIndex(INSTANCE)
        assert wiped in index.marked()[MARK]
        parent.kill()
        parent.wait(10)
        assert index.marked() == {MARK: (wiped,)}
        os.kill(wiped.pid, signal.SIGKILL)


def test_a_wiped_orphan_is_ours_by_a_session_that_strangers_cannot_join() -> None:
    code = (
        "import os, subprocess, sys\n"
        f"ps = [subprocess.Popen([sys.executable, '-c', {SLEEP!r}], env=e, stdout=-1) for e in ({{}}, None)]\n"
        "for p in ps: p.stdout.readline()\n"
        "print(*(p.pid for p in ps), flush=True); os._exit(0)"
    )
    with child(code, start_new_session=True) as parent:
        wiped, marked = (who(int(pid)) for pid in said(parent).split())
        parent.wait(10)
        assert set(proc.marked(INSTANCE)[MARK]) == {wiped, marked}  # a new index: nothing is remembered
        for orphan in (wiped, marked):
            os.kill(orphan.pid, signal.SIGKILL)


def test_a_stranger_in_the_session_of_a_strangers_shell_is_not_ours() -> None:
    with child() as ours, child(mark=None) as stranger:  # both in this test's own session and group
        said(ours), said(stranger)
        index = MarkIndex(INSTANCE)
        assert who(stranger.pid) not in index.marked()[MARK]
        assert who(stranger.pid) not in index.marked()[MARK]


def test_a_signal_needs_the_start_time_and_the_mark() -> None:
    with child() as ours:
        said(ours)
        real = who(ours.pid)
        assert not proc.send(ProcId(real.pid, real.start - 1), signal.SIGTERM, MARK, INSTANCE)
        assert not proc.send(real, signal.SIGTERM, Mark("primary", 4), INSTANCE)
        assert not proc.send(real, signal.SIGTERM, MARK, "another")
        assert ours.poll() is None
        assert proc.send(real, signal.SIGTERM, MARK, INSTANCE)
        assert ours.wait(10) == -signal.SIGTERM
        assert not proc.send(real, signal.SIGTERM, MARK, INSTANCE)


def test_a_zombie_is_not_alive() -> None:
    with child("pass") as ended:
        identity = who(ended.pid)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert proc.identify(ended.pid) == identity
        assert not proc.alive(identity)


def test_a_zombie_leader_with_a_living_thread_is_alive() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); print('up', flush=True)\n"
        "ctypes.CDLL(None).syscall(60 if ctypes.sizeof(ctypes.c_void_p) == 8 else 1, 0)"  # exit of this thread alone
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the exit system call is that of x86_64")
    with child(code) as half:
        said(half)
        identity, raw = who(half.pid), b""
        while b") Z " not in raw:
            raw = Path(f"/proc/{half.pid}/stat").read_bytes()
        assert proc.alive(identity)


def test_a_name_with_blanks_and_parentheses_is_read_whole() -> None:
    code = "open('/proc/self/comm', 'w').write('a) R (b'); " + SLEEP
    with child(code) as odd:
        said(odd)
        stat = proc.read_stat(odd.pid)
        assert stat
        assert (stat.comm, stat.ppid, stat.alive) == ("a) R (b", os.getpid(), True)


def test_a_title_of_vllm_is_told_whole() -> None:
    with subprocess.Popen(
        ["VLLM::Worker_DP0_PP1_TP0_EP3", "-c", SLEEP], executable=sys.executable, stdout=subprocess.PIPE
    ) as titled:
        said(titled)
        assert proc.title(titled.pid) == "VLLM::Worker_DP0_PP1_TP0_EP3"
        titled.kill()


def test_a_steady_host_is_read_without_its_environments() -> None:
    ours, stranger = (Stat(ProcId(pid, 5), "a", True, 1, pid, pid, False) for pid in (9_999_991, 9_999_992))
    index = MarkIndex(INSTANCE, lambda _: [ours, stranger])
    index.learn(ours.who, MARK)
    assert index.marked() == {MARK: (ours.who,)}
    assert index._known == {ours.who: MARK, stranger.who: None}
    index._lister = lambda _: []
    assert index.marked() == {}
    assert index._known == {}  # what is gone is forgotten


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
)
def test_the_holder_of_a_port_is_named(family: int, address: str) -> None:
    with socket.socket(family) as listening:
        listening.bind((address, 0))
        listening.listen()
        (holder,) = proc.listeners(listening.getsockname()[1], INSTANCE)
        assert (holder.pid, holder.name, holder.mark) == (os.getpid(), proc.title(os.getpid()), None)


def test_the_holder_of_a_port_carries_our_mark_where_it_is_ours() -> None:
    code = (
        "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n"
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    with child(code) as ours:
        port = int(said(ours))
        assert [holder.mark for holder in proc.listeners(port, INSTANCE)] == [MARK]
        assert [holder.pid for holder in proc.listeners(port, INSTANCE, first=(ours.pid,))] == [ours.pid]


def test_a_connection_is_no_listener() -> None:
    with socket.socket() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        client.connect(listening.getsockname())
        assert proc.listeners(client.getsockname()[1], INSTANCE) == ()


def test_an_instance_is_the_same_for_every_spelling_of_its_folder(tmp_path: Path) -> None:
    assert proc.instance_of(tmp_path) == proc.instance_of(tmp_path / "x" / "..")
    assert proc.instance_of(tmp_path) != proc.instance_of(tmp_path / "x")


# -- control groups, and who is never ours


def stat(pid: int, ppid: int) -> Stat:
    return Stat(ProcId(pid, 1), "python", True, ppid, pid, pid, False)


def test_whoever_is_in_a_group_of_ours_is_ours_and_so_are_its_children() -> None:
    stats = [stat(1, 0), stat(9_000_001, 1), stat(9_000_002, 9_000_001), stat(9_000_003, 1)]
    found = MarkIndex("i", lambda _: stats, lambda: {9_000_001: Mark("a", 1)}).marked()
    assert found == {Mark("a", 1): (ProcId(9_000_001, 1), ProcId(9_000_002, 1))}


def test_init_this_process_and_its_ancestors_are_never_ours() -> None:
    """Whatever a group or an inherited mark says: a daemon that is started from an engine's shell must not end it."""
    above = [1, 9_000_001, 9_000_002]
    line = [stat(pid, before) for before, pid in zip([0, *above], [*above, os.getpid()], strict=True)]
    line += [stat(9_000_003, 1), stat(9_000_004, 0)]
    said = dict.fromkeys([0, *above, os.getpid()], Mark("a", 1))
    index = MarkIndex("i", lambda _: line, lambda: dict(said))
    for each in line[:-2]:
        index.learn(each.who, Mark("a", 1))
    assert index.owned() == ()


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"),
                                                 (socket.AF_INET6, "::1")])
def test_a_port_refuses_when_nobody_listens_on_any_of_its_addresses(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as server:
        server.bind((address, 0))
        port = server.getsockname()[1]
        assert proc.refuses(port)
        server.listen()
        assert not proc.refuses(port)
        assert proc.listeners(port, INSTANCE)


def test_who_only_counts_sees_what_is_new_and_what_is_gone_and_passes_over_strangers() -> None:
    now = 100.0
    glance = Glance(lambda: now)
    index = MarkIndex(INSTANCE, glance)
    with child() as ours, child(mark=None) as stranger:
        said(ours), said(stranger)
        assert index.marked() == {MARK: (who(ours.pid),)}
        index._known[who(stranger.pid)] = None      # as if it were older than a young one
        before = {stat.who.pid: stat for stat in glance(index._stranger)}
        after = {stat.who.pid: stat for stat in glance(index._stranger)}
        assert after[stranger.pid] is before[stranger.pid]
        assert after[ours.pid] is not before[ours.pid]
        with child(mark=Mark("backup", 1)) as newcomer:
            said(newcomer)
            assert index.marked() == {MARK: (who(ours.pid),), Mark("backup", 1): (who(newcomer.pid),)}
        assert index.marked() == {MARK: (who(ours.pid),)}
        now += procfs.WHOLE_S
        again = {stat.who.pid: stat for stat in glance(index._stranger)}
        assert again[stranger.pid] is not before[stranger.pid]


def test_a_glance_shows_what_a_walk_shows() -> None:
    glance = Glance()
    seen = {stat.who for stat in glance(lambda _: False)}
    walked = {stat.who for stat in proc.walk()}
    assert who(os.getpid()) in seen & walked
    assert not any(stat.kernel for stat in glance(lambda _: True))
