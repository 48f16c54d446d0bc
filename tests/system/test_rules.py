"""Two services under one model's name behind the gateway: rules send long prompts to one of them, also while it is down."""

from __future__ import annotations

import re
import threading

import pytest
import requests
from tests.system.conftest import Make
from tests.system.harness import Doc, Watchdog, engine, free_port
from tests.system.test_gateway import gateway

pytestmark = pytest.mark.slow

LONG = {"model": "one-name", "prompt": "word " * 4000, "max_tokens": 2}      # 20 kB: 5000 tokens by the gateway's estimate
SHORT = {"model": "one-name", "prompt": "word", "max_tokens": 2}


class Front:
    def __init__(self, host: Watchdog, listen: str) -> None:
        self.host, self.listen, self.url = host, listen, f"http://{listen}/v1/completions"

    def rules(self, when_down: str) -> None:
        """Told to the daemon, and through it to the gateway."""
        before = self._routes()
        self.host.configure(**sections(self.listen, when_down))
        said = self.host.cli("reload")
        assert said.code == 0 and "gateway" not in said.out, said.out
        self.host.until(lambda: self._routes() > before, "the gateway hears nothing of it")

    def _routes(self) -> int:
        """How many the gateway has heard of."""
        return (self.host.folder / "gateway.log").read_bytes().count(b" gateway.route ")

    def ask(self, body: Doc) -> requests.Response:
        return requests.post(self.url, json=body, timeout=20)

    def answered(self, name: str) -> int:
        """How many requests an engine has answered."""
        text = requests.get(self.host.url(name) + "/metrics", timeout=5).text
        return sum(int(float(value)) for value in re.findall(r"(?m)^vllm:request_success_total\S* (\S+)$", text))

    def holds(self) -> bool:
        """Does a request wait in the gateway?"""
        return "llm_watchdog_gateway_holding 1\n" in requests.get(f"http://{self.listen}/metrics", timeout=5).text

    def by(self, body: Doc) -> str:
        """Which of the two that serve answers it."""
        before = {name: self.answered(name) for name in ("short", "long")}
        assert self.ask(body).status_code == 200
        (name,) = [name for name, count in before.items() if self.answered(name) > count]
        return name


def sections(listen: str, when_down: str) -> dict[str, Doc]:
    rule = {"engine": "long", "prompt_tokens_min": 3000, "when_down": when_down}
    return {"gateway": {"listen": listen, "rules": [rule]}}


def test_long_prompts_have_an_engine_of_their_own_and_wait_spill_or_are_refused_without_it(make: Make) -> None:
    listen = f"127.0.0.1:{free_port()}"
    engines = {name: engine(args={"served-model-name": "one-name"}) for name in ("short", "long")}
    host = make(engines, **sections(listen, "wait")).start()
    for name in engines:
        host.serving(name)
    with gateway(host):
        front = Front(host, listen)
        assert (front.by(SHORT), front.by(LONG)) == ("short", "long")
        explained = host.cli("explain", "--model", "one-name", "--tokens", "5000")
        assert explained.code == 0 and "  now: long serves\n" in explained.out

        assert host.cli("pause").code == 0      # so that nothing is started in its place
        host.fault("long", "oom")
        host.in_phase("long", "backoff")
        log = host.folder / "gateway.log"
        host.until(lambda: b"long is backoff" in log.read_bytes(), "the gateway hears nothing of it")
        late: list[requests.Response] = []
        waiting = threading.Thread(target=lambda: late.append(front.ask(LONG)))
        waiting.start()
        host.until(front.holds, "it is not held")

        front.rules("refuse")
        refused = front.ask(LONG)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "Retry-After" in refused.headers
        assert front.ask(SHORT).status_code == 200, "the others notice nothing"
        explained = host.cli("explain", "--tokens", "5000")
        assert explained.code == 1 and "it is down, so the request gets 503 at once" in explained.out
        assert not late, "what was let in before waits on"

        front.rules("spill")
        waiting.join(20)
        assert [answer.status_code for answer in late] == [200], "what waits spills, too"
        assert front.ask(LONG).status_code == 200
        assert "rule 1 matches, and spills while long is down" in host.cli("explain", "--tokens", "5000").out

        front.rules("wait")
        waiting = threading.Thread(target=lambda: late.append(front.ask(LONG)))
        waiting.start()
        host.until(front.holds, "it is not held")
        assert host.cli("resume").code == 0 and host.cli("restart", "long").code == 0
        waiting.join(20)
        assert [answer.status_code for answer in late] == [200, 200]
        assert front.answered("long") == 1, "it was the new one's to answer"
