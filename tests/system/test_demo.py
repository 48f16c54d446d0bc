"""`llm-watchdog demo` shows the main job, quickly, and cleans up after itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_watchdog.procfs import pids, read

PROMISED_S = 60


def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_watchdog.app.cli", "demo"], capture_output=True, text=True, timeout=PROMISED_S,
        cwd=folder, env=os.environ | {"TMPDIR": str(folder)}, check=False)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a short name: a socket's path may be 107 bytes long."""
    with tempfile.TemporaryDirectory(prefix="demo-") as name:
        yield Path(name)


def test_the_demo_shows_the_main_job_in_under_a_minute_and_leaves_nothing_behind(folder: Path) -> None:
    began = time.monotonic()
    done = demo(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < PROMISED_S
    assert done.stderr == ""
    for shown in ("primary serves on port", "exited with code 0; it is replaced: generation 2", "the backup with its lower",
                  "DEGRADED", "oom_runtime", "README.md", "An engine serves, nothing must be done now",
                  "stopped; no process is left"):
        assert shown in done.stdout, done.stdout
    assert list(folder.iterdir()) == []
    ports = re.findall(r"serves on port (\d+)", done.stdout)
    assert not [pid for pid in pids() for port in ports if f"\0--port\0{port}\0".encode() in read(pid, "cmdline")]


def test_a_demo_that_fails_says_why_and_keeps_what_shows_it(folder: Path) -> None:
    deep = folder / ("x" * 80)
    deep.mkdir()
    done = demo(deep)
    assert done.returncode == 1 and "bytes long, expected at most 107" in done.stdout, done.stdout
    assert [path.name for path in deep.glob("*/daemon.log")] == ["daemon.log"]
