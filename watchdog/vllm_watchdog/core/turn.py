"""One event's worth of change: `advance` works on it, takes its world and commands, and forgets it.

It is where decisions of the policy become commands, and where a failure becomes part of an incident.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from vllm_watchdog.core import causes, incidents, policy, reasons, repeats
from vllm_watchdog.core.blame import specificity
from vllm_watchdog.core.catalog import Words
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.commands import Drain, Dump, Kill, SampleGpus, Sleep, Spawn, Term, Wake
from vllm_watchdog.core.draft import Draft
from vllm_watchdog.core.failures import Failure
from vllm_watchdog.core.incidents import Incident, Need, Urgency
from vllm_watchdog.core.liveness import Pulse
from vllm_watchdog.core.phrases import filled
from vllm_watchdog.core.policy import Do, Phase, Sign
from vllm_watchdog.core.reload import settled
from vllm_watchdog.core.verdict import Finding
from vllm_watchdog.core.world import NOT_YET, Engine

HOST = incidents.HOST
BUNDLE_S = 10.0     # a bundle is as finished as it is by then
LOOK_S = 0.1        # how often the GPUs are sampled while an engine waits for their memory: it was back after 0.17-0.43 s
LEAVE_S = 1.0       # a vLLM whose core has died says why, and leaves by itself within 0.6 to 1 s: TERM was no faster
OOMS = frozenset({"oom_runtime", "startup_oom"})
HANG = "engine_hang"
DOWN = "engine_down"    # of a service, so it does not end with a process


class Turn(Draft):
    # -- the policy

    def sign(self, name: str, sign: Sign, doom: str = "") -> None:
        """Tell the policy of one engine what happened, and carry out its decision."""
        engine = self.world.engine(name)
        if sign is Sign.TIMEOUT and not engine.cause and engine.phase in reasons.OVERDUE:
            engine = self.explain(name, *reasons.overdue(engine, self.at))
        event = policy.Event(self.at, sign, doom)
        life, actions = policy.step(engine.life, event, engine.plan.limits, f"{self.world.plan.seed}/{name}")
        if life is engine.life:     # what the table does not list
            return
        was = engine.phase
        self.change(name, life=life, since=self.at if life.phase is not was else engine.since)
        if life.phase is not was:
            self.say("engine.phase", engine=engine.mark, was=was, now=life.phase, because=sign)
            self._passed(engine, was, sign, life.phase)
        for action in actions:
            CARRY_OUT[action](self, name)

    def _passed(self, engine: Engine, was: Phase, sign: Sign, now: Phase) -> None:
        """A change of phase in the incident's words: some are deeds of ours, and some need no human any more."""
        text = filled(causes.PHASE, engine=engine.name, was=causes.PHASES[was], now=causes.PHASES[now])
        self.note(engine.name, "phase", text)
        if (was, sign) in DEEDS:
            self.note(engine.name, DEEDS[was, sign], str(engine.mark), engine=str(engine.mark))
        self.amend(engine.name, lambda incident: incidents.relieved(incident, engine.name))

    def overdue(self, name: str) -> None:
        """A phase lasted too long, and `pause` keeps us from acting: tell it."""
        engine = self.world.engine(name)
        if engine.phase in reasons.OVERDUE:
            self.fault(name, *reasons.overdue(engine, self.at))

    def _spawn(self, name: str) -> None:
        engine = self.world.engine(name)
        if engine.spawned_at < inf:         # a first start is no restart
            self.world = repeats.restarted(self.world)
        engine = Engine(
            plan=engine.plan, life=engine.life, generation=engine.generation + 1, since=self.at, spawned_at=self.at,
            active_at=self.at, pulse=Pulse(since=self.at), metrics=NOT_YET, ooms=engine.ooms,
            renewed_at=engine.renewed_at,
        )
        self.world = self.world.with_engine(engine)
        self.note(name, "started", filled(causes.STARTING, mark=engine.mark), engine=str(engine.mark))
        self.do(Spawn(engine.mark))

    def _dump(self, name: str) -> None:
        engine = self.world.engine(name)
        incident = self.blame(name)
        self.change(name, dumped=True)
        self.bundle(incident.id, name, engine.blame, stacks=True, deadline_s=engine.plan.limits.dump_s)

    def _snap(self, name: str) -> None:
        engine = self.world.engine(name)
        if not engine.life.charged or engine.dumped:
            return
        incident = self.blame(name)
        self.change(name, dumped=True)
        self.bundle(incident.id, name, engine.blame, stacks=False, deadline_s=engine.plan.limits.dump_s)

    def bundle(self, incident: str, name: str, reason: str, stacks: bool, deadline_s: float = BUNDLE_S) -> None:
        """Ask for evidence.  A kill waits for every bundle of its generation: one answer must not pass for another's."""
        mark = None
        if name != HOST and self.world.engine(name).generation:
            engine = self.change(name, bundles=self.world.engine(name).bundles + 1)
            mark = engine.mark
        self.do(Dump(incident, mark, reason, stacks, deadline_s))

    def bundled(self, name: str) -> None:
        engine = self.change(name, bundles=max(0, self.world.engine(name).bundles - 1))
        leaves_by = engine.lost_at + LEAVE_S
        if not engine.bundles and self.at < leaves_by and engine.phase is Phase.DUMPING:
            self.change(name, life=replace(engine.life, deadline=min(engine.life.deadline, leaves_by)))
        elif not engine.bundles:
            self.sign(name, Sign.DUMPED)

    def _look(self, _: str) -> None:
        self.world = settled(self.world)
        self.sample_again()

    def sample_again(self) -> None:
        """Sample the GPUs now, and be woken soon: somebody waits for their memory."""
        self.world = replace(self.world, look_at=self.at + LOOK_S)
        self.do(SampleGpus())

    def look_soon(self) -> None:
        """As `sample_again`, unless a look is due already."""
        if not self.at < self.world.look_at <= self.at + LOOK_S:
            self.sample_again()

    def _sleep(self, name: str) -> None:
        engine = self.world.engine(name)
        self.do(Sleep(engine.mark, engine.plan.limits.sleep_s))

    def _wake(self, name: str) -> None:
        engine = self.world.engine(name)
        self.note(name, "woken", filled(causes.WAKING, mark=engine.mark), engine=str(engine.mark))
        self.do(Wake(engine.mark, engine.plan.limits.wake_s))

    def page(self, name: str) -> None:
        engine = self.world.engine(name)
        class_, text = reasons.PAGES[engine.phase](self.world, engine)
        incident = self.symptom(name, class_, Urgency.PAGE, text)
        if engine.phase is Phase.HELD and engine.life.doom:
            incident = incidents.caused(incident, class_, engine.words)     # what keeps it down is the cause now
        self.world = self.world.with_incident(incidents.needed(incident, Need(name, class_, text.en, text.zh)))

    def send(self, kind: type[Kill] | type[Term] | type[Drain], name: str) -> None:
        self.do(kind(self.world.engine(name).mark))

    def _drain(self, name: str) -> None:
        """Nothing of it is left, so nothing will say that its symptoms have cleared."""
        cards = {f"gpu{gpu}" for gpu in self.world.engine(name).plan.gpus}
        watches = tuple(watch for watch in self.world.watches
                        if (watch.subject != name or watch.class_ == DOWN)
                        and not (watch.class_ == "vram_growth" and watch.subject in cards))
        self.world = replace(self.world, watches=watches)
        self.send(Drain, name)

    # -- failures

    def blame(self, name: str) -> Incident:
        """The failure of this generation joins, or opens, the service's incident."""
        engine = self.world.engine(name)
        why = reasons.why(engine)
        last = () if engine.why else reasons.last_words(engine.last_words)
        self.explain(name, engine.blame, why)
        incident = self.symptom(name, engine.blame, Urgency.CRITICAL, why, last)
        if engine.blame == HANG and self.world.service(name).wanted == name:    # before a failover makes it another's turn
            self.amend(name, lambda incident: incidents.down(incident, engine.pulse.sign_at))
        self.failed(name)
        self._count_failure(engine)
        if engine.in_flight:
            self.change(name, in_flight=None)
            self.flown(name, engine.in_flight)
        return self.world.incident(incident.service) or incident

    def failed(self, name: str) -> None:
        """The failure of this generation, as it is known by now, stands in the open incident."""
        engine = self.world.engine(name)
        why = reasons.why(engine)
        failure = Failure(self.at, str(engine.mark), engine.blame, why.en, engine.ended, zh=why.own_zh)
        self.world = repeats.failed(self.world, engine.mark, engine.blame)
        self.amend(name, lambda incident: incidents.failed(incident, failure))

    def _count_failure(self, engine: Engine) -> None:
        """Too many in a day are no accident.  An unplanned gap is an outage from now on."""
        if text := repeats.crash_loop(self.world, engine.name):
            self.symptom(engine.name, "crash_loop", Urgency.WARNING, text)
        service = self.world.service(engine.name)
        if service.wanted == engine.name:
            self.world = self.world.with_service(replace(service, excused_until=-inf))

    def fault(self, name: str, class_: str, text: Words, findings: tuple[Finding, ...] = (), doom: bool = False) -> None:
        """A failure of the running generation that waiting does not mend.

        While paused, what a log said (it will not say it again) is charged, and acted on when automatic actions resume;
        a condition will be seen again.
        """
        engine = self.world.engine(name)
        ours = not engine.life.charged and engine.phase not in policy.ALIVE
        if ours or engine.phase in policy.AT_REST | {Phase.RELEASING, Phase.BACKOFF}:
            return                                      # what follows our own stop is not a symptom
        news = specificity(class_) > specificity(engine.cause)
        if news:
            engine = self.explain(name, class_, text)
        if class_ in OOMS and not engine.oomed:
            recent = tuple(at for at in engine.ooms if at > self.at - engine.plan.limits.window_s)
            self.change(name, ooms=(*recent, self.at), oomed=True)
        self.symptom(name, class_, Urgency.CRITICAL, text, findings)
        if class_ in OOMS and (often := repeats.oom_rate(self.world, self.service_of(name))):
            self.symptom(name, "oom_rate", Urgency.WARNING, often)
        reason = class_ if doom else ""
        if not (self.world.paused and engine.phase in policy.ALIVE):
            self.sign(name, Sign.FAULT, doom=reason)
            self.failed(name)
            return
        if findings:
            event = policy.Event(self.at, Sign.FAULT, reason)
            self.change(name, life=policy.remember(self.world.engine(name).life, event, engine.plan.limits))
        if news:
            self.note(name, "paused", filled(causes.LEFT_ALONE, engine=name), engine=name)

# Changes of phase that are deeds of ours, as the timeline calls them.
DEEDS = {
    (Phase.DUMPING, Sign.DUMPED): "stopped",
    (Phase.DUMPING, Sign.TIMEOUT): "stopped",
    (Phase.STOPPING, Sign.TIMEOUT): "killed",
}
CARRY_OUT: dict[Do, Callable[[Turn, str], None]] = {
    Do.LOOK: Turn._look,
    Do.SPAWN: Turn._spawn,
    Do.DUMP: Turn._dump,
    Do.SNAP: Turn._snap,
    Do.TERM: lambda turn, name: turn.send(Term, name),
    Do.KILL: lambda turn, name: turn.send(Kill, name),
    Do.SLEEP: Turn._sleep,
    Do.WAKE: Turn._wake,
    Do.DRAIN: Turn._drain,
    Do.PAGE: Turn.page,
}

