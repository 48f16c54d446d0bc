"""The faults that can be rehearsed: what each does, how the watchdog should notice, and what is promised of it.

Pure: a table.  `drill_verdict` judges what was seen, `app/drill` injects and looks.  A fault that touches more than
the service's own processes runs only in a sandbox, a throw-away service.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NEXT_S = 15.0           # systemd starts what died after 1 s; Python on busy processors and a survey take the rest


class Part(StrEnum):
    """What a fault touches."""

    API = "API server"
    CORE = "engine core"
    WORKER = "worker"
    DAEMON = "daemon"
    GATEWAY = "gateway"
    HELPER = "GPU helper"
    FILES = "files of the sandbox"
    HOST = "the host's processors"
    CARD = "a simulated card"


class Sees(StrEnum):
    """How it is noticed."""

    EXIT = "exit"           # by the end of a process, or a line of its log
    HANG = "hang"           # by tokens that do not come
    NEXT = "next"           # by the next daemon
    WAIT = "wait"           # by memory that does not come back
    START = "start"         # by a start that is refused, after a stop that an operator asked for
    GPU = "gpu"             # by the silence of the GPU helper
    NONE = "none"           # not by the watchdog: nothing must happen


class Ends(StrEnum):
    """When the fault is taken back."""

    SERVED = "served"       # when clients are answered again
    NOTICED = "noticed"     # when its signs were seen
    LATER = "later"         # after `lasts_s`


class Gap(StrEnum):
    """How long clients may be without an answer."""

    NONE = "none"           # as on any other day
    LASTS = "lasts"         # as long as the fault
    REPLACED = "replaced"   # until another engine serves
    UNPROMISED = "-"


@dataclass(frozen=True, slots=True)
class Fault:
    """`signs`: journal lines that tell of it, the first one counts; `NAME CLASS` or `NAME URGENCY` where that matters.
    `takes_s`: from the blow until it can be told.  `incident`: the class that its incident must have, "*" for any, "" where
    there must be none; `also`: classes of others that may open beside it.  `lost`: requests that may fail, None where
    nothing is promised.  `runs`: what fails still runs, so evidence and a stop come before the successor.  `evidence`: a
    bundle is written; not where what failed had ended before there was a daemon, or where it is no engine.
    """

    name: str
    does: str
    part: Part
    sees: Sees
    signs: tuple[str, ...] = ()
    ends: Ends = Ends.SERVED
    takes_s: float = 0.0
    lasts_s: float = 0.0
    gap: Gap = Gap.REPLACED
    lost: int | None = 0
    incident: str = "*"
    also: tuple[str, ...] = ()
    runs: bool = False
    evidence: bool = True
    sandbox: bool = False


# A real API server that lost its core says so in its log, and may take seconds to leave.
ENDED = ("engine.exited", "engine.member_died", "log.finding", "incident.opened")
TOLD = ("incident.opened", "incident.worsened")


def _process(part: Part, name: str) -> tuple[Fault, ...]:
    """What can happen to each process of an engine."""
    return (
        Fault(f"{name}-kill", f"SIGKILL to the {part} of the engine that serves", part, Sees.EXIT, ENDED),
        Fault(f"{name}-stop", f"SIGSTOP to the {part} of the engine that serves: it hangs", part, Sees.HANG, TOLD,
              runs=True),
    )


FAULTS: tuple[Fault, ...] = (
    *_process(Part.API, "api-server"), *_process(Part.CORE, "engine-core"), *_process(Part.WORKER, "worker"),
    Fault("engine-core-segv", "SIGSEGV to the engine core of the engine that serves", Part.CORE, Sees.EXIT, ENDED),
    Fault("daemon-kill", "SIGKILL to the daemon; its engines serve on, the next daemon adopts them", Part.DAEMON, Sees.NEXT,
          ("daemon.started",), ends=Ends.NOTICED, gap=Gap.NONE, incident=""),
    Fault("daemon-stop", "SIGSTOP to the daemon for 3 s; its engines serve on", Part.DAEMON, Sees.NONE, ends=Ends.LATER,
          lasts_s=3.0, gap=Gap.NONE, incident=""),
    Fault("gateway-kill", "SIGKILL to the gateway; clients are cut off until the next one listens", Part.GATEWAY, Sees.NONE,
          ends=Ends.SERVED, gap=Gap.LASTS, lasts_s=NEXT_S, lost=None, incident=""),
    Fault("gateway-stop", "SIGSTOP to the gateway for 2 s; clients wait", Part.GATEWAY, Sees.NONE, ends=Ends.LATER,
          lasts_s=2.0, gap=Gap.LASTS, incident=""),
    Fault("nvml-hung", "SIGSTOP to the GPU helper: the driver seems to hang", Part.HELPER, Sees.GPU, ("gpus.unknown",),
          ends=Ends.NOTICED, gap=Gap.NONE, incident="gpu_driver_unresponsive", evidence=False),
    Fault("core-and-daemon-kill", "SIGKILL to the daemon and, at once, to the engine core", Part.CORE, Sees.NEXT,
          ("daemon.started",), evidence=False),
    Fault("core-and-gateway-kill", "SIGKILL to the gateway and, at once, to the engine core", Part.CORE, Sees.EXIT, ENDED,
          gap=Gap.LASTS, lasts_s=NEXT_S, lost=None),
    Fault("cuda-oom", "a simulated CUDA out of memory in a step of the engine that serves", Part.CORE, Sees.EXIT,
          ("log.finding oom_runtime", *ENDED), incident="oom_runtime", sandbox=True),
    Fault("vram-taken", "a neighbour takes the rest of the card, then SIGKILL to the engine core", Part.CARD, Sees.WAIT,
          ("incident.worsened page",), ends=Ends.NOTICED, incident="vram_held", sandbox=True),
    Fault("host-oom", "the engine core outgrows a small memory control group, and the kernel ends it", Part.CORE, Sees.EXIT,
          ENDED, takes_s=5.0, sandbox=True),
    Fault("port-taken", "an operator restarts the primary, and a stranger listens on its port first", Part.API, Sees.START,
          ("engine.spawn_failed",), incident="port_stranger", sandbox=True),
    Fault("bad-flag", "a flag that vLLM does not know comes into the configuration, and the primary is restarted",
          Part.FILES, Sees.START, ("log.finding bad_args",), incident="bad_args", sandbox=True),
    Fault("model-removed", "the model's folder is moved away, and the primary is restarted", Part.FILES, Sees.START,
          ("log.finding model_not_found",), incident="model_not_found", sandbox=True),
    Fault("disk-full", "the disk with logs, journal and history is full for 3 s, and SIGKILL to the engine core",
          Part.FILES, Sees.EXIT, ENDED, ends=Ends.LATER, lasts_s=3.0, also=("disk_low",), evidence=False, sandbox=True),
    Fault("log-flood", "100 MB/s of garbage in the engine's log for 3 s, then SIGKILL to the engine core", Part.FILES,
          Sees.EXIT, ENDED, sandbox=True),
    Fault("log-rotated", "somebody else truncates the engine's log, then a CUDA out of memory", Part.FILES, Sees.EXIT,
          ("log.finding oom_runtime", *ENDED), incident="oom_runtime", sandbox=True),
    Fault("nvidia-smi-hung", "nvidia-smi never ends, then SIGKILL to the engine core", Part.FILES, Sees.EXIT, ENDED,
          sandbox=True),
    Fault("webhook-hung", "the receiver of alerts never answers, then SIGKILL to the engine core", Part.FILES, Sees.EXIT,
          ENDED, sandbox=True),
    Fault("clock-stepped", "the daemon's wall clock steps an hour ahead, SIGKILL to the engine core, and back", Part.DAEMON,
          Sees.EXIT, ENDED, sandbox=True),
    Fault("cpu-starved", "two busy processes for each processor for 4 s, and SIGKILL to the engine core", Part.HOST,
          Sees.EXIT, ENDED, ends=Ends.LATER, lasts_s=4.0, sandbox=True),
    Fault("xid", "the kernel log tells of an Xid 31, a fault of the engine core's work", Part.CORE, Sees.EXIT,
          ("log.finding xid_app",), incident="xid_app", runs=True, sandbox=True),
)
