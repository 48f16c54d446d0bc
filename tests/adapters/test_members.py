"""The processes that an engine can't live without: real ones, with the titles that vLLM gives them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from vllm_watchdog import proc
from vllm_watchdog.act import hands, members
from vllm_watchdog.act.hands import Hands
from vllm_watchdog.act.members import Members, titled
from vllm_watchdog.core.commands import Kill, Spawn, Term
from vllm_watchdog.core.events import Emptied, Event, Exited, MemberDied, Spawned
from vllm_watchdog.core.readings import Mark, Process
from vllm_watchdog.launch import Launch

INSTANCE = f"members{os.getpid()}"
ONE, TWO = Mark("primary", 1), Mark("primary", 2)
CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker_TP0"
ENGINE = """
import os, signal, sys, time
from vllm_watchdog.sim import proctitle
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def process(name, title, child=lambda: None):
    if os.fork() == 0:
        if title:
            proctitle.title(title)
        child()
        os.write(1, b"%s %d\\n" % (name.encode(), os.getpid()))      # in one piece: four processes write here
        time.sleep(60)
        os._exit(0)

def inside():
    process("worker", "VLLM::Worker_TP0")
    process("fork", "")

process("tracker", "", lambda: proctitle.comm("tracker"))
process("core", "VLLM::EngineCore", inside)
time.sleep(60)
"""


class Tree:
    """A leader, its core with a worker and a bare fork, and a process without a title; and the hands that hold it."""

    def __init__(self, folder: Path) -> None:
        self.log, self.events = folder / "primary.log", queue.Queue[Event]()
        launch = Launch(name="primary", argv=(sys.executable, "-c", ENGINE), env=(), cwd=folder, host="127.0.0.1", port=1,
                        models=("m",), api_key=None, log_path=self.log)
        self.hands = Hands(launch, INSTANCE, self.events.put, time.monotonic, group_after_s=60)
        self.leader = 0

    def start(self) -> None:
        self.hands.start()
        self.hands.do(Spawn(ONE))
        spawned = self.next()
        assert isinstance(spawned, Spawned)
        self.leader = spawned.pid
        until(lambda: len(self.pids()) == 4)

    def pids(self) -> dict[str, int]:
        words = [line.split() for line in self.log.read_text().splitlines() if len(line.split()) == 2]
        return {name: int(pid) for name, pid in words}

    def next(self) -> Event:
        return self.events.get(timeout=10)

    def sample(self) -> tuple[Process, ...]:
        """As the sensor takes one."""
        return tuple(row(pid) for pid in (self.leader, *self.pids().values()))

    def watch(self, mark: Mark = ONE) -> None:
        """Shown a sample, and both that count are held."""
        self.hands.watch(mark, self.sample())
        until(lambda: len(self.hands._members.fds) == 2)

    def end(self, name: str) -> None:
        os.kill(self.pids()[name], signal.SIGKILL)

    def close(self) -> None:
        self.hands.stop(5)
        for group in proc.marked(INSTANCE).values():
            for who in group:
                os.kill(who.pid, signal.SIGKILL)
        until(lambda: not proc.marked(INSTANCE))
        try:
            if self.leader:
                os.waitpid(self.leader, 0)
        except ChildProcessError:
            return      # reaped by hands


def row(pid: int) -> Process:
    return Process(pid, psutil.Process(pid).name(), 0, None, None, 1, None)


def alive(pid: int) -> bool:
    stat = proc.read_stat(pid)
    return stat is not None and stat.alive


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_core_that_ends_under_its_leader_is_told_by_its_title(tree: Tree) -> None:
    tree.watch()
    core = tree.pids()["core"]
    tree.end("core")
    died = tree.next()
    assert isinstance(died, MemberDied) and (died.mark, died.pid, died.name) == (ONE, core, CORE)


def test_neither_a_fork_nor_what_has_no_title_is_missed(tree: Tree) -> None:
    tree.watch()
    names = {process.pid: process.name for process in tree.sample()}
    assert names[tree.pids()["fork"]] == CORE, "a fork shows its parent's title"
    tree.end("fork")
    tree.end("tracker")
    time.sleep(2 * 0.02)
    tree.end("worker")
    died = tree.next()
    assert isinstance(died, MemberDied) and died.name == WORKER


def test_a_core_is_told_before_its_worker_whichever_is_seen_first(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hands, "TOGETHER_S", 1.0)
    tree.watch()
    tree.end("worker")
    until(lambda: len(tree.hands._members.fds) == 1)        # seen, and the rest is waited for
    tree.end("core")
    names = [died.name for died in (tree.next(), tree.next()) if isinstance(died, MemberDied)]
    assert names == [CORE, WORKER]


def test_what_ends_after_we_asked_it_to_stop_is_no_news(tree: Tree) -> None:
    tree.watch()
    tree.hands.do(Term(ONE))
    until(lambda: not tree.hands._members.fds)
    tree.hands.watch(ONE, tree.sample()[:-1])       # another sample holds nobody again
    tree.end("core")
    os.kill(tree.leader, signal.SIGKILL)
    assert isinstance(tree.next(), Exited)


def test_a_kill_of_ours_tells_only_the_end(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_watchdog.act.hands.TOGETHER_S", 0)
    tree.watch()
    tree.hands.do(Kill(ONE))
    assert [type(tree.next()), type(tree.next())] == [Exited, Emptied]
    assert tree.events.empty() and not tree.hands._members.fds


def test_a_signal_to_the_whole_group_is_the_leaders_end(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_watchdog.act.hands.TOGETHER_S", 5.0)      # a loaded machine
    tree.watch()
    tree.end("core")
    os.killpg(tree.leader, signal.SIGKILL)
    assert isinstance(tree.next(), Exited)
    assert tree.events.empty() and not tree.hands._members.fds


def test_a_sample_of_another_generation_holds_nobody(tree: Tree) -> None:
    tree.hands.watch(TWO, tree.sample())
    tree.end("core")
    time.sleep(0.05)
    os.kill(tree.leader, signal.SIGKILL)
    assert isinstance(tree.next(), Exited)


def test_the_same_sample_wakes_nobody(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.watch()
    monkeypatch.setattr(os, "eventfd_write", lambda *_: pytest.fail("woken"))
    tree.hands.watch(ONE, tree.sample())
    monkeypatch.undo()


def test_only_so_many_are_held(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MOST", 1)
    held = Members()
    held.learn(titled(tree.sample()), tree.leader)
    assert len(held.fds) == 1
    held.close()
    assert held.fds == ()


def test_a_strangers_process_under_a_known_number_is_not_held(tree: Tree) -> None:
    held = Members()
    held.learn(frozenset({(tree.pids()["core"], CORE)}), session=1)       # of another engine
    held.learn(frozenset({(tree.pids()["tracker"], CORE), (9_999_999, CORE)}), tree.leader)
    assert held.fds == ()


def test_what_is_dead_already_is_not_held() -> None:
    code = "from vllm_watchdog.sim import proctitle; proctitle.comm('VLLM::EngineCore')"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        until(lambda: not alive(child.pid))     # a zombie, with the title it had
        held = Members()
        held.learn(frozenset({(child.pid, CORE)}), os.getsid(0))
        assert held.fds == ()


def test_a_process_that_gets_its_title_late_is_held_then(tree: Tree) -> None:
    held, worker = Members(), tree.pids()["worker"]
    held.learn(frozenset({(tree.pids()["fork"], CORE)}), tree.leader)
    assert held.fds == ()
    held.learn(frozenset({(tree.pids()["fork"], CORE), (worker, WORKER)}), tree.leader)
    assert len(held.fds) == 1
    held.learn(frozenset({(worker, "VLLM::Worker")}), tree.leader)
    assert len(held.fds) == 1, "held once"
    held.learn(frozenset({(worker, WORKER[:15])}), tree.leader)
    tree.end("worker")
    until(lambda: not alive(worker))
    assert held.died(set(held.fds)) == ((worker, WORKER),)
    held.learn(frozenset({(worker, WORKER)}), tree.leader)
    assert held.fds == (), "a sample from before its death"
