"""Primary and backup, by themselves: the backup serves when the primary keeps failing, and gives way when it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.conftest import Make
from tests.system.harness import HASTY, backup, engine


@pytest.mark.slow
def test_a_second_failure_brings_the_backup_and_the_primary_returns_when_it_is_idle(make: Make) -> None:
    watchdog = make({"big": engine(args={"max-num-seqs": 64}), "small": backup("big")}, program=HASTY,
                    failover={"stable_s": 1.0}).start()
    watchdog.serving("big")
    watchdog.fault("big", "oom")
    watchdog.serving("big", after=1)
    watchdog.fault("big", "core_death")
    serving = watchdog.serving("small")
    assert (serving["generation"], watchdog.engine("big")["phase"]) == (1, "stopped")
    assert b"--max-num-seqs\x0016\x00" in Path(f"/proc/{serving['pid']}/cmdline").read_bytes()
    assert watchdog.prompt("small") == 200
    assert watchdog.cli("status").code == 1         # served, but not as configured

    watchdog.serving("big", after=2)
    assert watchdog.engine("small")["phase"] == "stopped"
    turns = [(line["say"], line["because"]) for line in watchdog.settled("service.")]
    assert turns == [("service.failover", "failures"), ("service.failback", "stable")]
    assert watchdog.until(lambda: watchdog.incident("big"), "no incident")["class"] == "oom_runtime"
