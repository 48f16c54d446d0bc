"""`llm-watchdog doctor`: what this host has and lacks, each finding with a remedy.

Starts no engine, changes nothing, and asks nothing without a deadline.  0: nothing keeps the watchdog from its work;
1: something does; 2: the configuration itself is wrong, and only the host was looked at.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from vllm_watchdog.app.vllm_of import Vllm, vllm_of
from vllm_watchdog.config import Settings
from vllm_watchdog.config_load import load, load_to_ask
from vllm_watchdog.config_problems import ConfigError
from vllm_watchdog.core.plan import Standby
from vllm_watchdog.core.readings import Mark
from vllm_watchdog.core.units import GIB
from vllm_watchdog.proc import MarkIndex, instance_of, listeners, mark_of, title
from vllm_watchdog.sense.gpu import START_S, DiedError, Helper
from vllm_watchdog.sense.kernel import open_kmsg
from vllm_watchdog.tell.client import Unreachable, call

ASK_S = 5.0
PASSED = ("--host", "--port", "--model")     # by the watchdog, and known since the first vLLM
BOOTED = Path("/run/systemd/system")      # as sd_booted(3) asks
OUR_SYSTEMD = 254       # DelegateSubgroup=, without which no engine's memory is limited
OLDEST_KERNEL = (5, 14)     # cgroup.kill


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.level:<5} {self.what}" + (f"\n      -> {self.remedy}" if self.remedy else "")


Found = Iterator[Finding]


def ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def warn(what: str, remedy: str) -> Finding:
    return Finding(Level.WARN, what, remedy)


def fail(what: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, what, remedy)


def doctor(path: Path | None, out: TextIO) -> int:
    problems: tuple[str, ...] = ()
    try:
        settings = load(path)
    except ConfigError as error:
        settings, problems = _without_engines(path), error.problems
    worst = 0
    for finding in findings(settings, problems):
        print(finding, file=out, flush=True)
        worst |= finding.level is Level.FAIL
    return 2 if problems else worst


def _without_engines(path: Path | None) -> Settings:
    """What a wrong configuration tells of the daemon; the defaults where even that is wrong."""
    try:
        return load_to_ask(path)
    except ConfigError:
        return Settings.model_validate({})


def findings(settings: Settings, problems: tuple[str, ...] = ()) -> Found:
    status = _daemon(settings)
    if problems:
        yield from (fail(problem, "correct it: until then no engine, port or flag can be checked") for problem in problems)
    else:
        yield from _configuration(settings)
    yield from _vllms(settings)
    yield from _gpus(settings)
    yield from _ports(settings)
    yield from _left_behind(settings, status)
    yield from _disks(settings)
    yield from _systemd()
    yield from _control_groups(settings, status)
    yield from _kernel_log()
    yield ok(f"the daemon answers: {status['health']}") if status else warn(
        f"no daemon answers on {settings.daemon.socket}",
        "systemctl start llm-watchdog" if BOOTED.is_dir() else "llm-watchdog run")
    if gateway := status and status.get("gateway"):
        yield warn(f"the gateway: {gateway['unknown']}", "start llm-watchdog gateway, or leave [gateway] out") if (
            "unknown" in gateway) else ok("the gateway tells the daemon how busy it is")


def _daemon(settings: Settings) -> dict[str, Any] | None:
    try:
        return call(settings.daemon.socket, {"verb": "status"}, ASK_S)
    except Unreachable:
        return None


def _configuration(settings: Settings) -> Found:
    warnings = settings.warnings()
    yield ok(f"configuration: {len(settings.engines)} engines, {len(settings.alerts.channels)} alert channels")
    for line in warnings:
        yield warn(line, "see config.example.toml")
    if not settings.alerts.channels:
        yield warn("no alert channel: nobody is told of a failure", "add a table [alerts.channels.NAME]")


# -- vLLM

def _vllms(settings: Settings) -> Found:
    seen: dict[tuple[str, ...], Vllm | None] = {}
    for name in settings.engines:
        command = settings.engine(name).command
        if command not in seen:
            seen[command] = vllm_of(command)
            yield _version(command, seen[command])
        if vllm := seen[command]:
            words = (word.split("=")[0] for word in settings.launches()[name].argv if word.startswith("--"))
            for flag in vllm.unknown(word for word in words if word not in PASSED):
                yield fail(f"engine {name}: vLLM {vllm.version} does not know {flag}", f"take it out of engines.{name}.args")


def _version(command: tuple[str, ...], vllm: Vllm | None) -> Finding:
    if vllm is None:
        return warn(f"{' '.join(command)}: no vLLM was found behind it, so its flags were not checked",
                    "name the vllm, or the python, of the environment that holds it")
    return ok(f"{' '.join(command)}: vLLM {vllm.version}")


# -- GPUs

def _gpus(settings: Settings) -> Found:
    wanted = sorted({gpu for name in settings.engines for gpu in settings.engine(name).gpus})
    cards = _cards()
    if isinstance(cards, str):
        remedy = "install the driver; nvidia-smi must list the cards"
        yield fail(f"{cards}, and engines want GPU {wanted}", remedy) if wanted else warn(cards, remedy)
        return
    for card in cards:
        used, total = card["used_bytes"] / GIB, card["total_bytes"] / GIB
        yield ok(f"GPU {card['index']} {card['name']}: {used:.1f} of {total:.1f} GiB in use")
        yield from _holders(settings, card, card["index"] in wanted)
    for gpu in sorted(set(wanted) - {card["index"] for card in cards}):
        yield fail(f"there is no GPU {gpu}, which the configuration names", "correct engines.NAME.gpus")


def _holders(settings: Settings, card: dict[str, Any], wanted: bool) -> Found:
    instance = instance_of(settings.daemon.state_dir)
    for row in card["processes"] if wanted else ():
        if mark_of(row["pid"], instance) is None:
            held = f"{row['used_bytes'] / GIB:.1f} GiB" if row["used_bytes"] else "memory"
            who = f"PID {row['pid']} ({title(row['pid']) or 'not visible'})"
            yield warn(f"GPU {card['index']}: {who} holds {held} and is not ours",
                       "an engine waits until there is room: end that process, or lower gpu-memory-utilization")


def _cards() -> list[dict[str, Any]] | str:
    """One dict a card, or why there is none."""
    try:
        helper = Helper()
    except OSError as error:
        return f"the GPU helper can't be started: {error.strerror}"
    try:
        answer = helper.ask(START_S)
    except DiedError:
        return "the GPU helper ended at once"
    finally:
        helper.condemn()
    if answer is None:
        return f"the NVIDIA driver did not answer within {START_S:.0f} s"
    return answer.get("gpus") or str(answer.get("unknown", "no GPU"))


# -- ports, processes, disks

def _ports(settings: Settings) -> Found:
    instance = instance_of(settings.daemon.state_dir)
    for name in settings.engines:
        engine = settings.engine(name)
        holders = listeners(engine.port, instance, engine.host)
        strangers = [holder for holder in holders if holder.mark is None]
        for holder in strangers:
            yield fail(f"port {engine.port} of engine {name} is held by {holder}", f"end it, or change engines.{name}.port")
        if not strangers:
            yield ok(f"port {engine.port} is {f'held by engine {name} itself' if holders else f'free for engine {name}'}")


def _left_behind(settings: Settings, status: dict[str, Any] | None) -> Found:
    known = {Mark(each["name"], each["generation"]) for each in status["engines"]} if status else set()
    found = MarkIndex(instance_of(settings.daemon.state_dir)).marked()
    for mark, members in found.items():
        if mark not in known:
            pids = ", ".join(str(who.pid) for who in members)
            yield warn(f"{mark} runs as PID {pids}, and no daemon watches it", "the next daemon adopts it, or ends it")


def _disks(settings: Settings) -> Found:
    least = settings.thresholds.disk_free_gib
    for folder in dict.fromkeys((settings.daemon.log_dir, settings.daemon.state_dir)):
        at = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(at).free / GIB
        said = f"{folder}: {free:.1f} GiB free"
        yield ok(said) if free >= least else warn(said, f"less than thresholds.disk_free_gib ({least:g}): make room")
    for name in settings.engines:
        engine = settings.engine(name)
        if engine.backup_for and engine.standby is Standby.SLEEPING:
            yield ok(f"engine {name} sleeps: its weights will be pinned in host memory")


# -- the host

def _systemd() -> Found:
    if not BOOTED.is_dir():
        yield warn("systemd does not run this host: nobody restarts the daemon", "have something else run llm-watchdog run")
        return
    version = _number(_said("systemctl", "--version"))
    yield ok(f"systemd {version}")
    state = _said("systemctl", "is-enabled", "llm-watchdog").strip()
    if state in ("enabled", "enabled-runtime", "static"):
        yield ok("the service is installed, and starts at boot")
    elif state == "masked":
        yield warn("the service is masked", "systemctl unmask llm-watchdog")
    elif state == "disabled":
        yield warn("the service is installed, and does not start at boot", "systemctl enable llm-watchdog")
    else:
        yield warn("the service is not installed", "llm-watchdog install")


def _control_groups(settings: Settings, status: dict[str, Any] | None) -> Found:
    limited = [name for name in settings.engines if settings.engine(name).memory_max_gib is not None]
    told = status.get("cgroups") if status else None
    if isinstance(told, str):
        yield ok(f"control groups of our own below {told}")
    elif told:
        yield warn(f"no control groups of our own: {told['unknown']}", "run it as the installed service (Delegate=yes)")
    release = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    if release < OLDEST_KERNEL:
        yield warn(f"Linux {os.uname().release} has no cgroup.kill", "engines are ended by process group and mark instead")
    if limited and status and not status.get("memory_limited"):
        yield warn(f"memory_max_gib of {', '.join(limited)} is not enforced",
                   f"needs the memory controller and systemd {OUR_SYSTEMD}; after an upgrade to it llm-watchdog install and "
                   "handover (docs/systemd.md)")


def _kernel_log() -> Found:
    try:
        os.close(open_kmsg())
        yield ok("the kernel log can be read")
    except OSError as error:
        yield warn(f"the kernel log can't be read by this user: {error.strerror}",
                   "the installed service has CAP_SYSLOG; else Xids and the OOM killer are known by their effects only")


def _said(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ASK_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _number(text: str) -> int:
    found = re.search(r"\d+", text)
    return int(found[0]) if found else 0
