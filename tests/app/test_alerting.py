"""A new configuration gets a new outbox, and what the old one owed is told by it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.receivers import Server, says
from tests.fakes.tell import Said, incident

from vllm_watchdog.app.alerting import Alerting
from vllm_watchdog.config import Settings
from vllm_watchdog.core.commands import Alert
from vllm_watchdog.tell.history import History


def settings(url: str) -> Settings:
    return Settings(alerts={"channels": {"ops": {"type": "webhook", "url": url}}})  # type: ignore[arg-type]


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db", time.monotonic, time.time, Said())
    history.start()
    yield history
    history.stop(5.0)


def test_what_one_outbox_owes_the_next_one_delivers(history: History) -> None:
    said = Said()
    deaf, good = Server(says(503)), Server(says(200))
    alerting = Alerting(settings(deaf.url), history, said)
    alerting.start()
    try:
        alerting.tell(Alert("opened", incident()))
        said.wait("alert.failed")
        alerting.change(settings(good.url))
        said.wait("alert.delivered")
        assert good.got.get(timeout=5)[2]["incident"] == incident().id
        assert alerting.written(5.0)
        assert [state.name for state in alerting.states()] == ["ops"]
    finally:
        alerting.stop(5.0)
        deaf.close()
        good.close()


def test_the_same_channels_keep_their_outbox(history: History) -> None:
    alerting = Alerting(settings("http://127.0.0.1:9/x"), history, Said())
    alerting.change(settings("http://127.0.0.1:9/x"))      # stopping one that was not started would raise
    alerting.start()
    assert alerting.stop(5.0)
