"""Drills of what only systemd starts again, as root on an installed service."""

from __future__ import annotations

import json

import pytest
from tests.systemd.box import PROGRAM
from tests.systemd.service import CONFIG, Service

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

DRILLS = ("daemon-kill", "daemon-stop", "gateway-kill", "core-and-daemon-kill")


def test_daemon_and_gateway_come_back_by_systemd_and_the_drill_says_when(service: Service) -> None:
    engine = service.start()
    service.box.ok("systemctl", "start", "llm-gateway")
    done = service.box.run(PROGRAM, "drill", *DRILLS, "--yes", "--json", "--config", CONFIG, within_s=240.0)
    results = {result["fault"]: result for result in json.loads(done.stdout)}
    assert set(results) == set(DRILLS) and done.returncode == 0, done.stdout + done.stderr
    seen = {fault: result["observed"] for fault, result in results.items()}
    assert all(seen.values()), {fault: result["skipped"] for fault, result in results.items()}
    assert seen["daemon-kill"]["detected_s"] > 1.0, "it is RestartSec=1 that is waited for"
    assert seen["daemon-kill"]["lost"] == seen["daemon-stop"]["lost"] == seen["core-and-daemon-kill"]["lost"] == 0
    assert service.serving()["generation"] == engine["generation"] + 1
    assert service.box.run("ls", "/var/lib/llm-watchdog/drill.lock").returncode != 0
