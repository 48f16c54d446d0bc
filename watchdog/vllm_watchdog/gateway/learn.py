"""What an engine says of itself: the model's context by /v1/models, and what its KV cache holds by /metrics.

Requests on connections of their own: two for each life of an engine, and one a second while long prompts are there or wait
(`kv.KvWatch`).  They wait at most `look_s` each.  What it does not tell (a key is needed, --disable-log-stats) is unknown,
and limits nothing.
"""

from __future__ import annotations

import asyncio
import json
import re

from vllm_watchdog.gateway.budget import Engine
from vllm_watchdog.gateway.heads import END, BadHeadError, parse_response
from vllm_watchdog.gateway.routes import Target

look_s = 5.0
answer_limit = 4 << 20      # bytes: /metrics of an engine with many labels
CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
NUMBER = re.compile(rb'(num_gpu_blocks|block_size|kv_cache_size_tokens)="(\d{1,15})"')
USED = re.compile(rb"^vllm:(?:gpu_cache|kv_cache)_usage_perc(?:\{[^\n]*\})? (\d+(?:\.\d+)?(?:e-?\d+)?)$", re.MULTILINE)
COUNT = re.compile(rb'"count"\s*:\s*(\d{1,12})')


async def learn(target: Target) -> Engine:
    return Engine(_context(await asked(target, b"GET", "/v1/models")), _kv_tokens(await asked(target, b"GET", "/metrics")))


async def kv_share(target: Target) -> float | None:
    """Of the KV cache in use, the fullest rank's; None: not told."""
    shares = [float(number) for number in USED.findall(await asked(target, b"GET", "/metrics"))]
    return max(shares, default=None)


async def tokenized(target: Target, body: bytes, authorization: bytes) -> int | None:
    """Tokens of a prompt, by the engine's /tokenize; None: it does not say."""
    found = COUNT.search(await asked(target, b"POST", "/tokenize", body, authorization))
    return int(found[1]) if found else None


async def asked(target: Target, method: bytes, path: str, body: bytes = b"", authorization: bytes = b"") -> bytes:
    """The answer's body; empty: none in time, or another status than 200.  HTTP/1.0, so that it comes in one piece."""
    writer: asyncio.StreamWriter | None = None
    shown = b"Authorization: %b\r\n" % authorization if authorization else b""
    try:
        async with asyncio.timeout(look_s):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=answer_limit)
            writer.write(b"%b %b HTTP/1.0\r\nHost: %b\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
                method, path.encode(), target.host.encode(), shown, len(body)) + body)
            head = parse_response(await reader.readuntil(END))
            if head.status != 200 or head.chunked or (head.length or 0) > answer_limit:
                return b""
            return await (_all(reader) if head.length is None else reader.readexactly(head.length))
    except (OSError, EOFError, TimeoutError, BadHeadError, asyncio.LimitOverrunError):
        return b""
    finally:
        if writer is not None:
            writer.transport.abort()


async def _all(reader: asyncio.StreamReader) -> bytes:
    parts: list[bytes] = []
    while (part := await reader.read(1 << 16)) and sum(map(len, parts)) < answer_limit:
        parts.append(part)
    return b"".join(parts)


def _context(said: bytes) -> int | None:
    """The least of its models'."""
    try:
        lengths = [model.get("max_model_len") for model in json.loads(said)["data"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return min((length for length in lengths if isinstance(length, int) and length > 0), default=None)


def _kv_tokens(said: bytes) -> int | None:
    """Of all data-parallel ranks together."""
    total = 0
    for labels in CACHE.findall(said):
        numbers = {name: int(value) for name, value in NUMBER.findall(labels)}
        total += numbers.get(b"kv_cache_size_tokens") or numbers.get(b"num_gpu_blocks", 0) * numbers.get(b"block_size", 0)
    return total or None
