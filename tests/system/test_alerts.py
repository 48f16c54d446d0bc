"""What the people on call hear: each thing once, whatever happened to the channel or the daemon meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.system.conftest import Make
from tests.system.harness import HASTY, Receiver, Watchdog, engine, free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def told(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Watchdog]:
    """One whose engine has just failed; what follows takes its time."""
    watchdog = Watchdog(
        tmp_path_factory.mktemp("told"), {"one": engine()}, program=HASTY, channels={"oncall": {"url": receiver.url}})
    watchdog.start().serving("one")
    watchdog.fault("one", "oom")
    yield watchdog
    watchdog.finish()


def test_nothing_is_lost_or_told_twice_when_channel_and_daemon_were_down(make: Make) -> None:
    port = free_port()
    watchdog: Watchdog = make({"two": engine()}, program=HASTY,
                              channels={"oncall": {"url": f"http://127.0.0.1:{port}/hook", "timeout_s": 1}}).start()
    watchdog.serving("two")
    watchdog.fault("two", "core_death")
    watchdog.until(lambda: watchdog.said("alert.failed"), "the receiver is down, and nobody said so")
    watchdog.kill()
    late = Receiver(port)
    try:
        watchdog.start()
        watchdog.until(lambda: late.of("two", kind="resolved"), "never told that it is over")
        assert [letter["kind"] for letter in late.of("two")] == ["opened", "resolved"]
        assert len({letter["incident"] for letter in late.of("two")}) == 1
        watchdog.until(lambda: len(watchdog.said("alert.delivered")) == 2, "not written down as told")
        watchdog.kill()
        watchdog.start().serving("two")
        assert watchdog.stop() == 0
        assert len(late.of("two")) == 2, "a new daemon told it again"
    finally:
        late.close()


def test_an_incident_is_told_once_when_it_opens_and_once_when_it_ends(told: Watchdog, receiver: Receiver) -> None:
    told.until(lambda: receiver.of("one", kind="resolved"), "never told that it is over")
    opened, resolved = receiver.of("one")
    assert (opened["kind"], resolved["kind"]) == ("opened", "resolved")
    assert opened["incident"] == resolved["incident"] and opened["class"] == resolved["class"] == "oom_runtime"
    assert "[OPENED] GPU out of memory while serving: service one, engine one" in opened["text"]
    assert "352.00 MiB" in opened["text"] and opened["folder"] == str(told.logs / "incidents" / opened["incident"])
    row = told.until(lambda: told.incident("one"), "no incident")
    assert row["wall_resolved"] is not None
