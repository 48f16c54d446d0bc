"""Completions, chat or plain, whole or streamed: OpenAI's shapes as vLLM fills them, with made-up words for tokens.

A prompt has as many tokens as words (or as the list of token numbers has entries), plus four for each chat message. A
request waits for EngineCore as long as its client stays, looking every `POLL_S` whether it still does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from vllm_watchdog.sim.client import DEAD, EngineClient
from vllm_watchdog.sim.flags import Options
from vllm_watchdog.sim.wire import ClientGoneError, Connection, Request, dumps

POLL_S = 0.25
CHAT_OVERHEAD_TOKENS = 4
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
WORDS = ("the", "engine", "answers", "with", "a", "steady", "row", "of", "plain", "words", "and", "nothing", "more")
DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."
MISSING_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
MISSING_MESSAGES = "1 validation error: {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'}"
ERROR_TYPES = {400: "BadRequestError", 403: "ForbiddenError", 404: "NotFoundError", 500: "InternalServerError"}


class RefusedError(Exception):
    """The request is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, request_id: str = "None") -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.request_id = status, message, param, request_id

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


@dataclass(frozen=True, slots=True)
class Job:
    """One request on its way through the engine."""

    client: EngineClient
    number: int
    id: str
    model: str
    chat: bool
    prompt_tokens: int
    with_usage: bool
    created: int


def read_json(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises RefusedError."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise RefusedError(400, f"JSON decode error: {error}") from error
    if not isinstance(value, dict):
        raise RefusedError(400, "Input should be a valid dictionary")
    return value


def texts(asked: dict[str, Any]) -> list[Any]:
    """What the prompt is made of: strings or token numbers."""
    messages = asked.get("messages")
    if isinstance(messages, list):
        return [message.get("content") or "" for message in messages if isinstance(message, dict)]
    prompt = asked.get("prompt")
    return prompt if isinstance(prompt, list) else [prompt or ""]


def prompt_tokens(asked: dict[str, Any]) -> int:
    """The length of the prompt in tokens, at least 1."""
    overhead = CHAT_OVERHEAD_TOKENS * len(texts(asked)) if "messages" in asked else 0
    return max(1, overhead + sum(_tokens(part) for part in texts(asked)))


def _tokens(part: Any) -> int:
    if isinstance(part, list):
        return sum(_tokens(each) for each in part)
    if isinstance(part, dict):
        return _tokens(part.get("text", ""))
    return 1 if isinstance(part, int) else len(str(part).split())


def start(options: Options, client: EngineClient, asked: dict[str, Any], chat: bool) -> Job:
    """Checks a request and hands it to the engine. Raises RefusedError."""
    model = asked.get("model") or options.served_names[0]
    if model not in options.served_names:
        aliases = ", ".join(options.served_names)
        raise RefusedError(404, f"The model `{model}` does not exist. Valid aliases: {aliases}.", "model")
    if ("messages" if chat else "prompt") not in asked:
        raise RefusedError(400, MISSING_MESSAGES if chat else MISSING_PROMPT, "messages" if chat else "prompt")
    length = prompt_tokens(asked)
    wanted = asked.get("max_completion_tokens") or asked.get("max_tokens") or (None if chat else COMPLETION_TOKENS)
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise RefusedError(400, f"max_tokens must be at least 1, got {wanted}.", "max_tokens")
    room = options.max_model_len - length
    if room < 1:
        raise RefusedError(
            400,
            f"This model's maximum context length is {options.max_model_len} tokens. However, your prompt contains "
            f"{length} input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            f"of the input prompt. (parameter=input_tokens, value={length})",
            "input_tokens",
        )
    word = options.sim.hang_on_word
    poison = bool(word) and any(word in str(part) for part in texts(asked))
    answer = min(wanted or options.sim.answer_tokens, room)  # vLLM shortens the answer, too
    number = client.add(length, answer, natural_stop=wanted is None, poison=poison)
    kind = "chatcmpl" if chat else "cmpl"
    usage = bool((asked.get("stream_options") or {}).get("include_usage"))
    return Job(client, number, f"{kind}-{os.urandom(8).hex()}", model, chat, length, usage, int(time.time()))


def _outputs(job: Job, gone: Callable[[], bool]) -> Generator[str, None, None]:
    """The request's outputs until its last; a client that has gone aborts it. Raises ClientGone-, RefusedError."""
    ended = False
    try:
        while not ended:
            output = job.client.take(job.number, POLL_S)
            if output is None:
                if gone():
                    raise ClientGoneError
                continue
            if output == DEAD:
                ended = True
                raise RefusedError(500, DEATH, request_id=job.id)
            ended = bool(output)
            yield output
    finally:
        job.client.close(job.number, abort=not ended)


def _word(index: int) -> str:
    return (" " if index else "") + WORDS[index % len(WORDS)]


def _usage(job: Job, generated: int) -> dict[str, Any]:
    total = job.prompt_tokens + generated
    return {"prompt_tokens": job.prompt_tokens, "total_tokens": total, "completion_tokens": generated}


def _frame(job: Job, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model, "choices": choices}


def whole(job: Job, gone: Callable[[], bool]) -> dict[str, Any]:
    """The answer in one piece."""
    words: list[str] = []
    reason = ""
    for reason in _outputs(job, gone):
        if reason != "abort":
            words.append(_word(len(words)))
    text, choice = "".join(words), {"index": 0, "logprobs": None, "finish_reason": reason, "stop_reason": None}
    said = {"message": {"role": "assistant", "content": text}} if job.chat else {"text": text}
    kind = "chat.completion" if job.chat else "text_completion"
    return {**_frame(job, kind, [{**choice, **said}]), "usage": _usage(job, len(words))}


def stream(job: Job, connection: Connection, request: Request, begun: Callable[[], None]) -> bool:
    """The answer as server-sent events; a death becomes an error event, for the 200 is out. Whether it was whole."""
    kind = "chat.completion.chunk" if job.chat else "text_completion"

    def send(value: dict[str, Any]) -> None:
        connection.chunk(b"data: " + dumps(value) + b"\n\n")

    def piece(text: str, reason: str, first: bool = False) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        said: dict[str, Any] = {"delta": {**role, "content": text}} if job.chat else {"text": text}
        return _frame(job, kind, [{"index": 0, **said, "logprobs": None, "finish_reason": reason or None}])

    count, alive = 0, True
    outputs = _outputs(job, connection.gone)
    try:
        connection.begin(request)
        begun()
        if job.chat:
            send(piece("", "", first=True))
        for reason in outputs:
            send(piece("" if reason == "abort" else _word(count), reason))
            count += reason != "abort"
        if job.with_usage:
            send({**_frame(job, kind, []), "usage": _usage(job, count)})
    except RefusedError as refused:
        send(refused.body())
        alive = False
    finally:
        outputs.close()
    connection.chunk(b"data: [DONE]\n\n")
    connection.chunk(b"")
    return alive
