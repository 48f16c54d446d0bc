"""The gateway in front of a real vLLM: what clients see while the engine behind it serves, dies and is replaced.

One daemon and one gateway for all tests, in this order: the cold backup takes over from a killed primary, the next daemon
makes a hot pair of them, an operator fails back, and each of the pair is killed.  Three kills, five starts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.real.clients import BENCH, BROKEN_OFF, OPENAI, Asked, ask, exchanged
from tests.real.conftest import Figures, lacking
from tests.real.rig import CONTEXT, PLAIN, START_S, RealWatchdog, Vllm
from tests.system.harness import Doc, free_port
from tests.system.test_gateway import gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

LONG = 300_000          # tokens of an answer that no machine ends before its engine is killed
POISON = 400_000        # tokens of a prompt that no machine has read when its engine is killed
PAIR_BYTES = 7 << 30    # of host memory for two engines and what runs beside them


@pytest.fixture(scope="module")
def sections() -> dict[str, Doc]:
    listen = {"listen": f"127.0.0.1:{free_port()}", "hold_s": START_S}
    return {"gateway": listen, "failover": {"failback": "manual"}}


@pytest.fixture(scope="module")
def host(vllm: Vllm, sections: dict[str, Doc], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealWatchdog]:
    engines = {"primary": vllm.engine(), "backup": {"backup_for": "primary", "port": free_port(), "args": {}}}
    first = {"failover": sections["failover"] | {"after_failures": 0}}      # by default a cold backup waits for the second
    made = RealWatchdog(tmp_path_factory.mktemp("gateway"), engines, **(sections | first))
    made.start()
    yield made
    made.finish()       # no process, port, socket or lock is left, and the journal replays


@pytest.fixture(scope="module")
def url(host: RealWatchdog, sections: dict[str, Doc]) -> Iterator[str]:
    """Where clients ask: the gateway runs from here to the end, whatever happens to daemon and engines."""
    host.up("primary")
    with gateway(host):
        yield f"http://{sections['gateway']['listen']}"


def killed_under_load(host: RealWatchdog, url: str, name: str) -> tuple[float, list[Asked], list[Asked]]:
    """Two streams on both seats and six requests behind them, SIGKILL of the engine core, and two requests after it.

    When it was killed; whose answer had begun by then; whose had not.
    """
    begun = [Asked(url, f"stream {number}", LONG, stream=True) for number in range(2)]
    host.until(lambda: all(each.first_at for each in begun), "the streams do not begin")
    waiting = [Asked(url, f"waits {number}", 8, stream=number % 2 == 0) for number in range(6)]
    host.until(lambda: host.metric(name, "vllm:num_requests_waiting") == 6, "six do not wait behind two")
    core = host.core(name)
    killed = time.time()
    os.kill(core, signal.SIGKILL)
    late = [Asked(url, f"late {number}", 8, stream=number % 2 == 0) for number in range(2)]
    for each in begun + waiting + late:
        each.join(2 * START_S)
    return killed, begun, waiting + late


def gap_s(killed: float, answered: list[Asked]) -> float:
    """From the kill until all of them are being answered."""
    return max(each.first_at or float("inf") for each in answered) - killed


def in_flight(host: RealWatchdog, generation: str) -> str:
    """What the gateway told of the requests that were there, as the open incident has it."""
    def told() -> str | None:
        heard = [line for line in host.said("gateway.casualties") if line["engine"] == generation]
        row = host.incident("primary")
        kept = [entry["text"] for entry in row["incident"]["timeline"] if entry["what"] == "in flight"] if row else []
        return next((line["text"] for line in heard if line["text"] in kept), None)

    return host.until(told, "the incident does not say who was in flight")


# -- what is passed on

PROMPT = {"model": "tiny", "prompt": "What is a watchdog?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
CHAT = PROMPT | {"messages": [{"role": "user", "content": "What is a watchdog?"}]}
del CHAT["prompt"]
STREAMED: Doc = {"stream": True, "stream_options": {"include_usage": True}}
SAME: dict[str, tuple[int, bytes]] = {
    "completion": (200, ask("POST", "/v1/completions", PROMPT)),
    "completion, streamed": (200, ask("POST", "/v1/completions", PROMPT | STREAMED)),
    "chat": (200, ask("POST", "/v1/chat/completions", CHAT)),
    "chat, streamed": (200, ask("POST", "/v1/chat/completions", CHAT | STREAMED)),
    "models": (200, ask("GET", "/v1/models")),
    "models, HEAD": (405, ask("HEAD", "/v1/models")),
    "version": (200, ask("GET", "/version")),
    "tokenize": (200, ask("POST", "/tokenize", {"model": "tiny", "prompt": "abc"})),
    "detokenize": (200, ask("POST", "/detokenize", {"model": "tiny", "tokens": [70, 71]})),
    "API description": (200, ask("GET", "/openapi.json")),
    "a value out of range": (400, ask("POST", "/v1/chat/completions", CHAT | {"temperature": -1})),
    "JSON that is none": (400, ask("POST", "/v1/chat/completions", b'{"model": "tiny",')),
    "a missing field": (400, ask("POST", "/v1/chat/completions", {"model": "tiny"})),
    "an unknown model": (404, ask("POST", "/v1/completions", PROMPT | {"model": "other"})),
    "an unknown path": (404, ask("GET", "/v1/nothing/here?x=%20y")),
    "an unknown path, POST": (404, ask("POST", "/v1/nothing", {})),
    "the wrong method": (405, ask("GET", "/v1/completions")),
}


@pytest.mark.parametrize("what", SAME)
def test_an_answer_is_the_engines_byte_for_byte(host: RealWatchdog, url: str, what: str) -> None:
    status, request = SAME[what]
    ports = (host.engines["primary"]["port"], int(url.rsplit(":", 1)[1]))
    for _ in range(5):      # an API server that lags puts two tokens into one event: not the gateway's doing
        direct, passed_on = (exchanged(port, request) for port in ports)
        if direct == passed_on:
            break
    assert passed_on == direct
    assert direct.startswith(b"HTTP/1.1 %d " % status), direct[:300]


def test_a_prompt_that_is_too_long_is_refused_as_the_engine_would_before_it_has_it(host: RealWatchdog, url: str) -> None:
    request = ask("POST", "/v1/completions", PROMPT | {"prompt": "a" * (CONTEXT + 1)})
    ports = (host.engines["primary"]["port"], int(url.rsplit(":", 1)[1]))
    direct, ours = (exchanged(port, request) for port in ports)
    assert direct.startswith(b"HTTP/1.1 400 ") and ours.startswith(b"HTTP/1.1 400 ")
    theirs, said = (json.loads(answer.partition(b"\r\n\r\n")[2])["error"] for answer in (direct, ours))
    assert str(CONTEXT) in theirs["message"]
    assert said["code"] == "context_length_exceeded" and said["param"] == "prompt"
    tokens, limit = map(int, re.findall(r"\d+", said["message"]))
    assert tokens > limit >= CONTEXT - 1


def test_the_openai_client_works_unchanged(vllm: Vllm, url: str, figures: Figures) -> None:
    said = subprocess.run([str(vllm.python), "-c", OPENAI, url], capture_output=True, text=True, timeout=300, check=False)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == {
        "models": ["tiny"], "tokens": [8, 8], "finish": "length", "completion": "text_completion",
        "errors": [["NotFoundError", 404, True], ["BadRequestError", 400, True]],
    }
    figures("OpenAI's client through the gateway", note="chat, stream, completion, models, NotFoundError, BadRequestError")


def test_vllm_bench_serve_completes_every_request(
    vllm: Vllm, host: RealWatchdog, url: str, tmp_path: Path, figures: Figures
) -> None:
    prompts = 40
    words = f"--backend openai --base-url {url} --model tiny --tokenizer {vllm.model} --dataset-name random --ignore-eos "
    words += f"--num-prompts {prompts} --random-input-len 64 --random-output-len 32 --save-result --result-filename=b.json"
    said = subprocess.run([str(vllm.python), "-c", BENCH, *words.split()], capture_output=True, text=True, timeout=600,
                          check=False, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    result = json.loads((tmp_path / "b.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (prompts, 0), said.stdout
    assert host.engine("primary")["generation"] == 1
    figures("vllm bench serve through the gateway", note=f"{result['completed']} of {prompts} completed, "
            f"{result['output_throughput']:.0f} tokens/s, first token after {result['mean_ttft_ms']:.0f} ms")


# -- what is broken


def test_cold_failover_costs_those_that_wait_a_pause_and_no_error(host: RealWatchdog, url: str, figures: Figures) -> None:
    killed, begun, others = killed_under_load(host, url, "primary")
    assert [each.verdict for each in begun] == ["cut"] * 2
    assert [each.verdict for each in others] == ["whole"] * 8
    assert host.up("backup")["generation"] == 1
    assert (host.engine("primary")["phase"], host.engine("primary")["generation"]) == ("stopped", 1)
    assert host.since(killed, "engine.spawned", engine="backup#1") > host.since(killed, "engine.emptied", engine="primary#1")
    told = in_flight(host, "primary#1")
    figures("core killed under load, cold backup, through the gateway", detected_s=host.since(killed, "engine.phase"),
            recovered_s=gap_s(killed, others),
            note=f"2 streams cut: {begun[0].error!r}; 8 of 8 others answered by the backup; {told}")


def test_a_daemon_told_of_a_hot_backup_adopts_it_and_starts_the_primary_beside_it(
    host: RealWatchdog, url: str, sections: dict[str, Doc], figures: Figures
) -> None:
    free = psutil.virtual_memory().available
    if free < PAIR_BYTES - (3 << 30):      # one runs already
        lacking(f"{free >> 20} MiB of memory are free, too few for a second engine: {(PAIR_BYTES >> 20) - 3072} are needed")
    asked = Asked(url, "while the daemon is away", 2_000, stream=True)
    host.until(lambda: asked.first_at, "the stream does not begin", START_S)
    before, log = host.up("backup")["pid"], host.folder / "gateway.log"
    known = len(log.read_text())
    killed = time.time()
    host.kill()
    host.engines["backup"]["standby"] = "hot"
    host.configure(**(PLAIN | sections))
    host.start()
    host.up("primary", after=1)
    assert host.up("backup")["pid"] == before
    asked.join(START_S)
    assert asked.verdict == "whole"
    unserved = re.findall(r"(?:primary|backup) is \w+", log.read_text()[known:])
    assert not unserved, "it had no route while the next daemon came up"
    figures("kill -9 of the daemon under a stream", detected_s=host.since(killed, "engine.adopted"),
            recovered_s=host.since(killed, "engine.ready", engine="primary#2"),
            note="the stream was whole, the route stayed; then the primary, now one of a hot pair, came up beside it")


@pytest.fixture
def pair(host: RealWatchdog) -> None:
    if "standby" not in host.engines["backup"]:
        lacking("no hot backup runs")


@pytest.mark.usefixtures("pair")
def test_failback_within_a_hot_pair_breaks_no_stream(host: RealWatchdog, url: str, figures: Figures) -> None:
    stays = Asked(url, "begun at the backup", 500, stream=True)
    host.until(lambda: stays.first_at, "the stream does not begin", START_S)
    before = host.metric("primary", "vllm:generation_tokens_total")
    asked = time.time()
    assert host.cli("failback").code == 0
    assert stays.is_alive(), "it ended before the route changed: this proves nothing"
    comes = Asked(url, "asks after it", 64, stream=True)
    for each in (stays, comes):
        each.join(START_S)
        assert each.verdict == "whole"
    assert host.metric("primary", "vllm:generation_tokens_total") >= before + 64
    figures("operator's failback within a hot pair", recovered_s=gap_s(asked, [comes]),
            note="the stream that had begun ended whole at the backup, the next one was the primary's")


@pytest.mark.usefixtures("pair")
def test_hot_failover_costs_those_that_wait_a_moment_and_no_error(host: RealWatchdog, url: str, figures: Figures) -> None:
    killed, begun, others = killed_under_load(host, url, "primary")
    assert [each.verdict for each in begun] == ["cut"] * 2
    assert [each.verdict for each in others] == ["whole"] * 8
    assert host.engine("backup")["phase"] == "serving"
    told = in_flight(host, "primary#2")
    host.up("primary", after=2)
    gap = gap_s(killed, others)
    assert gap < host.since(killed, "engine.ready", engine="primary#3"), "they waited for a restart"
    figures("core killed under load, hot, through the gateway", detected_s=host.since(killed, "engine.phase"),
            recovered_s=gap, note=f"2 streams cut: {begun[0].error!r}; 8 of 8 others answered; {told}")


@pytest.mark.usefixtures("pair")
def test_a_prompt_under_which_an_engine_died_is_refused_and_reaches_no_other(
    vllm: Vllm, host: RealWatchdog, url: str, figures: Figures
) -> None:
    primary = host.engine("primary")["generation"]
    words = [str(vllm.python), "-c", BROKEN_OFF, url, str(LONG)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout and client.stdout.readline() == "begun\n"
        poison = Asked(url, "poison " * (POISON // 7), 1, stream=True)
        host.until(lambda: host.metric("backup", "vllm:num_requests_running") == 2, "the prompt is not being read")
        innocent = [Asked(url, f"innocent {number}", 8, stream=number % 2 == 0) for number in range(4)]
        host.until(lambda: host.metric("backup", "vllm:num_requests_waiting") == 4, "four do not wait")
        core = host.core("backup")
        killed = time.time()
        os.kill(core, signal.SIGKILL)
        for each in [poison, *innocent]:
            each.join(START_S)
        assert [each.verdict for each in innocent] == ["whole"] * 4
        assert poison.quarantined, poison.verdict
        assert client.communicate(timeout=60)[0] == "APIError True\n"
    told = in_flight(host, "backup#1")
    assert "suspect" in told
    asked = time.time()
    again = Asked(url, "poison " * (POISON // 7), 1, stream=True)
    again.join(START_S)
    assert again.quarantined, again.verdict
    assert again.first_at and again.first_at - asked < 10
    host.until(lambda: host.metric("primary", "vllm:num_requests_running") == 0, "the next engine reads it", 3)
    assert host.engine("primary")["generation"] == primary
    figures(f"core killed while it reads {POISON:,} tokens", recovered_s=gap_s(killed, innocent),
            detected_s=host.since(killed, "gateway.casualties"),
            note=f"that prompt refused, again after {again.first_at - asked:.2f} s; 4 of 4 others answered; {told}")
