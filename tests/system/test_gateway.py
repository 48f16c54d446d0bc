"""Daemon and gateway together: what clients see while the engine that serves them is killed or restarted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from tests.fakes.model import write
from tests.system.harness import HASTY, Doc, Watchdog, backup, engine, free_port

pytestmark = pytest.mark.slow

CLIENTS = 8
Make = Callable[..., Watchdog]


@contextmanager
def gateway(host: Watchdog) -> Iterator[None]:
    with (host.folder / "gateway.log").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "vllm_watchdog.app.cli", "gateway", "--config", str(host.config)],
                                   stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=host.folder, env=host.env)
    try:
        log = host.folder / "gateway.log"
        host.until(lambda: b"gateway.ready" in log.read_bytes() or None, "the gateway does not come up")
        yield
        process.terminate()
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)


class Clients:
    """Ask again and again until the block is left; `answers` counts by status, or by the error's name."""

    def __init__(self, url: str) -> None:
        self.url, self.answers = url, Counter[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _ask(self, number: int) -> None:
        with requests.Session() as session:
            while not self._stop.is_set():
                body = {"model": "stand-in", "prompt": f"client {number}", "max_tokens": 4}
                try:
                    said = str(session.post(f"{self.url}/v1/completions", json=body, timeout=25).status_code)
                except requests.RequestException as error:
                    said = type(error).__name__
                self.answers[said] += 1

    def more(self, host: Watchdog, count: int = 2 * CLIENTS) -> None:
        """Waits until so many more were answered."""
        target = self.answers.total() + count
        host.until(lambda: self.answers.total() >= target, "the clients get no answers")


def pair(standby: str) -> tuple[dict[str, Doc], Doc]:
    primary = engine(sim={"token-s": 0.01}, gpus=[0])
    primary["args"] = primary["args"] | {"gpu-memory-utilization": 0.5}
    other = backup("primary", standby=standby)
    other["args"] = other["args"] | {"gpu-memory-utilization": 0.3}
    return {"primary": primary, "backup": other}, {"listen": f"127.0.0.1:{free_port()}"}


def simulated_card(folder: Path) -> dict[str, str]:
    folder.mkdir()
    (folder / "gpu.json").write_text(json.dumps({"total_bytes": 100 * 10**9}))
    return {"LLM_WATCHDOG_SIM_GPU": str(folder)}


@pytest.mark.parametrize("standby", ["hot", "sleeping", "cold"])
def test_a_killed_engine_costs_clients_a_pause_and_no_error(make: Make, tmp_path: Path, standby: str) -> None:
    engines, listen = pair(standby)
    host = make(engines, env=simulated_card(tmp_path / "card"), gateway=listen)
    host.start()
    first = host.serving("primary")
    if standby != "cold":
        host.in_phase("backup", "asleep" if standby == "sleeping" else "serving")
    with gateway(host), Clients(f"http://{listen['listen']}") as clients:
        clients.more(host)
        os.kill(first["pid"], signal.SIGKILL)
        clients.more(host)
        host.serving("primary" if standby == "cold" else "backup")
        if standby == "cold":
            row = host.until(lambda: waited(host), "the incident does not say how long clients waited")
            (wait, *_) = row["incident"]["waits"]
            assert wait["requests"] > 0 and wait["longest_s"] >= wait["median_s"] > 0
            assert "requests that waited in the gateway" in host.cli("incidents", row["id"]).out
    assert set(clients.answers) == {"200"}, clients.answers
    def told() -> bool:
        row = host.incident("primary")
        return row is not None and any(entry["what"] == "in flight" for entry in row["incident"]["timeline"])

    host.until(lambda: told() or None, "the incident does not say who was in flight")


def waited(host: Watchdog) -> Doc | None:
    row = host.incident("primary")
    return row if row and row["incident"]["waits"] else None


def test_an_operators_restart_costs_clients_a_pause_and_blames_nobody(make: Make, tmp_path: Path) -> None:
    engines, listen = pair("cold")
    host = make(engines, env=simulated_card(tmp_path / "card"), gateway=listen)
    host.start()
    host.serving("primary")
    with gateway(host), Clients(f"http://{listen['listen']}") as clients:
        clients.more(host)
        assert host.cli("restart", "primary").code == 0
        host.serving("primary", after=1)
        clients.more(host)
    assert set(clients.answers) == {"200"}, clients.answers


def running(host: Watchdog) -> int:
    """How many requests the primary says it works at."""
    text = requests.get(host.url("primary") + "/metrics", timeout=5).text
    found = re.search(r"^vllm:num_requests_running\S* (\S+)$", text, re.MULTILINE)
    assert found, text
    return int(float(found[1]))


def test_memory_over_its_limit_lets_fewer_requests_through_until_it_falls_and_restarts_nothing(
        make: Make, tmp_path: Path) -> None:
    engines, listen = pair("cold")
    engines["primary"]["args"] |= {"max-num-seqs": 64}
    engines["backup"]["args"] |= {"max-num-seqs": 2, "gpu-memory-utilization": 0.5}
    card = simulated_card(tmp_path / "card")
    neighbour = tmp_path / "card" / f"{os.getpid()}.json"       # it is ourselves who hold the memory
    host = make(engines, env=card, gateway=listen, program=HASTY, thresholds={"degrade_after_s": 6})
    host.start()
    host.serving("primary")
    with gateway(host), Clients(f"http://{listen['listen']}") as clients:
        host.until(lambda: running(host) > 2, "the clients do not ask all at once")
        neighbour.write_text(json.dumps({"pid": os.getpid(), "gpu": 0, "used_bytes": 30 * 10**9}))
        host.until(lambda: host.said("service.lowered"), "it is not lowered")
        clients.more(host)      # what was under way is answered by now
        most = 0
        before = clients.answers.total()
        while clients.answers.total() < before + 2 * CLIENTS:
            most = max(most, running(host))
        neighbour.unlink()
        status = host.until(host.status, "no status")
        host.until(lambda: host.said("service.restored"), "it does not recover")
        host.until(lambda: running(host) > 2, "the clients are not let through all at once again")
    assert most == 2
    assert (status["health"], status["services"][0]["lowered"]["to"]) == ("degraded", 2)
    assert set(clients.answers) == {"200"}, clients.answers
    assert not host.said("service.failover") and host.engine("primary")["generation"] == 1
    lowered = host.said("service.lowered")
    assert [(line["to"], line["because"]) for line in lowered] == [("2", "vram_degrade of gpu0")]
    row = host.until(lambda: host.incident("primary"), "no incident")
    assert "lowered" in [entry["what"] for entry in row["incident"]["timeline"]]


def test_a_full_kv_cache_lets_fewer_requests_through_and_status_says_so(make: Make, tmp_path: Path) -> None:
    engines, listen = pair("cold")
    engines["primary"]["args"] |= {"max-num-seqs": 3, "sim-kv-tokens": 64}     # of 4 blocks; 5 clients wait
    engines["backup"]["args"] |= {"max-num-seqs": 2}
    host = make(engines, env=simulated_card(tmp_path / "card"), gateway=listen, program=HASTY,
                thresholds={"kv_cache": 0.4, "kv_cache_after_s": 0.2})
    host.start()
    host.serving("primary")
    with gateway(host), Clients(f"http://{listen['listen']}") as clients:
        host.until(lambda: host.said("service.lowered"), "it is not lowered")
        host.until(lambda: "  lowered to 2 requests at a time, since " in host.cli("status").out, "status says nothing")
        host.until(lambda: "primary -> primary: in flight 2 of 2, " in host.cli("status").out, "nothing of the gateway")
        clients.more(host)
    assert set(clients.answers) == {"200"}, clients.answers


def test_a_prompt_limit_holds_at_the_gateway_and_a_reload_changes_it(make: Make, tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    single = engine() | {"model": str(model), "prompt_limit": 2000}
    single["args"] = single["args"] | {"served-model-name": "stand-in"}
    listen = {"listen": f"127.0.0.1:{free_port()}"}
    host = make({"primary": single}, gateway=listen)
    host.start()
    host.serving("primary")

    def asked(size: int) -> requests.Response:
        body = {"model": "stand-in", "prompt": "x" * size, "max_tokens": 1}
        return requests.post(f"http://{listen['listen']}/v1/completions", json=body, timeout=25)

    with gateway(host):
        assert asked(1999).status_code == 200
        refused = asked(2000)
        assert refused.status_code == 400 and "has 2001 tokens" in refused.json()["error"]["message"]
        host.engines["primary"] |= {"prompt_limit": 3000, "over_limit": "truncate"}
        host.configure(gateway=listen)
        assert host.cli("reload").code == 0
        host.until(lambda: asked(2000).status_code == 200 or None, "the reload does not reach the gateway")
        assert asked(9000).headers["X-LLM-Watchdog-Truncated"] == "9001 to 3000 tokens"
