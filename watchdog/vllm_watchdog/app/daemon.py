"""The wiring: makes every adapter, gives each command its executor, starts and stops all of it.

The only file that knows every module.  What blocks runs in the adapters' own threads; the loop runs in the main thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from vllm_watchdog import __version__
from vllm_watchdog.act.evidence import Evidence
from vllm_watchdog.act.retention import Retention
from vllm_watchdog.act.survey import survey
from vllm_watchdog.app.alerting import Alerting
from vllm_watchdog.app.announce import Announcer
from vllm_watchdog.app.clock import Sampling
from vllm_watchdog.app.console import Console, journald
from vllm_watchdog.app.document import context, document
from vllm_watchdog.app.engines import Engines
from vllm_watchdog.app.gateway_link import GatewayLink, heard
from vllm_watchdog.app.haste import Haste
from vllm_watchdog.app.loop import Loop, Outlets, boot_id, host_seed
from vllm_watchdog.app.malloc import keep_little
from vllm_watchdog.app.process import become_subreaper, crash, keep_capabilities, listen_to_signals, settle_memory
from vllm_watchdog.app.recall import recalled
from vllm_watchdog.app.reload import Reload, rules_hold
from vllm_watchdog.app.samples import Sampler
from vllm_watchdog.app.voice import Voice
from vllm_watchdog.cgroup import Groups, NoGroupsError, claim
from vllm_watchdog.config import ROUTE_FILE, Settings
from vllm_watchdog.core import commands as c
from vllm_watchdog.core import story
from vllm_watchdog.core.events import Booted, Event, HostSampled, Reloaded, StopAsked
from vllm_watchdog.core.plan import Plan
from vllm_watchdog.core.totals import Totals
from vllm_watchdog.core.units import DAY_S, GIB
from vllm_watchdog.core.world import World, remembered
from vllm_watchdog.proc import MarkIndex, instance_of
from vllm_watchdog.procfs import Glance
from vllm_watchdog.sense.gpu import GpuSense
from vllm_watchdog.sense.host import HostSense
from vllm_watchdog.sense.kernel import KernelSense, open_kmsg
from vllm_watchdog.tell.control import LOAD, ROUTE, Control
from vllm_watchdog.tell.history import History
from vllm_watchdog.tell.journal import Journal
from vllm_watchdog.tell.lock import Lock
from vllm_watchdog.tell.page import Pages
from vllm_watchdog.tell.samples import Samples
from vllm_watchdog.tell.store import Store, load
from vllm_watchdog.tell.systemd import Notifier

if TYPE_CHECKING:
    from vllm_watchdog.web.server import Web

GPU_SILENT_PERIODS = 3
EVIDENCE_FLOOR = 0.25       # of disk_free_gib: what is left then is for the journal and the engines' logs
WRITTEN_S = 5.0             # the state waits this long for the alerts that it owes to be on disk
FIRST_S = 3.0               # from the first listener to the first world takes milliseconds
SWITCH_S = 0.0005           # Python's 5 ms, once a system call, would make a busy thread cost an engine's start 0.1 s
LEAVE_S = 5.0               # to write the last lines down when everything has stopped


class Part(Protocol):
    def start(self) -> None: ...
    def stop(self, deadline_s: float) -> Any: ...


class Daemon:
    def __init__(self, settings: Settings, again: Callable[[], Settings], wall: Callable[[], float] = time.time,
                 kernel_log: Callable[[], int] = open_kmsg) -> None:
        """`again` reads the settings anew; it raises ConfigError.  A sandbox has its own wall clock and kernel log."""
        self.settings, self.wall, self._kernel_log = settings, wall, kernel_log
        self._again = again
        self.inbox: SimpleQueue[Event] = SimpleQueue()
        self.instance = instance_of(settings.daemon.state_dir)
        self.sampler, self.haste = Sampler(), Haste(time.monotonic)
        self.started = wall()
        self._shown: tuple[World, Totals] = (World(), Totals())
        self._folded = threading.Event()    # there is a world to show
        self._lag_s = 0.0
        self._saved: Any = None
        self._parts: list[Part] = []
        self._tell()
        self.groups = self._claim()
        self._sense()
        self._act()
        self._execute: dict[type[c.Command], Callable[[Any], None]] = self.engines.do | {
            c.SampleGpus: lambda _: self.gpus.wake(asked=True),
            c.Dump: lambda command: self.evidence.do(command, context(self.world, command.mark, self.sampler.rows)),
            c.Record: self._record,
            c.Alert: self._alert, c.Answer: self.control.answer, c.Say: self._decided, c.Quit: lambda _: None,
        }
        outlets = Outlets(self.journal.event, self._carry_out, self._publish, self.notifier.watchdog)
        self.loop = Loop(self.inbox, outlets, wall=wall)

    @property
    def world(self) -> World:
        """The newest world.  It is frozen, so any thread may read it."""
        return self.loop.world

    def _part(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    # -- what it is made of

    def _tell(self) -> None:
        daemon = self.settings.daemon
        self.notifier = Notifier.from_environ(os.environ)
        self.announcer = Announcer(self.notifier, daemon.ready, time.monotonic)
        self.voice = Voice(Console(journald()).line)
        self.journal: Journal = self._part(Journal(
            daemon.log_dir / "journal", time.monotonic, self.wall, tap=self.voice.line,
            total_bytes=int(self.settings.retention.journal_gib * GIB), give_way=self.haste.give_way))
        self.route: Store = self._part(Store(daemon.state_dir / ROUTE_FILE, time.monotonic, self.say))
        retention = self.settings.retention
        self.history: History = self._part(History(
            daemon.log_dir / "history.db", time.monotonic, self.wall, self.say, keep_s=retention.days * DAY_S,
            give_way=self.haste.give_way))
        self.samples: Samples = self._part(Samples(self.history.do))
        self.alerting: Alerting = self._part(Alerting(self.settings, self.history, self.say))
        self.reload = Reload(
            self.settings, self._again, lambda: self.world.plan, self._apply, self.announcer, self.say)
        self.pages: Pages = self._part(Pages(self._incidents_dir, time.monotonic, self.say, os.uname().nodename))
        self.store: Store = self._part(Store(
            daemon.state_dir / "state.json", time.monotonic, self.say, first=lambda: self.alerting.written(WRITTEN_S),
            give_way=self.haste.give_way))
        self.reader = reader = self.history.reader()
        self.control: Control = self._part(Control(
            daemon.socket, self.inbox.put, self.report, reader.incidents, reader.incident, time.monotonic, self.say,
            self._heard, self.reload,
            lambda: self.samples.recent(self.wall())))
        self.voice.listeners.append(self.control.publish)
        self.web: Web | None = None
        if daemon.port:
            from vllm_watchdog.app import page  # `llm-watchdog events` need not wait for a web server

            self.web = page.web(self.settings, self.control, self.report, reader, self.samples, self.say)
            self.voice.listeners.append(self._part(self.web).said)

    def _claim(self) -> Groups | None:
        """Control groups for the engines; without them marks alone tell who is ours, and that is said once."""
        try:
            groups = claim(self.say)
        except NoGroupsError as error:
            self._groups_why = str(error)
            self.say("cgroup.unknown", why=str(error))
            return None
        self._groups_why = ""
        self.say("cgroup.claimed", root=str(groups.root), memory="limited and counted" if groups.memory else "not counted")
        return groups

    def _sense(self) -> None:
        daemon, post, clock = self.settings.daemon, self.inbox.put, time.monotonic
        self.gpus: GpuSense = self._part(
            GpuSense(post, clock, self.instance, GPU_SILENT_PERIODS * max(daemon.sample_s, 1.0)))
        self.host: HostSense = self._part(HostSense(
            self._host_sampled, clock, MarkIndex(self.instance, Glance()), daemon.log_dir, self.groups))
        self.kernel: KernelSense = self._part(KernelSense(post, clock, self._kernel_log))

    def _act(self) -> None:
        post, clock = self.inbox.put, time.monotonic
        settings = self.settings
        self.retention: Retention = self._part(Retention(
            settings.daemon.log_dir, settings.retention.days, self.wall, self._open_incidents, self.say))
        self.engines = Engines(
            settings.launches(), self.instance, settings.daemon.state_dir, self.groups, self.retention.make_room, post,
            self._part, lambda: self.world, self.reload.start_of, self.haste)
        self.gateway = GatewayLink(
            self.engines.launches, settings.rules(), lambda route: self.control.publish(route, ROUTE), self.route.save,
            self.wall, expected="gateway" in settings.model_fields_set)
        self.evidence: Evidence = self._part(
            Evidence(self._incidents_dir, self.engines.launches, settings.evidence, post, clock, self.instance,
                     floor_bytes=int(settings.thresholds.disk_free_gib * GIB * EVIDENCE_FLOOR),
                     open_incidents=self._open_incidents))
        self._part(
            Sampling(settings.daemon.sample_s, (self.gpus.wake, self.host.wake, self.engines.wake_probes)))

    def _open_incidents(self) -> frozenset[str]:
        return frozenset(incident.id for incident in self.world.incidents)

    @property
    def _incidents_dir(self) -> Path:
        return self.settings.daemon.log_dir / "incidents"

    # -- one life

    def run(self) -> int:
        """Until everything is stopped.  Raises Busy, ControlError, OSError when it can't even begin."""
        daemon = self.settings.daemon
        listen_to_signals(self._stop_asked, self.reload)     # before there is anything that a stop would have to undo
        lock = Lock.acquire(daemon.state_dir / "lock")
        try:
            sys.setswitchinterval(SWITCH_S)
            keep_little()
            keep_capabilities()
            become_subreaper()
            index = MarkIndex(self.instance, inhabitants=self.groups.inhabitants) if self.groups else None
            memory = recalled(load(daemon.state_dir / "state.json", self.wall(), self.say), self.reader, self.say)
            booted = Booted(
                at=time.monotonic(), plan=self.settings.plan(host_seed()), wall_offset=self.wall() - time.monotonic(),
                boot_id=boot_id(), memory=memory, survivors=survey(self.instance, index),
                supervised=self.notifier.address is not None,
            )
            self.reload.adopt(booted.survivors)
            threading.excepthook = crash
            settle_memory()
            for part in self._parts:
                part.start()
            self.loop.run(booted)
            self.announcer.leave(self.world)
        finally:
            end = time.monotonic() + LEAVE_S
            for part in reversed(self._parts):
                part.stop(max(end - time.monotonic(), 0.1))
            lock.release()
        return 0

    def _stop_asked(self, by: str) -> None:
        self.inbox.put(StopAsked(time.monotonic(), by))     # SimpleQueue.put is reentrant, so a signal's handler may

    # -- what the loop hands out

    def _carry_out(self, command: c.Command) -> None:
        self._execute[type(command)](command)

    def _publish(self, world: World) -> None:
        """What must survive is written when it changed; systemd shows one line."""
        self._shown, self._lag_s = (world, self.loop.totals), time.monotonic() - world.at
        self._folded.set()
        if self.web:
            self.web.changed()
        if (memory := remembered(world)) != self._saved:
            self._saved = memory
            self.store.save(memory)
        self.gateway.publish(world)
        self.announcer.publish(world)

    def report(self) -> dict[str, Any]:
        """The status document: page, API, metrics and command line show this and nothing else.  Who asks while the daemon
        starts waits for the first one: an empty world would look like an outage."""
        self._folded.wait(FIRST_S)
        world, totals = self._shown
        return document(world, totals, self.reload.profile, self.engines.stage) | {
            "alerts": [asdict(state) for state in self.alerting.states()],
            "pid": os.getpid(),
            "daemon": {
                "version": __version__, "host": os.uname().nodename, "started": round(self.started, 3),
                "lag_s": round(self._lag_s, 6),
                "queues": {"inbox": self.inbox.qsize(), "journal": self.journal.waiting, "history": self.history.waiting},
                "lost": {"journal": self.journal.lost, "history": self.history.lost}, "alerts": dict(self.voice.alerts),
                "log_dir": str(self.settings.daemon.log_dir), "operable": self.settings.daemon.token is not None,
            },
            "gateway": self.gateway.report(),
            "memory_limited": bool(self.groups and self.groups.memory),
            "cgroups": str(self.groups.root) if self.groups else {"unknown": self._groups_why},
        } | self.reload.report()

    def _heard(self, said: dict[str, Any]) -> None:
        """The gateway's words, or a drill's.  Raises ValueError."""
        if said["verb"] == LOAD:
            self.gateway.take(said)
        else:
            self.inbox.put(heard(said, time.monotonic()))

    def _record(self, command: c.Record) -> None:
        self.history.record(command.incident)
        self.pages.write(command.incident, partial(self.sampler.points, command.incident.engine))

    def _alert(self, command: c.Alert) -> None:
        incident = command.incident
        self.alerting.tell(command)
        if command.kind != "resolved" and not command.again:      # the core says itself that it is over
            news = incident.failures[-1] if command.kind == "worsened" and incident.failures else incident
            self.say(f"incident.{command.kind}", incident=incident.id, urgency=incident.urgency, class_=news.class_,
                     text=incident.page or news.text,
                     text_zh=story.paged(incident).zh or news.words.zh)

    def _apply(self, settings: Settings, plan: Plan) -> None:
        """In the thread of whoever asked."""
        if rules_hold(self.settings, settings):
            self.gateway.rules = settings.rules()
        self.gateway.limits = {name: launch.prompt for name, launch in settings.launches().items()}
        self.inbox.put(Reloaded(time.monotonic(), plan))
        self.evidence.limits = settings.evidence
        self.alerting.change(settings)

    # -- samples, journal, log

    def _host_sampled(self, event: Event) -> None:
        self.inbox.put(event)
        if isinstance(event, HostSampled):
            self.engines.sampled(event.trees)
            self.samples.take(self.sampler.take(self.world))

    def _decided(self, command: c.Say) -> None:
        fields = dict(command.fields)
        self.journal.write({"at": round(self.world.at, 6), "say": command.name, "decided": True} | fields)

    def say(self, name: str, /, **fields: str | float) -> None:
        """What an adapter has to say for itself."""
        self.journal.say(name, **fields)
