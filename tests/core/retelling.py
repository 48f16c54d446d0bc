"""Whole-world histories as text: what happens stands at the margin, what it leads to is indented under it.

    plan backup gpu=0 share=0.8 budget=1
    0 boot
        primary starting, backup stopped | look, spawn primary#1
    20..50/1 scrape primary#1 still       # every second; only the turns that lead to something are told
        @30 primary serving, backup stopped | ask primary#1

The world after a turn is told when phases or sides changed or something was commanded; records and log lines are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.core import scenes
from tests.core.scenes import Scene, finding, gpu, mark, metrics

from vllm_watchdog.core import commands as c
from vllm_watchdog.core import events as e
from vllm_watchdog.core.incidents import Incident, Urgency
from vllm_watchdog.core.plan import FailoverPlan, Limits, Standby, Thresholds
from vllm_watchdog.core.readings import Health, Holder, Unknown
from vllm_watchdog.core.world import next_deadline, remembered

TEXTS: dict[type, Callable[..., str]] = {
    c.Spawn: lambda it: f"spawn {it.mark}",
    c.Adopt: lambda it: f"adopt {it.mark}",
    c.Term: lambda it: f"term {it.mark}",
    c.Kill: lambda it: f"kill {it.mark}",
    c.Drain: lambda it: f"drain {it.mark}",
    c.Ask: lambda it: f"ask {it.mark}",
    c.Sleep: lambda it: f"sleep {it.mark}",
    c.Wake: lambda it: f"wake {it.mark}",
    c.SampleGpus: lambda it: "look",
    c.Dump: lambda it: f"dump {it.mark or 'host'} {it.reason}" + (" with stacks" if it.stacks else ""),
    c.Alert: lambda it: f"alert {it.kind} {it.incident.class_} {it.incident.urgency}" + _reason(it.incident),
    c.Answer: lambda it: f"answer {'yes' if it.ok else 'no'}: {it.text}",
    c.Quit: lambda it: "quit",
}


def _reason(incident: Incident) -> str:
    """What a page says: the sentence of its latest symptom."""
    told = [entry.text for entry in incident.timeline if entry.what in ("opened", "symptom")]
    paged = incident.urgency is Urgency.PAGE and incident.wall_resolved is None
    return f" ({told[-1]})" if paged else ""


class Teller:
    """Reads the events of a journey, one line each, into a world."""

    def __init__(self, words: list[str]) -> None:
        self.plan = _plan(words)
        self.scene: Scene | None = None
        self.wall = scenes.WALL
        self.tokens: dict[str, float] = {}
        self.kv = 0.0

    def happen(self, at: float, verb: str, words: list[str]) -> str:
        """One event; what it led to, empty where it led to nothing."""
        before = self.scene.phases() if self.scene else None
        sides, limits = self._wanted(), self._lowered()
        if verb in ("boot", "reboot"):
            self._boot(at, verb, words)
        else:
            self.scene.feed(getattr(self, f"_{verb}")(at, *words))
        told = [f"turn to {name}" for name in self._wanted() if sides and name not in sides]
        told += [f"lowered to {now}" if now else "restored" for now in self._lowered() if limits and now not in limits]
        told += [TEXTS[type(it)](it) for it in self.scene.latest if type(it) in TEXTS]
        if told or self.scene.phases() != before:
            phases = ", ".join(f"{name} {phase}" for name, phase in self.scene.phases().items())
            return phases + (" | " + ", ".join(told) if told else "")
        return ""

    def _wanted(self) -> list[str]:
        return [service.wanted for service in self.scene.world.services] if self.scene else []

    def _lowered(self) -> list[int | None]:
        return [service.lowering.to for service in self.scene.world.services] if self.scene else []

    def _boot(self, at: float, verb: str, words: list[str]) -> None:
        """`primary#1=100` still runs as PID 100, `primary#1=orphan` has lost its leader."""
        old = self.scene
        survivors = tuple(self._survivor(word) for word in words)
        boot_id = "boot-2" if verb == "reboot" else "boot-1"
        if verb == "reboot":
            self.wall += old.now - at
        self.scene = Scene(self.plan, at, remembered(old.world) if old else None, survivors, boot_id, self.wall)

    def _survivor(self, word: str) -> e.Survivor:
        whose, _, pid = word.partition("=")
        return e.Survivor(mark(whose), 77 if pid == "orphan" else int(pid), pid != "orphan", 300.0)

    def _tick(self, at: float) -> e.Event:
        return e.Tick(at)

    def _deadline(self, at: float) -> e.Event:
        assert at == next_deadline(self.scene.world), f"the next deadline is at {next_deadline(self.scene.world)}"
        return e.Tick(at)

    def _stop(self, at: float) -> e.Event:
        return e.StopAsked(at, "SIGTERM")

    def _clock(self, at: float, by: str) -> e.Event:
        self.wall += float(by)
        return e.ClockSet(at, self.wall)

    def _spawned(self, at: float, whose: str, pid: str = "100") -> e.Event:
        return e.Spawned(at, mark(whose), int(pid))

    def _refused(self, at: float, whose: str, class_: str, *why: str) -> e.Event:
        return e.SpawnFailed(at, mark(whose), class_, " ".join(why))

    def _exits(self, at: float, whose: str, code: str) -> e.Event:
        return e.Exited(at, mark(whose), int(code))

    def _loses(self, at: float, whose: str, name: str, pid: str = "101") -> e.Event:
        return e.MemberDied(at, mark(whose), int(pid), name)

    def _empty(self, at: float, whose: str, *pids: str) -> e.Event:
        return e.Emptied(at, mark(whose), tuple(Holder(int(pid), "VLLM::EngineCore", mark(whose)) for pid in pids))

    def _dumped(self, at: float, whose: str) -> e.Event:
        service = self.plan.service_of(mark(whose).engine)
        return e.Dumped(at, mark(whose), self.scene.world.incident(service).id, "incidents/x")

    def _health(self, at: float, whose: str, health: str, pid: str = "100", *stranger: str) -> e.Event:
        owner = Holder(int(pid), " ".join(stranger) or "vllm", None if stranger else mark(whose))
        return e.Probed(at, mark(whose), Health(health), (owner,) if health == "ok" else ())

    def _answered(self, at: float, whose: str, answer: str) -> e.Event:
        known = {"yes": True, "no": False}
        return e.Answered(at, mark(whose), known.get(answer, Unknown(at, answer)), 10.0)

    def _slept(self, at: float, whose: str, *why: str) -> e.Event:
        return e.Slept(at, mark(whose), " ".join(why), 0.3)

    def _woke(self, at: float, whose: str, *why: str) -> e.Event:
        return e.Woke(at, mark(whose), " ".join(why), 0.2)

    def _scrape(self, at: float, whose: str, how: str, running: str = "0", waiting: str = "0") -> e.Event:
        if how == "unknown":
            return e.Scraped(at, mark(whose), Unknown(at, "no answer"))
        self.tokens[whose] = self.tokens.get(whose, 0.0) + (1.0 if how in ("moves", "full") else 0.0)
        self.kv += 0.001 if how == "prefills" else 0.0
        counters = None if how == "blind" else self.tokens[whose]
        seen = metrics(counters, float(running), float(waiting), 0.99 if how == "full" else self.kv)
        return e.Scraped(at, mark(whose), seen)

    def _gpu(self, at: float, used_gib: str, *rows: str) -> e.Event:
        """`70=primary#1` or `70=nginx`: a process with so many GiB; card 1 is empty."""
        if used_gib == "unknown":
            return e.GpusSampled(at, Unknown(at, "no answer"))
        holders = []
        for row in rows:
            gib, _, who = row.partition("=")
            whose = mark(who) if "#" in who else None
            holders.append((200, "VLLM::EngineCore" if whose else who, whose, float(gib)))
        return e.GpusSampled(at, (gpu(float(used_gib), *holders), gpu(0, index=1)))

    def _log(self, at: float, whose: str, *classes: str) -> e.Event:
        return e.LogRead(at, mark(whose), tuple(map(finding, classes)))

    def _drained(self, at: float, whose: str, *classes: str) -> e.Event:
        return e.LogRead(at, mark(whose), tuple(map(finding, classes)), drained=True)

    def _kernel(self, at: float, class_: str, pci: str) -> e.Event:
        return e.KernelRead(at, (finding(class_, pci=pci),))

    def _asks(self, at: float, verb: str, engine: str | None = None) -> e.Event:
        return e.Asked(at, 1, verb, engine)


def _plan(words: list[str]) -> scenes.Plan:
    options = dict(word.partition("=")[::2] for word in words)
    limits = replace(Limits(), **_given(Limits, options))
    failover = replace(FailoverPlan(), **_given(FailoverPlan, options))
    levels = {name: ((0, float(options[name])),) for name in ("vram_warn", "vram_degrade") if name in options}
    gpus, backup_gpus = ((int(options[name]),) if name in options else None for name in ("gpu", "backup_gpu"))
    share = float(options["share"]) if "share" in options else None
    backup_share = float(options["backup_share"]) if "backup_share" in options else None
    seqs, backup_seqs = (int(options[name]) if name in options else None for name in ("seqs", "backup_seqs"))
    return scenes.plan("backup" in options, gpus or (), share, backup_gpus, limits=limits, failover=failover,
                       thresholds=Thresholds(**levels), standby=Standby(options.get("standby", "cold")),
                       backup_share=backup_share, seqs=seqs, backup_seqs=backup_seqs)


def _given(kind: type, options: dict[str, str]) -> dict[str, object]:
    defaults = {field.name: field.default for field in fields(kind)}
    return {name: type(defaults[name])(options[name]) for name in defaults if name in options}


def retell(text: str) -> str:
    """The journey again, with what the events of today's core lead to."""
    lines, teller = [], None
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        words = line.split("#  ")[0].split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "plan":
            teller = Teller(words[1:])
            continue
        lines += _told(teller, words)
    return "\n".join(lines) + "\n"


def _told(teller: Teller, words: list[str]) -> Iterator[str]:
    when, verb, *rest = words
    many = ".." in when
    for at in _instants(when):
        if told := teller.happen(at, verb, rest):
            yield "    " + (f"@{at:g} " if many else "") + told


def _instants(when: str) -> Iterator[float]:
    """`20`, or `20..50/1`: every second from 20 to 50."""
    first, _, rest = when.partition("..")
    last, _, step = rest.partition("/")
    at = float(first)
    while at <= float(last or first) + 1e-9:
        yield round(at, 6)
        at += float(step or 1)


