"""How each fault is injected that only a sandbox may suffer: its files, its clock, its cards, its neighbours.

A function a fault: it acts, within seconds, and returns what takes it back.  `NotHereError` says why it can't be done.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import requests

from vllm_watchdog.app.drill.guard import Guard
from vllm_watchdog.app.drill.inject import nothing, strike, struck
from vllm_watchdog.app.drill.perform import Undo
from vllm_watchdog.app.drill.sandbox import CARD_BYTES, PRIMARY, Sandbox
from vllm_watchdog.app.drill.sandbox_daemon import CLOCK
from vllm_watchdog.app.drill.site import NotHereError
from vllm_watchdog.core.drills import Part
from vllm_watchdog.procfs import ProcId, alive

HOUR_S = 3600
FLOOD_S, FLOOD_BYTES = 3.0, 100_000_000     # a second
FLOOD_TURN_S = LOOK_S = 0.02
FILL_BLOCK = 1 << 20
LEAK_BYTES, LEAK_MIB_PER_S = 128 << 20, 400
GONE_S = 5.0
SEEN_S = 1.5            # the daemon compares its clocks each second, and looks at a log twice a second
NEIGHBOUR_S = 120.0      # whatever becomes of us, it leaves
BUSY = "import time; end = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def core_killed(box: Sandbox) -> None:
    struck(box, Part.CORE, signal.SIGKILL)


def asked_of_engine(box: Sandbox, fault: str, **given: float) -> None:
    """A fault that the stand-in brings about itself."""
    url = f"{box.launches[box.serving()['name']].url}/sim/fault"
    box.struck_at = time.monotonic()
    with suppress(requests.RequestException):       # it may die of it before it answers
        requests.post(url, json={"name": fault} | given, timeout=GONE_S)


def gone(who: ProcId) -> None:
    """Waits until it is, for some seconds."""
    end = time.monotonic() + GONE_S
    while alive(who) and time.monotonic() < end:
        time.sleep(LOOK_S)


def cuda_oom(box: Sandbox) -> Undo:
    asked_of_engine(box, "oom")
    return nothing


def vram_taken(box: Sandbox) -> Undo:
    neighbour = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({NEIGHBOUR_S})"])
    held = box.cards / f"{neighbour.pid}.json"
    held.write_text(json.dumps({"pid": neighbour.pid, "gpu": 0, "used_bytes": CARD_BYTES * 8 // 10}), "ascii")

    def undo() -> None:
        neighbour.kill()
        neighbour.wait(GONE_S)
        held.unlink(missing_ok=True)

    core_killed(box)
    return undo


def host_oom(box: Sandbox) -> Undo:
    top = Path("/sys/fs/cgroup/memory")
    group, limit = top / f"llm-watchdog-drill-{os.getpid()}", "memory.limit_in_bytes"
    if not (top / limit).exists():
        top = Path("/sys/fs/cgroup")
        group, limit = top / group.name, "memory.max"
    core = box.victim(Part.CORE)
    try:
        group.mkdir()
        (group / limit).write_text(str(LEAK_BYTES))
        (group / "cgroup.procs").write_text(str(core.who.pid))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise NotHereError(f"no memory control group can be made: {error.strerror}") from None

    def undo() -> None:
        gone(core.who)
        with suppress(OSError):
            group.rmdir()

    asked_of_engine(box, "leak", mib_per_s=LEAK_MIB_PER_S)
    return undo


def restarted(box: Sandbox) -> None:
    """The primary, at an operator's wish.  Raises NotHereError."""
    answer = box.ask("restart", engine=PRIMARY)
    if not answer.get("ok"):
        raise NotHereError(str(answer.get("text")))


