"""An engine's death costs clients a pause, until their own response has begun; then it is said, not hidden."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.gateway.harness import (
    SSE_HEAD,
    Answer,
    Asked,
    Backend,
    Bench,
    Client,
    chunk,
    echo,
    ok,
    request,
    run,
    running,
    until,
)

from vllm_watchdog.gateway import deaths, waits
from vllm_watchdog.gateway.last_words import of_status_s
from vllm_watchdog.gateway.report import Casualty


async def hang(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    await asyncio.Event().wait()


async def hang_headed(
    backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
) -> None:
    """As vLLM does with a stream: the head at once, the first token after the prompt."""
    writer.write(SSE_HEAD)
    await asyncio.Event().wait()


async def begin(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    writer.write(SSE_HEAD + chunk(b'data: {"n":1}\n\n'))
    await asyncio.Event().wait()


async def last_words(
    backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
) -> None:
    """As vLLM after its core has died: 500, then /health 503, then the port closes."""
    backend.health = 503
    writer.write(ok(b'{"error":{"message":"EngineCore encountered an issue"}}', "500 Internal Server Error"))
    asyncio.get_running_loop().call_later(0.2, backend.die)


async def last_event(
    backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
) -> None:
    backend.health = 503
    writer.write(SSE_HEAD + chunk(b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n'))
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def ask(bench: Bench, body: bytes = b"{}", path: str = "/v1/completions", more: str = "") -> Client:
    client = await bench.connect()
    client.send(request("POST", path, body, more))
    return client


def test_requests_wait_until_an_engine_serves() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(None, why="the primary starts")
            clients = [await ask(bench, b"%d" % n) for n in range(10)]
            await until(lambda: bench.gauge("holding") == 10, "all are held")
            bench.serve(backend.serving(), max_concurrent=1)
            for client in clients:
                assert (await client.answer()).status == 200
                client.close()
            assert [asked.body for asked in backend.asked] == [b"%d" % n for n in range(10)], "first in, first out"
            assert bench.gauge("gap_seconds_count") == 10

    run(work())


def words_of(bench: Bench) -> list[dict[str, Any]]:
    """What the daemon is told from now on."""
    heard: list[dict[str, Any]] = []
    bench.gateway.follow.tell = lambda message: heard.append(dict(message))  # type: ignore[method-assign]
    return heard


def test_how_long_clients_waited_is_told_when_the_hold_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "settle_s", 0.2)

    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            heard = words_of(bench)
            bench.serve(None, why="the primary starts")
            clients = [await ask(bench, b"%d" % n) for n in range(3)]
            await until(lambda: bench.gauge("holding") == 3, "all are held")
            clients.pop().close()
            await until(lambda: bench.gauge("holding") == 2, "one has left")
            bench.serve(backend.serving())
            for client in clients:
                assert (await client.answer()).status == 200
                client.close()
            await until(lambda: bool(heard), "the daemon is told")
            (told,) = heard
            assert {key: told[key] for key in ("verb", "requests", "failed", "replayed")} == {
                "verb": "waited", "requests": 2, "failed": 1, "replayed": 0}
            assert told["longest_s"] >= told["median_s"] > 0

    run(work())


def test_who_waits_for_room_alone_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "settle_s", 0.0)

    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            heard = words_of(bench)
            bench.serve(backend.serving(), max_concurrent=1)
            clients = [await ask(bench, b"%d" % n) for n in range(4)]
            for client in clients:
                assert (await client.answer()).status == 200
                client.close()
            await asyncio.sleep(0.6)        # two sweeps
            assert heard == []

    run(work())


def test_nobody_waits_longer_than_hold_s() -> None:
    async def work() -> None:
        async with running(hold_s=0.3) as bench:
            bench.serve(None, why="the primary starts")
            answer = await bench.complete()
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "engine_unavailable", "5")
            assert "the primary starts" in answer.json["error"]["message"]

    run(work())


def test_the_queue_is_bounded_in_number_and_bytes() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running(hold_requests=2, hold_bytes=1000) as bench:
            bench.serve(None)
            clients = [await ask(bench, b"x" * 300) for _ in range(2)]
            await until(lambda: bench.gauge("holding") == 2, "both are held")
            assert (await bench.complete()).code == "queue_full"
            bench.serve(backend.serving())
            for client in clients:
                assert (await client.answer()).status == 200
                client.close()
            bench.serve(None)
            assert (await bench.complete("x" * 1100)).code == "queue_full"
            assert (await bench.complete("x" * 2100)).code == "queue_full"

    run(work())


def test_what_is_not_safe_to_repeat_is_refused_while_nobody_serves() -> None:
    async def work() -> None:
        async with running() as bench:
            bench.serve(None)
            for method, path, body in (("POST", "/v1/load_lora_adapter", b"{}"), ("DELETE", "/x", b"")):
                assert (await bench.ask(method, path, body)).status == 503

    run(work())


@pytest.mark.parametrize("behaviour", [hang, hang_headed, last_words, last_event])
def test_a_request_without_an_answer_goes_to_the_next_engine(behaviour: Any) -> None:
    async def work() -> None:
        first, second = await Backend(behaviour, "first").start(), await Backend(echo, "second").start()
        async with running() as bench:
            bench.serve(first.serving())
            clients = [await ask(bench, b"%d" % n) for n in range(5)]
            await until(lambda: first.asked, "the engine has them")
            if behaviour in (hang, hang_headed):
                await until(lambda: len(first.asked) == 5, "all of them")
                first.die()
            await until(lambda: bench.gauge("holding") == 5, "they wait")
            bench.serve(second.serving())
            for client in clients:
                answer = await client.answer()
                assert (answer.status, answer.json["by"]) == (200, "second")
                client.close()
            assert len(second.asked) == 5
            assert {one.verdict for _, told in bench.told for one in told} == {"held"}

    run(work())


def test_a_hot_backup_takes_over_at_once() -> None:
    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running() as bench:
            bench.serve(first.serving())
            client = await ask(bench)
            await until(lambda: first.asked, "the engine has it")
            bench.serve(second.serving())  # the route may come before the death is seen
            await asyncio.sleep(0.02)
            assert not second.asked, "the first may still answer"
            first.die()
            assert (await client.answer()).json["by"] == "second"
            assert bench.told[0][1][0].verdict == "replayed"
            client.close()

    run(work())


def test_the_wait_of_a_request_that_is_sent_again_counts_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "settle_s", 0.0)

    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running() as bench:
            heard = words_of(bench)
            bench.serve(first.serving())
            began = asyncio.get_running_loop().time()
            client = await ask(bench)
            await until(lambda: asyncio.get_running_loop().time() - began > 0.5, "it hangs there for a while")
            first.die()
            await until(lambda: bench.gauge("holding") == 1, "it waits")
            held = asyncio.get_running_loop().time()
            bench.serve(second.serving())
            assert (await client.answer()).status == 200
            waited = asyncio.get_running_loop().time() - held
            client.close()
            await until(lambda: any(each["verb"] == "waited" for each in heard), "the daemon is told")
            (told,) = (each for each in heard if each["verb"] == "waited")
            assert told["replayed"] == 1 and told["longest_s"] > 0.4 + waited / 2

    run(work())


def test_an_engine_that_comes_back_under_the_same_name_is_used_again() -> None:
    async def work() -> None:
        first = await Backend(hang, "first").start()
        async with running() as bench:
            bench.serve(first.serving())
            client = await ask(bench)
            await until(lambda: first.asked, "the engine has it")
            first.die()
            await until(lambda: bench.gauge("holding") == 1, "it waits")
            again = await Backend(echo, "first").start(first.port)
            assert (await client.answer()).status == 200  # without a word from the daemon
            bench.serve(again.serving(2))
            assert (await bench.complete()).status == 200
            client.close()

    run(work())


def test_a_dead_engine_that_the_route_comes_back_to_is_used_when_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response of before is still under way there, so it is not forgotten meanwhile."""
    monkeypatch.setattr(deaths, "revive_s", 0.02)

    async def fails_once(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        if asked.body == b"long":
            await begin(backend, asked, writer, reader)
        elif asked.body == b"fatal" and backend.health == 200:
            backend.health = 503
            writer.write(ok(b"{}", "500 Internal Server Error"))
        else:
            await echo(backend, asked, writer, reader)

    async def work() -> None:
        primary, other = await Backend(fails_once).start(), await Backend(name="b").start()
        async with running() as bench:
            bench.serve(primary.serving())
            long = await ask(bench, b"long")
            await long.head()
            fatal = await ask(bench, b"fatal")
            await until(lambda: "gateway.engine_died" in [name for name, _ in bench.said], "it is taken for dead")
            bench.serve(other.serving())
            assert (await fatal.answer()).json["by"] == "b"
            (dead,) = (station for station in bench.gateway.dispatcher.stations.values() if station.dead)
            await until(lambda: not dead.reviving, "nobody looks at an engine that does not serve")
            primary.health = 200
            bench.serve(primary.serving())
            answer = await bench.complete()
            assert answer.json["by"] == "a"
            for client in (long, fatal):
                client.close()

    run(work())


def test_a_response_that_has_begun_ends_with_an_error_event() -> None:
    async def work() -> None:
        first = await Backend(begin, "first").start()
        async with running() as bench:
            bench.serve(first.serving())
            client = await ask(bench)
            head = await client.head()
            assert head.status == 200
            assert await client.chunk() == b'data: {"n":1}\n\n'
            first.die()
            event = await client.chunk()
            assert event.startswith(b"\n\ndata: ")
            assert event.endswith(b"\n\n")
            assert json.loads(event.split(b"data: ")[1])["error"]["code"] == "engine_died"
            assert await client.chunk() == b""
            client.send(request("GET", "/health"))  # the connection is as good as before
            assert (await client.answer()).status == 200
            client.close()
            await until(lambda: bench.told, "the death is told")
            (one,) = bench.told[0][1]
            assert (one.verdict, one.begun, one.bytes) == ("cut", True, 2)

    run(work())


def test_a_broken_answer_that_is_no_stream_is_visibly_short() -> None:
    async def half(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await asyncio.Event().wait()

    async def mid_chunk(
        backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        writer.write(SSE_HEAD + b"100\r\ndata: half")
        await asyncio.Event().wait()

    async def work() -> None:
        for behaviour in (half, mid_chunk):
            first = await Backend(behaviour).start()
            async with running() as bench:
                bench.serve(first.serving())
                client = await ask(bench)
                await client.head()
                first.die()
                assert not (await client.ended()).endswith(b"0\r\n\r\n")
                client.close()

    run(work())


def test_what_is_not_safe_to_repeat_is_sent_once() -> None:
    async def work() -> None:
        for path, more in (("/v1/load_lora_adapter", ""), ("/v1/completions", "X-No-Replay: 1\r\n")):
            first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
            async with running() as bench:
                bench.serve(first.serving())
                client = await ask(bench, path=path, more=more)
                await until(lambda b=first: b.asked, "the engine has it")
                first.die()
                answer = await client.answer()
                assert (answer.status, answer.code) == (502, "engine_died")
                bench.serve(second.serving())
                await bench.complete()
                assert len(second.asked) == 1
                client.close()

    run(work())


def test_an_error_of_an_engine_that_lives_passes_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(of_status_s, 500, 0.4)
    raw = ok(b'{"error":"bug"}', "500 Internal Server Error")

    async def say(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(raw if b"500" in asked.body else raw.replace(b"500", b"503"))

    async def work() -> None:
        backend = await Backend(say).start()
        async with running() as bench:
            bench.serve(backend.serving())
            loop = asyncio.get_running_loop()
            for status, limit_s in ((500, 0.8), (503, 0.6)):
                began = loop.time()
                client = await ask(bench, b"%d" % status)
                assert (await client.answer()).head == (
                    raw if status == 500 else raw.replace(b"500", b"503")
                ).partition(b"{")[0]
                assert loop.time() - began < limit_s
                client.close()
            assert len(backend.asked) == 2

    run(work())


def test_an_engine_that_only_hangs_up_is_asked_twice() -> None:
    async def hang_up(
        backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
    ) -> None:
        writer.transport.abort()

    async def work() -> None:
        backend = await Backend(hang_up).start()
        async with running() as bench:
            bench.serve(backend.serving())
            answer = await bench.complete()
            assert (answer.status, answer.code, len(backend.asked)) == (502, "engine_hung_up", 2)
            assert bench.gauge("engine_deaths_total") == 0

    run(work())


def test_an_idle_connection_that_the_engine_closed_costs_nothing() -> None:
    async def once(backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(ok(b"1"))
        if len(backend.asked) == 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()  # just as the next request is on its way

    async def work() -> None:
        backend = await Backend(once).start()
        async with running() as bench:
            bench.serve(backend.serving())
            for _ in range(2):
                assert (await bench.complete()).status == 200
            assert bench.gauge("engine_deaths_total") == 0

    run(work())


def test_a_client_that_leaves_the_queue_is_not_served() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running() as bench:
            bench.serve(None)
            client = await ask(bench)
            await until(lambda: bench.gauge("holding") == 1, "it is held")
            client.close()
            await until(lambda: bench.gauge("holding") == 0, "it is gone")
            bench.serve(backend.serving())
            assert (await bench.complete("x")).status == 200
            assert len(backend.asked) == 1

    run(work())


def test_no_more_requests_than_the_route_allows_are_at_the_engine() -> None:
    async def work() -> None:
        most = 0

        async def slowly(
            backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
        ) -> None:
            nonlocal most
            most = max(most, int(bench.gauge("in_flight")))
            await asyncio.sleep(0.01)
            writer.write(ok(b"1"))

        backend = await Backend(slowly).start()
        async with running() as bench:
            bench.serve(backend.serving(), max_concurrent=3)
            answers = await asyncio.gather(*(bench.complete() for _ in range(20)))
            assert [answer.status for answer in answers] == [200] * 20
            assert most == 3

    run(work())


def test_health_and_models_answer_for_the_service() -> None:
    async def work() -> None:
        backend = await Backend().start()
        async with running(hold_s=0.3) as bench:
            bench.serve(None, why="loading")
            assert (await bench.ask("GET", "/health")).status == 200  # requests are being held
            models = await bench.ask("GET", "/v1/models")
            assert [card["id"] for card in models.json["data"]] == ["m"]
            await asyncio.sleep(0.35)
            health = await bench.ask("GET", "/health")
            assert (health.status, health.json["services"]["primary"]["why"]) == (503, "loading")
            bench.serve(backend.serving())
            assert (await bench.ask("GET", "/health")).status == 200
            assert (await bench.ask("HEAD", "/health")).body == b""
            assert (await bench.ask("GET", "/v1/models")).json["target"] == "/v1/models"  # the engine's own
            metrics = bench.gateway.dispatcher.metrics
            assert (metrics.requests, metrics.statuses) == (6, {200: 5, 503: 1}), "each request has its answer counted"

    run(work())


def test_a_long_prompt_at_a_death_is_not_given_to_the_backup() -> None:
    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running(suspect_tokens=1000) as bench:
            bench.serve(first.serving())
            small = [await ask(bench, b"x" * n) for n in (10, 3000)]
            poison = await ask(bench, b"p" * 5000)
            long = await ask(bench, b"q" * 4500)
            await until(lambda: len(first.asked) == 4, "the engine has them")
            bench.serve(second.serving())
            first.die()
            answer = await poison.answer()
            assert (answer.status, answer.code) == (422, "prompt_quarantined")
            for client in (*small, long):
                assert (await client.answer()).json["by"] == "second"
                client.close()
            again = await bench.ask("POST", "/v1/completions", b"p" * 5000)
            assert (again.status, again.code, len(second.asked)) == (422, "prompt_quarantined", 3)
            assert {one.verdict for one in bench.told[0][1]} == {"suspect", "replayed"}
            poison.close()

    run(work())


def test_a_request_alone_at_two_deaths_is_refused() -> None:
    async def work() -> None:
        first, second, third = [await Backend(hang, name).start() for name in ("first", "second", "third")]
        async with running() as bench:
            bench.serve(first.serving())
            client = await ask(bench, b"small")
            for now, next_ in ((first, second), (second, third)):
                await until(lambda b=now: b.asked, "the engine has it")
                bench.serve(next_.serving())
                now.die()
            assert (await client.answer()).code == "prompt_quarantined"
            assert (await bench.ask("POST", "/v1/completions", b"small")).code == "prompt_quarantined"
            assert not third.asked
            client.close()

    run(work())


def test_an_engine_stopped_on_purpose_blames_nobody() -> None:
    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running(suspect_tokens=10) as bench:
            bench.serve(first.serving())
            client = await ask(bench, b"p" * 5000)
            await until(lambda: first.asked, "the engine has it")
            bench.serve(second.serving(), planned=True)
            first.die()
            assert (await client.answer()).json["by"] == "second"
            client.close()

    run(work())


def test_a_request_that_never_reached_the_dead_engine_is_no_suspect() -> None:
    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running(suspect_tokens=10) as bench:
            bench.serve(first.serving())
            first.die()
            client = await ask(bench, b"p" * 5000)
            await until(lambda: bench.gauge("holding") == 1, "it waits")
            bench.serve(second.serving())
            assert (await client.answer()).json["by"] == "second"
            client.close()

    run(work())


def test_operators_see_and_clear_the_quarantine_on_the_private_socket() -> None:
    async def work() -> None:
        first, second = await Backend(hang, "first").start(), await Backend(echo, "second").start()
        async with running(suspect_tokens=10, private=True) as bench:
            admin = bench.gateway.plan.admin
            assert admin.stat().st_mode & 0o777 == 0o600

            async def private(method: str, path: str) -> Answer:
                client = Client(*await asyncio.open_unix_connection(admin))
                client.send(request(method, path))
                answer = await client.answer()
                client.close()
                return answer

            bench.serve(first.serving())
            client = await ask(bench, b"p" * 5000)
            await until(lambda: first.asked, "the engine has it")
            (row,) = (await private("GET", "/gateway/inflight")).json["requests"]
            assert (row["bytes"], row["begun"], row["engine"]) == (5000, False, "first")
            bench.serve(second.serving())
            first.die()
            assert (await client.answer()).status == 422
            client.close()
            (entry,) = (await private("GET", "/gateway/quarantine")).json["quarantine"]
            assert (entry["why"], entry["tokens_estimated"]) == ("suspect", 1250)
            assert (await private("DELETE", "/gateway/quarantine/none")).status == 404
            assert (await private("DELETE", f"/gateway/quarantine/{entry['hash']}")).json == {"cleared": 1}
            assert (await bench.ask("POST", "/v1/completions", b"p" * 5000)).json["by"] == "second"
            assert (await private("GET", "/else")).status == 404
            assert (await bench.ask("DELETE", "/gateway/quarantine")).json[
                "by"
            ] == "second"  # public: the engine's affair

    run(work())


def test_the_engine_is_told_dead_once_with_everyone_who_was_there() -> None:
    async def work() -> None:
        first = await Backend(hang, "first").start()
        async with running() as bench:
            bench.serve(first.serving(7))
            clients = [await ask(bench, b"%d" % n) for n in range(5)]
            await until(lambda: len(first.asked) == 5, "all of them")
            first.die()
            await until(lambda: bench.told, "the death is told")
            ((target, told),) = bench.told
            assert (target.engine, target.generation) == ("first", 7)
            assert all(isinstance(one, Casualty) and len(one.hash) == 32 for one in told)
            assert len(told) == 5
            for client in clients:
                client.close()

    run(work())


def test_a_stop_drains_and_then_says_so() -> None:
    async def work() -> None:
        step = asyncio.Event()

        async def wait(
            backend: Backend, asked: Asked, writer: asyncio.StreamWriter, reader: asyncio.StreamReader
        ) -> None:
            writer.write(SSE_HEAD + chunk(b"data: 1\n\n"))
            if asked.body == b"short":
                await step.wait()
                writer.write(b"0\r\n\r\n")
            else:
                await asyncio.Event().wait()

        backend = await Backend(wait).start()
        async with running(drain_s=0.3) as bench:
            bench.serve(backend.serving())
            idle = await bench.connect()
            idle.send(request("GET", "/health"))
            await idle.answer()
            short, long = await ask(bench, b"short"), await ask(bench, b"long")
            for client in (short, long):
                await client.head()
                await client.chunk()
            drained = asyncio.create_task(bench.gateway.drain())
            assert await idle.ended() == b""
            with pytest.raises(ConnectionRefusedError):
                await bench.connect()
            step.set()
            assert await short.chunk() == b""
            assert b"gateway_stopping" in await long.chunk()
            assert await long.chunk() == b""
            await drained
            for client in (idle, short, long):
                client.close()

    run(work())
