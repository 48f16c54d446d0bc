"""What an administrator does to the service, in a real systemd, and how each ends; `service.finish` proves that it left
no orphan, no second engine, no port, lock or control group behind."""

from __future__ import annotations

import re
import time

import pytest
from tests.systemd.box import PROGRAM, Box
from tests.systemd.service import CONFIG, Service

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(180)]

SCORES = {"llm-watchdog.service": 4.0, "llm-gateway.service": 2.0}


def test_the_units_are_clean_and_hardened(service: Service) -> None:
    units = ("llm-watchdog.service", "llm-gateway.service", "llm.slice")
    verified = service.box.run("systemd-analyze", "verify", *units)
    assert (verified.returncode, verified.stderr) == (0, "")
    for unit, limit in SCORES.items():
        said = service.box.ok("systemd-analyze", "security", "--no-pager", unit)
        score = float(re.findall(r"exposure level for \S+: ([\d.]+)", said)[0])
        print(f"{unit}: exposure {score}")
        assert score <= limit


def test_start_and_stop(service: Service) -> None:
    engine = service.start()
    assert service.show("StatusText") == f"primary serving, gen {engine['generation']}"
    assert service.groups() == ["primary.1"]
    pid = engine["pid"]
    inside = service.box.read(f"/proc/{pid}/cgroup").splitlines()
    assert any(line.endswith("/llm.slice/llm-watchdog.service/primary.1") for line in inside)
    environ = service.box.read(f"/proc/{pid}/environ").split("\0")
    theirs = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "CREDENTIALS_DIRECTORY", "INVOCATION_ID", "JOURNAL_STREAM")
    assert not [entry for entry in environ if entry.startswith(theirs)]
    assert "CapEff:\t0000000000000000" in service.box.read(f"/proc/{pid}/status")
    assert (service.nice(service.main_pid), service.nice(pid)) == (-5, 0)
    began = time.monotonic()
    service.box.ok("systemctl", "stop", "llm-watchdog")
    print(f"a stop took {time.monotonic() - began:.2f} s")
    assert service.show("Result") == "success" and not service.leftovers() and not service.groups()


def test_doctor_finds_nothing_in_the_way(service: Service) -> None:
    service.start()
    said = service.box.ok(PROGRAM, "doctor")
    assert "ok    the daemon answers: healthy" in said
    assert "ok    control groups of our own below /sys/fs/cgroup/llm.slice/llm-watchdog.service" in said
    assert "warn  the service is installed, and does not start at boot\n      -> systemctl enable llm-watchdog" in said


def test_a_restart_is_a_stop_and_a_start(service: Service) -> None:
    service.start()
    service.box.ok("systemctl", "restart", "llm-watchdog")
    assert service.serving()["generation"] == 2
    assert service.groups() == ["primary.2"]


def test_a_reload_applies_and_says_what_waits(service: Service) -> None:
    engine = service.start()
    service.args["max-num-seqs"] = 7
    service.configure()
    service.box.ok("systemctl", "reload", "llm-watchdog")
    assert service.primary()["pid"] == engine["pid"]
    assert (service.status() or {})["pending"] == {"primary": ["args.max-num-seqs"]}
    assert service.show("ActiveState") == "active"
    service.box.write(CONFIG, service.box.read(CONFIG) + "\n[hang]\nstill_s = -1\n", 0o640)
    refused = service.box.run("systemctl", "reload", "llm-watchdog")
    assert refused.returncode != 0 and "hang.still_s" in service.said()
    assert service.show("ActiveState") == "active"
    service.configure()


def test_a_masked_service_does_not_start(service: Service) -> None:
    service.box.ok("systemctl", "mask", "llm-watchdog")
    assert "masked" in service.box.run("systemctl", "start", "llm-watchdog").stderr
    assert not service.leftovers()
    service.box.ok("systemctl", "unmask", "llm-watchdog")


def test_a_configuration_error_is_not_restarted_into(service: Service) -> None:
    del service.engine["model"]
    service.configure()
    assert service.box.run("systemctl", "start", "llm-watchdog").returncode != 0
    assert (service.show("ActiveState"), service.show("ExecMainStatus"), service.show("NRestarts")) == ("failed", "2", "0")
    assert f"{CONFIG}: engines.primary.model: missing" in service.said()


def test_a_killed_daemon_costs_the_engine_nothing(service: Service) -> None:
    engine = service.start()
    daemon = service.main_pid
    service.box.ok("systemctl", "kill", "--kill-who=main", "-s", "KILL", "llm-watchdog")
    service.box.until(lambda: service.main_pid not in (0, daemon), "no new daemon")
    after = service.serving()
    assert (after["pid"], after["generation"]) == (engine["pid"], engine["generation"])
    assert service.ask() and service.groups() == ["primary.1"]


def test_a_hung_loop_is_replaced_and_costs_the_engine_nothing(service: Service) -> None:
    service.drop_in(WatchdogSec="2", TimeoutAbortSec="2")
    engine = service.start()
    daemon = service.main_pid
    service.box.ok("systemctl", "kill", "--kill-who=main", "-s", "STOP", "llm-watchdog")
    service.box.until(lambda: service.main_pid not in (0, daemon), "no new daemon")
    assert (after := service.serving())["pid"] == engine["pid"], after
    assert "Watchdog timeout" in service.said()