def port_taken(box: Sandbox) -> Undo:
    """While the daemon looks away, so that it can't be there first."""
    daemon, api = box.victim(Part.DAEMON), box.victim(Part.API)
    port = box.serving()["port"]
    stranger = socket.socket()
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    guard = Guard(daemon.who)
    restarted(box)
    strike(box, daemon, signal.SIGSTOP)
    try:
        gone(api.who)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
    except OSError as error:
        stranger.close()
        raise NotHereError(f"port {port} can't be taken: {error.strerror}") from None
    finally:
        guard.release()

    return stranger.close


def bad_flag(box: Sandbox) -> Undo:
    def change(bad: bool) -> None:
        box.configure(bad_flag=bad)
        box.ask("reload")

    change(bad=True)
    restarted(box)
    return lambda: change(bad=False)


def moved(here: Path, there: Path) -> None:
    here.rename(there)


def model_removed(box: Sandbox) -> Undo:
    away = box.models / "away"
    (box.models / PRIMARY).rename(away)

    restarted(box)
    return lambda: moved(away, box.models / PRIMARY)


def disk_full(box: Sandbox) -> Undo:
    """Only where the logs lie on a small file system of their own, which `apart` makes."""
    logs = box.house.logs
    if not logs.is_mount():
        raise NotHereError("the logs lie on the host's own file system")
    filler = logs / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * FILL_BLOCK)
    core_killed(box)
    return filler.unlink


def log_flood(box: Sandbox) -> Undo:
    log, over = box.settings.daemon.log_dir / f"{box.serving()['name']}.log", threading.Event()
    noise = b"".join(bytes((number * 7 % 251,)) * 199 + b"\n" for number in range(FLOOD_BYTES // 200 // 50))
    began = time.monotonic()

    def flood() -> None:
        written = 0
        with log.open("ab", buffering=0) as file:
            while (passed := time.monotonic() - began) < FLOOD_S and not over.is_set():
                while written < passed * FLOOD_BYTES:
                    written += file.write(noise)
                over.wait(FLOOD_TURN_S)

    writer = threading.Thread(target=flood, name="flood", daemon=True)
    writer.start()
    over.wait(FLOOD_S / 2)
    core_killed(box)

    def undo() -> None:
        over.set()
        writer.join(GONE_S)

    return undo


def log_rotated(box: Sandbox) -> Undo:
    log = box.settings.daemon.log_dir / f"{box.serving()['name']}.log"
    os.truncate(log, 0)
    time.sleep(SEEN_S)
    return cuda_oom(box)


def nvidia_smi_hung(box: Sandbox) -> Undo:
    hung = box.bin / "hung"
    hung.touch()
    core_killed(box)
    return hung.unlink


def webhook_hung(box: Sandbox) -> Undo:
    box.hook.hung.set()
    core_killed(box)
    return box.hook.hung.clear


def clock_stepped(box: Sandbox) -> Undo:
    clock = box.folder / CLOCK
    clock.write_text(str(HOUR_S), "ascii")
    time.sleep(SEEN_S)
    core_killed(box)
    return clock.unlink


def cpu_starved(box: Sandbox) -> Undo:
    hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2 * (os.cpu_count() or 1))]

    def undo() -> None:
        for hog in hogs:
            hog.kill()
        for hog in hogs:
            hog.wait(GONE_S)

    core_killed(box)
    return undo


def xid(box: Sandbox) -> Undo:
    pid = box.victim(Part.CORE).who.pid
    with box.kmsg.open("wb", buffering=0) as log:
        log.write(f"4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 31, pid={pid}, name=VLLM::EngineCore, Ch 00000008\n".encode())
    return nothing


SANDBOXED: Mapping[str, Callable[[Sandbox], Undo]] = {
    "cuda-oom": cuda_oom, "vram-taken": vram_taken, "host-oom": host_oom, "port-taken": port_taken, "bad-flag": bad_flag,
    "model-removed": model_removed, "disk-full": disk_full, "log-flood": log_flood, "log-rotated": log_rotated,
    "nvidia-smi-hung": nvidia_smi_hung, "webhook-hung": webhook_hung, "clock-stepped": clock_stepped,
    "cpu-starved": cpu_starved, "xid": xid,
}
