"""A drill on a real vLLM, as somebody does it who has read `--help` and no more."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.real.conftest import Figures
from tests.real.rig import START_S, RealWatchdog, Vllm
from tests.system.harness import free_port
from tests.system.test_gateway import gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def host(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWatchdog]:
    made = RealWatchdog(tmp_path_factory.mktemp("drill"), {"primary": vllm.engine()},
                        gateway={"listen": f"127.0.0.1:{free_port()}", "hold_s": START_S})
    made.start()
    made.up("primary")
    with gateway(made):
        yield made
    made.finish()


def said(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "vllm_watchdog.app.cli", *words], capture_output=True, text=True,
                          timeout=2 * START_S, check=False)


def test_a_drill_on_a_running_vllm_keeps_every_promise(host: RealWatchdog, figures: Figures) -> None:
    help_ = said("drill", "--help").stdout
    assert "--list" in help_ and "--yes" in help_ and "--report" in help_
    names = re.findall(r"^(\S+) +anywhere", said("drill", "--list").stdout, re.MULTILINE)
    assert "engine-core-kill" in names
    report = host.folder / "report.html"
    done = said("drill", "engine-core-kill", "--config", str(host.config), "--yes", "--json", "--report", str(report))
    (result,) = json.loads(done.stdout)
    seen = result["observed"]
    assert done.returncode == 0 and result["kept"], (result, done.stderr)
    assert (seen["lost"], seen["orphans"]) == (0, 0) and seen["asked"] > 0
    assert host.engine("primary")["generation"] == 2
    assert "<svg" in report.read_text("utf-8")
    figures("drill engine-core-kill: the clients' gap", detected_s=seen["detected_s"], recovered_s=seen["gap_s"])
