"""Bad, slow and vanishing peers: each gets a clear answer or a closed door, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct

import pytest
from tests.gateway.harness import SSE_HEAD, Asked, Backend, Bench, chunk, echo, ok, request, run, running, until

BAD = {
    "two lengths": (400, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello"),
    "length and chunks": (
        400,
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    "chunks and length": (
        400,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ),
    "unknown coding": (501, b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    "twice chunked": (
        400,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    ),
    "chunks in 1.0": (400, b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "signed length": (400, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello"),
    "folded": (400, b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n"),
    "space before colon": (400, b"GET / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n"),
    "bare line feed": (400, b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n"),
    "NUL": (400, b"GET / HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n"),
    "no host": (400, b"GET / HTTP/1.1\r\n\r\n"),
    "two hosts": (400, b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"),
    "HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (505, b"GET /\r\n\r\n"),
    "unknown method": (501, b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "connect": (501, b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n"),
    "expectation": (417, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nExpect: miracles\r\n\r\nx"),
    "developer endpoint": (403, b"POST /sleep?level=2 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"),
    "developer endpoint, encoded": (403, b"POST /%73leep/ HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "long head": (431, b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000),
    "bad chunk": (
        400,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    ),
    "chunk too long": (
        400,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n",
    ),
    "too large": (413, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"),
    "too large to stream": (
        413,
        b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\nExpect: 100-continue\r\n\r\n",
    ),
    "too many chunks": (
        413,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"10000\r\n"
        + b"x" * 65536
        + b"\r\n"
        + (b"10000\r\n" + b"x" * 65536 + b"\r\n") * 20,
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_clear_request_is_refused_and_never_passed_on(name: str) -> None:
    status, data = BAD[name]

    async def work() -> None:
        backend = await Backend().start()
        async with running(max_body_bytes=1 << 20) as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(data + (request("GET", "/smuggled") if data.endswith(b"\n") or b"\r\n\r\n" in data else b""))
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert answer.json["error"]["message"]
            assert await client.ended() == b""
            client.close()
        assert not backend.asked

    run(work())


def test_a_streamed_body_over_the_limit_is_cut_off() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running(max_body_bytes=1 << 20) as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(
                b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 65536) * 30
            )
            assert (await client.answer()).status == 413
            client.close()
            await until(lambda: not backend.connections, "the engine's connection is closed")
        assert not backend.asked

    run(work())


def test_slow_clients_get_no_more_time_than_they_are_due() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running(head_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=0.2) as bench:
            bench.serve(backend.serving())
            silent, head, body, stream, idle = [await bench.connect() for _ in range(5)]
            head.send(b"GET / HTTP/1.1\r\nHo")
            body.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
            stream.send(b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
            idle.send(request("GET", "/x"))
            assert (await idle.answer()).status == 200
            for client, status in ((head, 408), (body, 408), (stream, 408)):
                assert (await client.answer()).status == status
                client.close()
            assert await silent.ended() == b""
            assert await idle.ended() == b""
            silent.close()
            idle.close()

    run(work())


def test_a_client_that_reads_nothing_is_let_go() -> None:
    async def flood(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(SSE_HEAD)
        while True:
            writer.write(chunk(b"x" * 65536))
            await writer.drain()

    async def work() -> None:
        backend = await Backend(flood).start()
        async with running(body_timeout_s=0.2) as bench:
            bench.serve(backend.serving())
            end = socket.socket()
            end.setblocking(False)
            await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", bench.port))
            await asyncio.get_running_loop().sock_sendall(end, request("POST", "/v1/completions", b"{}"))
            await until(lambda: backend.asked and not backend.connections, "the engine is free again")
            end.close()

    run(work())


def test_more_connections_than_allowed_are_told_so() -> None:
    async def work() -> None:
        async with running(max_connections=2) as bench:
            first, second = await bench.connect(), await bench.connect()
            await until(lambda: len(bench.gateway.dispatcher.connections) == 2, "both are in")
            third = await bench.connect()
            assert (await third.answer()).code == "too_many_connections"
            first.close()
            await until(lambda: len(bench.gateway.dispatcher.connections) == 1, "one has gone")
            fourth = await bench.connect()
            fourth.send(request("GET", "/health"))
            assert (await fourth.answer()).status == 200
            for client in (second, third, fourth):
                client.close()

    run(work())


GARBAGE = {
    "no http": b"hello there\r\n\r\n",
    "binary": os.urandom(500),
    "no status": b"HTTP/1.1 abc OK\r\n\r\n",
    "two framings": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx",
    "endless head": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 100_000,
    "unasked switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_an_engine_that_sends_garbage_is_a_bad_gateway(name: str) -> None:
    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(GARBAGE[name])

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            assert (await bench.complete()).code == "bad_answer"
            await until(lambda: not backend.connections, "the engine's connection is closed")

    run(work())


def test_garbage_inside_a_response_breaks_it_visibly() -> None:
    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"what?\r\n")

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b"{}"))
            answer = await client.answer()
            assert (answer.body, answer.whole) == (b"data: 1\n\n", False)
            client.close()

    run(work())


def test_more_than_was_asked_for_never_reaches_the_next_client() -> None:
    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(ok(b"1") + ok(b"poisoned"))

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            for _ in range(5):
                assert (await bench.complete()).body == b"1"

    run(work())


def test_any_cut_of_the_bytes_means_the_same() -> None:
    data = (
        request("POST", "/v1/completions", b"{}")
        + (b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nT: 1\r\n\r\n")
        + request("GET", "/last")
    )

    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            chance = random.Random(5)
            for _ in range(15):
                client = await bench.connect()
                at = 0
                while at < len(data):
                    step = chance.choice((1, 2, 3, 50))
                    client.send(data[at : at + step])
                    at += step
                    await asyncio.sleep(0)
                answers = [await client.answer() for _ in range(3)]
                assert [answer.json.get("size") for answer in answers] == [2, 3, 0], answers
                client.close()

    run(work())


def mutated(chance: random.Random) -> bytes:
    """One to three requests, with some bytes changed or the end missing."""
    data = bytearray(chance.choice(REQUESTS) * chance.randrange(1, 4))
    for _ in range(chance.choice((0, 0, 1, 3))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    return bytes(data)


REQUESTS = (
    request("POST", "/v1/completions", b'{"prompt":"x"}'),
    request("GET", "/v1/models"),
    request("POST", "/x", b"abc"),
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
)


def test_noise_crashes_and_leaks_nothing() -> None:
    """Mutated requests, half-open connections, resets in the middle, against engines that answer, hang up or babble."""
    chance = random.Random(11)

    async def moody(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        mood = chance.randrange(6)
        if mood < 2:
            await echo(backend, asked, writer, reader)
        elif mood == 2:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n") * 3 + b"0\r\n\r\n")
        elif mood == 3:
            writer.write(os.urandom(50))
        elif mood == 4:
            writer.write(SSE_HEAD + b"5\r\nab")
            writer.transport.abort()
        else:
            writer.transport.abort()

    async def one(bench: Bench) -> None:
        data = mutated(chance)
        client = await bench.connect()
        end = client.writer.get_extra_info("socket")
        client.send(data)
        await asyncio.sleep(chance.random() * 0.02)
        if chance.random() < 0.3:  # a reset instead of an end
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif chance.random() < 0.5:
            with contextlib.suppress(OSError):
                client.writer.write_eof()
        else:
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(client.reader.read(1000), 0.05)
        client.close()

    async def work() -> None:
        backend = await Backend(moody).start()
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        async with running() as bench:
            bench.serve(backend.serving())
            for _ in range(10):
                await asyncio.gather(*(one(bench) for _ in range(25)))
            await until(lambda: not bench.gateway.dispatcher.connections, "no connection is left", 3)
            assert not problems, problems[0]
            assert (await bench.ask("GET", "/health")).status == 200

    run(work())


def test_memory_stays_flat() -> None:
    """The short version of the bench's 100,000 requests."""

    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n") * 3 + b"0\r\n\r\n")

    async def many(bench: Bench, count: int) -> None:
        client = await bench.connect()
        for _ in range(count):
            client.send(request("POST", "/v1/completions", b"x" * 2000))
            await client.answer()
        client.close()

    def objects() -> int:
        import gc

        gc.collect()
        return len(gc.get_objects())

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            await many(bench, 50)
            backend.asked.clear()
            before = objects()
            await many(bench, 500)
            backend.asked.clear()
            assert objects() - before < 100

    run(work())
