"""A prompt that is too long is refused before an engine sees it; one that can't be is never looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model import write
from tests.gateway.harness import Backend, Bench, run, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write(tmp_path_factory.mktemp("model"))


def serve(bench: Bench, backend: Backend, model: Path, **plan: Any) -> None:
    bench.serve(backend.serving(), prompt={"tokenizer": str(model), "limit": 2000, **plan})


def chat(words: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": words}], **more}).encode()


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            fits, over = await bench.complete("x" * 1999), await bench.complete("x" * 2000)
            assert fits.status == 200 and len(backend.asked) == 1
            assert over.status == 400 and over.code == "context_length_exceeded"
            assert "2001 tokens" in over.json["error"]["message"] and "2000" in over.json["error"]["message"]
            assert over.json["error"]["type"] == "invalid_request_error" and over.json["error"]["param"] == "prompt"
            assert "x" * 20 not in over.body.decode()
            assert (await bench.ask("POST", "/v1/chat/completions", chat("y" * 1981))).status == 200
            assert (await bench.ask("POST", "/v1/chat/completions", chat("y" * 1982))).code == "context_length_exceeded"

    run(work())
