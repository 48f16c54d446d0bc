"""A gateway that drains while the daemon has something to say leaves all the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import uvloop
from tests.gateway.harness import route, until

from vllm_watchdog.gateway.follow import Follow


def test_a_route_that_comes_while_it_is_told_to_leave_does_not_keep_it(tmp_path: Path) -> None:
    """The line comes first, then the cancellation, before the follower has run: at any step between the two."""
    async def work() -> None:
        writers: list[asyncio.StreamWriter] = []

        async def daemon(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        socket = tmp_path / "control.sock"
        server = await asyncio.start_unix_server(daemon, socket)
        for steps in range(8):
            follow = Follow(socket, tmp_path / "route.json", lambda _: None, lambda *_, **__: None)
            known = len(writers)
            task = asyncio.create_task(follow.stream())
            await until(lambda known=known: len(writers) > known, "it does not connect")
            for version in (1, 2):
                writers[-1].write(json.dumps(route(None, version)).encode() + b"\n")
                await until(lambda follow=follow: follow.connected, "the route is not taken")
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=2)
            assert done, f"it did not leave ({steps} steps)"
        server.close()
        for writer in writers:
            writer.close()

    uvloop.run(work())
