"""`llm-watchdog drill`, as its users meet it: on a running service, and in the sandbox."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.harness import HASTY, WITHIN_S, Doc, Receiver, Watchdog, engine, free_port

from vllm_watchdog.core.drills import FAULTS
from vllm_watchdog.procfs import pids, read
from vllm_watchdog.tell.lock import Lock

ALL_S = 300         # for the whole table; some 60 s on two calm cores


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Watchdog]:
    watchdog = Watchdog(tmp_path_factory.mktemp("drilled"), {"one": engine()}, program=HASTY,
                        env={"HASTY_CONFIRM_S": "0.3"}, gateway={"listen": f"127.0.0.1:{free_port()}"},
                        channels={"hook": {"url": receiver.url}})
    watchdog.start().serving("one")
    yield watchdog
    watchdog.finish()


def test_a_killed_core_is_timed_and_judged_on_a_running_service_and_told_as_a_drill(host: Watchdog) -> None:
    first = host.serving("one")
    said = host.cli("drill", "engine-core-kill", "--yes", "--json")
    (result,) = json.loads(said.out)
    assert said.code == 0 and result["kept"], said.out
    seen = result["observed"]
    assert 0.0 < seen["detected_s"] < 2.0 and seen["evidence_s"] < 5.0
    assert (seen["incidents"], seen["orphans"], seen["alerts"]) == (["engine_proc_died"], 0, "opened, resolved")
    assert seen["gap_s"] is None and "no gateway listens" in said.err
    assert host.engine("one")["generation"] == first["generation"] + 1
    row = host.incident("one")
    assert row and "it was a drill: engine-core-kill was brought about on purpose" in host.cli("incidents", row["id"]).out
    assert "drill: engine-core-kill" in host.cli("events").out


def test_what_nobody_would_start_again_is_not_killed(host: Watchdog) -> None:
    assert host.daemon
    said = host.cli("drill", "daemon-kill", "--yes")
    assert said.code == 1 and "the daemon runs outside of systemd, so nobody would start it again" in said.out
    assert host.daemon.poll() is None


def test_a_host_that_is_not_calm_is_left_alone(host: Watchdog) -> None:
    before = host.serving("one")
    host.ask("pause")
    try:
        said = host.cli("drill", "engine-core-kill", "--yes")
    finally:
        host.ask("resume")
    assert said.code == 1
    assert said.err == ("automatic actions are paused: `llm-watchdog resume`\n"
                        "not calm, so no drill is begun; --force overrides\n")
    assert host.engine("one")["pid"] == before["pid"]


def test_one_drill_at_a_time_and_only_of_a_service_that_is_there(host: Watchdog) -> None:
    lock = Lock.acquire(host.state / "drill.lock")
    try:
        said = host.cli("drill", "engine-core-kill", "--yes")
    finally:
        lock.release()
    assert said.code == 1 and re.fullmatch(r"another drill is running, PID \d+\n", said.err)
    said = host.cli("drill", "engine-core-kill", "--service", "two", "--yes")
    assert said.code == 2 and said.err == "--service two: expected one of one\n"


def test_without_a_daemon_there_is_no_drill(tmp_path: Path) -> None:
    stopped = Watchdog(tmp_path / "w", {"one": engine()})
    said = stopped.cli("drill", "engine-core-kill", "--yes")
    assert said.code == 4 and "no daemon answers there" in said.err


# -- the sandbox

def of(folder: Path) -> list[int]:
    """The processes of a sandbox, by what shows its folder."""
    return [pid for pid in pids() if str(folder).encode() in read(pid, "environ") + read(pid, "cmdline")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short name: a socket's path may be 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        yield Path(name)


def sandboxed(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "vllm_watchdog.app.cli", "drill", "--sandbox", "--yes", *words],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"TMPDIR": str(folder)})


@pytest.mark.slow
@pytest.mark.timeout(ALL_S + 30)
def test_every_fault_keeps_its_promises_in_the_sandbox_and_nothing_is_left_behind(folder: Path) -> None:
    """In two sandboxes at once, which is half the time: a drill mostly waits."""
    names = [fault.name for fault in FAULTS]
    halves = {folder / "first.html": names[::2], folder / "second.html": names[1::2]}
    drills = [sandboxed(folder, *half, "--json", "--report", str(report)) for report, half in halves.items()]
    said = [drill.communicate(timeout=ALL_S) for drill in drills]
    for drill, (out, err), (report, half) in zip(drills, said, halves.items(), strict=True):
        results: list[Doc] = json.loads(out)
        assert [result["fault"] for result in results] == half
        broken = {result["fault"]: [check for check in result["checks"] if not check["kept"]] for result in results}
        assert not any(broken.values()), (broken, err)
        for result in results:
            assert not result["skipped"] or result["skipped"].startswith("not possible here: "), (result["skipped"], err)
        assert drill.returncode == 0
        assert report.read_text("utf-8").count("<svg") == sum(not result["skipped"] for result in results)
    assert set(folder.iterdir()) == set(halves)
    assert not of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_drill_that_is_ended_in_the_middle_leaves_no_process(folder: Path, number: signal.Signals) -> None:
    with sandboxed(folder, "engine-core-stop") as drill:
        assert drill.stdout
        assert any("injected" in line for line in drill.stdout)
        assert len(of(folder)) > 5
        drill.send_signal(number)
        drill.wait(WITHIN_S)
        end = time.monotonic() + WITHIN_S
        while left := of(folder):
            assert time.monotonic() < end, left
            time.sleep(0.1)
    assert list(folder.iterdir()) == [] or number is signal.SIGKILL
