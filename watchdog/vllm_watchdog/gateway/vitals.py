"""One look at an engine's /health on a connection of its own.  Waits at most `look_s`."""

from __future__ import annotations

import asyncio

from vllm_watchdog.gateway.routes import Target

look_s = 0.5
DEAD_FROM = 500     # vLLM: 503 (0.11 and later) or 500 once it has noticed that its engine died
NO_ANSWER = 0


async def health(target: Target) -> int | None:
    """Its status; NO_ANSWER: none in time, or none that can be read; None: the port refuses."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(look_s):
            reader, writer = await asyncio.open_connection(target.host, target.port, limit=4096)
            writer.write(b"GET /health HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % target.host.encode())
            words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else NO_ANSWER
    except ConnectionRefusedError:
        return None
    except (OSError, TimeoutError, ValueError):
        return NO_ANSWER
    finally:
        if writer is not None:
            writer.transport.abort()
