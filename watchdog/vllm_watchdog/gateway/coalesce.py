"""Merges tiny deltas of a stream of server-sent events, so that a slow front end gets fewer of them.  Pure.

Two events are merged when they differ in one text only, and that one is what a client appends to what it has: the text of
a completion, the content, reasoning or tool arguments of a chat's delta, of a choice that has nothing else to say.  Then
the second one's text, as JSON has it, is put behind the first one's: nothing is decoded and written again.  All other
events go through as they are, in their order, after what was kept.  A stream that is not of vLLM's form goes through whole.
"""

from __future__ import annotations

import json
import re
from typing import Any

OBJECTS = ("chat.completion.chunk", "text_completion")
TEXTS = ("text", "content", "reasoning", "reasoning_content", "arguments")      # what a client appends
# Of a chunk: the same in all of a stream.  Whatever else it has must be null.
SAME = frozenset({"id", "object", "created", "model", "system_fingerprint", "service_tier", "choices"})
# The inside of a JSON string.  Not half a surrogate pair: alone it is another text than together with the other half.
INSIDE = rb'[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*'
STRING = re.compile(INSIDE)
TEXT = re.compile(rb'"(?:%b)": ?"(%b)"' % ("|".join(TEXTS).encode(), INSIDE))
START, END = b"data: {", b"\n\n"
LARGEST = 8 << 10           # bytes of an event that may be merged; a token's has some hundred
EVENT_LIMIT = 64 << 10      # bytes of an event; with a longer one the rest of the stream goes through as it is


class Coalescer:
    """`feed` returns what goes to the client now.  Kept until more comes, or until `flush`: less than `limit` characters of
    text, and one event that isn't whole."""

    __slots__ = ("_after", "_before", "_begun", "_chars", "_limit", "_opaque", "_partial", "_texts")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._partial = b""                     # of an event
        self._before, self._after = b"", b""    # around the text of the newest event of its kind
        self._texts: list[bytes] = []           # kept
        self._chars = 0
        self._begun, self._opaque = False, False

    @property
    def pending(self) -> bool:
        """Text is kept."""
        return bool(self._texts)

    def feed(self, data: bytes) -> bytes:
        if self._opaque:
            return data
        *events, self._partial = (self._partial + data).split(END)
        out = [self._take(event) for event in events]
        if len(self._partial) > EVENT_LIMIT or b"\r" in data:
            self._opaque = True
            out.append(self.end())
        return b"".join(out)

    def flush(self) -> bytes:
        """The text that is kept, as one event."""
        if not self._texts:
            return b""
        event = b"".join((self._before, *self._texts, self._after, END))
        self._texts, self._chars = [], 0
        return event

    def end(self) -> bytes:
        """The stream is over: all that is left."""
        left = self.flush() + self._partial
        self._partial = b""
        return left

    def _take(self, event: bytes) -> bytes:
        if (text := self._continued(event)) is not None:
            return self._keep(text)
        kept = self.flush()
        if (text := self._first(event)) is None:
            return kept + event + END
        if not self._begun:
            self._begun = True      # nobody shall wait for the first text of all
            return kept + event + END
        return kept + self._keep(text)

    def _keep(self, text: bytes) -> bytes:
        self._texts.append(text)
        self._chars += len(_decoded(text))
        return self.flush() if self._chars >= self._limit else b""

    def _continued(self, event: bytes) -> bytes | None:
        """Its text, where all else is as in the one before."""
        before, after = self._before, self._after
        if not before or len(event) > LARGEST or len(event) < len(before) + len(after):
            return None
        if not event.startswith(before) or not event.endswith(after):
            return None
        text = event[len(before):len(event) - len(after)]
        return text if _appendable(text) else None

    def _first(self, event: bytes) -> bytes | None:
        """Its text, if it is one of those that may be merged; what is around it is remembered."""
        self._before = b""
        if len(event) > LARGEST or not event.startswith(START) or b"\n" in event:
            return None
        found = list(TEXT.finditer(event))      # no string can hold one: its quotes are escaped
        if len(found) != 1 or not _appendable(text := found[0][1]) or _only_text(event[len(START) - 1:]) != _decoded(text):
            return None
        self._before, self._after = event[:found[0].start(1)], event[found[0].end(1):]
        return text


def _appendable(text: bytes) -> bool:
    """May it be put behind another?  Halves of a character may not."""
    if not STRING.fullmatch(text):
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoded(text: bytes) -> str:
    return str(json.loads(b'"%b"' % text)) if b"\\" in text else text.decode()


def _only_text(data: bytes) -> str | None:
    """What a chunk of one choice brings, if it is text and nothing else."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if chunk.get("object") not in OBJECTS or not _present(chunk).keys() <= SAME:
        return None
    choice = _only(chunk.get("choices"))
    if type(choice.pop("index", None)) is not int:
        return None
    if choice.keys() == {"delta"}:
        choice = _present(choice["delta"])
    if choice.keys() == {"tool_calls"}:     # whose beginning has its name, and is no more than that
        call = _only(choice["tool_calls"])
        choice = _present(call.get("function")) if call.keys() == {"index", "function"} else {}
    (key, value), *more = choice.items() or [("", None)]
    return value if key in TEXTS and isinstance(value, str) and not more else None


def _present(value: Any) -> dict[str, Any]:
    """What isn't null of an object."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else {}


def _only(value: Any) -> dict[str, Any]:
    """The one object of a list."""
    return _present(value[0]) if isinstance(value, list) and len(value) == 1 else {}
