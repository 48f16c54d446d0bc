"""The daemon's word on who serves: streamed over its control socket; read from the file while it is away.

The last word received holds.  Reconnects for ever, with backoff up to `backoff_max_s`; the file is looked at every
`look_s` meanwhile.  A word that can't be read changes nothing and is said once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_watchdog.gateway.routes import Route, RouteError, parse_route
from vllm_watchdog.say import Say

look_s = 0.025          # the gateway follows within 50 ms, also without the daemon
backoff_s, backoff_max_s = 0.05, 1.0
silence_s = 60.0        # four of the daemon's heartbeats
line_limit = 1 << 20
tell_s = 2.0
tell_limit = 4          # messages under way at once; what comes then is dropped


class Follow:
    """`follow` gets each new route."""

    def __init__(self, control: Path, route_file: Path, follow: Callable[[Route], None], say: Say) -> None:
        self._control, self._file, self._follow, self._say = control, route_file, follow, say
        self._seen: tuple[int, int, int] | None = None
        self._said = ""
        self._telling: set[asyncio.Task[None]] = set()
        self._refused: set[tuple[str, str]] = set()     # what this daemon does not take: said once
        self._deaf = False      # it let a word wait; what else it is told would only stand in its queue
        self.connected = False
        self.connects = 0       # how often, so far

    @property
    def listens(self) -> bool:
        return self.connected and not self._deaf

    def read_file(self) -> None:
        """Takes the file's word if it is a new one."""
        try:
            stat = self._file.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen == self._seen or stat.st_size > line_limit:
                return
            data = self._file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self._complain(f"{self._file}: {error.strerror or type(error).__name__}")
            return
        self._seen = seen
        self._take(data, str(self._file))

    def _take(self, data: bytes, source: str) -> bool:
        """Whether it was a route."""
        try:
            document = json.loads(data)
            route = parse_route(document)
        except (ValueError, RecursionError):
            self._complain(f"{source}: expected JSON")
        except RouteError as error:
            self._complain(f"{source}: {error}")
        else:
            self._follow(route)
            return True
        return False

    def _complain(self, why: str) -> None:
        if why != self._said:
            self._said = why
            self._say("gateway.route_unreadable", why=why)

    async def watch_file(self) -> None:
        while True:
            await asyncio.sleep(look_s)
            if not self.connected:
                self.read_file()

    async def stream(self) -> None:
        wait_s = backoff_s
        while True:
            if await self._listen():
                wait_s = backoff_s
            await asyncio.sleep(wait_s * (0.5 + os.urandom(1)[0] / 256))
            wait_s = min(backoff_max_s, wait_s * 2)

    async def _listen(self) -> bool:
        """Until the daemon goes; whether it said anything."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(tell_s):
                reader, writer = await asyncio.open_unix_connection(self._control, limit=line_limit)
                writer.write(b'{"verb":"route"}\n')
            self.connects += 1
            self._refused.clear()
            while line := await self._line(reader):
                self._deaf = False
                if line.strip():
                    self.connected = self._take(line, "the daemon's route") or self.connected
        except (OSError, TimeoutError, ValueError):
            pass        # away, silent, or no daemon of ours: the same to us
        finally:
            said, self.connected = self.connected, False
            if writer is not None:
                writer.transport.abort()
        return said

    @staticmethod
    async def _line(reader: asyncio.StreamReader) -> bytes:
        """Not by wait_for: before Python 3.12 it loses a cancellation that meets a line, and the gateway never left."""
        async with asyncio.timeout(silence_s):
            return await reader.readline()

    def tell(self, message: Mapping[str, Any]) -> bool:
        """Sends the daemon something without waiting for it; dropped where it does not listen.  False: dropped at once."""
        if len(self._telling) >= tell_limit:
            return False
        task = asyncio.get_running_loop().create_task(self._tell(message))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        return True

    async def _tell(self, message: Mapping[str, Any]) -> None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(tell_s):
                reader, writer = await asyncio.open_unix_connection(self._control, limit=line_limit)
                writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
                answer = json.loads(await reader.readline())
                refused = str(message.get("verb")), str(answer.get("text"))[:100]
                if not answer.get("ok") and refused not in self._refused:
                    self._refused.add(refused)
                    self._say("gateway.untold", what=refused[0], why=refused[1])
        except (OSError, TimeoutError, ValueError) as error:
            self._deaf = True
            self._say("gateway.untold", what=str(message.get("verb")), why=str(error)[:100] or type(error).__name__)
        finally:
            if writer is not None:
                writer.transport.abort()
