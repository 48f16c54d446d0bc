"""A clean stop, at whatever moment it is asked for: no process, no port, no lock, no socket is left (see `finish`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.system.conftest import Make
from tests.system.harness import QUICK_HANG, Doc, Watchdog, engine
from tests.system.kills import at


def start(watchdog: Watchdog) -> None:
    watchdog.start()


def oom(watchdog: Watchdog) -> None:
    watchdog.start().serving("one")
    watchdog.fault("one", "oom")


def freeze(watchdog: Watchdog) -> None:
    watchdog.start().serving("one")
    os.kill(watchdog.core("one"), signal.SIGSTOP)


MOMENTS: tuple[tuple[Callable[[Watchdog], None], str, Doc], ...] = (
    (start, "engine.spawned", engine(sim={"load_s": 30})),
    (start, "now=backoff", engine(sim={"die_with": "SIGSEGV"})),
    (oom, "engine.exited", engine()),
    (freeze, "now=dumping", engine(stop_timeout_s=1)),
)


def stopped(folder: Path, begin: Callable[[Watchdog], None], words: str, keys: Doc) -> str:
    watchdog = Watchdog(folder, {"one": keys}, hang=QUICK_HANG, restart={"backoff_s": 30, "backoff_max_s": 60})
    try:
        begin(watchdog)
        at(words)(watchdog, 0)
        assert watchdog.stop() == 0
        watchdog.finish()
        return watchdog.cli("incidents").out
    finally:
        watchdog.clear()


@pytest.mark.slow
def test_a_stop_at_any_moment_leaves_nothing_behind(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        lives = [pool.submit(stopped, tmp_path / str(number), *moment) for number, moment in enumerate(MOMENTS)]
    told = [life.result() for life in lives]
    assert told[0] == "no incidents\n", "a stop while it loads is no failure of the engine"


def test_a_clean_stop_and_start_tries_a_held_engine_again_but_a_killed_daemon_is_no_human(make: Make) -> None:
    watchdog = make({"one": engine(args={"no-such-flag": True})}).start()
    watchdog.in_phase("one", "held")
    watchdog.until(lambda: '"held": "bad_args"' in (watchdog.state / "state.json").read_text("utf-8"), "not written down")
    del watchdog.engines["one"]["args"]["no-such-flag"]
    watchdog.configure()
    watchdog.kill()
    watchdog.start()
    doc = watchdog.in_phase("one", "held")
    assert (doc["generation"], doc["cause"]) == (1, "bad_args")
    assert watchdog.stop() == 0
    watchdog.start()
    assert watchdog.serving("one")["generation"] == 2
