"""A prompt that is too long, cut to what fits: a text keeps its head and its tail, a chat loses its oldest turns first.

Cuts lie between tokens.  System prompts stay; tool results and answers in a form are not put at risk unless `anything`
says so.  A turn is what one user says and all that follows up to the next.  Blocks as `tokens` does, a few times over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_watchdog.gateway.chat import Json
from vllm_watchdog.gateway.tokens import CHATS, PROMPTS, Tokens, prompts, strict

CHARACTERS = 16         # of a token: more than in any language, so that a megabyte is no long work
TRIES = 8               # texts that meet where the middle was may make some more tokens than they had
SYSTEM = ("system", "developer")


class CannotCutError(Exception):
    """Why it is refused instead; never text of the request."""


def cut(tokens: Tokens, path: str, asked: Json, limit: int, anything: bool) -> Json:
    """A body like it whose prompts have `limit` tokens at most.  Raises CannotCutError, UnreadableError."""
    if strict(asked) and not anything:
        raise CannotCutError("its answer must have a form, which a cut prompt may spoil")
    if path in CHATS and "messages" in asked:
        return _chat(tokens, path, asked, limit, anything)
    key = PROMPTS.get(path, "")
    if key not in asked:
        raise CannotCutError("a request of this kind can't be cut")
    items = [_prompt(tokens, path, asked, key, item, limit) for item in prompts(asked[key], key)]
    whole = asked[key]
    single = isinstance(whole, str) or (isinstance(whole, list) and bool(whole) and isinstance(whole[0], int))
    return asked | {key: items[0] if single else items}


def _prompt(tokens: Tokens, path: str, asked: Json, key: str, item: str | list[int], limit: int) -> str | list[int]:
    if isinstance(item, list):
        head = (limit + 1) // 2
        return item if len(item) <= limit else item[:head] + item[len(item) - (limit - head):]
    return _text(tokens, item, limit, lambda text: tokens.count(path, asked | {key: text}).longest)


def _text(tokens: Tokens, text: str, limit: int, count: Callable[[str], int]) -> str:
    """`count`: of the whole request with this text in its place.  Raises CannotCutError."""
    most = limit * CHARACTERS
    text = text if len(text) <= 2 * most else text[:most] + text[-most:]
    excess = count(text) - limit
    if excess <= 0:
        return text
    places = tokens.encode(text).offsets
    keep = len(places) - excess
    for _ in range(TRIES):
        if keep < 2:
            break
        head = (keep + 1) // 2
        shorter = text[: places[head - 1][1]] + text[places[len(places) - (keep - head)][0] :]
        excess = count(shorter) - limit
        if excess <= 0:
            return shorter
        keep -= excess
    raise CannotCutError("too little of it would be left")


def _chat(tokens: Tokens, path: str, asked: Json, limit: int, anything: bool) -> Json:
    messages = asked["messages"]

    def count(some: list[Any]) -> int:
        return tokens.count(path, asked | {"messages": some}, limit + 1).longest

    turns = _turns(messages)
    low, high = 0, max(0, len(turns) - 1)       # turns to drop: not the last one
    while low < high:
        middle = (low + high) // 2
        if count(_without(messages, turns[:middle])) <= limit:
            high = middle
        else:
            low = middle + 1
    gone = turns[:low]
    if not anything and any(_of_tools(messages[index]) for turn in gone for index in turn):
        raise CannotCutError("its oldest turns hold tool results")
    left = _without(messages, gone)
    return asked | {"messages": left if count(left) <= limit else _last_turn_cut(tokens, left, limit, anything, count)}


def _turns(messages: list[Any]) -> list[list[int]]:
    """Places of each turn's messages; what comes before the first user is a turn, too."""
    turns: list[list[int]] = []
    for index, message in enumerate(messages):
        if message.get("role") in SYSTEM:
            continue
        if message.get("role") == "user" or not turns:
            turns.append([])
        turns[-1].append(index)
    return turns


def _without(messages: list[Any], turns: list[list[int]]) -> list[Any]:
    gone = {index for turn in turns for index in turn}
    return [message for index, message in enumerate(messages) if index not in gone]


def _size(message: Json) -> int:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return max(map(len, texts), default=0)


def _of_tools(message: Json) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _last_turn_cut(tokens: Tokens, messages: list[Any], limit: int, anything: bool,
                   count: Callable[[list[Any]], int]) -> list[Any]:
    """The longest text of its user; of a tool, if that may be cut and is longer."""
    roles = ("user", "tool") if anything else ("user",)
    said = [index for index, message in enumerate(messages) if message.get("role") in roles]
    if not said:
        raise CannotCutError("no user's text is in it")
    at = max(said, key=lambda index: (_size(messages[index]) if anything else 0, index))
    message = messages[at]

    def replaced(content: object) -> list[Any]:
        return [*messages[:at], message | {"content": content}, *messages[at + 1 :]]

    content = message.get("content")
    if isinstance(content, str):
        return replaced(_text(tokens, content, limit, lambda text: count(replaced(text))))
    parts = [part for part in content or () if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not parts:
        raise CannotCutError("no user's text is in it")
    longest = max(parts, key=lambda part: len(part["text"]))

    def with_text(text: str) -> list[Any]:
        return replaced([part | {"text": text} if part is longest else part for part in content or ()])

    return with_text(_text(tokens, longest["text"], limit, lambda text: count(with_text(text))))
