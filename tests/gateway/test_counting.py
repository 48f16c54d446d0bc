"""The process that counts: what it costs the streams, what it can be made to take, and the forms of requests it knows."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.bench.sizing import CHARACTERS, Turns, chat, timed
from tests.fakes.model import write
from tests.gateway.harness import Backend, run, running

from vllm_watchdog.gateway.counter import MODULE
from vllm_watchdog.gateway.tokens import NoTokenizerError, Tokens, folder_of
from vllm_watchdog.prompt_plan import PromptPlan

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
def test_a_prompt_of_100_000_characters_holds_no_stream_up(model: Path) -> None:
    async def longest_s() -> float:
        async with running() as bench:
            backend, client = await Backend().start(), await bench.connect()
            bench.serve(backend.serving(), prompt={"tokenizer": str(model), "limit": 1000})
            await timed(client, chat("x" * CHARACTERS))
            bodies = [chat(f"{number} " + "words, " * (CHARACTERS // 7)) for number in range(10)]
            turns = Turns()
            for body in bodies:
                assert (await timed(client, body))[1] == 400
            client.close()
            return turns.stop()

    found: list[float] = []

    async def work() -> None:
        found.append(await longest_s())

    for _ in range(3):      # caches that other processes empty make any turn longer
        run(work())
    assert min(found) < 0.005


@pytest.mark.slow
def test_a_body_made_to_fill_the_memory_fills_only_what_its_process_may_have(model: Path) -> None:
    question = {"plan": {"tokenizer": str(model)}, "path": TEXT, "enough": 1000, "cut": None}
    fill = b",".join(b'"%d":0' % number for number in range(200_000))
    bombs = [b'{"a":[' + b"[]," * (12 << 20) + b"[]]}", b"{" + fill + b"}", b'{"prompt":[' + b"0.1," * (1 << 20) + b"0]}"]
    asked = b"".join(json.dumps(question | {"size": len(bomb)}).encode() + b"\n" + bomb for bomb in bombs)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run((sys.executable, "-m", MODULE), input=asked, capture_output=True, timeout=60, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 3 and ["too many" in each.get("bad", "") for each in said] == [True, False, False], said
    assert max(before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) <= 2 << 20       # KiB


@pytest.mark.parametrize(("path", "body", "tokens", "exact"), [
    (TEXT, {"prompt": "añb"}, 5, True),
    (TEXT, {"prompt": "ab", "add_special_tokens": False}, 2, True),
    (TEXT, {"prompt": ["ab", "c"]}, 5, True),
    (TEXT, {"prompt": [7, 8]}, 2, True),
    (TEXT, {"prompt": [[7], [8, 9]]}, 3, True),
    (TEXT, {"prompt": "abcdef", "truncate_prompt_tokens": 3}, 3, True),
    (TEXT, {"prompt": "ab", "suffix": "c"}, 3, False),
    ("/v1/embeddings", {"input": "ab"}, 3, True),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, len("s<user>hi\n<assistant>"), True),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}, len("s<user>hi\n"), True),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
     len("s<user>a\nb\n<assistant>"), True),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
     1024 + len("s<user>\n<assistant>"), False),
    (CHAT, {"messages": [{"role": "assistant", "content": "hi"}], "continue_final_message": True,
            "add_generation_prompt": False}, len("s<assistant>hi"), True),
    ("/v1/responses", {"model": "m", "input": "abc", "instructions": "d"}, len("abc\nd"), False),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"}, len("s<user>hi\n<assistant>"), False),
])
def test_each_form_of_a_prompt_is_counted(path: str, body: dict[str, Any], tokens: int, exact: bool, model: Path) -> None:
    counted = Tokens(model, PromptPlan()).count(path, body)
    assert (counted.tokens, counted.exact) == (tokens, exact)


def test_several_prompts_count_together_and_the_longest_alone(model: Path) -> None:
    counted = Tokens(model, PromptPlan()).count(TEXT, {"prompt": ["ab", "c"], "max_tokens": 9})
    assert (counted.tokens, counted.longest, counted.max_tokens, counted.strict) == (5, 3, 9, False)


def test_a_text_that_is_far_too_long_is_not_counted_to_its_end(model: Path) -> None:
    tokens = Tokens(model, PromptPlan())
    assert 100 < tokens.count(TEXT, {"prompt": "x" * 1_000_000}, enough=100).tokens < 1_000_000


def test_a_template_that_refuses_leaves_the_request_to_the_engine(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path, "{{ raise_exception('no') }}"), PromptPlan())
    counted = tokens.count(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
    assert not counted.exact and counted.tokens == len("user\nhi")


def test_a_template_can_not_leave_its_sandbox(tmp_path: Path) -> None:
    tokens = Tokens(write(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}"), PromptPlan())
    assert not tokens.count(CHAT, {"messages": []}).exact


def test_a_model_is_found_in_the_hub_s_cache(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    write(cached / "snapshots" / "abc")
    assert folder_of(PromptPlan("org/name", str(tmp_path))) == cached / "snapshots" / "abc"
    for plan in (PromptPlan("org/other", str(tmp_path)), PromptPlan("org/name", str(tmp_path), "v2"), PromptPlan()):
        with pytest.raises(NoTokenizerError):
            folder_of(plan)


@pytest.mark.parametrize("damage", ["tokenizer.json", "template"])
def test_a_folder_that_can_not_be_used_says_why(damage: str, tmp_path: Path) -> None:
    write(tmp_path, "{% if %}" if damage == "template" else "x")
    if damage == "tokenizer.json":
        (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(NoTokenizerError, match=damage):
        Tokens(tmp_path, PromptPlan())


def test_a_bos_token_that_only_the_configuration_names_is_counted(tmp_path: Path) -> None:
    write(tmp_path)
    for wanted, tokens in ((True, 2), (False, 1), (None, 2)):
        config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": wanted}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert Tokens(tmp_path, PromptPlan()).count(TEXT, {"prompt": "a"}).tokens == tokens
