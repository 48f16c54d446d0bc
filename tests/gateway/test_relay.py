"""What passes the gateway passes unchanged, both ways, as it comes."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from tests.gateway.harness import SSE_HEAD, Asked, Backend, chunk, echo, ok, request, run, running, until


def test_a_request_reaches_the_engine_byte_for_byte() -> None:
    async def work() -> None:
        backend = await Backend().start()
        body = json.dumps({"model": "m", "prompt": "héllo"}).encode()
        sent = request(
            "POST", "/v1/completions?a=%20b", body, "X-Odd-CASE:   padded\r\nAuthorization: Bearer k\r\nEmpty:\r\n"
        )
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(sent)
            assert (await client.answer()).status == 200
            client.close()
        asked = backend.asked[0]
        assert (asked.method, asked.target, asked.body) == ("POST", "/v1/completions?a=%20b", body)
        assert asked.headers == [
            ("Host", "test"),
            ("X-Odd-CASE", "padded"),
            ("Authorization", "Bearer k"),
            ("Empty", ""),
            ("Content-Length", str(len(body))),  # written again, last
        ]

    run(work())


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_any_method_and_path_passes(method: str) -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            answer = await bench.ask(method, "/some/path?x=1", b"12345" if method in ("POST", "PUT", "PATCH") else b"")
            assert answer.status == 200
        assert [(asked.method, asked.target, len(asked.body)) for asked in backend.asked] == [
            (method, "/some/path?x=1", 5 if method in ("POST", "PUT", "PATCH") else 0)
        ]

    run(work())


def test_a_response_reaches_the_client_byte_for_byte() -> None:
    raw = b"HTTP/1.1 418 I'm a  teapot\r\nX-odd:  v\r\nset-cookie: a\r\nset-cookie: b\r\nContent-Length: 3\r\n\r\nabc"

    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(raw)

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b"{}"))
            assert await client.reader.readexactly(len(raw)) == raw
            client.close()

    run(work())


def test_headers_for_one_hop_stay_on_their_hop() -> None:
    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(ok(b"x", more="Connection: close, X-Hop\r\nKeep-Alive: timeout=5\r\nX-Hop: 1\r\nX-End: 2\r\n"))
        writer.close()

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            for _ in range(2):  # the engine closes, the client's connection stays
                client.send(
                    request("GET", "/x", more="Connection: keep-alive, X-Mine, Host\r\nX-Mine: 1\r\nTE: trailers\r\n")
                )
                answer = await client.answer()
                assert answer.status == 200
                assert set(answer.headers) == {"content-type", "x-end", "content-length"}
            client.close()
        assert [name for name, _ in backend.asked[0].headers] == ["Host"]

    run(work())


def test_connections_are_kept_on_both_sides() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            for _ in range(20):
                client.send(request("POST", "/v1/completions", b"{}"))
                assert (await client.answer()).status == 200
            assert backend.accepted == 1
            client.close()

    run(work())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(
                b"".join(request("POST", "/v1/completions", b"x" * n) + request("GET", f"/g{n}") for n in range(1, 40))
            )
            for n in range(1, 40):
                assert (await client.answer()).json["size"] == n
                assert (await client.answer()).json["target"] == f"/g{n}"
            client.send(
                b"\r\n\r\n" + request("GET", "/health") * 3000
            )  # answered here, far more than the stack is deep
            for _ in range(3000):
                assert (await client.answer()).status == 200
            client.close()

    run(work())


def test_a_stream_arrives_chunk_by_chunk() -> None:
    gate = asyncio.Event

    async def work() -> None:
        step = gate()

        async def stream(
            backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
        ) -> None:
            writer.write(SSE_HEAD)
            for n in range(5):
                writer.write(chunk(b"data: %d\n\n" % n))
                await step.wait()
                step.clear()
            writer.write(b"0\r\n\r\n")

        backend = await Backend(stream).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b"{}"))
            head = await client.head()
            assert head.head == SSE_HEAD
            for n in range(5):
                assert await client.chunk() == b"data: %d\n\n" % n  # before the next one exists
                step.set()
            assert await client.chunk() == b""
            client.send(request("GET", "/version"))
            assert (await client.head()).status == 200
            step.set()
            client.close()

    run(work())


def test_the_head_of_a_stream_waits_for_its_first_event() -> None:
    """vLLM sends it before the prompt is read; without it the request can still go to another engine."""

    async def work() -> None:
        step = asyncio.Event()

        async def stream(
            backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
        ) -> None:
            writer.write(SSE_HEAD)
            await step.wait()
            writer.write(chunk(b"data: 1\n\n") + b"0\r\n\r\n")

        backend = await Backend(stream).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b"{}"))
            await until(lambda: backend.asked, "the request is there")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.reader.read(1), 0.05)
            step.set()
            assert (await client.answer()).body == b"data: 1\n\n"
            client.close()

    run(work())


def test_an_old_client_gets_the_stream_without_chunks() -> None:
    async def stream(
        backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        await asyncio.sleep(0.01)
        writer.write(chunk(b"data: 2\n\n")[:5])
        await asyncio.sleep(0.01)
        writer.write(chunk(b"data: 2\n\n")[5:] + b"0\r\n\r\n")

    async def work() -> None:
        backend = await Backend(stream).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("POST", "/v1/completions", b"{}", version="1.0"))
            head = await client.head()
            assert "transfer-encoding" not in head.headers
            assert head.headers["connection"] == "close"
            assert await client.ended() == b"data: 1\n\ndata: 2\n\n"
            client.close()

    run(work())


def test_an_old_client_may_keep_its_connection() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            for _ in range(2):
                client.send(request("GET", "/x", version="1.0", more="Connection: keep-alive\r\n"))
                assert (await client.answer()).headers["connection"] == "keep-alive"
            client.close()

    run(work())


def test_an_old_engine_without_length_is_relayed_until_it_closes() -> None:
    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(b"HTTP/1.0 200 Fine\r\nContent-Type: text/plain\r\n\r\nall ")
        await asyncio.sleep(0.01)
        writer.write(b"of it")
        writer.close()

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("GET", "/x"))
            assert (await client.head()).head.startswith(b"HTTP/1.1 200 Fine\r\n")
            assert await client.ended() == b"all of it"
            client.close()

    run(work())


def test_a_chunked_body_is_handed_on_with_its_length() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(
                request("PUT", "/v1/completions").replace(b"PUT", b"POST")[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for part in (b"5\r", b"\nhello\r\n", b"6;x=y\r\n world", b"\r\n0\r\nTrailer: 1\r\n", b"\r\n"):
                client.send(part)
                await asyncio.sleep(0.002)
            assert (await client.answer()).json["size"] == 11
            client.close()
        assert backend.asked[0].body == b"hello world"
        assert backend.asked[0].header("content-length") == "11"

    run(work())


def test_a_body_for_an_unknown_path_streams_through() -> None:
    """With backpressure: the gateway never holds it whole."""

    async def work() -> None:
        backend = await Backend().start()
        async with running(max_body_bytes=16 << 20) as bench:
            bench.serve(backend.serving())
            answer = await bench.ask("POST", "/upload", b"x" * (8 << 20))
            assert answer.json["size"] == 8 << 20
            client = await bench.connect()
            client.send(b"POST /upload HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"abc"))
            client.send(chunk(b"defg") + b"0\r\n\r\n" + request("GET", "/next"))
            assert (await client.answer()).json["size"] == 7
            assert (await client.answer()).json["target"] == "/next"
            client.close()
            assert bench.gateway.dispatcher._charged == 0

    run(work())


def test_expect_is_answered_and_not_passed_on() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            for path in ("/v1/completions", "/unknown"):
                client = await bench.connect()
                client.send(
                    f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n".encode()
                )
                assert (await client.head()).status == 100
                client.send(b"{}")
                assert (await client.answer()).status == 200
                client.close()
        assert all(asked.header("expect") is None for asked in backend.asked)

    run(work())


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def hang(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        if b"begin" in asked.body:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
        assert await reader.read() == b""

    async def work() -> None:
        backend = await Backend(hang).start()
        async with running() as bench:
            bench.serve(backend.serving())
            for body in (b"begin", b"wait"):
                client = await bench.connect()
                client.send(request("POST", "/v1/completions", body))
                await until(lambda: backend.connections == 1 and bench.gauge("in_flight"), "it is there")
                if body == b"begin":
                    await client.head()
                client.close()
                await until(lambda: backend.connections == 0, "the engine's connection is closed", 0.5)
                assert bench.gauge("in_flight") == 0

    run(work())


def test_a_slow_reader_slows_the_engine_and_not_the_memory() -> None:
    sent = 0

    async def flood(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        nonlocal sent
        writer.write(SSE_HEAD)
        for _ in range(2000):
            writer.write(chunk(b"x" * 16384))
            await writer.drain()
            sent += 16384
        writer.write(b"0\r\n\r\n")

    async def work() -> None:
        backend = await Backend(flood).start()
        async with running() as bench:
            bench.serve(backend.serving())
            end = socket.socket()
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            end.setblocking(False)
            await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", bench.port))
            await asyncio.get_running_loop().sock_sendall(end, request("POST", "/v1/completions", b"{}"))
            await until(lambda: sent, "it flows")
            last = -1
            while last != sent:
                last = sent
                await asyncio.sleep(0.1)
            assert sent < 20 << 20, "the kernel's buffers and little more"
            got = 0
            while got < 2000 * 16384:
                got += len(await asyncio.get_running_loop().sock_recv(end, 1 << 20))
            end.close()

    run(work())


def test_both_sides_have_no_delay() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("GET", "/x"))
            await client.answer()
            gate = bench.gateway.dispatcher
            (down,), (station,) = gate.connections, gate.stations.values()
            (up,) = station.pool.open
            for transport in (down.transport, up.transport):
                assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            client.close()

    run(work())


def test_a_switch_of_protocols_is_tunnelled() -> None:
    async def switch(
        backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        assert asked.header("upgrade") == "websocket"
        assert asked.header("connection") == "Upgrade"
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(100):
            writer.write(b"<" + data + b">")
        writer.close()

    async def work() -> None:
        backend = await Backend(switch).start()
        async with running() as bench:
            bench.serve(backend.serving())
            client = await bench.connect()
            client.send(request("GET", "/v1/realtime", more="Connection: Upgrade\r\nUpgrade: websocket\r\n"))
            head = await client.head()
            assert (head.status, head.headers["upgrade"], head.headers["connection"]) == (101, "websocket", "Upgrade")
            client.send(b"frame")
            assert await client.reader.readexactly(7) == b"<frame>"
            client.close()
            await until(lambda: backend.connections == 0, "the tunnel is closed")

    run(work())


def test_requests_go_by_model_where_there_are_several_services() -> None:
    async def work() -> None:
        one, two = await Backend(echo, "one").start(), await Backend(echo, "two").start()
        async with running() as bench:
            bench.gateway.plan.route_file.write_text(
                json.dumps(
                    {
                        "version": 1,
                        "services": [
                            {"name": "s1", "models": ["a"], "serving": one.serving()},
                            {"name": "s2", "models": ["b"], "serving": two.serving()},
                        ],
                    }
                )
            )
            bench.gateway.follow.read_file()
            for model, by in (("a", "one"), ("b", "two"), ("unknown", "one")):
                answer = await bench.ask(
                    "POST", "/v1/completions", json.dumps({"model": model, "prompt": '"model": "b"'}).encode()
                )
                assert answer.json["by"] == by
            models = await bench.ask("GET", "/v1/models")
            assert [card["id"] for card in models.json["data"]] == ["a", "b"]

    run(work())
