"""What the people on call hear: each thing once, whatever happened to the channel or the daemon meanwhile."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.fakes.receivers import Hook, Server, Slack
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
    assert opened["text"].startswith(f"[OPENED, critical] GPU out of memory while serving: one on {os.uname().nodename}\n")
    assert "352.00 MiB" in opened["text"] and opened["folder"] == str(told.logs / "incidents" / opened["incident"])
    row = told.until(lambda: told.incident("one"), "no incident")
    assert row["wall_resolved"] is not None


@pytest.mark.timeout(400)
def test_thirty_kills_of_the_daemon_during_alerts_lose_none_and_double_none_that_has_an_id(make: Make) -> None:
    """A third of the kills hit a daemon that has just begun.  The seed is fixed, the moments are not: the host is not."""
    hook, slack, chance = Hook(time.time, "s3cret-of-the-hook"), Slack(time.time), random.Random(7)
    servers = [Server(hook, "hook"), Server(slack, "services/T0/B0/x")]
    names = ("a", "b", "c")
    watchdog: Watchdog = make(
        {name: engine() for name in names}, program=HASTY, restart={"budget": 1000},
        channels={"hook": {"url": servers[0].url, "secret": "s3cret-of-the-hook"},
                  "team": {"type": "slack", "url": servers[1].url}}).start()

    def calm(generations: int) -> bool:
        """Each outage is over: a new daemon believes for a moment in what served under the last one."""
        doc = watchdog.status()
        return bool(doc and doc["health"] == "healthy" and not doc["incidents"]
                    and all(each["phase"] == "serving" and each["generation"] >= generations for each in doc["engines"])
                    and not any(channel["waiting"] for channel in doc["alerts"]))

    try:
        for number in range(1, 11):
            watchdog.until(lambda number=number: calm(number), "never calm", 60)
            for name in names:
                watchdog.fault(name, "core_death")
            for _ in range(3):
                threading.Event().wait(chance.choice((chance.uniform(0, 0.2), chance.uniform(0.2, 1.5))))
                watchdog.kill()
                watchdog.start()
        watchdog.until(lambda: calm(11), "never calm again", 60)
        rows = watchdog.ask("incidents", limit=1000)["incidents"]
        assert len(rows) >= 30 and all(row["wall_resolved"] for row in rows)
        owed = {f"{row['id']}/{kind}" for row in rows for kind in ("opened", "resolved")}
        assert set(hook.kept) == owed
        doubled = {id_: times for id_, times in Counter(each["id"] for each in hook.taken).items() if times > 1}
        assert sum(doubled.values()) - len(doubled) <= 30, doubled
        assert all(id_.partition("/")[0] in " ".join(str(each) for each in slack.taken) for id_ in owed)
    finally:
        for server in servers:
            server.close()
