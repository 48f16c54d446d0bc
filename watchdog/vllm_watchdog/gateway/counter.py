"""Asks the counting processes, and remembers what it said.  Waits at most `count_s` for one answer, in a task of its own.

Two processes, so that a long body keeps no short one waiting; each starts with its first question and ends with this
process.  One that gives no answer in time is killed, and what it was asked counts as bad.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from vllm_watchdog.prompt_plan import PromptPlan, told

MODULE = "vllm_watchdog.gateway.counting"
count_s = 10.0
start_s = 30.0          # of a process: a tokenizer of 250,000 tokens takes a second
long_bytes = 256 << 10  # 50 ms of work
waiting_limit = 256     # questions of each process
cached = 4096           # answers
cached_bytes = 1 << 20  # of a body: to hash more would hold the streams up

Answer = dict[str, Any]     # `body`: bytes, of a prompt that was cut
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
SLOW: Answer = {"bad": "The prompt could not be measured in time"}
TOO_MANY: Answer = {"lacks": "too many prompts wait to be counted"}


class Counter:
    """An answer is what `counting.answer` says."""

    def __init__(self, spawn: Spawn) -> None:
        self._quick, self._long = _Lane(spawn), _Lane(spawn)
        self._known: OrderedDict[tuple[object, ...], Answer] = OrderedDict()

    def warm(self, plan: PromptPlan) -> asyncio.Future[Answer]:
        """The process is started, and has the tokenizer ready; what it knows of the model."""
        return self._quick.put(_question(plan, "", b""), b"")

    async def count(self, plan: PromptPlan, path: str, body: bytes, enough: int | None) -> Answer:
        """From `enough` tokens on, at least so many; None: all of them."""
        question = _question(plan, path, body, enough=enough)
        if len(body) > cached_bytes:
            return await self._put(question, body)
        key = (plan, path, enough, blake2b(body, digest_size=16).digest())
        answer = self._known.pop(key, None) or await self._put(question, body)
        if "tokens" in answer:
            self._known[key] = answer
            if len(self._known) > cached:
                self._known.popitem(last=False)
        return answer

    async def cut(self, plan: PromptPlan, path: str, body: bytes, limit: int) -> Answer:
        return await self._put(_question(plan, path, body, cut=limit), body)

    def _put(self, question: bytes, body: bytes) -> asyncio.Future[Answer]:
        return (self._quick if len(body) <= long_bytes else self._long).put(question, body)


def _question(plan: PromptPlan, path: str, body: bytes, enough: int | None = None, cut: int | None = None) -> bytes:
    return json.dumps({"plan": told(plan), "path": path, "enough": enough, "cut": cut, "size": len(body)}).encode() + b"\n"


class _Question:
    """`data` empty: nobody wants the answer any more, or it is there; the body then takes no memory."""

    def __init__(self, line: bytes, body: bytes, answer: asyncio.Future[Answer]) -> None:
        self.data, self.answer = line + body, answer

    def forget(self, _: object) -> None:
        self.data = b""


class _Lane:
    """One process and the questions that wait for it."""

    def __init__(self, spawn: Spawn) -> None:
        self._spawn = spawn
        self._questions: asyncio.Queue[_Question] = asyncio.Queue(waiting_limit)
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None

    def put(self, question: bytes, body: bytes) -> asyncio.Future[Answer]:
        """The answer that will come; who no longer wants it cancels it."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        asked = _Question(question, body, future)
        future.add_done_callback(asked.forget)
        try:
            self._questions.put_nowait(asked)
        except asyncio.QueueFull:
            future.set_result(TOO_MANY)
            return future
        if self._task is None:
            self._task = self._spawn(self._work())
        return future

    async def _work(self) -> None:
        try:
            while True:
                question = await self._questions.get()
                if question.data:
                    answer = await self._asked(question.data)
                    if not question.answer.done():
                        question.answer.set_result(answer)
        finally:
            await self._end()

    async def _asked(self, question: bytes) -> Answer:
        try:
            async with asyncio.timeout(count_s if self._process is not None else start_s):
                process = self._process or await self._start()
                return await _talk(process, question)
        except (OSError, ValueError, EOFError, TimeoutError):
            await self._end()
            return SLOW

    async def _start(self) -> Process:
        env = {key: os.environ[key] for key in ("PATH", "PYTHONPATH", "LANG") if key in os.environ}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True,
            env=env | {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"})
        return self._process

    async def _end(self) -> None:
        """After SIGKILL it is gone within milliseconds, whatever it was doing."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _talk(process: Process, question: bytes) -> Answer:
    """Raises OSError, ValueError, EOFError."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("no pipe")
    process.stdin.write(question)
    await process.stdin.drain()
    answer = dict(json.loads(await process.stdout.readline()))
    return answer | {"body": await process.stdout.readexactly(answer["size"])}
