"""Merged streams over real sockets: framing, the time bound, and what a client sees when the engine dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.gateway.harness import SSE_HEAD, Asked, Backend, Behaviour, Bench, Client, chunk, request, run, running, until
from tests.gateway.test_coalesce import DONE, complete

HOLD_S = 30.0       # longer than any test


def streaming(*texts: str, then: Callable[[Backend], Awaitable[None]] | None = None, head: bytes = SSE_HEAD) -> Behaviour:
    """A chunk for each text; afterwards `then`, else an end."""
    chunked = b"chunked" in head

    async def work(backend: Backend, _: Asked, writer: asyncio.StreamWriter, __: asyncio.StreamReader) -> None:
        writer.write(head)
        for text in texts:
            writer.write(chunk(complete(text)) if chunked else complete(text))
            await writer.drain()
            await asyncio.sleep(0)
        if then is not None:
            await then(backend)
        writer.write(chunk(DONE) + b"0\r\n\r\n" if chunked else DONE)
        if not chunked:
            writer.close()

    return work


def with_stream(behaviour: Behaviour, work: Callable[[Bench, Backend, Client], Awaitable[None]], version: str = "1.1",
                **plan: Any) -> None:
    async def whole() -> None:
        async with running(**({"coalesce_chars": 1000, "coalesce_s": HOLD_S} | plan)) as bench:
            backend = await Backend(behaviour).start()
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b'{"stream":true}', version=version))
            await work(bench, backend, client)
            client.close()

    run(whole())


def test_a_merged_stream_is_framed_anew_and_the_connection_stays() -> None:
    async def work(bench: Bench, _: Backend, client: Client) -> None:
        for _again in range(2):
            assert (await client.head()).headers["transfer-encoding"] == "chunked"
            assert await client.chunk() == complete("a")
            assert await client.chunk() == complete("bcd") + DONE
            assert await client.chunk() == b""
            client.send(request("POST", "/v1/completions", b'{"stream":true}'))
        await client.answer()
        assert bench.gauge("connections") == 1

    with_stream(streaming(*"abcd"), work)


def test_without_the_setting_every_chunk_goes_as_it_came() -> None:
    async def work(_: Bench, __: Backend, client: Client) -> None:
        await client.head()
        assert [await client.chunk() for _ in range(5)] == [*map(complete, "abcd"), DONE]

    with_stream(streaming(*"abcd"), work, coalesce_chars=0)


@pytest.mark.parametrize("head", [
    SSE_HEAD.replace(b"200 OK", b"201 Created"), SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: br\r\n\r\n"),
    SSE_HEAD.replace(b"text/event-stream", b"text/plain")])
def test_only_a_plain_stream_of_events_is_merged(head: bytes) -> None:
    async def work(_: Bench, __: Backend, client: Client) -> None:
        await client.head()
        assert [await client.chunk() for _ in range(5)] == [*map(complete, "abcd"), DONE]

    with_stream(streaming(*"abcd", head=head), work)


def test_text_is_kept_back_no_longer_than_it_may() -> None:
    async def never(_: Backend) -> None:
        await asyncio.sleep(60)

    async def work(_: Bench, __: Backend, client: Client) -> None:
        await client.head()
        assert await client.chunk() == complete("a")
        assert await client.chunk() == complete("bcd")

    with_stream(streaming(*"abcd", then=never), work, coalesce_s=0.02)


async def dies(backend: Backend) -> None:
    await asyncio.sleep(0.02)
    backend.die()
    await asyncio.sleep(60)


def test_an_engine_that_dies_loses_no_text_and_the_error_comes_last() -> None:
    async def work(_: Bench, __: Backend, client: Client) -> None:
        body = (await client.answer()).body
        before, _, error = body.partition(b"\n\n\n\n")
        assert before + b"\n\n" == complete("a") + complete("bcd")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_died"

    with_stream(streaming(*"abcd", then=dies), work)


def test_a_client_that_leaves_is_written_nothing_more() -> None:
    async def never(_: Backend) -> None:
        await asyncio.sleep(60)

    async def work(bench: Bench, _: Backend, client: Client) -> None:
        await client.head()
        await client.chunk()
        (exchange,) = bench.gateway.dispatcher.exchanges
        merging = exchange._reply._merging
        assert merging is not None
        await until(lambda: merging._timer, "text is kept")
        client.close()
        await until(lambda: not bench.gateway.dispatcher.exchanges, "it is noticed")
        assert merging._timer is None

    with_stream(streaming(*"abcd", then=never), work)


OLD_HEAD = SSE_HEAD.replace(b"transfer-encoding: chunked", b"connection: close")


@pytest.mark.parametrize("head", [SSE_HEAD, OLD_HEAD])
def test_old_clients_and_old_servers_need_no_chunks(head: bytes) -> None:
    async def work(_: Bench, __: Backend, client: Client) -> None:
        await client.head()
        assert await client.ended() == complete("a") + complete("bcd") + DONE

    with_stream(streaming(*"abcd", head=head), work, version="1.0")
