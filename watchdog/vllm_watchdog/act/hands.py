"""Starts, stops and kills the processes of one engine, and tells of their end at once.

One thread an engine sleeps in `poll` over four things: commands (in order), the pidfd of the leader (so that `Exited`
is posted within a millisecond of the death), those of its cores and workers, and those of what a `Kill` has struck.
The loop's calls only enqueue.  The thread blocks on fork and exec, on a full disk while room is made, and for TOGETHER_S
at a death under a leader that lives.  Must never signal what is not surely ours, and never start a generation while a
process of another one of the same engine lives.
"""

from __future__ import annotations

import os
import queue
import select
import signal
import threading
from collections.abc import Callable, Iterable
from math import inf

from vllm_watchdog.act.leader import Leader, adopt, spawn
from vllm_watchdog.act.members import Members, Titled, ends_with_its_core, titled
from vllm_watchdog.act.purge import Purge, ended_children, reap
from vllm_watchdog.act.step import RefusedError
from vllm_watchdog.cgroup import Group, Groups
from vllm_watchdog.core.commands import Adopt, Kill, Spawn, Term
from vllm_watchdog.core.events import Emptied, Event, Exited, MemberDied, Spawned, SpawnFailed
from vllm_watchdog.core.readings import Mark, Process
from vllm_watchdog.launch import Launch
from vllm_watchdog.proc import MarkIndex, deliver, holding, listeners, refuses

ASKED = (signal.SIGTERM, signal.SIGCONT)  # one that is stopped hears nothing before it goes on
GROUP_AFTER_S = 5.0  # a vLLM asked while it was loading left TERM to the leader unanswered for 90 s
TOGETHER_S = 0.02  # a signal to a whole group reaches one process after another: is it the leader's end, too?
SEEN_S = 1.0  # how long a walk that has shown nothing of an engine is believed: only its hands start any of it
TIDY_S = 5.0  # how often orphans that ended under us are reaped
BACKLOG = 64  # the policy has at most a few commands in flight; more is a bug


