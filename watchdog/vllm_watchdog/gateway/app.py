"""The gateway as a program: listens, follows the route, serves until SIGTERM, then drains.

SIGTERM and SIGINT: no new connection, idle ones closed, requests under way (held ones, too) finish within `drain_s`; what
is left is told so.  A second one: at once.  SIGHUP: nothing, the route comes by itself.  A restart leaves the port closed
from the beginning of the drain to the next start; only one gateway has the port at a time.  Exit status 0, or 1 where it
can't listen.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop

from vllm_watchdog.gateway import errors
from vllm_watchdog.gateway.answers import Answers
from vllm_watchdog.gateway.dispatch import Dispatcher
from vllm_watchdog.gateway.downstream import Downstream
from vllm_watchdog.gateway.follow import Follow
from vllm_watchdog.gateway.report import Casualty, Load, casualties
from vllm_watchdog.gateway.routes import Target
from vllm_watchdog.gateway_plan import GatewayPlan
from vllm_watchdog.say import Say

sweep_s = 0.25
drained_look_s = 0.02
flush_s = 1.0
backlog = 2048


class CannotListenError(Exception):
    """One sentence: which address, and why."""


def say_on_stderr(name: str, /, **fields: str | float) -> None:
    words = " ".join(f"{key}={value!r}" for key, value in fields.items())
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {name} {words}".rstrip(), file=sys.stderr, flush=True)  # noqa: T201


class Gateway:
    """Everything that runs in the process."""

    def __init__(self, plan: GatewayPlan, say: Say) -> None:
        self.plan, self.say = plan, say
        self.loop = asyncio.get_running_loop()
        self.dispatcher = Dispatcher(plan, self.loop, say, self._tell, Answers)
        self.follow = Follow(plan.control, plan.route_file, self.dispatcher.follow, say)
        self._load = Load()
        self.stopping = asyncio.Event()
        self._now = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        return int(self._servers[0].sockets[0].getsockname()[1])

    def _tell(self, target: Target, all_: list[Casualty]) -> None:
        self.follow.tell(casualties(target, all_))

    async def start(self) -> None:
        """Listens.  Raises CannotListenError."""
        self.follow.read_file()
        plan, gate = self.plan, self.dispatcher
        try:
            listener = await self.loop.create_server(lambda: Downstream(gate), plan.host, plan.port, backlog=backlog)
        except OSError as error:
            raise CannotListenError(f"{plan.host}:{plan.port}: {error.strerror or error}") from None
        self._servers.append(listener)
        if plan.admin is not None:
            await self._listen_privately(plan.admin)
        works = (self.follow.stream(), self.follow.watch_file(), self._sweep())
        self._tasks = [self.loop.create_task(work) for work in works]

    async def _listen_privately(self, path: Path) -> None:
        before = os.umask(0o177)        # 0600 from its first moment
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_socket():
                path.unlink()           # a dead gateway's: the port was free
            gate = self.dispatcher
            self._servers.append(await self.loop.create_unix_server(lambda: Downstream(gate, private=True), str(path)))
        except OSError as error:
            raise CannotListenError(f"{path}: {error.strerror or error}") from None
        finally:
            os.umask(before)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(sweep_s)
            self.dispatcher.sweep(self.loop.time())
            for message in self.dispatcher.waits(self.loop.time()):
                self.follow.tell(message)
            if self.follow.listens:
                load = self._load.told(self.dispatcher, self.loop.time(), self.follow.connects)
                if load and not self.follow.tell(load):
                    self._load.forget()

    def stop(self) -> None:
        """From a signal."""
        if self.stopping.is_set():
            self._now.set()
        self.stopping.set()

    async def drain(self) -> None:
        """No more requests; those under way get `drain_s`."""
        gate = self.dispatcher
        gate.draining = True
        for server in self._servers:
            server.close()
        for down in tuple(gate.connections):
            down.close_if_idle()
        await self._until(lambda: not gate.exchanges, self.plan.drain_s)
        self.say("gateway.drained", left=len(gate.exchanges))
        for exchange in tuple(gate.exchanges):
            exchange.interrupt(errors.DRAINING)
        await self._until(lambda: not gate.connections, flush_s)
        gate.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.plan.admin is not None:
            self.plan.admin.unlink(missing_ok=True)

    async def _until(self, done: Callable[[], bool], wait_s: float) -> None:
        end = self.loop.time() + wait_s
        while not done() and self.loop.time() < end and not self._now.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), drained_look_s)


async def serve(plan: GatewayPlan, say: Say, ready: Callable[[str], None], stopping: Callable[[str], None]) -> int:
    gateway = Gateway(plan, say)
    for number in (signal.SIGTERM, signal.SIGINT):
        gateway.loop.add_signal_handler(number, gateway.stop)
    gateway.loop.add_signal_handler(signal.SIGHUP, lambda: None)
    try:
        await gateway.start()
    except CannotListenError as error:
        say("gateway.cannot_listen", why=str(error))
        return 1
    gc.freeze()                         # what is here now stays: no need to look at it again
    ready(f"serving {plan.host}:{gateway.port}")
    say("gateway.ready", host=plan.host, port=gateway.port, pid=os.getpid())
    await gateway.stopping.wait()
    stopping("draining")
    await gateway.drain()
    return 0


def unheard(_: str) -> None:
    """Nobody wants to know."""


def run(plan: GatewayPlan, say: Say = say_on_stderr, ready: Callable[[str], None] = unheard,
        stopping: Callable[[str], None] = unheard) -> int:
    """Until a signal; the exit status.  `ready` and `stopping` are told once each (systemd wants to know)."""
    return uvloop.run(serve(plan, say, ready, stopping))
