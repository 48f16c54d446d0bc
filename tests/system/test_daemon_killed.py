"""kill -9 of the daemon costs the engines nothing, and never doubles one.  `sweep.py` does the same at many more moments."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.system.conftest import Make
from tests.system.harness import engine
from tests.system.kills import Step, at, chain, never_two

pytestmark = pytest.mark.slow

CHAINS: dict[str, tuple[Step, ...]] = {
    "restarts": (("start", at("engine.spawned")), ("restart", at("now=stopping")), ("restart", at("now=starting")),
                 ("stop", at("now=stopping"))),
    "failovers": (("failover", at("now=settling")), ("failover", at("engine.spawned")), ("death", at("engine.exited"))),
}


@pytest.fixture(scope="module", autouse=True)
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """They mostly wait, so they go on beside the other tests."""
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(chain, tmp_path_factory.mktemp(name), steps) for name, steps in CHAINS.items()}


def test_a_running_engine_is_adopted_and_never_restarted(make: Make) -> None:
    watchdog = make({"one": engine(), "two": engine()}).start()
    first = {name: watchdog.serving(name) for name in ("one", "two")}
    watchdog.kill()
    assert watchdog.prompt("one") == 200, "a dead daemon costs the engines nothing"
    watchdog.start()
    for name, before in first.items():
        doc = watchdog.serving(name)
        assert (doc["pid"], doc["generation"]) == (before["pid"], before["generation"])
    told = watchdog.until(lambda: len(found := watchdog.said("engine.adopted")) == 2 and found, "not told")
    assert [line["then"] for line in told] == ["kept", "kept"]
    watchdog.fault("one", "oom")
    assert watchdog.serving("one", after=1)["pid"] != first["one"]["pid"], "an adopted engine is watched like any other"
    assert watchdog.until(lambda: watchdog.incident("one"), "no incident")["class"] == "oom_runtime"


def test_an_engine_that_died_while_no_daemon_lived_is_cleaned_up_and_replaced(make: Make) -> None:
    watchdog = make({"one": engine()}).start()
    first = watchdog.serving("one")
    core = watchdog.core("one")
    with never_two(watchdog):
        watchdog.kill()
        os.kill(first["pid"], signal.SIGKILL)       # its EngineCore lives on and holds the card
        assert core in watchdog.of("one")
        watchdog.start()
        watchdog.serving("one", after=first["generation"])
    assert core not in watchdog.of("one")
    assert any(line["engine"] == "one#1" for line in watchdog.settled("engine.stray"))


def test_an_open_incident_goes_on_and_is_not_said_to_open_again(make: Make) -> None:
    watchdog = make({"one": engine(args={"no-such-flag": True})}).start()
    watchdog.in_phase("one", "held")
    watchdog.until(lambda: watchdog.said("incident.opened"), "not told")
    watchdog.kill()
    watchdog.start()
    watchdog.in_phase("one", "held")
    assert len(watchdog.settled("daemon.started")) == 2 and len(watchdog.said("incident.opened")) == 1
    assert len(watchdog.ask("incidents")["incidents"]) == 1


def test_an_engine_that_is_configured_no_more_is_gone_before_another_starts(make: Make) -> None:
    watchdog = make({"old": engine()}).start()
    watchdog.serving("old")
    watchdog.kill()
    watchdog.engines["new"] = watchdog.engines.pop("old")       # the same port, another name
    watchdog.configure()
    with never_two(watchdog):
        watchdog.start()
        watchdog.serving("new")
    assert not watchdog.of("old")


def test_a_state_that_cannot_be_read_is_set_aside_and_costs_no_engine(make: Make) -> None:
    watchdog = make({"one": engine()}).start()
    first = watchdog.serving("one")
    watchdog.kill()
    for name in ("state.json", "one.offset"):
        (watchdog.state / name).write_text("{nonsense")
    watchdog.start()
    doc = watchdog.serving("one")
    assert (doc["pid"], doc["generation"]) == (first["pid"], first["generation"])
    assert [line["file"] for line in watchdog.settled("file.set_aside")] == [str(watchdog.state / "state.json")]


@pytest.mark.parametrize("name", CHAINS)
def test_a_daemon_killed_in_the_middle_is_followed_by_one_that_ends_with_one_engine(
        chains: dict[str, Future[None]], name: str) -> None:
    chains[name].result(timeout=50)