class Hands:
    """The hands of one engine.  `begins` is called in their thread right before a spawn; `make_room` frees some bytes of the
    log disk; both may block on it.  `index` is given only by tests that need a fake `/proc`."""

    def __init__(
        self,
        launch: Launch,
        instance: str,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        index: MarkIndex | None = None,
        group_after_s: float = GROUP_AFTER_S,
        tidy_s: float = TIDY_S,
        groups: Groups | None = None,
        make_room: Callable[[int], None] = lambda _: None,
        begins: Callable[[Mark], None] = lambda _: None,
    ) -> None:
        self.launch, self._instance, self._post, self._clock = launch, instance, post, clock
        self._groups = groups
        self._index = index or (MarkIndex(instance, inhabitants=groups.inhabitants) if groups else MarkIndex(instance))
        self._group_after_s, self._tidy_s, self._make_room = group_after_s, tidy_s, make_room
        self._begins = begins
        self._inbox: queue.Queue[Spawn | Adopt | Term | Kill] = queue.Queue(BACKLOG)
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"hands-{launch.name}", daemon=True)
        self._leader: Leader | None = None
        self._exited = False  # the leader's death was posted
        self._members = Members()  # of the leader, while nobody has asked it to stop
        self._sampled: tuple[Mark, Titled] | None = None  # its processes, as another thread saw them
        self._watching = False
        self._purge: Purge | None = None
        self._orphaned = False  # its leader was gone before the purge began
        self._group_term_at: float | None = None
        self._purge_at = self._tidy_at = clock()
        self._nothing_at = -inf  # when a walk has shown no process of this engine

    def start(self) -> None:
        self._thread.start()

    def do(self, command: Spawn | Adopt | Term | Kill) -> None:
        """Never waits.  Raises queue.Full when the backlog is full, which is a bug."""
        self._inbox.put_nowait(command)
        os.eventfd_write(self._bell, 1)

    def adopt(self, mark: Mark, pid: int) -> None:
        """Never waits.  -> Exited at once where the process is not there any more."""
        self.do(Adopt(mark, pid))

    def watch(self, mark: Mark, processes: Iterable[Process]) -> None:
        """What a sample saw of a generation -> MemberDied.  Never waits; for one thread, which need not be the loop's."""
        if (sampled := (mark, titled(processes))) != self._sampled:
            self._sampled = sampled
            os.eventfd_write(self._bell, 1)

    def stop(self, deadline_s: float) -> None:
        """Ends the thread.  The engine is left as it is: it outlives us."""
        self._stopping = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(deadline_s)

    # -- the thread

    def _run(self) -> None:
        while not self._stopping:
            ready = self._sleep()
            self._notice_death()
            self._notice_members(ready)
            while not self._inbox.empty():
                self._carry_out(self._inbox.get_nowait())
            now = self._clock()
            if self._purge and now >= self._purge_at:
                self._purge_once(self._purge)
            if self._group_term_at is not None and now >= self._group_term_at:
                self._term_group()
            if now >= self._tidy_at:
                self._tidy()

    def _sleep(self) -> set[int]:
        """Until a command, a death, or the next deadline.  What can be read then."""
        watched = select.poll()
        watched.register(self._bell, select.POLLIN)
        if self._leader and not self._exited:
            watched.register(self._leader.fd, select.POLLIN)
        for fd in (*self._members.fds, *(self._purge.fds if self._purge else ())):
            watched.register(fd, select.POLLIN)
        due = [self._tidy_at]
        due += [self._purge_at] if self._purge else []
        due += [self._group_term_at] if self._group_term_at is not None else []
        ready = {fd for fd, _ in watched.poll(max(0.0, min(due) - self._clock()) * 1000)}
        if self._bell in ready:
            os.eventfd_read(self._bell)
        if self._purge and self._purge.all_died(ready):
            self._purge_at = self._clock()  # look again at once
        return ready

    def _notice_death(self) -> None:
        leader = self._leader
        if leader and not self._exited and select.select([leader.fd], [], [], 0)[0]:
            self._exited = True
            self._group_term_at = None
            self._unwatch()
            group = self._group(leader.mark)
            self._post(Exited(self._clock(), leader.mark, leader.code(), group.oom_kills if group else 0))

    def _notice_members(self, ready: set[int]) -> None:
        """Of a leader that lives and was not asked to stop; then learns whom the latest sample has shown."""
        leader = self._leader
        if leader is None or not self._watching:
            return
        died = self._members.died(ready)
        if died and select.select([leader.fd], [], [], TOGETHER_S)[0]:
            self._notice_death()
            return
        if died:
            died += self._members.died(set(select.select(self._members.fds, [], [], 0)[0]))
        for pid, name in sorted(died, key=ends_with_its_core):
            self._post(MemberDied(self._clock(), leader.mark, pid, name))
        if self._sampled and self._sampled[0] == leader.mark:
            self._members.learn(self._sampled[1], leader.who.pid)

    def _unwatch(self) -> None:
        self._members.close()
        self._watching = False

    def _carry_out(self, command: Spawn | Adopt | Term | Kill) -> None:
        match command:
            case Spawn(mark):
                self._spawn(mark)
            case Adopt(mark, pid):
                self._adopt(mark, pid)
            case Term(mark):
                self._term(mark)
            case Kill(mark):
                self._kill(mark)

    def _spawn(self, mark: Mark) -> None:
        try:
            self._refuse_a_double()
            self._refuse_a_taken_port()
            group = self._groups.create(mark, self.launch.memory_max) if self._groups else None
            self._begins(mark)
            leader = spawn(self.launch, mark, self._instance, self._make_room, group.path if group else None)
        except RefusedError as refused:
            self._post(SpawnFailed(self._clock(), mark, refused.class_, str(refused)))
            return
        self._nothing_at = -inf
        self._hold(leader)
        self._post(Spawned(self._clock(), mark, leader.who.pid, leader.lost_log))

    def _refuse_a_double(self) -> None:
        if self._clock() - self._nothing_at < SEEN_S:
            return
        for mark, members in self._index.marked().items():
            if mark.engine == self.launch.name:
                raise RefusedError(f"{mark} still runs as PID {members[0].pid}")

    def _refuse_a_taken_port(self) -> None:
        port, host = self.launch.port, self.launch.host
        if refuses(port, host):
            return
        for holder in listeners(port, self._instance, host):
            raise RefusedError(f"port {port} is held by {holder}", "port_stranger")

    def _adopt(self, mark: Mark, pid: int) -> None:
        leader = adopt(mark, pid, self._index)
        if leader:
            self._hold(leader)
        else:
            self._post(Exited(self._clock(), mark, None))

    def _hold(self, leader: Leader) -> None:
        if self._leader:
            self._leader.release()
        self._index.learn(leader.who, leader.mark)
        self._leader, self._exited, self._watching = leader, False, True

    def _group(self, mark: Mark) -> Group | None:
        return self._groups.find(mark) if self._groups else None

    def _led(self, mark: Mark) -> Leader | None:
        return self._leader if self._leader and self._leader.mark == mark else None

    def _term(self, mark: Mark) -> None:
        leader = self._led(mark)
        if leader and not self._exited:
            self._unwatch()
            for number in ASKED:
                leader.send(number)
            self._group_term_at = self._clock() + self._group_after_s
        else:
            self._term_members(mark)

    def _term_group(self) -> None:
        self._group_term_at = None
        if self._leader and not all(self._leader.send_group(number) for number in ASKED):
            self._term_members(self._leader.mark)

    def _term_members(self, mark: Mark) -> None:
        for who in self._index.marked().get(mark, ()):
            with holding(who) as fd:
                if fd is not None and deliver(fd, signal.SIGTERM):
                    deliver(fd, signal.SIGCONT)

    def _kill(self, mark: Mark) -> None:
        if self._purge and self._purge.mark == mark:
            return
        if self._purge:
            self._purge.close()
        self._group_term_at = None
        leader = self._led(mark)
        if leader:
            self._unwatch()
        self._orphaned = leader is None or self._exited
        self._purge, self._purge_at = Purge(mark, leader, self._index, self._group(mark)), self._clock()

    def _purge_once(self, purge: Purge) -> None:
        empty = purge.round()
        self._notice_death()
        if not empty or (self._led(purge.mark) and not self._exited):  # Exited comes before Emptied
            self._purge_at = self._clock() + purge.wait_s
            return
        purge.close()
        self._purge = None
        self._nothing_at = self._clock() if purge.nothing_left else -inf
        if leader := self._led(purge.mark):
            leader.release()
            self._leader = None
        self._post(Emptied(self._clock(), purge.mark, purge.struck if self._orphaned else ()))

    def _tidy(self) -> None:
        """Reaps what re-parented to us and ended; but what began a session may be a leader in other hands."""
        self._tidy_at = self._clock() + self._tidy_s
        if not ended_children():
            return
        ours = [owned for owned in self._index.owned() if owned.mark.engine == self.launch.name]
        reap([owned for owned in ours if owned.stat.session != owned.stat.who.pid], self._leader)
