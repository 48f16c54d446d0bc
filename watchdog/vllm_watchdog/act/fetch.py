"""What an engine answers to a GET, within one deadline for all of it, drips included.

HTTP/1.0, so that nothing is chunked.  It blocks for `deadline_s` at most.
"""

from __future__ import annotations

import select
import socket
import time
from urllib.parse import urlsplit

from vllm_watchdog.act.capture import OverrunError


def fetch(url: str, deadline_s: float, limit: int = 4 << 20) -> bytes:
    """The body of an answer of at most `limit` bytes.  Raises OSError, OverrunError."""
    until = time.monotonic() + deadline_s
    where = urlsplit(url)
    answer = bytearray()
    with socket.create_connection((where.hostname or "", where.port or 80), deadline_s) as connection:
        connection.sendall(f"GET {where.path} HTTP/1.0\r\nHost: {where.netloc}\r\n\r\n".encode())
        while len(answer) < limit:
            if not select.select([connection], [], [], max(0.0, until - time.monotonic()))[0]:
                raise OverrunError(f"{where.path} gave no whole answer in {deadline_s:g} s")
            part = connection.recv(65536)
            if not part:
                break
            answer += part
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise OSError(f"{where.path} answered {head[:80].decode(errors='replace').splitlines()[:1]}")
    return body
