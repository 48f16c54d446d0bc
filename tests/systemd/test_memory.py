"""Each engine's memory, counted and limited by its own control group: what only a systemd from 254 on lets us have.

Skipped where this machine has an older one, or gives its boxes no memory controller of cgroup v2.
"""

from __future__ import annotations

import json

import pytest
from tests.systemd.box import PROGRAM
from tests.systemd.service import Doc, Service

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(180)]

UNIT = "/sys/fs/cgroup/llm.slice/llm-watchdog.service"
LIMIT_GIB = 0.25        # the stand-in needs some 60 MiB
SINCE = 254             # DelegateSubgroup=


@pytest.fixture
def counted(service: Service) -> Service:
    """With a second engine, `eater`, that has a limit."""
    version = int(service.box.ok("systemctl", "--version").split()[1])
    if version < SINCE:
        pytest.skip(f"systemd {version} has no DelegateSubgroup=")
    if "memory" not in service.box.read("/sys/fs/cgroup/cgroup.controllers").split():
        pytest.skip("no memory controller in cgroup v2 here")
    service.sections["engines.eater"] = service.engine | {"port": service.port + 1000, "memory_max_gib": LIMIT_GIB}
    service.sections["engines.eater.args"] = {"sim-load-s": 0.1}
    service.configure()
    return service


def engine(service: Service, name: str, after: int = 0) -> Doc:
    """When it serves."""
    def found() -> Doc | None:
        rows = (service.status() or {"engines": []})["engines"]
        serve = [row for row in rows if row["name"] == name and row["phase"] == "serving"]
        return next((row for row in serve if row["generation"] > after), None)

    return service.box.until(found, f"no generation of {name} after {after} serves")


def test_memory_is_counted_and_limited_and_the_daemon_has_its_own(counted: Service) -> None:
    counted.start()
    eater, read = engine(counted, "eater"), counted.box.read
    there = {"cpu", "memory"} & set(read("/sys/fs/cgroup/cgroup.controllers").split())
    assert set(read(f"{UNIT}/cgroup.subtree_control").split()) == there
    assert int(read(f"{UNIT}/eater.1/memory.max")) == int(LIMIT_GIB * (1 << 30))
    assert (read(f"{UNIT}/primary.1/memory.max"), read(f"{UNIT}/eater.1/memory.oom.group")) == ("max\n", "1\n")
    assert int(read(f"{UNIT}/daemon/memory.low")) == 128 << 20
    assert "cpu" not in there or int(read(f"{UNIT}/daemon/cpu.weight")) == 1000
    assert read(f"/proc/{counted.main_pid}/cgroup").strip().endswith("/llm-watchdog.service/daemon")
    assert read(f"/proc/{eater['pid']}/cgroup").strip().endswith("/llm-watchdog.service/eater.1")
    assert (counted.status() or {})["memory_limited"] is True
    assert "memory_max_gib" not in counted.box.run(PROGRAM, "doctor").stdout


def test_an_engine_over_its_limit_is_ended_by_name_and_nobody_else(counted: Service) -> None:
    primary, daemon = counted.start(), counted.main_pid
    eater = engine(counted, "eater")
    counted.ask('{"name": "leak", "mib_per_s": 200}', "/sim/fault", counted.port + 1000)
    assert engine(counted, "eater", after=eater["generation"])["generation"] == eater["generation"] + 1
    rows = json.loads(counted.box.ok(PROGRAM, "incidents", "--json"))
    told, = (row for row in rows if row["service"] != "host")
    assert (told["service"], told["class"]) == ("eater", "host_oom_kill")
    assert "says its control group" in counted.box.ok(PROGRAM, "incidents", told["id"], "--json")
    assert (counted.primary()["pid"], counted.main_pid) == (primary["pid"], daemon)


def test_a_killed_daemon_finds_its_engines_in_groups_with_controllers(counted: Service) -> None:
    """What an older systemd can't: start the next daemon beside engines that live on."""
    primary, daemon = counted.start(), counted.main_pid
    eater = engine(counted, "eater")
    counted.box.ok("systemctl", "kill", "--kill-who=main", "-s", "KILL", "llm-watchdog")
    counted.box.until(lambda: counted.main_pid not in (0, daemon), "no new daemon")
    assert (counted.serving()["pid"], engine(counted, "eater")["pid"]) == (primary["pid"], eater["pid"])
    assert int(counted.box.read(f"{UNIT}/eater.1/memory.max")) == int(LIMIT_GIB * (1 << 30))
