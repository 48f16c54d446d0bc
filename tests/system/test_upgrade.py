"""An installation that is replaced or taken away under a running daemon costs no engine, and neither does a handover."""

from __future__ import annotations

import shutil
from pathlib import Path

import requests
from tests.system.conftest import Make
from tests.system.harness import engine, free_port

import vllm_watchdog

PACKAGE = Path(vllm_watchdog.__file__).parent


def test_a_daemon_whose_package_is_gone_starts_engines_and_shows_its_page(make: Make, tmp_path: Path) -> None:
    copy = tmp_path / "site" / "vllm_watchdog"
    shutil.copytree(PACKAGE, copy)      # with its bytecode: else all of it is compiled first
    (copy / "__init__.py").write_text('__version__ = "the copy"\n')
    page = f"127.0.0.1:{free_port()}"
    watchdog = make({"one": engine()}, env={"PYTHONPATH": str(copy.parent)}, daemon={"listen": page}).start()
    watchdog.serving("one")
    status = watchdog.status()
    assert status and status["daemon"]["version"] == "the copy"
    shutil.rmtree(copy)
    assert watchdog.ask("restart", engine="one")["ok"]
    watchdog.serving("one", after=1)
    assert watchdog.prompt("one") == 200
    for path in ("/", "/static/page.js", "/metrics"):
        assert requests.get(f"http://{page}{path}", timeout=10).status_code == 200


def test_the_first_answer_of_a_new_daemon_is_that_the_engine_serves_as_before(make: Make) -> None:
    page = f"127.0.0.1:{free_port()}"
    watchdog = make({"one": engine()}, daemon={"listen": page}).start()
    before = watchdog.serving("one")
    watchdog.until(lambda: '"served": true' in (watchdog.state / "state.json").read_text(), "not on disk")
    watchdog.kill()
    assert watchdog.daemon
    gone = watchdog.daemon.pid
    watchdog.start()

    def readyz() -> int | None:
        try:
            return requests.get(f"http://{page}/readyz", timeout=10).status_code
        except requests.ConnectionError:
            return None

    assert watchdog.until(readyz, "no page") == 200
    status = watchdog.until(watchdog.status, "no answer")
    assert status["pid"] != gone and status["health"] == "healthy"
    (after,) = status["engines"]
    for fact in ("phase", "pid", "since", "ready"):
        assert after[fact] == before[fact] or abs(after[fact] - before[fact]) < 0.1, fact  # clocks wander
    watchdog.until(lambda: watchdog.said("engine.adopted"), "not adopted")
    assert len(watchdog.settled("engine.ready")) == 1
