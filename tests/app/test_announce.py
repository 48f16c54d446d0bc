from __future__ import annotations

from dataclasses import replace

import pytest
from tests.core.scenes import Scene, finding, plan

from vllm_watchdog.app.announce import AGAIN_S, EXTEND_S, Announcer, Ready
from vllm_watchdog.core import events as e
from vllm_watchdog.tell.systemd import Notifier


class Systemd(Notifier):
    """Keeps what it would be told."""

    def __init__(self) -> None:
        super().__init__("/run/nobody")
        self.told: list[str] = []

    def notify(self, state: str) -> None:
        self.told.append(state)


class Stage:
    def __init__(self, ready: Ready) -> None:
        self.systemd, self.now = Systemd(), 0.0
        self.announcer = Announcer(self.systemd, ready, lambda: self.now)

    def publish(self, scene: Scene, at: float = 0.0) -> list[str]:
        self.now = at
        self.systemd.told.clear()
        self.announcer.publish(scene.world)
        return list(self.systemd.told)


EXTEND = f"EXTEND_TIMEOUT_USEC={int(EXTEND_S * 1e6)}"


def test_a_daemon_that_watches_is_ready_at_once() -> None:
    stage, scene = Stage("watching"), Scene(plan())
    assert stage.publish(scene) == ["READY=1\nSTATUS=primary starting, gen 1"]
    assert stage.publish(scene, 1.0) == []
    assert stage.publish(scene.serve(), 2.0) == ["STATUS=primary serving, gen 1"]


def test_a_start_that_waits_for_the_service_asks_for_more_time_until_it_serves() -> None:
    stage, scene = Stage("serving"), Scene(plan())
    assert stage.publish(scene) == ["STATUS=primary starting, gen 1", EXTEND]
    assert stage.publish(scene, AGAIN_S / 2) == []
    assert stage.publish(scene, AGAIN_S) == [EXTEND]
    assert stage.publish(scene.serve(), AGAIN_S + 1) == ["READY=1\nSTATUS=primary serving, gen 1"]
    assert stage.publish(scene, 100.0) == []


def test_a_service_that_is_given_up_ends_the_wait() -> None:
    stage, scene = Stage("serving"), Scene(plan(backup=False))
    stage.publish(scene)
    scene.crash("primary", 1.0, finding("bad_args"))
    assert stage.publish(scene, 1.0) == ["READY=1\nSTATUS=primary held, gen 1"]


def test_a_stop_is_told_once_and_asks_for_more_time_while_it_goes_on() -> None:
    stage, scene = Stage("watching"), Scene(plan()).serve()
    stage.publish(scene)
    scene.feed(e.StopAsked(5.0, "SIGTERM"))
    assert stage.publish(scene, 5.0) == ["STOPPING=1\nSTATUS=primary stopping, gen 1", EXTEND]
    assert stage.publish(scene, 6.0) == []
    assert stage.publish(scene, 5.0 + AGAIN_S) == [EXTEND]


def test_a_daemon_that_is_stopped_before_it_was_ready_never_says_so() -> None:
    stage, scene = Stage("watching"), Scene(plan())
    scene.feed(e.StopAsked(0.0, "SIGTERM"))
    assert stage.publish(scene)[0].startswith("STOPPING=1")


@pytest.mark.parametrize(("stopping", "words"), [
    (True, "stopped"), (False, "left to the next daemon: primary serving, gen 1")])
def test_the_last_word_tells_a_stop_from_a_handover(stopping: bool, words: str) -> None:
    stage, scene = Stage("watching"), Scene(plan()).serve()
    stage.announcer.leave(replace(scene.world, stopping=stopping))
    assert stage.systemd.told == [f"STOPPING=1\nSTATUS={words}"]


def test_a_reload_is_told_only_by_a_daemon_that_is_ready() -> None:
    stage, scene = Stage("serving"), Scene(plan())
    stage.publish(scene)
    stage.systemd.told.clear()
    stage.announcer.reloading()
    stage.announcer.reloaded()
    assert stage.systemd.told == [], "else a start would be over by a reload"
    stage.publish(scene.serve())
    stage.announcer.reloading()
    stage.announcer.reloaded()
    first, second = stage.systemd.told[-2:]
    assert first.startswith("RELOADING=1\nMONOTONIC_USEC=") and second == "READY=1\nSTATUS=primary serving, gen 1"
