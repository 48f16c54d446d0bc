"""One engine over two simulated cards by worker processes: one of them lost or stopped, and the gate of each card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.harness import HASTY, QUICK_HANG, Watchdog, engine

from vllm_watchdog.procfs import title
from vllm_watchdog.sim import vram

pytestmark = pytest.mark.slow

GIB = 1 << 30


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, cards: Path) -> Iterator[Watchdog]:
    args = {"tensor-parallel-size": 2, "gpu-memory-utilization": 0.6}
    watchdog = Watchdog(tmp_path_factory.mktemp("wide"), {"wide": engine(gpus=[1, 0], args=args)},
                        env={"LLM_WATCHDOG_SIM_GPU": str(cards)}, program=HASTY, hang=QUICK_HANG)
    yield watchdog.start()
    watchdog.finish()


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait(5)


def worker(host: Watchdog, rank: int) -> int:
    return next(pid for pid in host.of("wide") if title(pid) == f"VLLM::Worker_TP{rank}")


def used(cards: Path) -> dict[int, int]:
    """Processes that hold memory, by card."""
    held = [use.gpu for use in vram.uses(cards)]
    return {gpu: held.count(gpu) for gpu in sorted(set(held))}


def test_ranks_take_the_cards_in_the_order_of_the_configuration(host: Watchdog, cards: Path) -> None:
    host.serving("wide")
    assert {use.gpu: use.pid for use in vram.uses(cards)} == {1: worker(host, 0), 0: worker(host, 1)}


def test_a_stopped_worker_that_the_other_waits_for_is_a_hang(host: Watchdog, cards: Path) -> None:
    first = host.serving("wide")
    before = host.of("wide")
    os.kill(worker(host, 0), signal.SIGSTOP)
    threading.Thread(target=host.prompt, args=("wide",), daemon=True).start()
    host.serving("wide", after=first["generation"])
    row = host.until(lambda: host.incident("wide", **{"class": "engine_hang"}), "no incident")
    assert host.bundle(row).is_dir()
    assert not set(before) & set(host.of("wide"))
    assert used(cards) == {0: 1, 1: 1}


def test_a_killed_worker_ends_all_of_it_and_the_card_that_lacks_room_is_the_one_that_is_named(
        host: Watchdog, cards: Path, neighbour: subprocess.Popen[bytes]) -> None:
    first = host.serving("wide")
    lost = worker(host, 1)
    (cards / f"{neighbour.pid}.json").write_text(json.dumps({"pid": neighbour.pid, "gpu": 1, "used_bytes": 32 * GIB}))
    os.kill(lost, signal.SIGKILL)
    names = f"PID {neighbour.pid} (sleep) 32.0 GiB"
    host.until(lambda: names in str(host.incident("wide", urgency="page")), "nobody was told")
    (need,) = (host.incident("wide", urgency="page") or {})["incident"]["needs"]
    assert "GPU 1" in need["en"] and "GPU 0" not in need["en"]
    assert host.engine("wide")["phase"] == "releasing"
    assert (host.of("wide"), used(cards)) == ((), {1: 1}), "nothing of it is left on either card"
    heard = {line["process"] for line in host.settled("engine.member_died")} | {
        line["class_"] for line in host.said("log.finding")}
    assert heard & {"VLLM::Worker_TP1", "worker_died"}, heard      # the kernel's word or the log's, whichever came first
    neighbour.kill()
    neighbour.wait(5)
    assert host.serving("wide", after=first["generation"])["gpus"] == [1, 0]
