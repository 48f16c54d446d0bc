"""What the stages of `drive` and `pair` have in common: nvidia-smi beside our samples, and what followed a death."""

from __future__ import annotations

import subprocess
import time

import psutil
from tests.gpu.meter import held_by, used
from tests.gpu.rig import MIB, Host, pause

SEEN = ("engine.exited", "engine.member_died", "log.finding")       # how a death is noticed; a hang by its phase


def smi(*query: str) -> list[str]:
    done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
                          timeout=20, check=False)
    return [line for line in done.stdout.splitlines() if line.strip()]


def compare(host: Host, gpus: tuple[int, ...], name: str) -> None:
    """A fresh sample of ours beside nvidia-smi's of the same moment, with nobody asking; MiB, as nvidia-smi rounds."""
    cards = host.meter.read()
    host.record(name, cards)
    for gpu in gpus:
        theirs = [int(word) for word in smi("-i", str(gpu), "--query-gpu=memory.used,memory.total")[0].split(",")]
        apps = smi("-i", str(gpu), "--query-compute-apps=pid,used_memory")
        by_pid = dict(tuple(map(int, line.split(","))) for line in apps)
        ours = [round(figure / MIB) for figure in used(cards, gpu)]
        mine = {pid: round(held / MIB) for pid, held in held_by(cards, gpu).items() if held is not None}
        host.row(f"GPU {gpu}: used, total; by process, MiB: {'equal' if (ours, mine) == (theirs, by_pid) else 'NOT EQUAL'}",
                 f"ours {ours} {mine}; nvidia-smi {theirs} {by_pid}")


def aftermath(host: Host, since: float, label: str) -> None:
    """What followed a death of the primary, in seconds after it, by the journal."""
    pause(0.5)      # the journal's own thread writes a moment later
    condemned = host.first(since, "engine.phase", engine="primary", now="dumping")
    noticed = (host.first(since, *SEEN, engine="primary"), condemned)
    found = {"detected": min((doc for doc in noticed if doc), key=lambda doc: doc["at"], default=None),
             "evidence done": host.first(since, "evidence.done"),
             "nothing of it left": host.first(since, "engine.emptied", engine="primary"),
             "backup awake": host.first(since, "engine.woke"),
             "exec": host.first(since, "engine.spawned", engine="primary"),
             "ready": host.first(since, "engine.ready", engine="primary")}
    host.row(f"{label}: seconds after it", ", ".join(f"{what} {doc['at'] - since:.2f}" if doc else f"{what} –"
                                                     for what, doc in found.items()))
    if (spawned := found["exec"]) and (ready := found["ready"]):
        host.row(f"{label}: cold start of the same, exec to ready", f"{ready['at'] - spawned['at']:.1f} s")


def death_of(pid: int) -> float:
    """The instant at which a process that is not our child is gone."""
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        pause(0.001)
    return time.monotonic()
