"""Tokens as we count them are tokens as a real vLLM counts them: /tokenize, and usage.prompt_tokens of what it generates."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import requests
from tests.real.conftest import Figures
from tests.real.requests_of_all_kinds import IN_PARTS, Body, all_kinds, folder
from tests.real.rig import START_S, Vllm
from tests.system.harness import free_port

from vllm_watchdog.gateway.tokens import Counted, Tokens
from vllm_watchdog.gateway.truncate import CannotCutError, cut
from vllm_watchdog.prompt_plan import PromptPlan

LIMIT = 150            # tokens that prompts are cut to

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
REQUESTS, HUGE, SEED = 1000, 12, 7
GENERATED = 8192        # longer prompts are tokenized only: this model takes minutes to read 100,000 tokens on two cores
FLAGS = ("--served-model-name", "tiny", "--max-model-len", "131072", "--enforce-eager", "--dtype", "float32",
         "--max-num-seqs", "16", "--max-num-batched-tokens", "8192", "--trust-request-chat-template")


@pytest.fixture(scope="module")
def model(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(vllm.model, tmp_path_factory.mktemp("tokens") / "model")


@pytest.fixture(scope="module")
def url(vllm: Vllm, model: Path) -> Iterator[str]:
    port = free_port()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = (str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
               "--host", "127.0.0.1", *FLAGS)
    with (model.parent / "log").open("wb") as log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as child:
        try:
            yield _ready(f"http://127.0.0.1:{port}", child)
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(60)
            child.kill()


def _ready(url: str, child: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + START_S
    while time.monotonic() < end and child.poll() is None:
        with suppress(requests.RequestException):
            if requests.get(url + "/health", timeout=1).ok:
                return url
        time.sleep(0.5)
    raise AssertionError("vLLM does not start")


def _ours(tokens: dict[bool, Tokens], path: str, body: Body) -> Counted:
    asked = {key: value for key, value in body.items() if key != "chat_template"}
    return tokens["chat_template" in body].count(path, asked)


def _theirs(url: str, path: str, body: Body) -> tuple[int, int | None, str]:
    """Status; tokens by /tokenize, or usage.prompt_tokens of one generated; what is wrong if both tell and differ."""
    told: int | None = None
    if "truncate_prompt_tokens" not in body and not isinstance(body.get("prompt"), list):
        answer = requests.post(url + "/tokenize", json=body | {"model": "tiny"}, timeout=300)
        told = answer.json()["count"] if answer.ok else None
    if told is not None and told > GENERATED:
        return 200, told, ""
    answer = requests.post(url + path, json=body | {"model": "tiny", "max_tokens": 1}, timeout=300)
    if answer.status_code != 200:
        return answer.status_code, None, answer.text[:300]
    used = answer.json()["usage"]["prompt_tokens"]
    return 200, used, "" if told in (None, used) else f"/tokenize says {told}"


def test_a_thousand_requests_are_counted_as_the_engine_counts_them(url: str, model: Path, figures: Figures) -> None:
    tokens = {parts: Tokens(model, PromptPlan(template=IN_PARTS if parts else "")) for parts in (False, True)}
    asked = all_kinds(SEED, REQUESTS, HUGE)
    ours = [_ours(tokens, path, body) for path, body in asked]
    with ThreadPoolExecutor(8) as pool:
        theirs = list(pool.map(lambda each: _theirs(url, *each), asked))
    refused = [words for status, _, words in theirs if status != 200]
    wrong = [
        (path, json.dumps(body)[:600], mine, told, words)
        for (path, body), mine, (status, told, words) in zip(asked, ours, theirs, strict=True)
        if status == 200 and (mine.tokens != told or words or not mine.exact)
    ]
    counted = [mine.tokens for mine, (status, *_) in zip(ours, theirs, strict=True) if status == 200]
    figures(f"{len(counted)} requests counted as the engine counts", note=f"{sum(counted)} tokens, up to {max(counted)}; "
            f"{len(refused)} refused by the engine")
    assert not wrong, f"{len(wrong)} of {len(counted)} differ: {wrong[:5]}"
    assert len(refused) <= REQUESTS // 50, refused[:5]


def test_a_cut_prompt_is_taken_by_the_engine_and_is_as_long_as_we_say(url: str, model: Path, figures: Figures) -> None:
    tokens, cuts, kept = Tokens(model, PromptPlan()), 0, 0
    for path, body in all_kinds(SEED + 1, 300, 0):
        if "chat_template" in body or tokens.count(path, body).longest <= LIMIT:
            continue
        try:
            shorter = cut(tokens, path, body, LIMIT, anything=False)
        except CannotCutError:
            kept += 1
            continue
        mine = tokens.count(path, shorter)
        status, told, words = _theirs(url, path, shorter)
        assert (status, told, words) == (200, mine.tokens, "") and mine.longest <= LIMIT, (path, shorter)
        cuts += 1
    figures(f"{cuts} prompts cut to {LIMIT} tokens", note=f"{kept} could not be cut")
    assert cuts > 40
