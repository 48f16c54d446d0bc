"""The line between the API server and EngineCore: one JSON object a packet over a socket pair, either way.

A send waits at most `SEND_S` for a stopped reader and then counts as a broken line. `receive` waits as long as it is
told and never longer. A closed line is a value (`CLOSED`), for both sides must outlive the other.
"""

from __future__ import annotations

import json
import select
import socket
from typing import Any

SEND_S = 60.0
PACKET_BYTES = 1 << 20
BUFFER_BYTES = 4 << 20

Message = dict[str, Any]
CLOSED: Message = {"kind": "closed"}


def pair() -> tuple[Link, Link]:
    """Two connected ends; each process closes the one it doesn't use."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        end.settimeout(SEND_S)
    return Link(ends[0]), Link(ends[1])


class Link:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Message) -> bool:
        """Whether the other side can still take it."""
        try:
            self._end.send(json.dumps(message, separators=(",", ":")).encode())
        except (BrokenPipeError, ConnectionError, TimeoutError):
            return False
        return True

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, None when none came in time, CLOSED when the other side has gone."""
        try:
            if not select.select([self._end], [], [], timeout_s)[0]:
                return None
            data = self._end.recv(PACKET_BYTES)
        except ConnectionError:
            return CLOSED
        return json.loads(data) if data else CLOSED

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()
