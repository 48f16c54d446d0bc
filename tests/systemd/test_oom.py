"""The kernel's OOM killer in an engine's memory, for real: the engine is named, and the daemon lives.

The kernel log names the victim by the PID of the real machine, which is why the daemon runs there and not in a box.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.harness import Watchdog, engine
from tests.systemd.box import unified

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(120)]

LIMIT = 400 << 20       # the stand-in needs some 60 MiB


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory control group with a limit, of version 2 or 1."""
    name, top = f"llm-watchdog-test-{uuid.uuid4().hex[:8]}", unified()
    old = Path("/sys/fs/cgroup/memory")
    if top and "memory" in (top / "cgroup.subtree_control").read_text().split():
        group, limit = top / name, "memory.max"
    elif (old / "memory.limit_in_bytes").exists():
        group, limit = old / name, "memory.limit_in_bytes"
    else:
        pytest.skip("no memory controller to put an engine into")
    if os.geteuid() != 0 or not os.access("/dev/kmsg", os.R_OK):
        pytest.skip("not root, or no kernel log")
    group.mkdir()
    (group / limit).write_text(str(LIMIT))
    yield group
    group.rmdir()


def test_a_kill_of_the_oom_killer_is_told_by_name_and_the_engine_is_replaced(tmp_path: Path, limited: Path) -> None:
    watchdog = Watchdog(tmp_path / "w", {"eater": engine(sim={"leak_mib_per_s": 200}), "other": engine()}).start()
    try:
        first, other = watchdog.serving("eater"), watchdog.serving("other")
        for pid in watchdog.of("eater"):
            (limited / "cgroup.procs").write_text(str(pid))
        incident = watchdog.until(lambda: watchdog.incident("eater", **{"class": "host_oom_kill"}), "not told by name", 40.0)
        assert incident["engine"] == "eater"
        assert "Out of memory" in str(incident["incident"]) or "out of memory" in str(incident["incident"])
        assert watchdog.serving("eater", after=first["generation"])["pid"] != first["pid"]
        assert watchdog.engine("other")["pid"] == other["pid"]
        assert watchdog.daemon and watchdog.daemon.poll() is None
        watchdog.finish()
    finally:
        watchdog.clear()
