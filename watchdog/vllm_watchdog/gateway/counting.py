"""The process that counts tokens for the gateway, and cuts prompts; `python -m` runs it.  One question at a time.

A process, because a tokenizer holds Python's lock for as long as it works (58 ms for 100,000 characters, which every stream
would wait), and because a body made to fill the memory then fills this one's, which has a limit.  A question is a line of
JSON and `size` bytes of body, and so is an answer.  Ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from vllm_watchdog.gateway import bodies
from vllm_watchdog.gateway.bodies import UnreadableError
from vllm_watchdog.gateway.chat import Json
from vllm_watchdog.gateway.tokens import NoTokenizerError, Tokens, folder_of
from vllm_watchdog.gateway.truncate import CannotCutError, cut
from vllm_watchdog.prompt_plan import Over, PromptPlan, heard

MEMORY = 2 << 30        # bytes: a tokenizer of 250,000 tokens, and sixteen times a body of 64 MiB as objects
MODELS = 8


@lru_cache(MODELS)
def tokens_of(plan: PromptPlan) -> Tokens | str:
    """Or why there are none."""
    try:
        return Tokens(folder_of(plan), plan)
    except NoTokenizerError as error:
        return str(error)


def answer(question: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """`lacks`: no tokenizer, and why; `bad`: what is wrong with the request; else the fields of Counted.

    `cut` in the question: the body, cut to so many tokens, comes with it; `kept`: why it can't be.  Without a body: only
    the model's `shape`.
    """
    plan = heard(question["plan"])
    tokens = tokens_of(plan)
    if isinstance(tokens, str):
        return {"lacks": tokens}, b""
    if not body:
        return {"shape": asdict(tokens.shape) if tokens.shape is not None else None}, b""
    try:
        return _measured(tokens, plan, question, bodies.read(body))
    except UnreadableError as error:
        return {"bad": str(error)}, b""
    except MemoryError:
        return {"bad": "The body needs more memory to be read than this gateway gives it"}, b""


def _measured(tokens: Tokens, plan: PromptPlan, question: dict[str, Any], asked: Json) -> tuple[dict[str, Any], bytes]:
    path, limit = question["path"], question["cut"]
    if limit is None:
        return asdict(tokens.count(path, asked, question["enough"])), b""
    try:
        asked = cut(tokens, path, asked, limit, plan.over is Over.TRUNCATE_ANY)
    except CannotCutError as error:
        return {"kept": str(error)}, b""
    return asdict(tokens.count(path, asked)), json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    while line := source.readline():
        question = json.loads(line)
        said, body = answer(question, source.read(question["size"]))
        sink.write(json.dumps(said | {"size": len(body)}, separators=(",", ":")).encode() + b"\n" + body)
        sink.flush()


def step_back() -> None:
    """A stream's next token is more urgent, and when memory is short this is the process to go.  A sandbox may say no."""
    for ask in (
        lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)), lambda: os.nice(10),
        lambda: Path("/proc/self/oom_score_adj").write_text("500"),
    ):
        with suppress(OSError, ValueError):
            ask()


if __name__ == "__main__":
    step_back()
    gc.set_threshold(1_000_000)     # JSON makes no cycles, and a million lists would be looked at a thousand times
    serve(sys.stdin.buffer, sys.stdout.buffer)
