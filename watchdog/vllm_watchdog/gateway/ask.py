"""What a generation request wants, as far as anybody has to know: from its head and a search of its bytes, unparsed.  Pure.

`bound` can't be exceeded by the prompt: a token stands for one byte of text at least, and a text is no longer than its JSON.
What isn't text is counted in parts (`media`: at most so many).  `tokens` is known once `sizing` has counted them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from vllm_watchdog.gateway.heads import CACHED, RequestHead, header
from vllm_watchdog.gateway.routes import model_of
from vllm_watchdog.gateway_rules import key_of

TEMPLATE_TOKENS = 1024      # what a chat template adds at most: a system prompt of its own, instructions for tools
COMPOSED = 3                # NFC makes at most three times as many bytes of text that isn't ASCII: U+1D160
TOOLS = 8                   # a template writes tools again, indented
SEARCHED = 32 << 10         # bytes of a body that is searched for these: 0.2 ms; the worst is taken for a longer one
PART = 24                   # bytes of a part that isn't text, at least


@dataclass(frozen=True, slots=True)
class Ask:
    """`key`: of whom, "" for nobody.  `exact`: `tokens` is what the engine will count, no estimate.  `longest`: of one of
    its prompts.  `max_tokens`: of the answer; None: not counted yet, or not said."""

    path: str
    key: str
    model: str | None
    bound: int
    media: int = 0
    tokens: int | None = None
    longest: int = 0
    exact: bool = False
    max_tokens: int | None = None

    @property
    def cost(self) -> int:
        """The best that is known of the prompt's tokens, never too few."""
        return self.bound if self.tokens is None else self.tokens


def ask_of(head: RequestHead, body: bytes) -> Ask:
    """`body`: the whole of it."""
    searched = len(body) <= SEARCHED
    growth = 1 if body.isascii() else COMPOSED
    if not searched or b'"tools"' in body or b'"documents"' in body:
        growth *= TOOLS
    media = _parts(body) if searched else len(body) // PART
    return Ask(head.path, key_in(head), model_of(body), len(body) * growth + TEMPLATE_TOKENS, media)


def most_tokens(size: int, media_tokens: int) -> int:
    """No prompt in a body of so many bytes has more, whatever it says."""
    return size * COMPOSED * TOOLS + TEMPLATE_TOKENS + size // PART * media_tokens


def _parts(body: bytes) -> int:
    """That are no text, at most: each names its kind, and has a key like it, so twice as many are safe."""
    return body.count(b'"image') + body.count(b'"video') + body.count(b'"audio') + body.count(b'"input_')


@lru_cache(CACHED)
def key_in(head: RequestHead) -> str:
    """Of whom it is, without the secret; "" for nobody."""
    return key_of(secret(head))


def secret(head: RequestHead) -> bytes:
    """The API key that the client shows, empty without one."""
    scheme, _, token = (header(head, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else header(head, b"x-api-key") or b""
