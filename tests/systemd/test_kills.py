"""kill -9 of the daemon again and again while its engine answers requests and floods its log.

`LLM_WATCHDOG_KILLS=100` for the whole sweep, some five minutes.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time

import pytest
from tests.systemd.box import PYTHON, Box
from tests.systemd.service import Service

KILLS = int(os.environ.get("LLM_WATCHDOG_KILLS", "8"))
SEED = int(os.environ.get("LLM_WATCHDOG_SEED", "1"))

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(120 + 10 * KILLS)]

LOAD = """
import json, pathlib, sys, threading, urllib.request
end, url, counts = pathlib.Path(sys.argv[1]), sys.argv[2], {"ok": 0, "failed": 0}
body = b'{"model": "stand-in", "prompt": "a b c", "max_tokens": 8}'
def ask():
    while not end.exists():
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=20).read()
            counts["ok"] += 1
        except OSError:
            counts["failed"] += 1
threads = [threading.Thread(target=ask) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(counts))
"""


class Load:
    """Requests without a pause, inside the box."""

    def __init__(self, box: Box, port: int) -> None:
        self._box, self._said = box, ""
        self._end = f"/run/load-{port}"
        url = f"http://127.0.0.1:{port}/v1/completions"
        self._thread = threading.Thread(target=self._run, args=(url,), daemon=True)
        self._thread.start()

    def _run(self, url: str) -> None:
        self._said = self._box.ok(PYTHON, "-c", LOAD, self._end, url, within_s=120.0 + 10 * KILLS)

    def finish(self) -> dict[str, int]:
        self._box.ok("touch", self._end)
        self._thread.join(30)
        return dict(json.loads(self._said))


def test_no_kill_of_the_daemon_costs_a_request_an_engine_or_a_line_of_its_log(service: Service) -> None:
    service.args["sim-flood-mb-per-s"] = 1.0
    service.configure()
    engine = service.start()
    load, chance = Load(service.box, service.port), random.Random(SEED)
    for number in range(KILLS):
        time.sleep(chance.uniform(0.0, 1.5))        # the moment is what is tried
        daemon = service.main_pid
        service.box.ok("systemctl", "kill", "--kill-who=main", "-s", "KILL", "llm-watchdog")
        service.box.ok("systemctl", "reset-failed", "llm-watchdog")     # its limit on restarts is not what is tried
        service.box.until(lambda daemon=daemon: service.main_pid not in (0, daemon), f"no daemon after kill {number}")
    after = service.serving()
    counts = load.finish()
    print(f"{KILLS} kills: {counts['ok']} requests answered, {counts['failed']} failed")
    assert (after["pid"], after["generation"], after["failures"]) == (engine["pid"], 1, 0)
    assert counts["failed"] == 0 < counts["ok"]
    service.ask('{"name": "oom"}', "/sim/fault")
    service.serving(after=1)
    journal = service.box.ok("sh", "-c", "cat /var/log/llm-watchdog/journal/*.jsonl")
    lines = [json.loads(line) for line in journal.splitlines() if '"log.finding"' in line and line.endswith("}")]
    found = [line["text"] for line in lines if line["say"] == "log.finding"]
    assert found and len(found) == len(set(found)), "what its log says is found once"
