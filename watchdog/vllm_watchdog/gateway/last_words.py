"""Which answers may be an engine's last words, and how long they are kept back until that is known.  Pure."""

from __future__ import annotations

import re

from vllm_watchdog.gateway.heads import NO_ANSWER, ResponseHead

patience_s = 1.5                            # vLLM's port closes within 1 s after its last 500 (seen on 0.24 and 0.32)
of_status_s = {500: patience_s, 502: patience_s, 503: 0.3}     # 503 is also vLLM's "queue full": don't sit on it
broken_statuses = (500, 502, 504)           # an engine that lives and says so often is broken
hung_up_s = 0.3                             # the kernel closes a dead process's port at once
kept_limit = 64 << 10                       # bytes
ERROR_EVENT = re.compile(rb'(?:[0-9A-Fa-f]+\r\n)?(?:event: ?error\r?\n)?data: ?\{"error"')   # a stream's only event


class Answer:
    """What an engine said before any of it went to the client.  `ended`: it is whole; `broken`: no more will come."""

    __slots__ = ("_kept", "broken", "ended", "head")

    def __init__(self) -> None:
        self.head: ResponseHead = NO_ANSWER
        self.ended, self.broken = False, False
        self._kept: list[bytes] = []

    def keep(self, data: bytes) -> bool:
        """False: that is enough for now."""
        self._kept.append(data)
        return sum(map(len, self._kept)) <= kept_limit

    def kept(self) -> bytes:
        """Once."""
        kept, self._kept = b"".join(self._kept), []
        return kept

    def is_error_event(self, data: bytes) -> bool:
        return self.head.event_stream and ERROR_EVENT.match(data) is not None
