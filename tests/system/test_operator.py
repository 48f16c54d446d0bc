"""What people ask of a running daemon, and what each is answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.harness import Watchdog, backup, engine


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watchdog]:
    watchdog = Watchdog(tmp_path_factory.mktemp("operator"), {"big": engine(), "small": backup("big"), "lone": engine()})
    watchdog.start()
    watchdog.serving("big")
    watchdog.serving("lone")
    yield watchdog
    watchdog.finish()


def test_restart_is_answered_and_done(host: Watchdog) -> None:
    before = host.engine("lone")["generation"]
    said = host.cli("restart", "lone")
    assert (said.code, said.err) == (0, "") and "lone (generation 1, serving) is being stopped, and then started" in said.out
    host.serving("lone", after=before)
    assert host.incident("lone") is None


def test_a_restart_of_what_is_not_there_is_refused_with_what_is(host: Watchdog) -> None:
    said = host.cli("restart", "nobody")
    assert said.code == 1 and said.out == "no engine 'nobody' is configured; there are: big, small, lone\n"
    assert "not in service" in host.cli("restart", "small").out


def test_failover_and_failback_change_sides_and_never_run_both(host: Watchdog) -> None:
    both = threading.Event()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if host.of("big") and host.of("small"):
                both.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    said = host.cli("failover")
    assert (said.code, said.out) == (0, "big: big is being stopped, then small starts\n")
    host.serving("small")
    assert "already meant to serve" in host.cli("failover", "big").out
    assert host.cli("failback", "small").code == 0
    host.serving("big", after=1)
    over.set()
    watcher.join(5)
    assert not both.is_set()
    assert host.cli("failover", "lone").code == 1
    assert host.incident("big") is None, "an operator's wish is no incident"


def test_pause_leaves_a_dead_engine_alone_and_resume_brings_it_back(host: Watchdog) -> None:
    before = host.serving("lone")["generation"]
    said = host.cli("pause")
    assert said.code == 0 and "paused" in said.out
    assert "automatic actions are paused" in host.cli("status").out
    host.fault("lone", "core_death")
    host.until(lambda: host.incident("lone"), "pause stops acting, not telling")
    host.until(lambda: not host.of("lone"), "it did not die")
    assert host.engine("lone")["generation"] == before
    assert host.cli("resume").code == 0
    host.serving("lone", after=before)


def test_a_snapshot_is_a_bundle_now_and_the_engine_goes_on(host: Watchdog) -> None:
    first = host.serving("big")
    said = host.cli("snapshot", "big", "--reason", "looks slow")
    assert said.code == 0
    folder = Path(said.out.split(" (without")[0].strip())
    assert folder.parent == host.logs / "incidents"
    assert folder.name in host.cli("incidents").out
    assert {"bundle.txt", "stacks.txt", "vllm-metrics.txt", "engine.json"} <= {path.name for path in folder.iterdir()}
    assert "looks slow" in (folder / "bundle.txt").read_text("utf-8")
    assert "vllm:num_requests_running" in (folder / "vllm-metrics.txt").read_text("utf-8")
    assert host.engine("big")["pid"] == first["pid"]
