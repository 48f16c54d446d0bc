"""A new configuration without a new daemon, and a new daemon without new engines."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import requests
from tests.system.conftest import Make
from tests.system.harness import WITHIN_S, Receiver, Watchdog, engine, free_port


def args_of(watchdog: Watchdog, name: str) -> list[str]:
    return Path(f"/proc/{watchdog.engine(name)['pid']}/cmdline").read_text().split("\0")


def hang_up(watchdog: Watchdog) -> None:
    assert watchdog.daemon
    watchdog.daemon.send_signal(signal.SIGHUP)


@pytest.mark.slow
def test_a_reload_tells_what_counts_at_once_and_what_waits_and_a_restart_takes_it(make: Make, receiver: Receiver) -> None:
    watchdog = make({"one": engine()}).start()
    first = watchdog.serving("one")
    watchdog.engines["one"]["args"]["max-num-seqs"] = 7
    watchdog.configure(alerts={"language": "zh"}, channels={"ops": {"url": receiver.url}})
    said = watchdog.cli("reload")
    assert (said.code, said.out) == (0, (
        "thresholds, limits, rules and alerts are applied; one gets args.max-num-seqs at its next start "
        "(llm-watchdog restart one)\n"))
    doc = watchdog.until(watchdog.status, "no status")
    assert doc["pending"] == {"one": ["args.max-num-seqs"]} and doc["engines"][0]["pid"] == first["pid"]
    assert "one: waits for its next start: args.max-num-seqs" in watchdog.cli("status").out
    assert [alert["name"] for alert in doc["alerts"]] == ["ops"]
    watchdog.ask("restart", engine="one")
    watchdog.serving("one", after=first["generation"])
    assert args_of(watchdog, "one")[-3:-1] == ["--max-num-seqs", "7"]
    assert watchdog.engine("one")["profile"] == {"model": "stand-in", "max-num-seqs": 7}
    assert (watchdog.status() or {})["pending"] == {}
    watchdog.fault("one", "oom")
    watchdog.until(lambda: receiver.of("one", kind="opened"), "the new channel is told nothing")
    watchdog.serving("one", after=first["generation"] + 1)


def test_an_invalid_file_changes_nothing_and_the_log_says_why(make: Make) -> None:
    watchdog = make({"one": engine()}).start()
    watchdog.serving("one")
    good = watchdog.config.read_text()
    watchdog.config.write_text(good + "[hang]\nstill_s = -1\n")
    hang_up(watchdog)
    refused = watchdog.until(lambda: watchdog.said("config.refused"), "not refused")
    assert "hang.still_s" in refused[0]["why"]
    assert not watchdog.said("daemon.reloaded")
    watchdog.config.write_text(good + "[hang]\nstill_s = 3\n")
    hang_up(watchdog)
    watchdog.until(lambda: watchdog.said("daemon.reloaded"), "not reloaded")


@pytest.mark.slow
def test_what_needs_a_new_daemon_is_listed(make: Make) -> None:
    watchdog = make({"one": engine()}).start()
    watchdog.serving("one")
    before, after = watchdog.engines["one"]["port"], free_port()
    watchdog.engines["one"]["port"] = after
    watchdog.configure()
    assert "engines.one.port: after a restart of the daemon" in watchdog.cli("reload").out
    assert "waits for a restart of the daemon: engines.one.port" in watchdog.cli("status").out
    assert watchdog.engine("one")["port"] == before
    watchdog.engines["one"]["port"] = before        # where `finish` looks for what was left behind


@pytest.mark.slow
def test_an_engine_that_is_added_is_there_after_a_handover_with_all_that_is_told_of_one(make: Make) -> None:
    watchdog = make({"one": engine()}, daemon={"sample_s": 0.2, "listen": f"127.0.0.1:{free_port()}"}).start()
    first = watchdog.serving("one")
    watchdog.engines["two"] = engine(args={"max-num-seqs": 5})
    watchdog.configure(daemon={"sample_s": 0.2, "listen": f"127.0.0.1:{free_port()}"})
    assert "engines.two: after a restart of the daemon" in watchdog.cli("reload").out
    assert "waits for a restart of the daemon: daemon.listen, engines.two" in watchdog.cli("status").out
    watchdog.cli("handover")
    assert watchdog.daemon and watchdog.daemon.wait(WITHIN_S) == 0
    watchdog.start()
    assert watchdog.serving("two")["profile"] == {"model": "stand-in", "max-num-seqs": 5}
    assert watchdog.serving("one")["pid"] == first["pid"]
    at = watchdog.settled("web.listening")[-1]["url"]
    told = requests.get(f"{at}api/v1/status", timeout=10).json()
    assert [each["profile"].get("max-num-seqs") for each in told["engines"]] == [None, 5]
    metrics = requests.get(f"{at}metrics?engines=1", timeout=10).text
    assert 'llm_watchdog_engine_page_ok{engine="two"} 1.0' in metrics
    assert re.search(r'^vllm:[^\n]*watchdog_engine="two"', metrics, re.MULTILINE)


@pytest.mark.slow
def test_a_handover_costs_no_engine_and_forgives_nothing(make: Make) -> None:
    watchdog = make({"one": engine()}, restart={"backoff_s": 0.1, "backoff_max_s": 0.2, "budget": 5}).start()
    first = watchdog.serving("one")
    watchdog.fault("one", "oom")
    before = watchdog.serving("one", after=first["generation"])
    incident = watchdog.until(lambda: watchdog.incident("one"), "no incident")
    said = watchdog.cli("handover")
    assert (said.code, said.out) == (
        0, f"this daemon leaves; the next one takes over one#{before['generation']}. It is not run by systemd, so nobody "
        "starts the next one: until you do (llm-watchdog run), nobody watches the engines\n")
    assert watchdog.daemon and watchdog.daemon.wait(WITHIN_S) == 0
    assert watchdog.prompt("one") == 200
    watchdog.start()
    after = watchdog.serving("one")
    assert {key: after[key] for key in ("pid", "generation", "failures")} == {
        "pid": before["pid"], "generation": before["generation"], "failures": 1}
    still = watchdog.until(lambda: watchdog.incident("one"), "no incident")
    assert (still["id"], still["wall_resolved"]) == (incident["id"], None)
    findings = [line["text"] for line in watchdog.settled("log.finding")]
    assert len(findings) == len(set(findings)), "read on from where it was: nothing twice"
