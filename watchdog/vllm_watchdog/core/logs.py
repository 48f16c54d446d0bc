"""What findings in the engine's log and in the kernel's mean: whether another try can help, and whose failure it is."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_watchdog.core import gate, incidents, reasons
from vllm_watchdog.core.blame import specificity
from vllm_watchdog.core.changed import replace
from vllm_watchdog.core.events import KernelRead, LogRead
from vllm_watchdog.core.incidents import Urgency
from vllm_watchdog.core.policy import ALIVE, HAS_CHILD, Sign
from vllm_watchdog.core.readings import Unknown
from vllm_watchdog.core.turn import HOST, Turn
from vllm_watchdog.core.verdict import Finding
from vllm_watchdog.core.world import Engine

SAME_WHILE_HELD = frozenset({"startup_kv_insufficient", "startup_oom"})     # also said while an orphan holds the memory
ONE_RETRY = frozenset({"compile_failure"})      # with a fresh compile cache it may pass


def log_read(turn: Turn, event: LogRead) -> None:
    if _missed(turn, event):
        return
    engine = next((engine for engine in turn.world.engines if engine.mark == event.mark), None)
    if engine is None:
        return
    turn.change(engine.name, active_at=event.at)
    for finding in sorted(event.findings, key=lambda finding: -finding.rank):     # the cause names the incident
        _finding(turn, engine.name, finding)
    if event.drained:
        turn.change(engine.name, last_words=event.last_words)
        turn.sign(engine.name, Sign.SETTLED)


def _missed(turn: Turn, event: LogRead) -> bool:
    """Does it say why a generation ended that nobody saw end?  Its engine waits for its next start, or has begun it."""
    name = event.mark.engine
    incident = turn.world.incident(turn.service_of(name)) if name in {engine.name for engine in turn.world.engines} else None
    known = next((each for each in incident.failures if each.mark == str(event.mark)), None) if incident else None
    fatal = tuple(finding for finding in event.findings if finding.severity == "fatal")
    if known is None or known.text != reasons.unseen(event.mark).en or not fatal:
        return False
    cause = max(fatal, key=lambda finding: specificity(finding.class_))
    turn.say("log.finding", engine=event.mark, class_=cause.class_, action=cause.action, text=cause.text)
    turn.symptom(name, cause.class_, Urgency.CRITICAL, cause.text, fatal)
    told = replace(known, class_=cause.class_, text=cause.text, zh="")
    turn.amend(name, lambda incident: incidents.failed(incident, told))
    return True


def _finding(turn: Turn, name: str, finding: Finding) -> None:
    engine = turn.world.engine(name)
    turn.say("log.finding", engine=engine.mark, class_=finding.class_, action=finding.action, text=finding.text)
    if finding.severity == "fatal":
        turn.fault(name, finding.class_, finding.text, (finding,), doom=doomed(turn, engine, finding))
    elif engine.phase in ALIVE and finding.action != "ignore":
        turn.symptom(name, finding.class_, Urgency.WARNING, finding.text, (finding,))


def doomed(turn: Turn, engine: Engine, finding: Finding) -> bool:
    """Would another try fail alike?  Memory that somebody else holds is waited for instead."""
    if finding.action == "failover":
        return True
    if finding.class_ in ONE_RETRY:
        return len(engine.life.failures) > engine.life.charged       # an earlier one than this
    if finding.action == "wait-vram" or finding.class_ in SAME_WHILE_HELD:
        if isinstance(turn.world.gpus, Unknown):
            return finding.action != "wait-vram"
        return not gate.others_on(engine.plan, turn.world.gpus, engine.mark) and finding.class_ != "startup_profile_race"
    return finding.action == "config-error-stop"


def kernel_read(turn: Turn, event: KernelRead) -> None:
    if isinstance(event.findings, Unknown):
        turn.world = replace(turn.world, kernel=event.findings)
        turn.say("kernel.unknown", why=event.findings.why)
        return
    turn.world = replace(turn.world, kernel=None)
    for finding in event.findings:
        details = dict(finding.details)
        victims = [engine.name for engine in turn.world.engines if _concerns(turn, engine, details)]
        for name in victims:
            _finding(turn, name, finding)
        if not victims and "xid" in finding.class_:
            turn.symptom(HOST, finding.class_, Urgency.WARNING, finding.text, (finding,))


def _concerns(turn: Turn, engine: Engine, details: Mapping[str, object]) -> bool:
    """By PID where the kernel names one, else by the card it names."""
    if engine.phase not in HAS_CHILD:
        return False
    pids = {engine.pid} | ({process.pid for process in engine.tree.processes} if engine.tree else set())
    if details.get("pid") in pids:
        return True
    bus, gpus = str(details.get("pci", "")).lower(), turn.world.gpus
    if not bus or isinstance(gpus, Unknown):
        return False
    cards = {gpu.index for gpu in gpus if gpu.bus_id and bus.startswith(gpu.bus_id)}
    return bool(cards & set(engine.plan.gpus))
