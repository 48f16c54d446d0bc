"""The command line against a daemon that runs, one that is down, and what either left on the disk."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.system.conftest import Make
from tests.system.harness import Watchdog, command, engine

from vllm_watchdog.tell.journal import files


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watchdog]:
    watchdog = Watchdog(tmp_path_factory.mktemp("commands"), {"one": engine(sim={"oom_over_tokens": 100})})
    watchdog.start()
    watchdog.serving("one")
    yield watchdog
    watchdog.finish()


def test_status_of_a_healthy_host_is_0(host: Watchdog) -> None:
    said = host.cli("status")
    assert said.code == 0 and said.out.startswith("HEALTHY")
    assert f"one serves on port {host.engines['one']['port']}" in said.out and "no open incident" in said.out
    assert json.loads(host.cli("status", "--json").out)["health"] == "healthy"


def test_whoever_only_asks_needs_no_secrets(host: Watchdog, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(host.config.read_text() + '\n[alerts.channels.ops]\ntype = "slack"\n')   # its url is a secret file
    assert command("check-config", "--config", str(config)).code == 2
    said = command("status", "--config", str(config))
    assert said.code == 0 and said.out.startswith("HEALTHY")
    assert command("logs", "one", "--config", str(config)).code == 0


def test_a_second_daemon_on_the_same_state_is_refused_and_names_the_first(host: Watchdog) -> None:
    assert host.daemon
    said = host.cli("run")
    assert said.code == 1 and f"held by PID {host.daemon.pid}" in said.err
    assert host.cli("status").code == 0


def test_a_log_that_is_rotated_or_truncated_under_the_daemon_is_read_on(host: Watchdog) -> None:
    log = host.logs / "one.log"
    place = host.state / "one.offset"
    kept = place.read_text()
    os.truncate(log, 0)
    host.until(lambda: place.read_text() != kept, "the truncation went unnoticed")
    host.prompt("one", words=200)
    second = host.serving("one", after=1)
    row = host.until(lambda: host.incident("one"), "no incident")
    assert row["class"] == "oom_runtime"
    log.rename(log.with_suffix(".old"))         # by somebody's logrotate; the engine goes on writing into the old file
    host.fault("one", "oom")
    third = host.serving("one", after=second["generation"])
    exits = [line for line in host.settled("engine.exited") if line["engine"] == f"one#{second['generation']}"]
    assert len(exits) == 1 and log.exists()
    assert third["generation"] == second["generation"] + 1


def test_status_of_a_host_with_an_open_incident_is_1(host: Watchdog) -> None:
    said = host.cli("status")
    assert said.code == 1 and said.out.startswith("DEGRADED") and "OPEN CRITICAL" in said.out


def test_incidents_lists_them_and_shows_one_whole(host: Watchdog) -> None:
    row = host.until(lambda: host.incident("one"), "no incident")
    listed = host.cli("incidents")
    line = next(line for line in listed.out.splitlines() if row["id"] in line)
    assert listed.code == 0 and "GPU out of memory while serving" in line and "open" in line
    one = host.cli("incidents", row["id"])
    assert one.code == 0 and one.out.startswith("GPU out of memory while serving: one\n")
    assert one.out.index("What to change") < one.out.index("What proves it") < one.out.index("Timeline")
    assert str(host.logs / "incidents" / row["id"]) in one.out
    assert json.loads(host.cli("incidents", "--json").out)[0]["id"] == row["id"]
    missing = host.cli("incidents", "nope")
    assert missing.code == 2 and "no incident 'nope'" in missing.err
    before = command("--config", str(host.config), "incidents")
    assert before.code == 0 and row["id"] in before.out


def test_an_incident_of_another_version_is_one_sentence(host: Watchdog, tmp_path: Path) -> None:
    history = tmp_path / "history.db"
    with sqlite3.connect(host.logs / "history.db") as db:
        db.execute("VACUUM INTO ?", (str(history),))
    with sqlite3.connect(history) as db:
        db.execute("""UPDATE incidents SET json = '{"_": "Incident", "of_the_future": 1}'""")
        (id_,) = db.execute("SELECT id FROM incidents").fetchone()
    db.close()
    (tmp_path / "config.toml").write_text(host.config.read_text().replace(str(host.logs), str(tmp_path)))
    said = command("incidents", id_, "--config", str(tmp_path / "config.toml"))
    assert said.code == 1 and "written by another version" in said.err


def test_events_are_the_journal_in_words(host: Watchdog) -> None:
    said = host.cli("events", "-n", "100")
    assert said.code == 0
    assert "one#1: loading -> serving (well)" in said.out
    assert {line["say"] for line in map(json.loads, host.cli("events", "-n", "9", "--json").out.splitlines())}
    assert said.out.splitlines()[0].startswith("20")
    assert len(host.cli("events", "-n", "3").out.splitlines()) == 3


def test_events_can_be_followed(host: Watchdog) -> None:
    words = [sys.executable, "-m", "vllm_watchdog.app.cli", "events", "-f", "-n", "1", "--config", str(host.config)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as follower:
        assert follower.stdout
        pipe, seen = follower.stdout.fileno(), b""
        os.set_blocking(pipe, False)

        def followed() -> bool:
            nonlocal seen
            host.ask("resume")
            with suppress(BlockingIOError):
                seen += os.read(pipe, 65536)
            return seen.count(b"an operator asked: resume") > 1       # the first may be the newest line of before

        try:
            host.until(followed, "nothing followed")
        finally:
            follower.kill()


def test_logs_mark_the_lines_that_are_findings(host: Watchdog) -> None:
    host.prompt("one", words=200)
    host.until(lambda: "CUDA out of memory" in (host.logs / "one.log").read_text("utf-8", "replace"), "no OOM in the log")
    said = host.cli("logs", "one", "-n", "300")
    assert said.code == 0 and "<== oom_runtime, restart" in said.out
    missing = host.cli("logs", "nobody")
    assert missing.code == 2 and "no log of 'nobody'; there are: one\n" in missing.err


def test_replay_of_a_doctored_journal_prints_the_first_difference(host: Watchdog, tmp_path: Path) -> None:
    journal = files(host.logs / "journal")[0]
    lines = journal.read_text("utf-8").splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if '"say":"engine.phase"' in line and '"serving"' in line)
    lines[at] = lines[at].replace('"serving"', '"held"')
    doctored = tmp_path / "doctored.jsonl"
    doctored.write_text("".join(lines), "utf-8")
    said = host.replay(doctored)
    assert said.code == 1 and said.out.startswith(f"line {at + 1}: first difference\n")
    assert '"held"' in said.out.splitlines()[1] and '"serving"' in said.out.splitlines()[2]
    assert host.replay(journal).code == 0


def test_status_of_a_host_that_serves_nothing_is_3(make: Make) -> None:
    watchdog = make({"flag": engine(args={"no-such-flag": True})}).start()
    watchdog.in_phase("flag", "held")
    said = watchdog.cli("status")
    assert said.code == 3 and said.out.startswith("DOWN") and "unrecognized arguments: --no-such-flag" in said.out


@pytest.mark.slow
def test_without_a_daemon_status_is_4_and_the_history_is_still_told(make: Make) -> None:
    watchdog = make({"one": engine()})
    said = watchdog.cli("status")
    assert said.code == 4 and said.err.strip().endswith("no daemon answers there; is it running?")
    watchdog.start().serving("one")
    assert watchdog.stop() == 0
    assert watchdog.cli("incidents").out == "no incidents\n", "a clean stop is no incident"
    assert watchdog.cli("restart", "one").code == 4
    assert "the watchdog stops (SIGTERM)" in watchdog.cli("events", "-n", "100").out