def test_a_handover_is_a_new_daemon_for_the_same_engine(service: Service) -> None:
    engine = service.start()
    daemon = service.main_pid
    service.args["max-num-seqs"] = 7
    service.configure()
    service.box.ok(PROGRAM, "handover")
    service.box.until(lambda: service.main_pid not in (0, daemon), "no new daemon")
    assert service.serving()["pid"] == engine["pid"]
    assert (service.status() or {})["pending"] == {"primary": ["settings that changed before this daemon"]}
    service.box.ok(PROGRAM, "restart", "primary")
    service.serving(after=1)
    assert (service.status() or {})["pending"] == {}


def test_systemctl_kill_ends_the_daemon_as_a_stop_and_systemd_starts_the_next(service: Service) -> None:
    """SIGTERM from whoever is a clean stop of the engines; that it comes back is Restart=always."""
    service.start()
    daemon = service.main_pid
    service.box.ok("systemctl", "kill", "--kill-who=main", "llm-watchdog")
    service.box.until(lambda: service.main_pid not in (0, daemon), "no new daemon")
    assert service.serving()["generation"] == 2


def test_a_start_can_wait_until_the_service_serves(service: Service) -> None:
    service.drop_in(TimeoutStartSec="8")        # a busy machine needs seconds for the first word of a daemon
    service.args["sim-load-s"] = 10
    service.configure(ready="serving")
    began = time.monotonic()
    service.box.ok("systemctl", "start", "llm-watchdog")
    took = time.monotonic() - began
    assert took > 9, "longer than the time-out, which the daemon asked to extend"
    assert service.show("StatusText").startswith("primary serving")


def test_a_stop_of_an_engine_that_will_not_leave_ends_in_time(service: Service) -> None:
    service.drop_in(TimeoutStopSec="3")
    service.args["sim-ignore-term"] = True
    service.configure()
    service.start()
    began = time.monotonic()
    service.box.ok("systemctl", "stop", "llm-watchdog")
    took = time.monotonic() - began
    assert 5 <= took < 15, "stop_timeout_s (5) is longer than the unit's time-out, and is asked for"
    assert service.show("Result") == "success"


def test_a_secret_comes_from_the_folder_of_credentials(service: Service) -> None:
    service.box.write("/etc/llm-watchdog/credentials/engines.primary.api_key", "not-for-everyone\n", 0o600)
    try:
        engine = service.start()
        assert "VLLM_API_KEY=not-for-everyone" in service.box.read(f"/proc/{engine['pid']}/environ").split("\0")
    finally:
        service.box.ok("rm", "/etc/llm-watchdog/credentials/engines.primary.api_key")


def test_the_journal_can_be_filtered_by_priority(service: Service) -> None:
    engine = service.start()
    service.ask('{"name": "oom"}', "/sim/fault")
    service.serving(after=engine["generation"])
    loud, all_ = service.said("-p", "warning"), service.said()
    assert re.search(r"incident\.opened incident=\S+-primary-oom_runtime urgency=critical", loud), loud
    assert "engine.phase" in all_ and "engine.phase" not in loud
    assert "<4>" not in all_, "the prefix is the journal's to take"


def test_the_gateway_drains(service: Service) -> None:
    service.sections["gateway"] = {"listen": "127.0.0.1:8000", "drain_s": 5}
    service.configure()
    service.start()
    service.box.ok("systemctl", "start", "llm-gateway")
    assert service.show("StatusText", "llm-gateway") == "serving 127.0.0.1:8000"
    service.box.ok("systemctl", "stop", "llm-gateway")
    assert service.show("Result", "llm-gateway") == "success"


def test_a_boot_starts_what_is_enabled_the_daemon_before_the_gateway(service: Service, box: Box) -> None:
    """The target of a boot, begun anew: what `systemctl enable` has linked comes up in the order of the units."""
    service.sections["gateway"] = {"listen": "127.0.0.1:8000", "drain_s": 5}
    service.configure()
    box.ok("systemctl", "enable", "llm-gateway", "llm-watchdog")
    serving = "serving 127.0.0.1:8000"
    try:
        box.ok("systemctl", "start", "multi-user.target")
        service.serving()
        box.until(lambda: service.show("StatusText", "llm-gateway") == serving, "the gateway does not serve")
        at = [int(service.show(f"{key}TimestampMonotonic", unit)) for key, unit in (
            ("ExecMainStart", "llm-watchdog"), ("ActiveEnter", "llm-watchdog"), ("ExecMainStart", "llm-gateway"),
            ("ActiveEnter", "llm-gateway"), ("ActiveEnter", "multi-user.target"))]
        assert at == sorted(at) and at[0] > 0
        box.ok("systemctl", "stop", "llm-watchdog", "llm-gateway")
        ends = [int(service.show("InactiveEnterTimestampMonotonic", unit)) for unit in ("llm-gateway", "llm-watchdog")]
        assert ends == sorted(ends), "a shutdown lets the gateway drain before the engines leave"
    finally:
        box.ok("systemctl", "disable", "llm-gateway", "llm-watchdog")
        box.ok("systemctl", "stop", "multi-user.target")


def test_install_is_idempotent_keeps_the_configuration_and_uninstall_leaves_it(service: Service, box: Box) -> None:
    before = box.read(CONFIG)
    again = box.ok(PROGRAM, "install")
    assert "wrote" not in again and f"kept {CONFIG}: it is yours" in again
    assert "would remove" in box.ok(PROGRAM, "uninstall", "--dry-run")
    service.start()
    gone = box.ok(PROGRAM, "uninstall")
    assert "removed /usr/local/lib/systemd/system/llm-watchdog.service" in gone
    assert box.run("systemctl", "cat", "llm-watchdog").returncode != 0
    assert box.read(CONFIG) == before and not service.leftovers()
    assert box.ok("ls", "/var/log/llm-watchdog/primary.log")
