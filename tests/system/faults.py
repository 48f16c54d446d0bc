"""The faults that are rehearsed, as a table: how each is struck, and what the one incident of it may be called."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from socket import SO_REUSEADDR, SOL_SOCKET, socket

from tests.system.stage import PHASES, Stage

FROZEN_S = 1.5      # longer than a probe and a sample, shorter than anybody's patience
Strike = Callable[[Stage], None]


@dataclass(frozen=True)
class Fault:
    """`classes`: what the one incident may be called; empty: there may be none.  `ends`: which of our own processes dies;
    with the gateway go the requests that it had."""

    strike: Strike
    classes: tuple[str, ...] = ()
    standbys: tuple[str, ...] = tuple(PHASES)
    ends: str = ""


# -- the faults


def kill(words: str, number: signal.Signals = signal.SIGKILL) -> Strike:
    """A signal to the process of the primary with this title."""
    return lambda stage: os.kill(stage.titled("primary", words), number)


def asked(fault: str) -> Strike:
    """One of the stand-in's own."""
    return lambda stage: (stage.host.fault("primary", fault), None)[1]


def daemon_killed(stage: Stage) -> None:
    stage.host.kill()
    stage.host.start()


def daemon_stopped(stage: Stage) -> None:
    with stage.daemon_frozen():
        time.sleep(FROZEN_S)


def gateway_killed(stage: Stage) -> None:
    stage.gateway.kill()
    stage.gateway.start()


def gateway_stopped(stage: Stage) -> None:
    os.kill(stage.gateway.pid, signal.SIGSTOP)
    time.sleep(FROZEN_S)
    os.kill(stage.gateway.pid, signal.SIGCONT)


def port_taken(stage: Stage) -> None:
    """While the daemon looks away the primary dies and a stranger takes its port; later the stranger leaves."""
    port = int(stage.host.engines["primary"]["port"])
    with stage.daemon_frozen():
        for pid in stage.host.of("primary"):
            os.kill(pid, signal.SIGKILL)
        taken = stage.host.until(lambda: free(port), "the port does not come free")
    with taken:
        held = stage.host.in_phase("primary", "held")
        assert str(os.getpid()) in held["why"], held["why"]
        if stage.standby != "none":
            stage.host.until(lambda: stage.serving() == "backup", "the backup does not serve meanwhile")
    assert stage.host.ask("restart", engine="primary")["ok"]


def orphan_left(stage: Stage) -> None:
    """The API server dies while no daemon lives: the next one finds its engine core, which holds the card."""
    leader = stage.leader()
    stage.host.kill()
    os.kill(leader, signal.SIGKILL)
    stage.host.start()


def both_engines(stage: Stage) -> None:
    leaders = [stage.leader("primary"), stage.leader("backup")]
    for pid in leaders:
        os.kill(pid, signal.SIGKILL)


def daemon_and_core(stage: Stage) -> None:
    core = stage.titled("primary", "VLLM::EngineCore")
    stage.host.kill()
    os.kill(core, signal.SIGKILL)
    stage.host.start()


def gateway_and_api_server(stage: Stage) -> None:
    leader = stage.leader()
    stage.gateway.kill()
    os.kill(leader, signal.SIGKILL)
    stage.gateway.start()


def core_killed_while_api_server_stopped(stage: Stage) -> None:
    core = stage.titled("primary", "VLLM::EngineCore")
    os.kill(stage.leader(), signal.SIGSTOP)
    os.kill(core, signal.SIGKILL)


KILLED, DIED, HUNG = ("unexpected_exit",), ("engine_proc_died",), ("engine_hang",)
FAULTS: dict[str, Fault] = {
    "SIGKILL api server": Fault(kill("vllm"), KILLED),
    "SIGKILL engine core": Fault(kill("VLLM::EngineCore"), DIED),
    "SIGKILL worker": Fault(kill("VLLM::Worker_TP1"), ("worker_died",)),
    "SIGKILL daemon": Fault(daemon_killed, ends="daemon"),
    "SIGKILL gateway": Fault(gateway_killed, ends="gateway"),
    "SIGSTOP api server": Fault(kill("vllm", signal.SIGSTOP), ("engine_hang", "api_unreachable")),
    "SIGSTOP engine core": Fault(kill("VLLM::EngineCore", signal.SIGSTOP), HUNG),
    "SIGSTOP worker": Fault(kill("VLLM::Worker_TP1", signal.SIGSTOP), HUNG),
    "SIGSTOP daemon": Fault(daemon_stopped),
    "SIGSTOP gateway": Fault(gateway_stopped),
    "SIGSEGV api server": Fault(kill("vllm", signal.SIGSEGV), KILLED),
    "SIGSEGV engine core": Fault(kill("VLLM::EngineCore", signal.SIGSEGV), DIED),
    "CUDA OOM": Fault(asked("oom"), ("oom_runtime",)),
    "exit 0, engine dead": Fault(asked("core_death"), DIED),
    "exit 0, unasked TERM": Fault(kill("vllm", signal.SIGTERM), KILLED),
    "hang, /health 200": Fault(asked("hang"), HUNG),
    "port taken": Fault(port_taken, ("port_stranger",)),
    "orphan left": Fault(orphan_left, KILLED, ends="daemon"),
    "both engines": Fault(both_engines, KILLED, ("sleeping", "hot")),
    "daemon and core": Fault(daemon_and_core, DIED, ends="daemon"),
    "gateway and api server": Fault(gateway_and_api_server, KILLED, ends="gateway"),
    "core, api server stopped": Fault(core_killed_while_api_server_stopped, (*DIED, *HUNG, "api_unreachable")),
}


def free(port: int) -> socket | None:
    """Somebody else's listening socket, once the port is free."""
    try:
        return stranger(port)
    except OSError:
        return None


def stranger(port: int) -> socket:
    """Somebody else's process on an engine's port; the caller closes it."""
    taken = socket()
    taken.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    taken.bind(("127.0.0.1", port))
    taken.listen(1)
    return taken
