"""The process that counts tokens for the gateway: `python -m vllm_watchdog.gateway.counting`.  One question at a time.

A process, because a tokenizer holds Python's lock for as long as it works (58 ms for 100,000 characters, which every stream
would wait), and because a body made to fill the memory then fills this one's, which has a limit.  A question is a line of
JSON and `size` bytes of body, an answer is a line of JSON.  Ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import asdict
from functools import lru_cache
from typing import BinaryIO

from vllm_watchdog.gateway import bodies
from vllm_watchdog.gateway.bodies import UnreadableError
from vllm_watchdog.gateway.tokens import NoTokenizerError, Tokens, folder_of
from vllm_watchdog.prompt_plan import PromptPlan

MEMORY = 2 << 30        # bytes: a tokenizer of 250,000 tokens, and sixteen times a body of 64 MiB as objects
MODELS = 8


@lru_cache(MODELS)
def tokens_of(plan: PromptPlan) -> Tokens | str:
    """Or why there are none."""
    try:
        return Tokens(folder_of(plan), plan)
    except NoTokenizerError as error:
        return str(error)


def answer(question: dict[str, object], body: bytes) -> dict[str, object]:
    """`lacks`: no tokenizer, and why; `bad`: what is wrong with the request; else the fields of Counted."""
    plan = PromptPlan(**question["plan"])       # type: ignore[arg-type]
    tokens = tokens_of(plan)
    if isinstance(tokens, str):
        return {"lacks": tokens}
    if not body:
        return {}       # only to be ready
    try:
        return asdict(tokens.count(str(question["path"]), bodies.read(body), question["enough"]))   # type: ignore[arg-type]
    except UnreadableError as error:
        return {"bad": str(error)}
    except MemoryError:
        return {"bad": "The body needs more memory to be read than this gateway gives it"}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    while line := source.readline():
        question = json.loads(line)
        body = source.read(question["size"])
        sink.write(json.dumps(answer(question, body), separators=(",", ":")).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.nice(5)          # a stream's next token is more urgent
    serve(sys.stdin.buffer, sys.stdout.buffer)
