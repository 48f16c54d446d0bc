"""Alive, busy or wedged, on a daemon with little patience."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from tests.system.harness import QUICK_HANG, Watchdog, engine


@pytest.fixture(scope="module")
def asleep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watchdog]:
    """A daemon that is stopped while its engine serves, for as long as the other test lasts."""
    watchdog = Watchdog(tmp_path_factory.mktemp("asleep"), {"one": engine()}, hang=QUICK_HANG)
    watchdog.start().serving("one")
    assert watchdog.daemon
    os.kill(watchdog.daemon.pid, signal.SIGSTOP)
    yield watchdog
    os.kill(watchdog.daemon.pid, signal.SIGCONT)
    watchdog.finish()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watchdog]:
    watchdog = Watchdog(
        tmp_path_factory.mktemp("hang"),
        {"frozen": engine(stop_timeout_s=0.8), "busy": engine(args={"max-num-seqs": 2}, sim={"token_s": 0.8})},
        hang=QUICK_HANG,
    )
    yield watchdog.start()
    watchdog.finish()


@pytest.mark.slow
def test_a_full_queue_on_a_slow_engine_is_busy_and_a_frozen_engine_is_wedged_dumped_and_replaced(
        asleep: Watchdog, host: Watchdog) -> None:
    first, busy = host.serving("frozen"), host.serving("busy")
    clients = [threading.Thread(target=host.prompt, args=("busy", 300, 40), daemon=True) for _ in range(32)]
    for client in clients:
        client.start()
    core = host.core("frozen")
    os.kill(core, signal.SIGSTOP)
    assert requests.get(host.url("frozen") + "/health", timeout=5).status_code == 200

    host.engine_when("busy", lambda doc: doc["life"] == "busy", "never judged busy")
    host.serving("frozen", after=1)

    row = host.until(lambda: host.incident("frozen"), "no incident")
    assert row["class"] == "engine_hang" and "the counters stand still" in row["incident"]["text"]
    stacks = (host.bundle(row) / "stacks.txt").read_text("utf-8")
    for pid in (first["pid"], core):
        assert f"===== PID {pid} " in stacks
    assert "waits in do_signal_stop" in stacks or "State: T (stopped)" in stacks
    order = [line["say"] for line in host.settled() if line.get("incident") == row["id"] or line.get("engine") == "frozen#1"]
    assert order.index("evidence.done") < order.index("engine.exited"), "evidence comes before the kill"
    assert not Path(f"/proc/{core}").exists()

    doc = host.engine("busy")
    assert doc["generation"] == 1 and doc["pid"] == busy["pid"]
    assert host.incident("busy") is None


def test_a_daemon_that_was_itself_stopped_does_not_blame_its_engine(asleep: Watchdog) -> None:
    assert asleep.daemon
    os.kill(asleep.daemon.pid, signal.SIGCONT)
    woken = len(asleep.said())
    threading.Event().wait(QUICK_HANG["still_s"] + QUICK_HANG["patience_s"])
    assert (asleep.engine("one")["phase"], asleep.engine("one")["generation"]) == ("serving", 1), asleep.said()[woken:]
