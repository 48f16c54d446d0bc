"""The gate before a start and the thresholds after it, on simulated cards."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.harness import HASTY, Watchdog, backup, engine

pytestmark = pytest.mark.slow

GIB = 1 << 30


@pytest.fixture(scope="module")
def neighbour(cards: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process that holds half of card 0."""
    process = subprocess.Popen(["sleep", "60"])
    (cards / f"{process.pid}.json").write_text(json.dumps({"pid": process.pid, "gpu": 0, "used_bytes": 40 * GIB}))
    yield process
    process.kill()
    process.wait(5)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, cards: Path, neighbour: subprocess.Popen[bytes]) -> Iterator[Watchdog]:
    watchdog = Watchdog(
        tmp_path_factory.mktemp("vram"),
        {
            "waits": engine(gpus=[0], args={"gpu-memory-utilization": 0.8}),
            "leaks": engine(gpus=[1], args={"gpu-memory-utilization": 0.5}),
            "spare": backup("leaks", args={"gpu-memory-utilization": 0.4, "max-num-seqs": 16}),
        },
        env={"LLM_WATCHDOG_SIM_GPU": str(cards)}, program=HASTY,
        thresholds={"degrade_after_s": 0.5},
    )
    yield watchdog.start()
    watchdog.finish()


def test_memory_that_a_neighbour_holds_is_waited_for_and_the_neighbour_named(
        host: Watchdog, neighbour: subprocess.Popen[bytes]) -> None:
    row = host.until(lambda: host.incident("waits", urgency="page"), "nobody was told")
    assert row["class"] == "vram_held" and f"PID {neighbour.pid} (sleep) 40.0 GiB" in row["incident"]["text"]
    doc = host.engine("waits")
    assert (doc["phase"], doc["generation"]) == ("releasing", 0)
    assert neighbour.poll() is None, "it kills only what it started"
    neighbour.kill()
    neighbour.wait(5)
    assert host.serving("waits")["generation"] == 1


def test_memory_over_the_threshold_is_documented_and_then_the_backup_takes_over(host: Watchdog) -> None:
    first = host.serving("leaks")
    host.fault("leaks", "vram_leak", mib_per_s=8 * 1024)
    host.serving("spare")
    raised = [line["symptom"] for line in host.settled("symptom.raised") if line["subject"] == "gpu1"]
    assert raised[:2] == ["vram_high", "vram_degrade"]
    turns = [(line["service"], line["because"]) for line in host.settled("service.failover")]
    assert turns == [("leaks", "degraded")]
    assert [(line["service"], line["to"]) for line in host.settled("service.lowered")] == [("leaks", "16")], "tried before"
    assert not os.path.exists(f"/proc/{first['pid']}")
    row = host.until(lambda: host.incident("leaks"), "no incident")
    folder = host.bundle(row)
    assert '"used_bytes"' in (folder / "gpu-processes.json").read_text("utf-8")
    assert "vram_high" in (folder / "bundle.txt").read_text("utf-8"), "the first bundle is of the first threshold"
    assert host.engine("waits")["generation"] == 1, "another card's engine is left alone"


def test_a_killed_daemon_leaves_no_gpu_helper_and_the_next_adopts_engines_that_hold_their_cards(host: Watchdog) -> None:
    first = {name: host.serving(name)["pid"] for name in ("waits", "spare")}
    host.kill()
    host.until(lambda: not helpers(host), "a helper outlived its daemon")
    host.start()
    assert {name: host.serving(name)["pid"] for name in first} == first
    host.until(lambda: isinstance(host.until(host.status, "no status")["gpus"], list), "no GPU sample came")
    assert len(helpers(host)) == 1


def helpers(host: Watchdog) -> list[int]:
    return [pid for pid, name in host.descendants() if name == "watchdog-gpu"]
