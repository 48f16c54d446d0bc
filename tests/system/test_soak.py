"""What the soak notes of what should not be; the soak itself is run by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bench.failover import Loss
from tests.bench.soak_notes import SILENT, Struck, told
from tests.system.harness import Doc
from tests.system.stage import Stage

from vllm_watchdog.core.readings import Mark
from vllm_watchdog.proc import MARK_ENV, mark_value

AT = 1_796_000_000.0        # 2026-11-30T00:53:20Z


def lost(outcome: str = "ConnectionResetError", asked: float = AT, over: float = AT + 1) -> Loss:
    return Loss(outcome, stream=False, asked=asked, over=over)


def test_a_killed_gateway_had_what_was_asked_before_it_answered_again_and_failed_after() -> None:
    kill = Struck(AT, "SIGKILL gateway", answered=AT + 3)
    assert kill.had(lost(asked=AT - 5, over=AT + 1)) and kill.had(lost(asked=AT + 2, over=AT + 2))
    assert not kill.had(lost(asked=AT - 5, over=AT - 1)) and not kill.had(lost(asked=AT + 4, over=AT + 5))
    assert not Struck(AT, "SIGKILL engine core").had(lost(asked=AT - 5, over=AT + 1))


def test_a_request_that_nobody_answers_is_no_killed_gateways() -> None:
    assert not Struck(AT, "SIGKILL gateway", answered=AT + 3).had(lost(SILENT, AT - 1, AT + 60))


def test_a_loss_is_told_with_its_faults_and_what_was_said_meanwhile(tmp_path: Path) -> None:
    lines = {"daemon.log": ["00:53:19.999Z before", "00:53:20.123Z asked", "00:53:21.500Z given up", "00:53:22.000Z after"],
             "gateway.log": ["00:53:21 gateway.route primary='backup:1'"]}
    for name, texts in lines.items():
        (tmp_path / name).write_text("".join(f"2026-11-30T{text}\n" for text in texts))
    struck = [Struck(AT - 100, "long before"), Struck(AT - 2, "SIGSTOP gateway"), Struck(AT + 9, "later")]
    first, *rest = told(lost(), struck, tmp_path).splitlines()
    assert first == ("ConnectionResetError after 1.0 s of a request asked at 2026-11-30T00:53:20; "
                     "faults: SIGSTOP gateway at 2026-11-30T00:53:18")
    assert rest == ["daemon.log, 2 lines:", "  2026-11-30T00:53:20.123Z asked", "  2026-11-30T00:53:21.500Z given up",
                    "gateway.log, 1 lines:", "  2026-11-30T00:53:21 gateway.route primary='backup:1'"]


# -- strays


class Told(Stage):
    """A host without a daemon, of which the test says what a daemon would: phase, generation and PID of the only engine,
    look by look; the last word holds.  `left` is a process of its second generation."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "none", loaded=False)
        self.words: list[tuple[str, int, int | None]] = []
        self.host.status = self._status  # type: ignore[method-assign]
        env = {MARK_ENV: mark_value(Mark("primary", 2), self.host.instance)}
        self.left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)

    def _status(self) -> Doc:
        phase, generation, pid = self.words.pop(0) if len(self.words) > 1 else self.words[0]
        engine = {"name": "primary", "phase": phase, "generation": generation, "pid": pid, "cause": "", "why": ""}
        return {"engines": [engine]}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.left.kill()
    made.left.wait(10)
    made.receiver.close()


def test_a_process_of_an_older_generation_is_a_stray_and_is_described(stage: Told) -> None:
    stage.words = [("serving", 3, 1)]
    (stray,) = stage.strays()
    assert stray.startswith(f"primary#2 {stage.left.pid}, ")
    assert f"alive, its parent {os.getpid()}, " in stray and "time.sleep" in stray


def test_one_of_the_generation_that_runs_is_none(stage: Told) -> None:
    stage.words = [("serving", 2, 1)]
    assert stage.strays() == []


def test_a_generation_that_starts_between_the_looks_is_none(stage: Told) -> None:
    """The daemon was asked first, and named the one before it or none: that looked like an orphan, once."""
    stage.words = [("releasing", 1, None), ("serving", 1, 1), ("serving", 2, 1)]
    assert stage.strays() == []
    assert len(stage.words) == 1, "it looked again until nothing changed"
