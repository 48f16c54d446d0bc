"""A prompt that is too long is refused or cut before an engine sees it; one that can't be too long is never looked at."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model import write
from tests.gateway.harness import SSE_HEAD, Answer, Asked, Backend, Bench, chunk, ok, request, run, running, until

from vllm_watchdog.gateway import counter, counting

LIMIT = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


def serve(bench: Bench, backend: Backend, model: Path | str, **plan: Any) -> None:
    bench.serve(backend.serving(), prompt={"tokenizer": str(model), "limit": LIMIT, **plan})


def posts(backend: Backend) -> list[Asked]:
    return [each for each in backend.asked if each.target.startswith("/v1/") and each.method == "POST"]


async def chat(bench: Bench, words: str, **more: Any) -> Answer:
    body = {"model": "m", "messages": [{"role": "user", "content": words}], **more}
    return await bench.ask("POST", "/v1/chat/completions", json.dumps(body).encode())


def test_a_prompt_over_the_limit_is_refused_with_both_numbers(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            fits, over = await bench.complete("x" * (LIMIT - 1)), await bench.complete("x" * LIMIT)
            assert fits.status == 200 and len(posts(backend)) == 1
            assert over.status == 400 and over.code == "context_length_exceeded"
            error = over.json["error"]
            assert "2001 tokens" in error["message"] and "has 2000:" in error["message"] and "xxx" not in error["message"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "prompt")
            frame = len("<s>") - 2 + len("<user>\n<assistant>")
            assert (await chat(bench, "y" * (LIMIT - frame))).status == 200
            assert (await chat(bench, "y" * (LIMIT - frame + 1))).code == "context_length_exceeded"
            assert bench.gauge("in_flight") == 0

    run(work())


def test_what_needs_no_counting_is_never_parsed(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            for body in (b"{", b'{"prompt":"\xff"}', b'{"a":1,"a":2}', b"[" * 900):
                assert (await bench.ask("POST", "/v1/completions", body)).status == 200
                assert posts(backend)[-1].body == body

    run(work())


HOSTILE = {
    "deep": (b"[" * 100_000, "nested too deeply"),
    "deep object": (b'{"a":' * 100_000, "nested too deeply"),
    "digits": (b'{"max_tokens":' + b"9" * 100_000 + b"}", "too many digits"),
    "fraction": (b'{"max_tokens": 1.5, "prompt": "' + b"x" * 3000 + b'"}', "max_tokens: expected a whole number"),
    "twice": (b'{"prompt":"a","prompt":"' + b"x" * 3000 + b'"}', "same key twice"),
    "no utf-8": (b'{"prompt":"' + b"\xff" * 3000 + b'"}', "not UTF-8: byte 11"),
    "utf-16": (('{"prompt":"' + "x" * 3000 + '"}').encode("utf-16"), "not UTF-8: byte 0"),
    "half a character": (b'{"prompt":"' + b"\\ud800" * 3000 + b'"}', "lone surrogate"),
    "no number": (b'{"prompt":"' + b"x" * 3000 + b'","n":NaN}', "NaN"),
    "no json": (b'\xef\xbb\xbf{"prompt":"' + b"x" * 3000, "not JSON"),
    "no object": (b'"' + b"x" * 3000 + b'"', "no JSON object"),
    "no prompt": (b'{"prompt":{"a":"' + b"x" * 3000 + b'"}}', "prompt: expected text"),
    "mixed": (b'{"prompt":["a",[1,' + b"true," * 3000 + b"2]]}", "prompt: expected text"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_with_a_body_is_said_without_its_text(name: str, model: Path) -> None:
    question = {"plan": {"tokenizer": str(model)}, "path": "/v1/completions", "enough": LIMIT, "cut": None}
    said, _ = counting.answer(question, HOSTILE[name][0])
    assert HOSTILE[name][1] in said["bad"] and len(said["bad"]) < 200


def test_a_body_that_must_be_read_and_can_not_be_is_told_so(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            for name in ("deep", "no utf-8", "twice"):
                answer = await bench.ask("POST", "/v1/completions", HOSTILE[name][0])
                assert (answer.status, answer.code) == (400, "invalid_body")
                assert HOSTILE[name][1] in answer.json["error"]["message"]
            assert not posts(backend)

    run(work())


def test_a_compressed_body_is_refused_since_its_size_could_not_be_known(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            bomb = gzip.compress(b"x" * 10_000_000)
            answer = await bench.ask("POST", "/v1/completions", bomb, "Content-Encoding: gzip\r\n")
            assert (answer.status, answer.code) == (415, "unsupported_encoding") and not posts(backend)
            assert (await bench.ask("POST", "/v1/completions", b"{}", "Content-Encoding: identity\r\n")).status == 200

    run(work())


def test_an_engine_is_asked_once_what_it_takes(model: Path) -> None:
    async def talk(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: asyncio.StreamReader) -> None:
        answers = {
            "/v1/models": b'{"data":[{"id":"m","max_model_len":3000},{"id":"lora","max_model_len":2500}]}',
            "/metrics": b'# HELP\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="400"} 1.0\n',
        }
        writer.write(ok(answers.get(asked.target, b"{}")))

    async def work() -> None:
        async with running() as bench:
            backend = await Backend(talk).start()
            serve(bench, backend, model, limit=None)
            sizing = bench.gateway.dispatcher.sizing
            service = bench.gateway.dispatcher.route.services[0]
            await until(lambda: sizing.budget(service).longest == 2500, "the engine's context is known")
            assert sizing._engines[service.serving].kv_tokens == 6400
            serve(bench, backend, model, limit=None)
            assert (await bench.complete("x" * 2500)).code == "context_length_exceeded"
            assert [each.target for each in backend.asked] == ["/v1/models", "/metrics"]

    run(work())


def test_without_a_tokenizer_the_engine_counts(model: Path) -> None:
    async def talk(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: asyncio.StreamReader) -> None:
        count = 5000 if b"long" in asked.body else 10
        writer.write(ok(b'{"count":%d,"tokens":[]}' % count if asked.target == "/tokenize" else b"{}"))

    async def work() -> None:
        async with running() as bench:
            backend = await Backend(talk).start()
            serve(bench, backend, "no/such-model")
            assert (await bench.complete("short" * 600)).status == 200
            body = json.dumps({"prompt": "long" * 800}).encode()
            answer = await bench.ask("POST", "/v1/completions", body, "Authorization: Bearer sk-secret\r\n")
            assert answer.code == "context_length_exceeded" and "has 5000 tokens" in answer.json["error"]["message"]
            asked = [each for each in backend.asked if each.target == "/tokenize"]
            assert asked[-1].header("authorization") == "Bearer sk-secret" and asked[-1].body == body
            assert [fields["why"] for name, fields in bench.said if name == "gateway.no_tokenizer"]

    run(work())


def test_without_both_an_estimate_says_that_it_is_one(model: Path) -> None:
    async def talk(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: asyncio.StreamReader) -> None:
        writer.write(ok(b"", "404 Not Found") if asked.target == "/tokenize" else ok())

    async def work() -> None:
        async with running() as bench:
            backend = await Backend(talk).start()
            serve(bench, backend, "no/such-model")
            assert (await bench.complete("x" * 7000)).status == 200
            assert "by estimate" in (await bench.complete("x" * 9000)).json["error"]["message"]

    run(work())


def test_a_client_that_leaves_while_its_prompt_is_counted_leaves_nothing_behind(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            clients = [await bench.connect() for _ in range(20)]
            for number, client in enumerate(clients):
                client.send(request("POST", "/v1/completions", json.dumps({"prompt": f"{number}" + "x" * 100_000}).encode()))
            await until(lambda: len(bench.gateway.dispatcher.exchanges) == 20, "all are there")
            assert {each.phase for each in bench.gateway.dispatcher.exchanges} == {"sizing"}
            for client in clients:
                client.close()
            await until(lambda: not bench.gateway.dispatcher.exchanges, "all have gone")
            assert (await bench.complete("x" * 1900)).status == 200 and len(posts(backend)) == 1

    run(work())


def test_a_prompt_that_can_not_be_counted_in_time_is_refused_and_the_next_one_counted(
        model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            assert (await bench.complete("x" * 3000)).code == "context_length_exceeded"
            monkeypatch.setattr(counter, "count_s", 0.0)
            assert "in time" in (await bench.complete("y" * 3000)).json["error"]["message"]
            monkeypatch.undo()
            assert (await bench.complete("z" * 3000)).code == "context_length_exceeded"

    run(work())


def test_a_prompt_is_cut_where_that_is_allowed_and_the_answer_says_so(model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model, over="truncate")
            answer = await bench.complete("a" * 3000 + "b" * 3000, max_tokens=3, user="é")
            assert answer.status == 200 and answer.headers["x-llm-watchdog-truncated"] == "6001 to 2000 tokens"
            sent = json.loads(posts(backend)[-1].body)
            assert sent == {"model": "m", "prompt": "a" * 1000 + "b" * 999, "max_tokens": 3, "user": "é"}
            assert [fields["to"] for name, fields in bench.said if name == "gateway.truncated"] == [2000]
            assert bench.gauge("truncated_total") == 1
            assert "x-llm-watchdog-truncated" not in (await bench.complete("a")).headers
            refused = await bench.complete("a" * 3000, response_format={"type": "json_object"})
            assert refused.code == "context_length_exceeded" and "must have a form" in refused.json["error"]["message"]

    run(work())


def test_a_cut_stream_says_so_in_its_head(model: Path) -> None:
    async def talk(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, _: asyncio.StreamReader) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b"") if asked.method == "POST" else ok())

    async def work() -> None:
        async with running() as bench:
            backend = await Backend(talk).start()
            serve(bench, backend, model, over="truncate-any")
            answer = await bench.complete("a" * 3000, stream=True, response_format={"type": "json_object"})
            assert answer.headers["x-llm-watchdog-truncated"] == "3001 to 2000 tokens" and answer.body == b"data: 1\n\n"
            client = await bench.connect()
            body = json.dumps({"prompt": "a" * 3000}).encode()
            pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:1000], body[1000:])]
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.send(head + b"".join(pieces) + b"0\r\n\r\n")
            assert (await client.answer()).headers["x-llm-watchdog-truncated"] == "3001 to 2000 tokens"
            assert len(json.loads(posts(backend)[-1].body)["prompt"]) == 1999
            client.close()

    run(work())


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/score", "/v1/rerank"])
def test_what_has_no_single_prompt_is_passed_on(path: str, model: Path) -> None:
    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            serve(bench, backend, model)
            body = b"--x\r\n\xff\xfe" + b"sound" * 1000
            assert (await bench.ask("POST", path, body, "Content-Type: multipart/form-data\r\n")).status == 200
            assert [each.body for each in backend.asked if each.method == "POST"] == [body]

    run(work())


def test_free_vram_limits_prompts_by_the_most_that_was_free(tmp_path: Path) -> None:
    model, shape = write(tmp_path), {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float16"}
    (model / "config.json").write_text(json.dumps(shape))       # 512 bytes a token

    async def work() -> None:
        async with running() as bench:
            backend = await Backend().start()
            sizing = bench.gateway.dispatcher.sizing
            for free in (2_048_000, 1_024_000):
                bench.serve(backend.serving(), prompt={"tokenizer": str(model), "vram_share": 0.5}, vram_free=free)
            service = bench.gateway.dispatcher.route.services[0]
            await until(lambda: sizing.budget(service).longest == 2000, "the model's shape is known")
            assert (await bench.complete("x" * 2000)).code == "context_length_exceeded"
            assert bench.gateway.dispatcher.lines["primary"].room == 2000

    run(work())
